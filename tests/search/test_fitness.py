"""Every fitness against a plain fp64 computation, position by position."""

from __future__ import annotations

import math

import pytest
import torch

from moe_lab.search.fitness import POSITION_FITNESS, average, contexts, drawn, row_sums
from moe_lab.search.speculative_decoding import accepted_and_proposed, prompts

P, Q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)


def naive(name: str, p: list[float], q: list[float], target: int, luck: float) -> float:
    if name == "esap":
        return sum(map(min, p, q))
    if name == "nll":
        return math.log(q[target])
    if name == "kl_reversed":
        p, q = q, p
    if name != "sap":
        return -sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    y = next(y for y in range(len(q)) if sum(q[: y + 1]) > luck)
    return min(1.0, p[y] / q[y])


@pytest.mark.parametrize("name", sorted(POSITION_FITNESS))
def test_row_sums_against_fp64(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (3, 9), generator=generator)
    answers = torch.rand(3, 9, generator=generator) < 0.5
    answers[1] = False
    at = contexts(ids, answers, shift=True, generator=generator)
    full, pruned = (3 * torch.randn(len(at.rows), 11, generator=generator) for _ in range(2))
    expected = [0.0] * 3
    places = [(row, place) for row in range(3) for place in range(8) if answers[row, place + 1]]
    for n, (row, place) in enumerate(places):
        p, q = (logits[n].double().softmax(0).tolist() for logits in (full, pruned))
        expected[row] += naive(name, p, q, int(ids[row, place + 1]), float(at.draws[n]))
    assert row_sums(name, full.log_softmax(-1), pruned, at).tolist() == pytest.approx(expected, rel=1e-5)
    assert expected[1] == 0 and len(places) == len(at.rows) > 5


def test_contexts_are_just_before_answers_or_on_them() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    answers = torch.tensor([[True, False, True, True]])
    luck = torch.Generator().manual_seed(0)
    shifted = contexts(ids, answers, shift=True, generator=luck)
    assert shifted.where.tolist() == [[False, True, True, False]] and shifted.targets.tolist() == [7, 8]
    released = contexts(ids, answers, shift=False, generator=luck)
    assert released.where.tolist() == answers.tolist() and released.targets.tolist() == [6, 8, 0]


def test_macro_and_micro() -> None:
    sums, counts = [1.0, 0.0, 9.0], [1, 0, 10]
    assert average(sums, counts, "macro") == pytest.approx((1 + 0.9) / 2)
    assert average(sums, counts, "micro") == pytest.approx(10 / 11)


def test_drawing_follows_the_probabilities() -> None:
    luck = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = drawn(torch.tensor([Q]).expand(1000, 3), luck).bincount()
    assert counts.tolist() == [200, 300, 500]


def markov(table: list[list[float]], ids: torch.Tensor, valid: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """A language model that only looks at the last token."""
    return torch.tensor(table, dtype=torch.float64)[ids[where]]


def test_speculative_decoding_by_hand() -> None:
    """Token 2 ends a text. The candidate always drafts 1; the full model accepts it half of the time after 0, never
    after 1, where it says 2 itself."""
    candidate = [[0.0, 1.0, 0.0]] * 3
    full = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    luck = torch.tensor(
        [[[0.5, 0.4, 0.5], [0.5] * 3], [[0.5, 0.6, 0.5], [0.5, 0.1, 0.5]], [[0.5, 0.1, 0.5], [0.5] * 3]]
    )
    found = accepted_and_proposed(
        [[0], [0], []],
        luck.double(),
        lambda *batch: markov(candidate, *batch),
        lambda *batch: markov(full, *batch),
        ends=frozenset({2}),
    )
    # first text: 1 is accepted, 2 follows; second: 1 is refused, 0 follows, then 1 is accepted; the third has no task
    assert found == [(1, 1), (1, 2), (0, 0)]


def test_prompts_end_before_the_answer() -> None:
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    answers = torch.tensor([[False, False, True, True], [True, True, False, False]])
    assert prompts(ids, valid, answers) == [[4, 5], []]
