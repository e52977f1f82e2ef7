"""Generation and likelihoods in batches equal those of each row alone, and of transformers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from transformers import GenerationConfig

from moe_lab.evaluation.engines import Likelihood, Row
from moe_lab.evaluation.engines.hf import greedy
from moe_lab.evaluation.engines.likelihoods import log_likelihoods

pytestmark = pytest.mark.slow

NEW = 20


def by_transformers(model: Any, prompts: list[list[int]], ends: list[int]) -> list[list[int]]:
    """New tokens of each prompt alone, up to and with an end token, from transformers' own loop."""
    texts = []
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=ends, pad_token_id=0)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        produced = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        texts.append(produced[0, len(prompt) :].tolist())
    return texts


def sizes_of_passes(model: Any) -> list[tuple[int, int]]:
    """The numbers of rows and of tokens in each that are read by every forward pass from now on."""
    sizes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(lambda *given: sizes.append(given[2]["input_ids"].shape), with_kwargs=True)
    return sizes


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_loop_gives_the_tokens_of_transformers_whenever_rows_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_lab.evaluation.engines.hf.LEFT", 0.9)
    model = tiny.build(name)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist() for length in (9, 3, 7, 7, 5)]
    free = by_transformers(model, prompts, [])
    ends = [free[2][0]]
    for text in free:  # rows end one after another, unless a model repeats one token
        if text[8] not in {other[0] for other in free}:
            ends.append(text[8])
    expected = by_transformers(model, prompts, ends)
    sizes = sizes_of_passes(model)
    texts = greedy(model, prompts, NEW, ends, 0, lambda left, new: [False] * len(left))
    rows = [rows for rows, _ in sizes]
    assert [text.tokens for text in texts] == expected
    assert len(set(map(len, expected))) > 1
    assert rows[0] == len(prompts) > rows[-1]
    assert all(later <= earlier for earlier, later in pairwise(rows))


def starting_like(text: list[int], tokens: int, then: list[int]) -> list[int]:
    """An answer that begins as the text does, and goes on otherwise."""
    other = next(token for token in range(3, tiny.VOCABULARY) if token not in text[tokens : tokens + 1])
    return [*text[:tokens], other, *then]


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_answers_that_are_read_with_their_prompts_change_no_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build(name)
    generator = torch.Generator().manual_seed(4)
    lengths = (9, 3, 7, 7, 5, 6, 4)
    prompts = [torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    free = by_transformers(model, prompts, [])
    ends = [free[2][6]]
    expected = [[*text[: text.index(ends[0])], *ends] if ends[0] in text else text for text in free]
    answers = [
        starting_like(free[0], 4, [8, 9]),
        starting_like(free[1], 0, []),
        free[2],  # has an end token in its middle
        None,
        [*free[4], 5, 6],  # longer than the text may be
        free[5][:2],
        [*starting_like(free[6], 11, []), *range(3, 20)],
    ]
    rows = [
        Row((*prompt, *answer), len(prompt) - number % 3) if answer else None
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    for tokens in (80, 10**6):  # after which a pass may give logits: too few to read answers, or enough
        monkeypatch.setattr("moe_lab.evaluation.engines.hf.tokens_with_logits", lambda model, tokens=tokens: tokens)
        texts = greedy(model, prompts, NEW, ends, 0, lambda left, _: [False] * len(left), rows)
        assert [text.tokens for text in texts] == expected
        read = tokens > 80 and name not in UNREAD
        assert [text.likelihood is not None for text in texts] == [bool(row and read) for row in rows]
        for text, row in zip(texts, rows, strict=True):
            if text.likelihood:
                ((total, likeliest),) = log_likelihoods(model, [row], 1)
                assert text.likelihood == (pytest.approx(total, rel=1e-5), likeliest)


UNREAD = {"qwen3_next", "minimax"}
"""Families whose cache has states that cannot forget a token."""


def test_a_right_answer_that_the_model_would_give_takes_one_pass() -> None:
    model = tiny.build("olmoe")
    (text,) = by_transformers(model, [[5, 6, 7]], [])
    passes = sizes_of_passes(model)
    for tokens, ends in ((text[: NEW - 1], []), (text[:9], [text[4]])):
        answer = Row((5, 6, 7, *tokens), 3)
        greedy(model, [[5, 6, 7]], NEW, ends, 0, lambda left, _: [False] * len(left), answers=[answer])
    assert len(passes) == 2
    seen: list[int] = []
    nothing: Any = lambda left, new: seen.append(new) or [False] * len(left)  # noqa: E731
    greedy(model, [[5, 6, 7]], NEW, [], 0, nothing, answers=[Row((5, 6, 7, *text[:9]), 3)])
    assert seen == [10] + [1] * (NEW - 10)


def score(model: Any, rows: list[list[int]], starts: list[int], batch_size: int) -> list[Likelihood]:
    return log_likelihoods(model, [Row(tuple(row), start) for row, start in zip(rows, starts, strict=True)], batch_size)


QUESTION = [5, 6, 7, 8, 9, 10, 11, 12]
ANSWERS = [[13], [14], [15, 16, 17], [15, 18], [19, 20], [13]]


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_answers_to_one_question_get_the_likelihoods_that_they_have_alone(name: str) -> None:
    model = tiny.build(name)
    rows = [[*QUESTION, *answer] for answer in ANSWERS] + [[5, *answer] for answer in ANSWERS] + [[30, 31]]
    starts = [len(QUESTION)] * 6 + [1] * 7
    together = score(model, rows, starts, 3)
    for row, start, (value, likeliest) in zip(rows, starts, together, strict=True):
        [(alone, of_alone)] = score(model, [row], [start], 1)
        ids = torch.tensor([row])
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, ids[0, start:, None]).sum()
        assert value == pytest.approx(float(expected), abs=1e-4)
        assert (alone, of_alone) == (pytest.approx(value, abs=1e-4), likeliest)


@pytest.mark.parametrize(("name", "tokens"), [("olmoe", 8 + 2 + 1), ("deepseek_v3", 8 + 2 + 1), ("qwen3_next", 3 * 10)])
def test_a_question_is_read_once_where_attention_is_full(name: str, tokens: int) -> None:
    model = tiny.build(name)
    rows = [[*QUESTION, *answer] for answer in ANSWERS[:3]] + [[*QUESTION, *ANSWERS[4]]]
    score(model, rows, [8] * 4, 64)
    read = sizes_of_passes(model)
    score(model, rows, [8] * 4, 64)
    assert sum(map(math.prod, read)) == tokens


def test_windows_that_begin_alike_are_not_read_as_answers_to_their_first_token() -> None:
    model = tiny.build("olmoe")
    generator = torch.Generator().manual_seed(0)
    windows = [[1, *torch.randint(3, tiny.VOCABULARY, (30,), generator=generator).tolist()] for _ in range(12)]
    score(model, windows[:1], [1], 1)
    read = sizes_of_passes(model)
    score(model, windows, [1] * 12, 4)
    assert [tokens for _, tokens in read] == [30, 30, 30]


def test_a_family_that_reads_answers_together_in_another_way_reads_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, starts = [[*QUESTION, *answer] for answer in ANSWERS], [len(QUESTION)] * 6
    model = tiny.build("olmoe")
    expected = [score(model, [row], [8], 1)[0][0] for row in rows]
    other = tiny.build("olmoe")
    forward = other.forward

    def causal(*arguments: Any, **named: Any) -> Any:
        if named["attention_mask"].dim() == 4:
            del named["attention_mask"]
        return forward(*arguments, **named)

    monkeypatch.setattr(other, "forward", causal)
    assert [value for value, _ in score(other, rows, starts, 64)] == pytest.approx(expected, abs=1e-5)
