"""Which tokens belong to an answer, by hand; and that marking changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_lab.calibration.batches import answer_batches, batches
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError

Settings = Callable[..., CalibrationConfig]


def answered(settings: CalibrationConfig, tokenizer: Any, **options: Any) -> list[list[str]]:
    """The answer tokens of each row, as words."""
    return [
        tokenizer.convert_ids_to_tokens(ids[marks].tolist())
        for batch in answer_batches(settings, tokenizer, **options)
        for ids, marks in zip(batch[0], batch[2], strict=True)
    ]


PAIRS = (
    {"instruction": "w0 w1", "output": "w2 w3"},
    {"question": "w4", "answer": "w5 w6 w7"},
    {"prompt": "w8 w9", "completion": " w10"},
    {"text": "w11 w12 w13"},
)


def test_a_pair_of_each_kind_and_a_text_without_an_answer(
    source: Settings, tokenizer: Any, chat_tokenizer: Any
) -> None:
    chosen = source(*PAIRS, packing="none", length=9, tokens=36, special_tokens=True)
    for each in (tokenizer, chat_tokenizer):
        assert answered(chosen, each) == [["w2", "w3"], ["w5", "w6", "w7"], ["w10"], []]


@pytest.mark.parametrize("packing", ["none", "chunk", "reap"])
@pytest.mark.parametrize("gap", ["none", "eos", "zero"])
def test_ids_are_those_of_a_calibration_set(packing: str, gap: str, source: Settings, tokenizer: Any) -> None:
    chosen = source(*PAIRS, packing=packing, gap=gap, length=5, tokens=10, order="random", seed=1)
    with_answers, without = answer_batches(chosen, tokenizer), batches(chosen, tokenizer).rows
    for (ids, valid, answers), (same_ids, same_valid) in zip(with_answers, without, strict=True):
        assert torch.equal(ids, same_ids) and torch.equal(valid, same_valid)
        assert not bool((answers & ~valid).any())


def test_marks_follow_their_tokens_through_packing(source: Settings, tokenizer: Any) -> None:
    assert answered(source(*PAIRS, packing="chunk", gap="eos", length=6, tokens=12), tokenizer) == [
        ["w2", "w3"],
        ["w5", "w6", "w7"],
    ]
    # reap drops what overflows a row: w6 and w7 are gone, and the next row begins with a document
    assert answered(source(*PAIRS, packing="reap", length=6, tokens=12), tokenizer) == [["w2", "w3", "w5"], ["w10"]]


def test_only_what_the_assistant_says_is_an_answer(source: Settings, chat_tokenizer: Any) -> None:
    said = [("user", "w0 w1"), ("assistant", "w2 w0"), ("user", "w3"), ("assistant", "w0 w4")]
    chat = {"messages": [{"role": role, "content": content} for role, content in said]}
    chosen = source(chat, packing="none", length=16, tokens=16)
    assert answered(chosen, chat_tokenizer) == [["w2", "w0", "w0", "w4"]]
    with_header = [["assistant", "w2", "w0", "assistant", "w0", "w4", "</s>"]]
    assert answered(chosen, chat_tokenizer, header=True) == with_header


def test_sets_and_rows_without_answers_are_refused(source: Settings, tokenizer: Any) -> None:
    unanswered = ({"text": "w1 w2 w3 w4"}, {"instruction": "w1 w2 w3", "output": " "})
    with pytest.raises(UserError, match=r"set\.jsonl holds no answers: .* instruction and output"):
        answer_batches(source(*unanswered, length=4, tokens=4), tokenizer)
    with pytest.raises(UserError, match=r"calibration\.length=4 cuts every answer"):
        record = {"instruction": "w0 w1 w2 w3", "output": "w4"}
        answer_batches(source(record, packing="none", length=4, tokens=4), tokenizer)


def test_an_answer_the_template_rewrites_is_refused_unless_turns_are_taken(
    source: Settings, tokenizer_with: Any
) -> None:
    slow = tokenizer_with("{% for m in messages %}{{ m.role }} {{ m.content | replace(' ', ' w9 ') }} {% endfor %}")
    chosen = source({"instruction": "w0", "output": "w1 w2"}, packing="none", length=6, tokens=6)
    with pytest.raises(UserError, match="header=true"):
        answer_batches(chosen, slow)
    assert answered(chosen, slow, header=True) == [["assistant", "w1", "w9", "w2"]]
