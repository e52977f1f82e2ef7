"""Mixtures of calibration sets: shares of tokens, order, identity, and the sentence for what cannot be mixed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import choices
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from moe_lab import grid
from moe_lab.calibration import check
from moe_lab.calibration.batches import TOLERANCE, Calibration, batches
from moe_lab.config import CalibrationConfig, Config, SourceConfig
from moe_lab.config.base import SettingsError, identity, valid
from moe_lab.errors import UserError
from moe_lab.paths import resolve

Settings = Callable[..., CalibrationConfig]
Two = tuple[CalibrationConfig, CalibrationConfig]
W = 5  # the id of w0
POCKET = ("pocket_general", "pocket_code", "pocket_math")


def write(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def mixture(*parts: tuple[float, CalibrationConfig], **settings: Any) -> CalibrationConfig:
    """A mixture whose sets are at hand, in small rows."""
    sources = [SourceConfig(part.name, share, settings=part) for share, part in parts]
    return CalibrationConfig(**{"name": "mix", "length": 8, "tokens": 1600, "sources": sources, "seed": 1, **settings})


@pytest.fixture
def two(tmp_path: Path, settings: Settings) -> Two:
    """600 documents of two words from w0 to w9, and 400 of five words from w10 to w19."""
    low = write(tmp_path / "low.jsonl", *({"text": f"w{n % 10} w{(n + 1) % 10}"} for n in range(600)))
    high = write(
        tmp_path / "high.jsonl", *({"text": " ".join(f"w{10 + (n + k) % 10}" for k in range(5))} for n in range(400))
    )
    return settings(low, name="low", order="random"), settings(high, name="high", order="random")


def counted(found: Calibration) -> tuple[int, int]:
    """Valid tokens below and from w10 on."""
    tokens = torch.cat([ids[valid] for ids, valid in found.rows])
    assert bool(((tokens >= W) & (tokens < W + 20)).all())
    return int((tokens < W + 10).sum()), int((tokens >= W + 10).sum())


def test_the_report_has_every_set_and_the_seed_decides_the_order_within_each(two: Two, tokenizer: Any) -> None:
    chosen = mixture((0.4, two[0]), (0.6, two[1]), packing="chunk")
    first, again, other = (batches(each, tokenizer) for each in (chosen, chosen, replace(chosen, seed=2)))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first.rows, again.rows, strict=True))
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(first.rows, other.rows, strict=True))
    assert tuple(first.report["valid_tokens"].items()) == tuple(zip(("low", "high"), counted(first), strict=True))
    assert [source["share"] for source in first.report["sources"]] == [0.4, 0.6]
    assert json.loads(json.dumps(first.report)) == first.report
    kept = replace(chosen, sources=[replace(s, settings=replace(s.settings, seed=7)) for s in chosen.sources])
    assert identity(kept) == identity(replace(kept, seed=2)), "a set's own seed goes before the cell's"


@pytest.fixture(scope="module")
def pocket_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve("pocket:olmoe"))


@cache
def published(name: str) -> Any:
    """A file of conf/calibration as typed settings."""
    return grid.mixed(choices.choose(CalibrationConfig, "calibration", name), choices.Files())


@hypothesis_settings(max_examples=8, deadline=None)
@example(weights=[1, 1, 4], seed=0, packing="none", gap="none")
@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    seed=st.integers(0, 3),
    packing=st.sampled_from(["chunk", "reap", "none"]),
    gap=st.sampled_from(["none", "eos"]),
)
def test_shipped_sets_keep_their_shares(
    pocket_tokenizer: Any, weights: list[int], seed: int, packing: str, gap: str
) -> None:
    shares = [weight / sum(weights) for weight in weights]
    length = 64 if packing == "none" else 256  # a document a row: enough of them that one is below 1 %
    sets = zip(shares, map(published, POCKET), strict=False)
    found = batches(mixture(*sets, seed=seed, packing=packing, gap=gap, length=length, tokens=32768), pocket_tokenizer)
    kept = found.report["valid_tokens"]
    assert sum(kept.values()) == sum(int(valid.sum()) for _, valid in found.rows)
    assert [kept[name] / sum(kept.values()) for name in POCKET[: len(shares)]] == pytest.approx(shares, abs=TOLERANCE)


def test_each_set_is_read_by_its_own_settings(tmp_path: Path, settings: Settings, tokenizer: Any) -> None:
    templated = settings(
        write(tmp_path / "a.jsonl", *({"q": "w1", "a": "w2"} for _ in range(9))), name="a", template="w0 {q} w0 {a}"
    )
    named = settings(
        write(tmp_path / "b.jsonl", *({"text": "w9", "body": "w3 w4 w5"} for _ in range(9))),
        name="b",
        field="body",
        special_tokens=True,
    )
    found = batches(mixture((0.5, templated), (0.5, named), packing="none", length=4, tokens=24), tokenizer)
    rows = {tuple(row) for ids, _ in found.rows for row in ids.tolist()}
    assert rows == {(W, W + 1, W, W + 2), (1, W + 3, W + 4, W + 5)}


def test_a_set_that_runs_out_is_named_with_its_tokens(two: Two, tokenizer: Any) -> None:
    chosen = mixture((0.5, two[0]), (0.5, two[1]), packing="chunk", tokens=8000)
    with pytest.raises(UserError, match=r"low, .* share of 0.5 .* its 1200 tokens .* would fit") as error:
        batches(chosen, tokenizer)
    fitting = int(re.findall(r"calibration\.tokens=(\d+)", str(error.value))[1])
    assert batches(replace(chosen, tokens=fitting), tokenizer).report["rows"] == fitting // 8
    with pytest.raises(UserError, match="is too short"):
        batches(replace(chosen, tokens=fitting + 8), tokenizer)


def test_a_share_that_documents_are_too_long_for_is_refused(
    tmp_path: Path, settings: Settings, two: Two, tokenizer: Any
) -> None:
    long = settings(write(tmp_path / "long.jsonl", *({"text": "w1 " * 8} for _ in range(9))), name="long")
    with pytest.raises(UserError, match=r"long makes 50.0% of the tokens and not 30.0%.*expected more tokens"):
        batches(mixture((0.3, long), (0.7, two[1]), tokens=16), tokenizer)


def test_every_set_and_its_share_are_checked_and_part_of_the_identity(two: Two) -> None:
    low, high = two
    with pytest.raises(UserError, match="does not exist"):
        check(mixture((0.5, low), (0.5, replace(high, path="nowhere.jsonl"))))
    before = identity(mixture((0.4, low), (0.6, high)))
    assert [source["path"] for source in before["sources"]] == [identity(replace(s, seed=1))["path"] for s in two]
    assert identity(mixture((0.4, replace(low, length=4, packing="none")), (0.6, high))) == before
    assert identity(mixture((0.4, replace(low, special_tokens=True)), (0.6, high))) != before
    Path(high.path).write_text(Path(high.path).read_text() + '{"text": "w1"}\n')
    assert identity(mixture((0.4, low), (0.6, high))) != before


@pytest.mark.parametrize(
    ("shares", "changes", "begin"),
    [
        ((0.5, 0.6), {}, "calibration.sources: the shares add up to 1.1"),
        ((0.5, 0.5), {"order": "first"}, "calibration.order=first beside sources"),
        ((0.5, 0.5), {"path": "a.txt"}, "calibration.path=a.txt beside sources"),
    ],
)
def test_mixtures_that_cannot_be(two: Two, shares: tuple[float, ...], changes: dict[str, Any], begin: str) -> None:
    sources = [{"calibration": text.name, "share": share} for share, text in zip(shares, two, strict=True)]
    with pytest.raises(SettingsError) as error:
        valid(CalibrationConfig, {"name": "m", "sources": sources, **changes}, "calibration")
    assert [sentence.startswith(begin) for sentence in error.value.sentences] == [True]


NAMED = {
    "a": "path: owner/a\nfield: body",
    "b": "path: ???",
    "nested": "sources: [{calibration: mix, share: 0.5}, {calibration: a, share: 0.5}]",
    "mix": "sources: [{calibration: a, share: 0.75}, {calibration: b, path: notes.txt, share: 0.25}]",
    "twice": "sources: [{calibration: a, share: 0.5}, {calibration: a, share: 0.5}]",
    "wrong": "sources: [{calibration: aa, share: 0.5}, {calibration: a, share: 0.5}]",
}


def test_names_in_a_mixture_are_files_and_a_path_goes_before_theirs(tmp_path: Path) -> None:
    """Of what is calibrated on and of the other texts; a mixture of mixtures is refused."""
    (tmp_path / "calibration").mkdir()
    for name, content in NAMED.items():
        (tmp_path / "calibration" / f"{name}.yaml").write_text(f"name: {name}\n{content}\n")

    def cell(calibration: str, flops_text: str = "a") -> grid.Cell:
        files, lists = choices.Files(tmp_path), {"calibration": [calibration]}
        return choices.cells(Config(flops_text=flops_text), lists, files=files)[0]

    for text in (cell("mix").calibration, cell("a", flops_text="mix").texts["flops"]):
        found = [(source.share, source.settings.name, source.settings.path) for source in text.sources]
        assert found == [(0.75, "a", "owner/a"), (0.25, "notes", "notes.txt")]
        assert [source.settings.field for source in text.sources] == ["body", None]
    with pytest.raises(UserError, match=r"source=aa is unknown: did you mean a\?"):
        cell("wrong")
    with pytest.raises(UserError, match="mix is a mixture itself"):
        cell("nested")
    with pytest.raises(UserError, match="names a twice"):
        cell("twice")
