from __future__ import annotations

from itertools import product

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.allocation.problem import apportion


def test_largest_remainders_come_first() -> None:
    assert apportion([5, 3, 2], 7, 0, 100).tolist() == [4, 2, 1]  # shares 3.5, 2.1, 1.4
    assert apportion([1, 1, 1], 5, 0, 100).tolist() == [2, 2, 1]  # ties: first
    assert apportion([8, 1, 1], 9, 0, 5).tolist() == [5, 2, 2]  # what a full one cannot take, others get
    assert apportion([8, 1, 1], 9, [0, 4, 1], 16).tolist() == [4, 4, 1]
    assert apportion([5, 3, 2], 16, 0, 100, 4).tolist() == [8, 4, 4]  # shares 8, 4.8, 3.2: two units of four left


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_sum_bounds_and_steps(groups: list[tuple[float, int, int]], step: int, fill: float) -> None:
    weights, low, units = map(numpy.array, zip(*groups, strict=True))
    high = low + units * step
    total = int(low.sum()) + step * round(fill * int(units.sum()))
    found = apportion(weights, total, low, high, step)
    assert found.sum() == total
    assert (found >= low).all() and (found <= high).all()
    assert not ((found - low) % step).any()


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=3), st.integers(0, 12))
def test_nearest_of_all_whole_numbers(weights: list[float], total: int) -> None:
    """Without bounds in the way, no other whole numbers with that sum are nearer to the exact shares."""
    share = numpy.array(weights) / sum(weights) * total
    found = apportion(weights, total, 0, 100)
    distances = [
        ((numpy.array(other) - share) ** 2).sum()
        for other in product(range(total + 1), repeat=len(weights))
        if sum(other) == total
    ]
    assert ((found - share) ** 2).sum() == pytest.approx(min(distances), abs=1e-6)
