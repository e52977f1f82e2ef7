"""Parts of allocation=coverage: CBA against a naive search, priors, smoothing."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_lab.allocation.coverage import cover, expert_prior
from moe_lab.allocation.shapes import FUNCTIONS, smooth
from moe_lab.errors import UserError

GROUPS = [numpy.array(row, dtype=float) for row in ((8, 1, 1, 0), (3, 3, 2, 2), (5, 4, 3, 2))]
PRIOR = numpy.array([0.5, 1, 0.8])


def covered(groups: list[numpy.ndarray], prior: numpy.ndarray, alpha: float) -> list[int]:
    """N_g(min(alpha phi_g, 1)) as defined: the smallest n whose prefix sum reaches the share."""
    kept = []
    for scores, phi in zip(groups, prior, strict=True):
        descending = sorted(scores, reverse=True)
        wanted = min(alpha * phi, 1) * sum(descending)
        kept.append(next(n for n in range(len(scores) + 1) if sum(descending[:n]) >= wanted))
    return kept


def naive(groups: list[numpy.ndarray], prior: numpy.ndarray, budget: int) -> list[int]:
    """The specification word by word: bisect alpha until floats meet, then one channel at a time to the group with the
    smallest achieved / target coverage."""
    low, high = 0.0, 1 / min(prior)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(covered(groups, prior, middle)) <= budget else (low, middle)
    kept = covered(groups, prior, low)
    while sum(kept) < budget:
        open_groups = [g for g in range(len(groups)) if kept[g] < len(groups[g])]

        def reached(g: int) -> float:
            return float(sum(sorted(groups[g], reverse=True)[: kept[g]]) / sum(groups[g]) / prior[g])

        kept[min(open_groups, key=reached)] += 1
    return kept


def test_golden_example_of_cba() -> None:
    assert cover(GROUPS, PRIOR, 6).tolist() == [1, 3, 2]
    assert covered(GROUPS, PRIOR, 1.0) == [1, 4, 3]
    assert cover(GROUPS, PRIOR, 8).tolist() == [1, 4, 3]


scores = st.lists(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), min_size=1, max_size=4)
TARGETS = st.lists(st.floats(0.05, 1), min_size=4, max_size=4)


@given(scores, TARGETS, st.floats(0, 1))
@settings(max_examples=50)
def test_exact_is_the_search_run_to_the_end(rows: list[list[float]], targets: list[float], fill: float) -> None:
    groups, prior = [numpy.array(row) for row in rows], numpy.array(targets[: len(rows)])
    budget = max(len(groups), round(fill * sum(map(len, groups))))  # below, alpha is 0 and all groups are tied
    shares = [s / p for row, p in zip(rows, prior, strict=True) for s in numpy.cumsum(sorted(row)[::-1]) / sum(row)]
    assume(len({round(share, 6) for share in shares}) == len(shares))  # ties may fall either way
    assert cover(groups, prior, budget).tolist() == naive(groups, prior, budget)


def test_groups_without_score_or_target_come_last() -> None:
    groups = [numpy.zeros(3), numpy.array([2.0, 1.0, 0.0]), numpy.array([5.0, 4.0, 3.0]), -numpy.ones(3)]
    prior = numpy.array([1, 1, 0, 1.0])
    assert cover(groups, prior, 2).tolist() == [0, 2, 0, 0]
    assert cover(groups, prior, 5).tolist() == [0, 2, 3, 0]
    assert cover(groups, prior, 12).tolist() == [3, 3, 3, 3]
    assert cover(groups, numpy.zeros(4), 4).sum() == 4


def test_of_what_is_equal_the_larger_target_comes_first() -> None:
    assert cover([numpy.ones(2), numpy.ones(2)], numpy.array([0.5, 1]), 1).tolist() == [0, 1]


# ---- priors

SUMS = numpy.zeros((3, 3, 3))
SUMS[:, 1, 0] = [0.5, 1.5, 2.5]
EVIDENCE: dict[str, Any] = {
    "statistics": {
        7: {
            "ala_first": numpy.array([3.0, -1.0, 2.0]),
            "ala_second": numpy.array([4.0, 5.0, 6.0]),
            "tokens": numpy.array([10.0, 0.0, 30.0]),
            "sums_model": SUMS,
        }
    },
    "ablation": {7: {"ablation": numpy.array([0.1, -0.2, 0.3])}},
    "gradients": {7: {"channel_product": numpy.array([[-1.0, -2.0], [3.0, 4.0], [-5.0, 1.0]])}},
}


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        ("ala1", [3, 0, 2]),
        ("ala2", [4, 5, 6]),
        ("true_ablation", [4, 5, 6]),
        ("loss", [0.1, 0, 0.3]),
        ("usage", [10, 0, 30]),
        ("router_weight", [0.5, 1.5, 2.5]),
        ("ala_lm", [3, 0, 4]),
        ("none", [1, 1, 1]),
    ],
)
def test_values_of_priors(prior: Any, expected: list[float]) -> None:
    assert expert_prior(prior, EVIDENCE, 7, 3) == pytest.approx(expected)


def test_missing_evidence() -> None:
    with pytest.raises(UserError, match=r"channel_product of layer 8.* gradients"):
        expert_prior("ala_lm", EVIDENCE, 8, 3)


# ---- smoothing

X = numpy.array([0.25, 0.75, 1.0, 2.0])  # mean 1, population deviation sqrt(0.40625)
HALF = 0.5 * 0.40625**0.5


def test_formulas_of_smoothing() -> None:
    assert smooth(X, "sqrt") == pytest.approx([0.5, 0.75**0.5, 1, 2**0.5])
    assert smooth(X, "log") == pytest.approx([numpy.log(2.25), numpy.log(4.75), numpy.log(6), numpy.log(11)])
    delta = 1 + HALF
    assert smooth(X, "huber") == pytest.approx([0.25, 0.75, 1, delta + (delta * (2 - delta)) ** 0.5])
    assert smooth(X, "clip") == pytest.approx([1 - HALF, 0.75, 1, 1 + HALF])
    assert smooth(X, "none") == pytest.approx(X)


@given(
    st.lists(st.just(0.0) | st.floats(1e-9, 1e6), min_size=1, max_size=9),
    st.sampled_from(sorted(FUNCTIONS)),
    st.floats(1e-3, 1e3),
)
def test_order_stays_nothing_is_zero_and_units_do_not_matter(values: list[float], name: str, unit: float) -> None:
    x = numpy.array(values)
    found = smooth(x, name)
    assert (found > 0).all()
    assert (numpy.diff(found[numpy.argsort(x)]) >= -1e-12).all()
    assert smooth(x * unit, name) == pytest.approx(found, rel=1e-6)
