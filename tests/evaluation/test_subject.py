"""Batched generation gives the text that each prompt gets alone, ends where it should, and looks at no prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asking import ask, write
from omegaconf import OmegaConf

from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, run
from moe_lab.evaluation.engines import Prompt, Writing
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.vllm import VllmModel
from moe_lab.paths import resolve

ROOT = Path(__file__).parents[2]


def prompts(name: str, count: int) -> list[str]:
    lines = Path(resolve(f"pocket:benchmarks/{name}.jsonl")).read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def losses(subject: LoadedModel, prompts: list[str], references: list[Any], **settings: Any) -> list[float | None]:
    return [reply.loss for reply in ask(subject, prompts, 1, references=references, skip_long=True, **settings)]


def loss(subject: LoadedModel, prompt: str, answer: str) -> float:
    """Bits per byte of the answer, space before it included: one unpadded forward pass in fp64."""
    head = prompt.rstrip()
    before, whole = (subject.tokenizer(text).input_ids for text in (head, prompt + answer))
    with torch.inference_mode():
        scores = subject.model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    likelihood = sum(float(scores[place - 1, whole[place]]) for place in range(len(before), len(whole)))
    return -likelihood / math.log(2) / len((prompt[len(head) :] + answer).encode())


def test_answer_losses_are_those_of_each_text_alone(subject: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*prompts("gsm8k", 3), *prompts("humaneval", 3), *prompts("wildbench", 2)]
    answers = [*write(subject, asked[:7], 24), " The end \u00e4."]
    expected = [loss(subject, *pair) for pair in zip(asked, answers, strict=True)]
    assert min(expected) < 0.5 < max(expected)
    for size in (1, 3, 64):
        found = losses(subject, asked, answers, batch_size=size)
        assert found == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr("moe_lab.models.load.LOGITS", 1)
    assert losses(subject, asked, answers) == pytest.approx(expected, abs=1e-5)


def test_an_answer_that_cannot_be_read_has_no_loss(subject: LoadedModel) -> None:
    (asked,) = prompts("gsm8k", 1)
    read = len(subject.tokenizer(asked + " 12").input_ids)
    found = losses(subject, [asked, asked, asked], [" 12", None, " 12 34"], max_length=read)
    assert found == [pytest.approx(loss(subject, asked, " 12"), abs=1e-5), None, None]


def test_stop_texts_cut_and_are_not_looked_for_in_prompts(subject: LoadedModel) -> None:
    """The longest prompt comes last, after shorter ones, and holds the stop text itself."""
    asked = prompts("humaneval", 4)
    asked.append("\n\n".join([*asked, asked[0]]))
    stop = ("\ndef ", ")")
    assert stop[0] in asked[-1]
    whole = write(subject, asked, 32)
    assert any(")" in text for text in whole)
    cut = write(subject, asked, 32, stop=stop)
    assert cut == [text[: min((text.index(s) for s in stop if s in text), default=None)] for text in whole]  # type: ignore[type-var]
    assert len(cut[-1]) > 4


def test_a_stop_text_that_begins_in_the_prompt_does_not_count(subject: LoadedModel) -> None:
    asked = prompts("humaneval", 1)
    text = write(subject, asked, 8)[0]
    spanning = asked[0][-1] + text[:3]
    assert spanning not in text
    assert write(subject, asked, 8, stop=(spanning,)) == [text]


def test_stopping_early_saves_forward_passes(subject: LoadedModel) -> None:
    asked = prompts("humaneval", 4)
    calls = []
    hook = subject.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        write(subject, asked, 48, stop=("    r",))
    finally:
        hook.remove()
    assert len(calls) < 12


def test_answers_that_go_beyond_a_stop_text_change_no_text(subject: LoadedModel) -> None:
    asked = prompts("humaneval", 4)
    written = write(subject, asked, 32)
    stop = written[0].strip()[4:9]
    begun = [text[:50] for text in written]
    cut = write(subject, asked, 32, stop=(stop,))
    assert len(cut[0]) < len(written[0])
    assert write(subject, asked, 32, stop=(stop,), references=begun) == cut
    passes: list[object] = []
    hook = subject.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        write(subject, asked[:1], 32, stop=(stop,), references=begun[:1])
    finally:
        hook.remove()
    assert len(passes) == 1


def test_the_checkpoints_sampling_and_penalties_are_not_used(subject: LoadedModel) -> None:
    asked = prompts("wildbench", 3)
    expected = write(subject, asked, 24)
    settings = subject.model.generation_config
    changes = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0, "min_new_tokens": 23, "num_beams": 2}
    before = {name: getattr(settings, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(settings, name, value)
        assert write(subject, asked, 24) == expected
        assert subject.model.generation_config is settings
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


# Logits that are no finite numbers.


@contextmanager
def overflowing(subject: LoadedModel, number: float) -> Iterator[LoadedModel]:
    """The shipped model with one logit that is `number` after every token."""
    model = deepcopy(subject.model)
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor([5]), number))
    yield replace(subject, model=model)
    hook.remove()


NOT_FINITE = pytest.mark.parametrize("number", [math.nan, math.inf])


@NOT_FINITE
@pytest.mark.parametrize("name", ["arc_challenge", "humaneval", "gsm8k"])
def test_a_benchmark_fails_where_a_logit_is_not_finite(
    name: str, number: float, subject: LoadedModel, tmp_path: Path
) -> None:
    fields: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/benchmark/pocket_{name}.yaml"))
    benchmark = replace(BenchmarkConfig(**fields), limit=2)
    with overflowing(subject, number) as broken, pytest.raises(FloatingPointError, match=r"is (nan|inf)\b"):
        run.evaluate(broken, benchmark, tmp_path, policy=Policy(allow_code_execution=True))
    assert not (tmp_path / "result.json").exists()


@NOT_FINITE
def test_an_engine_that_computes_no_finite_number_gives_no_text(number: float, subject: LoadedModel) -> None:
    """vLLM's samplers choose a token whatever the logits are; its log-likelihood is what they leave to see."""
    process: Any = SimpleNamespace(about={"max_length": 512}, items=lambda *_, **__: iter([[0, [5, 5], number]]))
    served = VllmModel(process, subject.tokenizer, (0,), {})
    with pytest.raises(FloatingPointError, match=str(number)):
        served.generate([Prompt("A dog", (5, 6))], Writing(2))


def test_what_follows_a_complete_text_may_overflow(subject: LoadedModel) -> None:
    """A row whose text is complete stays in a batch of five, and is computed without being used."""
    asked = prompts("gsm8k", 5)
    whole = write(subject, asked, 24)
    longest = max(range(5), key=lambda number: len(subject.tokenizer(asked[number]).input_ids))  # the first row
    stop = next(
        end
        for n in range(9)
        if not any((end := whole[longest][n : n + 3]) in whole[m] for m in {*range(5)} - {longest})
    )
    tokens: list[int] = []
    overflowed = []

    def overflow(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        if len(logits) == 5 and stop in subject.tokenizer.decode(tokens):
            logits = logits.index_fill(0, torch.tensor([0]), math.nan)
            overflowed.append(1)
        tokens.append(int(logits[0, -1].argmax()))
        return logits

    expected = write(subject, asked, stop=(stop,))
    hook = subject.model.lm_head.register_forward_hook(overflow)
    try:
        assert write(subject, asked, stop=(stop,)) == expected and overflowed
    finally:
        hook.remove()
