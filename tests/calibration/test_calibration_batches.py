"""Batches, their report, and the identity of what they hold."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lab.calibration import check
from moe_lab.calibration.batches import batches
from moe_lab.config import CalibrationConfig
from moe_lab.config.base import SettingsError, identity, valid
from moe_lab.errors import UserError

Settings = Callable[..., CalibrationConfig]
BOS, EOS, W = 1, 2, 5  # the ids of <s>, </s> and w0


@pytest.fixture
def words(source: Settings) -> Settings:
    """Settings of thirty documents of three words each; keywords change them."""
    records = [{"text": f"w{3 * n} w{3 * n + 1} w{3 * n + 2}"} for n in range(30)]
    return lambda **changes: source(*records, **{"name": "words", **changes})


def test_shapes_types_and_mask(words: Settings, tokenizer: Any) -> None:
    found = batches(words(length=8, tokens=31, batch_size=2, gap="eos"), tokenizer)
    assert [tuple(ids.shape) for ids, _ in found.rows] == [(2, 8), (1, 8)]
    ids, valid = found.rows[0]
    assert ids.dtype == torch.int64 and valid.dtype == torch.bool
    assert ids[0].tolist() == [W, W + 1, W + 2, EOS, W + 3, W + 4, W + 5, EOS]
    assert valid[0].tolist() == [True, True, True, False, True, True, True, False]
    assert all((ids[valid] >= W).all() and (ids[~valid] == EOS).all() for ids, valid in found.rows)


def test_report(words: Settings, tokenizer: Any) -> None:
    chosen = words(length=8, tokens=16)
    report = batches(chosen, tokenizer).report
    assert json.loads(json.dumps(report)) == report
    assert report["sha256"] == hashlib.sha256(Path(chosen.path).read_bytes()).hexdigest()
    assert (report["documents_read"], report["documents_used"], report["rows"]) == (30, 6, 2)
    assert report["valid_tokens"] == {"words": 16} and report["tokens_cut"] == 2
    assert report["first_row"] == "w0 w1 w2 w3 w4 w5 w6 w7"
    assert report["rendered"] == ["as it stands"]
    padded = batches(words(packing="none", length=8, tokens=16), tokenizer)
    assert [valid.sum().item() for _, valid in padded.rows] == [6]
    assert padded.report["first_row"] == "w0 w1 w2" and padded.report["valid_tokens"] == {"words": 6}


def all_ids(settings: CalibrationConfig, tokenizer: Any) -> list[int]:
    return [token for ids, _ in batches(settings, tokenizer).rows for token in ids.flatten().tolist()]


def test_the_seed_decides_a_random_order_without_replacement(words: Settings, tokenizer: Any) -> None:
    chosen = words(order="random", seed=7, packing="chunk", length=9, tokens=90)
    first = all_ids(chosen, tokenizer)
    assert first == all_ids(replace(chosen, batch_size=1), tokenizer)
    assert first != all_ids(replace(chosen, seed=8), tokenizer)
    assert sorted(first) == list(range(W, W + 90))
    assert all_ids(replace(chosen, order="first"), tokenizer) == list(range(W, W + 90))


def test_special_tokens_are_a_choice_for_text_and_the_templates_for_conversations(
    words: Settings, source: Settings, tokenizer: Any, chat_tokenizer: Any
) -> None:
    assert all_ids(words(special_tokens=True), tokenizer)[:5] == [BOS, W, W + 1, W + 2, BOS]
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    pair = {"instruction": "w1", "output": "w2 w3"}
    found = batches(source({"messages": messages}, pair, special_tokens=True, length=7, tokens=14), chat_tokenizer)
    ((ids, _),) = found.rows
    assert ids.tolist() == [[BOS, 3, W + 1, 4, W + 2, W + 3, EOS]] * 2, "a pair is the same conversation"
    assert found.report["rendered"] == ["chat template"]
    found = batches(source(pair, length=3, tokens=3), tokenizer)
    assert found.rows[0][0].tolist() == [[W + 1, W + 2, W + 3]]
    assert found.report["rendered"] == ["pair parted by a blank line"]


def test_conversations_that_cannot_be_written_are_refused(
    source: Settings, tokenizer: Any, tokenizer_with: Callable[..., Any]
) -> None:
    chosen = source({"messages": [{"role": "tool", "content": "w1"}]})
    with pytest.raises(UserError, match="has no chat template"):
        batches(chosen, tokenizer)
    with pytest.raises(UserError, match="roles tool: no tools"):
        batches(chosen, tokenizer_with("{{ raise_exception('no tools') }}"))


def test_a_source_that_is_too_short_says_what_would_fit(words: Settings, tokenizer: Any) -> None:
    chosen = words(packing="chunk", length=8, tokens=800)
    with pytest.raises(UserError, match=r"its 90 tokens .* 11 of the 100 rows .* calibration.tokens=88 would fit"):
        batches(chosen, tokenizer)
    assert batches(replace(chosen, tokens=88), tokenizer).report["rows"] == 11
    with pytest.raises(UserError, match=r"its 90 tokens .* 0 of the 1 rows .* expected a longer text"):
        batches(replace(chosen, length=512, tokens=512), tokenizer)


def test_what_the_model_or_its_tokenizer_cannot_have_is_refused(
    words: Settings, tokenizer: Any, tokenizer_with: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match=r"calibration.length=8 .* at most 4"):
        batches(words(), tokenizer_with(longest=4))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"calibration.gap=eos: .* no end-of-text token"):
        batches(words(gap="eos"), tokenizer)
    with pytest.raises(UserError, match=r"calibration.path=genersl.txt does not exist"):
        check(replace(words(), path="genersl.txt"))


@pytest.mark.parametrize(("name", "value"), [("tokens", 7), ("path", "")])
def test_settings_that_cannot_work_together(words: Settings, name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        valid(CalibrationConfig, {**asdict(words()), name: value}, "calibration")
    assert [sentence.startswith(f"calibration.{name}") for sentence in error.value.sentences] == [True]


CHANGES: list[dict[str, Any]] = [
    {"packing": "chunk"},
    {"length": 4},
    {"tokens": 24},
    {"order": "first"},
    {"seed": 8},
    {"gap": "eos"},
    {"special_tokens": True},
    {"field": "text"},
    {"batch_size": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_identity_changes_with_what_changes_the_result(words: Settings, changes: dict[str, Any]) -> None:
    chosen = words(order="random", seed=7)
    assert identity(replace(chosen, **changes)) != identity(chosen)


def test_identity_is_that_of_the_bytes_and_of_how_they_are_read(words: Settings, tmp_path: Path) -> None:
    chosen = words(order="first", seed=7)
    before, file = identity(chosen), Path(chosen.path)
    for name, is_same in (("copy.jsonl", True), ("copy.txt", False)):
        (tmp_path / name).write_bytes(file.read_bytes())
        copied = replace(chosen, path=str(tmp_path / name), name="other", engine="streamed")
        assert (identity(copied) == before) == is_same
    assert identity(replace(chosen, seed=8)) == before == identity(replace(chosen, tokens=17))
    file.write_text(file.read_text() + '{"text": "w1"}\n')
    assert identity(chosen) != before
    hub = replace(chosen, path="owner/set", subset="raw", split="train")
    assert [identity(hub)[name] for name in ("path", "subset", "split")] == [{"hub": "owner/set"}, "raw", "train"]
    with pytest.raises(UserError, match=r"calibration.seed is not set"):
        identity(words(order="random", seed=None))
    assert identity(words(order="first", seed=None))["seed"] is None


def test_checking_needs_no_heavy_library(words: Settings) -> None:
    code = (
        "import sys; import moe_lab.calibration; from moe_lab.config import CalibrationConfig;"
        "from moe_lab.config.base import identity;"
        f"identity(CalibrationConfig(name='a', path={words().path!r}, seed=1));"
        "print([m for m in ('torch', 'transformers', 'datasets', 'huggingface_hub', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
