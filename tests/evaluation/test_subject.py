"""Batched generation gives the text that each prompt gets alone, ends where it should, and looks at no prompt."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from moe_lab.errors import UserError
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.paths import resolve


def prompts(name: str, count: int) -> list[str]:
    lines = Path(resolve(f"pocket:benchmarks/{name}.jsonl")).read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def alone(subject: LocalModel, prompt: str, tokens: int) -> str:
    """Plain transformers, one prompt, no padding."""
    encoded = subject.tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        found = subject.model.generate(**encoded, max_new_tokens=tokens, do_sample=False)
    return str(subject.tokenizer.decode(found[0, encoded.input_ids.shape[1] :], skip_special_tokens=True))


def test_batches_of_any_size_give_what_each_prompt_gets_alone(subject: LocalModel) -> None:
    asked = [*prompts("gsm8k", 4), *prompts("wildbench", 3), *prompts("humaneval", 3)]
    expected = [alone(subject, prompt, 24) for prompt in asked]
    for size in (1, 3, 64):
        assert subject.generate(asked, GenSpec(24, batch_size=size)) == expected


def loss(subject: LocalModel, prompt: str, answer: str) -> float:
    """Bits per byte of the answer, space before it included: one unpadded forward pass in fp64."""
    head = prompt.rstrip()
    before, whole = (subject.tokenizer(text).input_ids for text in (head, prompt + answer))
    with torch.inference_mode():
        scores = subject.model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    likelihood = sum(float(scores[place - 1, whole[place]]) for place in range(len(before), len(whole)))
    return -likelihood / math.log(2) / len((prompt[len(head) :] + answer).encode())


def test_answer_losses_are_those_of_each_text_alone(subject: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*prompts("gsm8k", 3), *prompts("humaneval", 3), *prompts("wildbench", 2)]
    answers = [*subject.generate(asked[:7], GenSpec(24)), " The end \u00e4."]
    expected = [loss(subject, *pair) for pair in zip(asked, answers, strict=True)]
    assert min(expected) < 0.5 < max(expected)
    for size in (1, 3, 64):
        found = subject.answer_losses(asked, answers, GenSpec(1, batch_size=size))
        assert found == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr("moe_lab.models.device.LOGITS", 1)
    assert subject.answer_losses(asked, answers, GenSpec(1)) == pytest.approx(expected, abs=1e-5)


def test_an_answer_that_cannot_be_read_has_no_loss(subject: LocalModel) -> None:
    (asked,) = prompts("gsm8k", 1)
    read = len(subject.tokenizer(asked + " 12").input_ids)
    found = subject.answer_losses([asked, asked, asked, ""], [" 12", None, " 12 34", "a"], GenSpec(1, max_length=read))
    assert found == [pytest.approx(loss(subject, asked, " 12"), abs=1e-5), None, None, None]


def test_stop_texts_cut_and_are_not_looked_for_in_prompts(subject: LocalModel) -> None:
    """The longest prompt comes last, after shorter ones, and holds the stop text itself."""
    asked = prompts("humaneval", 4)
    asked.append("\n\n".join([*asked, asked[0]]))
    stop = ("\ndef ", ")")
    assert stop[0] in asked[-1]
    whole = subject.generate(asked, GenSpec(32))
    assert any(")" in text for text in whole)
    cut = subject.generate(asked, GenSpec(32, stop=stop))
    assert cut == [text[: min((text.index(s) for s in stop if s in text), default=None)] for text in whole]  # type: ignore[type-var]
    assert len(cut[-1]) > 4


def test_a_stop_text_that_begins_in_the_prompt_does_not_count(subject: LocalModel) -> None:
    asked = prompts("humaneval", 1)
    text = subject.generate(asked, GenSpec(8))[0]
    spanning = asked[0][-1] + text[:3]
    assert spanning not in text
    assert subject.generate(asked, GenSpec(8, stop=(spanning,))) == [text]


def test_stopping_early_saves_forward_passes(subject: LocalModel) -> None:
    asked = prompts("humaneval", 4)
    calls = []
    hook = subject.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        subject.generate(asked, GenSpec(48, stop=("    r",)))
    finally:
        hook.remove()
    assert len(calls) < 12


def test_answers_that_go_beyond_a_stop_text_change_no_text(subject: LocalModel) -> None:
    asked = prompts("humaneval", 4)
    written = subject.generate(asked, GenSpec(32))
    stop = written[0].strip()[4:9]
    begun = [text[:50] for text in written]
    spec = GenSpec(32, stop=(stop,))
    cut = subject.generate(asked, spec)
    assert len(cut[0]) < len(written[0])
    rows = subject.answer_rows(asked, begun, spec)
    assert sorted((index, text) for index, text, _ in subject.complete(asked, rows, spec)) == list(enumerate(cut))
    passes: list[object] = []
    hook = subject.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        list(subject.complete(asked[:1], rows[:1], spec))
    finally:
        hook.remove()
    assert len(passes) == 1


def test_the_checkpoints_sampling_and_penalties_are_not_used(subject: LocalModel) -> None:
    asked = prompts("wildbench", 3)
    expected = subject.generate(asked, GenSpec(24))
    settings = subject.model.generation_config
    changes = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0, "min_new_tokens": 23, "num_beams": 2}
    before = {name: getattr(settings, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(settings, name, value)
        assert subject.generate(asked, GenSpec(24)) == expected
        assert subject.model.generation_config is settings
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def test_nothing_to_generate_is_nothing(subject: LocalModel) -> None:
    assert subject.generate([], GenSpec(4)) == []


def test_a_prompt_that_leaves_no_room_is_said(subject: LocalModel) -> None:
    assert subject.max_length is not None
    with pytest.raises(UserError, match=f"do not fit the model's {re.escape(str(subject.max_length))} tokens"):
        subject.generate(["a", "word " * subject.max_length], GenSpec(4))


def test_a_prompt_that_leaves_no_room_can_be_left_out(subject: LocalModel) -> None:
    assert subject.max_length is not None
    asked = ["The story", "word " * subject.max_length, *prompts("gsm8k", 1)]
    found = dict(subject.stream(asked, GenSpec(4, skip_long=True)))
    assert found == dict(zip((0, 2), subject.generate([asked[0], asked[2]], GenSpec(4)), strict=True))
