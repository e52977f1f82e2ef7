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
from moe_lab.search.schedules import Problem, Schedule, Space, pattern, project, space_of


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


# ---- the first population


def space(layers: int, experts: int, fewest: int, budget: int, granularity: int = 1) -> Space:
    return space_of(Problem((experts,) * layers, (fewest,) * layers, (1,) * layers, budget), granularity)


# 8 layers of 16 experts lose 32. By hand, e.g. up: weights 1..8 of 36, shares 8i/9 = .89 1.78 2.67 3.56 4.44 5.33 6.22
# 7.11, whole parts 0 1 2 3 4 5 6 7 = 28, the 4 left go to the fractions .89 .78 .67 .56.
BY_HAND = {
    "uniform": (4, 4, 4, 4, 4, 4, 4, 4),
    "up": (1, 2, 3, 4, 4, 5, 6, 7),
    "down": (7, 6, 5, 4, 4, 3, 2, 1),
    # weights 1 2 3 4 4 3 2 1 of 20: 1.6 3.2 4.8 6.4 6.4 4.8 3.2 1.6, whole 28, left to .8 .8 .6 .6
    "mid": (2, 3, 5, 6, 6, 5, 3, 2),
    # weights 4.5 3.5 2.5 1.5 and mirrored, of 24: 6 4.67 3.33 2 2 3.33 4.67 6, whole 30, left to .67 .67
    "mid_neg": (6, 5, 3, 2, 2, 3, 5, 6),
    # weights 1.0001 .7001 .4901 .3431 .2402 .1682 .1177 .0825 of 3.1420 : 10.19 7.13 4.99 3.49 2.45 1.71 1.20 .84,
    # whole 10 7 4 3 2 1 1 0 = 28, left to .99 .84 .71 .49
    "front_heavy": (10, 7, 5, 4, 2, 2, 1, 1),
    # weights 1 1.3 1.69 2.197 2.8561 3.7129 4.8268 6.2749 of 23.8577: 1.34 1.74 2.27 2.95 3.83 4.98 6.47 8.42,
    # whole 1 1 2 2 3 4 6 8 = 27, left to .98 .95 .83 .74 .47
    "back_heavy": (1, 2, 2, 3, 4, 5, 7, 8),
    # two layers of 2, six of 1, of 10: 6.4 and 3.2, whole 30, left to .4 .4
    "block_early": (7, 7, 3, 3, 3, 3, 3, 3),
    "block_late": (3, 3, 3, 3, 3, 3, 7, 7),
    # 2 1 2 1 ... of 12: 5.33 and 2.67, whole 28, left to the four .67
    "alt": (5, 3, 5, 3, 5, 3, 5, 3),
    # .5 .643 .786 .929 and mirrored, of 5.714: 2.8 3.6 4.4 5.2, whole 28, left to .8 .8 .6 .6
    "deep_flat": (3, 4, 4, 5, 5, 4, 4, 3),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_patterns_as_computed_by_hand(name: str) -> None:
    assert pattern(name, space(8, 16, 2, 32), Generator(PCG64(0))) == BY_HAND[name]


def test_random_is_in_proportion_to_uniform_weights() -> None:
    weights = [float(value) + 1e-4 for value in Generator(PCG64(3)).random(8)]
    found = pattern("random", space(8, 16, 2, 32), Generator(PCG64(3)))
    shares = [32 * weight / sum(weights) for weight in weights]
    assert all(abs(lost - share) < 1 for lost, share in zip(found, shares, strict=True))


def test_caps_send_the_rest_round_robin_from_the_first_layer() -> None:
    # shares 12 2.4 .8 .8, cap 6: 6 2 0 0, then one each to .8 .8 .4, then again from the first layer with room
    assert project([15, 3, 1, 1], space(4, 8, 2, 16)) == (6, 5, 3, 2)


def test_even_numbers_are_the_same_in_pairs() -> None:
    # 16 pairs: weights 1..8 of 36 give .44 .89 1.33 1.78 2.22 2.67 3.11 3.56, whole 0 0 1 1 2 2 3 3 = 12
    expected = (0, 2, 2, 4, 4, 6, 6, 8)
    assert pattern("up", space(8, 16, 2, 32, granularity=2), Generator(PCG64(0))) == expected
    # an odd number of experts loses an odd number: 3 pairs beyond one each
    assert project([1, 1, 2], space(3, 9, 2, 9, granularity=2)) == (3, 3, 3)


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(4, 9), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.floats(0, 1),
)
@settings(max_examples=200)
def test_projections_are_feasible(layers: list[tuple[float, int, int]], step: int, share: float) -> None:
    weights, counts, fewest = zip(*layers, strict=True)
    most = [(count - few - count % step) // step for count, few in zip(counts, fewest, strict=True)]
    if min(most) < 0:
        return
    budget = sum(count % step for count in counts) + step * int(share * sum(most))
    found = project(weights, space_of(Problem(counts, fewest, (step,) * len(counts), budget), 1))
    assert sum(found) == budget
    for lost, count, few in zip(found, counts, fewest, strict=True):
        assert 0 <= lost <= count - few and (count - lost) % step == 0
