from __future__ import annotations

from collections import Counter
from itertools import product
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import PCG64, Generator
from scipy.stats import chisquare

from moe_lab.errors import UserError
from moe_lab.search.schedules import Problem, Schedule, space_of


def enumerated(problem: Problem, granularity: int) -> list[Schedule]:
    """Every feasible schedule, by trying all."""
    choices = [
        [lost for lost in range(count - few + 1) if (count - lost) % step == 0 and (count - lost) % granularity == 0]
        for count, few, step in zip(problem.n_experts, problem.fewest, problem.steps, strict=True)
    ]
    return [each for each in product(*choices) if sum(each) == problem.budget]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, int]:
    layers, step = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    counts = tuple(draw(st.lists(st.integers(4, 9), min_size=layers, max_size=layers)))
    fewest = tuple(draw(st.integers(1, 3)) for _ in counts)
    return Problem(counts, fewest, (step,) * layers, draw(st.integers(0, sum(counts)))), draw(st.integers(1, 2))


@given(problems())
@settings(max_examples=200)
def test_the_space_is_what_enumeration_finds(case: tuple[Problem, int]) -> None:
    problem, granularity = case
    expected = enumerated(problem, granularity)
    try:
        space = space_of(problem, granularity)
    except UserError as error:
        assert not expected
        if "nearest feasible" in str(error):
            named = str(error).split(": ")[2].split(" is the nearest")[0].split(" or ")
            for budget in map(int, named):
                assert enumerated(Problem(problem.n_experts, problem.fewest, problem.steps, budget), granularity)
        return
    assert space.size == len(expected)
    assert [space.nth(number) for number in range(space.size)] == expected
    assert [space.schedule(space.taken(each)) for each in expected] == expected


@pytest.mark.parametrize("granularity", [1, 2])
def test_sampling_is_uniform(granularity: int) -> None:
    problem = Problem((6, 4, 8), (2, 1, 3), (1, 1, 1), 6)
    space, random = space_of(problem, granularity), Generator(PCG64(7))
    seen = Counter(space.sample(random) for _ in range(100 * space.size))
    assert set(seen) == set(enumerated(problem, granularity)) and len(seen) > 3
    assert chisquare(list(seen.values())).pvalue > 0.01


def test_counts_are_exact_beyond_fp64() -> None:
    # without caps in reach there are C(B + L - 1, L - 1) ways
    space = space_of(Problem((128,) * 48, (8,) * 48, (1,) * 48, 100), 1)
    assert space.size == comb(147, 47) > 2**53
    assert sum(space.nth(space.size - 1)) == sum(space.nth(0)) == 100
    assert space.nth(space.size - 1) == (100, *[0] * 47)


@pytest.mark.parametrize(
    ("problem", "granularity", "message"),
    [
        (Problem((8, 8), (2, 2), (1, 1), 13), 1, "13 experts cannot be removed.*: 12 is the nearest feasible number$"),
        (Problem((8, 8), (2, 2), (1, 1), 5), 2, r"multiple of 2 .*: 4 or 6 is the nearest.*smaller .*granularity\)"),
        (Problem((7, 7), (2, 2), (2, 2), 0), 1, "0 experts cannot be removed.*: 2 is the nearest feasible number$"),
        (Problem((8, 8), (2, 7), (4, 4), 4), 3, r"MoE layer 0 \(counted from 0\) has 8 .*multiple of 12"),
        (Problem((8, 8), (2, 2), (2, 3), 4), 1, r"multiples of \[2, 3\] in different layers"),
    ],
)
def test_what_cannot_be_is_said(problem: Problem, granularity: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        space_of(problem, granularity)
