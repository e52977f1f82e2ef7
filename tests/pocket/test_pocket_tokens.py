"""Prompts are cut where the training text has token boundaries; otherwise a model meets tokens it never saw there."""

from __future__ import annotations

from typing import Any

import pytest

from tools.pocket.benchmarks import COUNTS
from tools.pocket.examples import Example


def continuations(example: Example) -> list[tuple[str, str]]:
    """What a harness puts together from the item: each context with what may follow it."""
    if example.skill == "winogrande":
        return [(context, example.answer) for context in example.choices]
    wanted = [(example.prompt, example.answer)]
    return wanted + [(example.prompt, f" {choice}") for choice in example.choices]


@pytest.mark.parametrize("skill", COUNTS)
def test_a_prompt_tokenizes_alone_as_it_does_with_its_answer(
    skill: str, items: dict[str, list[Example]], tokenizer: Any
) -> None:
    for example in items[skill]:
        for prompt, answer in continuations(example):
            alone, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + answer)
            assert whole[: len(alone)] == alone
            assert whole == alone + tokenizer.encode(answer)


def test_any_text_comes_back(tokenizer: Any) -> None:
    text = "Zoë paid 42 €\n\n\tfor  two … or three? 茶"
    assert tokenizer.decode(tokenizer.encode(text)) == text
