"""Batches, their report, and the identity of what they hold."""

from __future__ import annotations

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
def words(tmp_path: Path) -> Path:
    """Thirty documents of three words each."""
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps({"text": f"w{3 * n} w{3 * n + 1} w{3 * n + 2}"}) + "\n" for n in range(30)))
    return file


def test_shapes_types_and_mask(words: Path, settings: Settings, tokenizer: Any) -> None:
    found = batches(settings(words, length=8, tokens=31, batch_size=2, gap="eos"), tokenizer)
    assert [tuple(ids.shape) for ids, _ in found.rows] == [(2, 8), (1, 8)]
    ids, valid = found.rows[0]
    assert ids.dtype == torch.int64 and valid.dtype == torch.bool
    assert ids[0].tolist() == [W, W + 1, W + 2, EOS, W + 3, W + 4, W + 5, EOS]
    assert valid[0].tolist() == [True, True, True, False, True, True, True, False]
    assert all((ids[valid] >= W).all() and (ids[~valid] == EOS).all() for ids, valid in found.rows)


def test_report(words: Path, settings: Settings, tokenizer: Any) -> None:
    import hashlib

    report = batches(settings(words, length=8, tokens=16), tokenizer).report
    assert json.loads(json.dumps(report)) == report
    assert report["sha256"] == hashlib.sha256(words.read_bytes()).hexdigest()
    assert (report["documents_read"], report["documents_used"], report["rows"]) == (30, 6, 2)
    assert report["valid_tokens"] == {"words": 16} and report["tokens_cut"] == 2
    assert report["first_row"] == "w0 w1 w2 w3 w4 w5 w6 w7"
    assert report["rendered"] == ["as it stands"]


def test_padding_is_invalid_and_not_shown(words: Path, settings: Settings, tokenizer: Any) -> None:
    found = batches(settings(words, packing="none", length=8, tokens=16), tokenizer)
    assert [valid.sum().item() for _, valid in found.rows] == [6]
    assert found.report["first_row"] == "w0 w1 w2" and found.report["valid_tokens"] == {"words": 6}


def all_ids(settings: CalibrationConfig, tokenizer: Any) -> list[int]:
    return [token for ids, _ in batches(settings, tokenizer).rows for token in ids.flatten().tolist()]


def test_the_seed_decides_a_random_order_without_replacement(words: Path, settings: Settings, tokenizer: Any) -> None:
    chosen = settings(words, order="random", seed=7, packing="chunk", length=9, tokens=90)
    first = all_ids(chosen, tokenizer)
    assert first == all_ids(replace(chosen, batch_size=1), tokenizer)
    assert first != all_ids(replace(chosen, seed=8), tokenizer)
    assert sorted(first) == list(range(W, W + 90))
    assert all_ids(replace(chosen, order="first"), tokenizer) == list(range(W, W + 90))


def test_special_tokens_are_a_choice_for_text(words: Path, settings: Settings, tokenizer: Any) -> None:
    assert all_ids(settings(words, special_tokens=True), tokenizer)[:5] == [BOS, W, W + 1, W + 2, BOS]


def test_a_chat_template_is_never_given_a_second_first_token(
    tmp_path: Path, settings: Settings, chat_tokenizer: Any
) -> None:
    file = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + '{"instruction": "w1", "output": "w2 w3"}\n')
    found = batches(settings(file, special_tokens=True, length=7, tokens=14), chat_tokenizer)
    ((ids, _),) = found.rows
    assert ids.tolist() == [[BOS, 3, W + 1, 4, W + 2, W + 3, EOS]] * 2, "a pair is the same conversation"
    assert found.report["rendered"] == ["chat template"]


def test_without_a_chat_template_pairs_are_text_and_messages_refused(
    tmp_path: Path, settings: Settings, tokenizer: Any
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"instruction": "w1 w2", "output": "w3"}\n')
    found = batches(settings(file, length=3, tokens=3), tokenizer)
    assert found.rows[0][0].tolist() == [[W + 1, W + 2, W + 3]]
    assert found.report["rendered"] == ["pair parted by a blank line"]
    file.write_text('{"messages": [{"role": "user", "content": "w1"}]}\n')
    with pytest.raises(UserError, match=r"has no chat template"):
        batches(settings(file), tokenizer)


def test_a_template_that_refuses_the_messages_is_one_sentence(
    tmp_path: Path, settings: Settings, tokenizer_with: Callable[..., Any]
) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "tool", "content": "w1"}]}\n')
    strict = tokenizer_with("{{ raise_exception('no tools') }}")
    with pytest.raises(UserError, match=r"refuses messages with roles tool: no tools"):
        batches(settings(file), strict)


def test_a_source_that_is_too_short_says_what_would_fit(words: Path, settings: Settings, tokenizer: Any) -> None:
    chosen = settings(words, packing="chunk", length=8, tokens=800)
    with pytest.raises(UserError, match=r"its 90 tokens .* 11 of the 100 rows .* calibration.tokens=88 would fit"):
        batches(chosen, tokenizer)
    assert batches(replace(chosen, tokens=88), tokenizer).report["rows"] == 11
    with pytest.raises(UserError, match=r"its 90 tokens .* 0 of the 1 rows .* expected a longer text"):
        batches(replace(chosen, length=512, tokens=512), tokenizer)


def test_rows_longer_than_the_model_reads_are_refused(
    words: Path, settings: Settings, tokenizer_with: Callable[..., Any]
) -> None:
    with pytest.raises(
        UserError, match=r"calibration.length=8 is more than the model reads at once: expected at most 4"
    ):
        batches(settings(words), tokenizer_with(longest=4))


def test_gap_eos_needs_such_a_token(words: Path, settings: Settings, tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"calibration.gap=eos: .* no end-of-text token"):
        batches(settings(words, gap="eos"), tokenizer)


def test_a_text_that_is_not_there_is_named(words: Path, settings: Settings) -> None:
    with pytest.raises(UserError, match=r"calibration.path=genersl.txt does not exist"):
        check(replace(settings(words), path="genersl.txt"))


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", 7), ("path", ""), ("length", 1), ("seed", -1), ("gap", "zeros")]
)
def test_settings_that_cannot_work(words: Path, settings: Settings, name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        valid(CalibrationConfig, {**asdict(settings(words)), name: value}, "calibration")
    assert [sentence.startswith(f"calibration.{name}") for sentence in error.value.sentences] == [True]


def test_a_random_order_needs_a_seed(words: Path, settings: Settings) -> None:
    with pytest.raises(UserError, match=r"calibration.seed is not set"):
        identity(settings(words, order="random", seed=None))
    assert identity(settings(words, order="first", seed=None))["seed"] is None


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


@pytest.mark.parametrize("changes", CHANGES)
def test_identity_changes_with_what_changes_the_result(
    words: Path, settings: Settings, changes: dict[str, Any]
) -> None:
    chosen = settings(words, order="random", seed=7)
    assert identity(replace(chosen, **changes)) != identity(chosen)


def test_identity_ignores_what_does_not(words: Path, settings: Settings, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(words.read_bytes())
    chosen = settings(words, order="first", seed=7)
    for same in (
        replace(chosen, path=str(copy), name="other", engine="streamed"),
        replace(chosen, seed=8),
        replace(chosen, tokens=17),
    ):
        assert identity(same) == identity(chosen)


def test_identity_of_other_text_and_of_the_same_bytes_read_otherwise(words: Path, settings: Settings) -> None:
    chosen = settings(words)
    before = identity(chosen)
    as_text = words.with_suffix(".txt")
    as_text.write_bytes(words.read_bytes())
    assert identity(settings(as_text)) != before
    words.write_text(words.read_text() + '{"text": "w1"}\n')
    assert identity(chosen) != before


def test_identity_of_a_hub_set_is_its_id_subset_and_split(settings: Settings) -> None:
    chosen = settings("owner/set", subset="raw", split="train")
    assert [identity(chosen)[name] for name in ("path", "subset", "split")] == [{"hub": "owner/set"}, "raw", "train"]


def test_checking_needs_no_heavy_library(words: Path) -> None:
    code = (
        "import sys; import moe_lab.calibration; from moe_lab.config import CalibrationConfig;"
        "from moe_lab.config.base import identity;"
        f"identity(CalibrationConfig(name='a', path={str(words)!r}, seed=1));"
        "print([m for m in ('torch', 'transformers', 'datasets', 'huggingface_hub', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
