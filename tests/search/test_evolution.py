"""Schedules and their evolution."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, permutations, product
from math import comb, lcm
from typing import Any, NamedTuple

import pytest
from allocation.example_facts import layer
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import PCG64, Generator
from processes import time_limit
from scipy.stats import chisquare

from moe_lab.allocation.problem import Limits
from moe_lab.errors import UserError
from moe_lab.search.evolution import (
    PATTERNS,
    Schedule,
    SearchSettings,
    Space,
    evolve,
    feasible_space,
    mutate,
    parse,
    pattern,
    project,
    space_to_search,
)


class Problem(NamedTuple):
    """Experts of each layer, the fewest that it can keep, the step of these numbers, and experts to
    remove in all."""

    n_experts: tuple[int, ...]
    fewest: tuple[int, ...]
    steps: tuple[int, ...]
    budget: int

    def space(self, granularity: int) -> Space:
        layers = zip(self.n_experts, self.steps, self.fewest, strict=True)
        limits = [Limits(count, 1, 1, step, few) for count, step, few in layers]
        return feasible_space(limits, self.budget, granularity)


def enumerated(problem: Problem, granularity: int) -> list[Schedule]:
    """Every feasible schedule, by trying all."""
    multiple = lcm(granularity, *problem.steps)
    choices = []
    for count, few in zip(problem.n_experts, problem.fewest, strict=True):
        choices.append([lost for lost in range(count - few + 1) if (count - lost) % multiple == 0])
    return [counts for counts in product(*choices) if sum(counts) == problem.budget]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, int]:
    layers = draw(st.integers(1, 4))
    counts = tuple(draw(st.lists(st.integers(4, 9), min_size=layers, max_size=layers)))
    fewest = tuple(draw(st.integers(1, 3)) for _ in counts)
    steps = tuple(draw(st.integers(1, 3)) for _ in counts)
    budget = draw(st.integers(0, sum(counts)))
    granularity = draw(st.integers(1, 2))
    return Problem(counts, fewest, steps, budget), granularity


@given(problems())
@settings(max_examples=200)
def test_the_space_is_what_enumeration_finds(case: tuple[Problem, int]) -> None:
    problem, granularity = case
    expected = enumerated(problem, granularity)
    try:
        space = problem.space(granularity)
    except UserError as error:
        assert not expected
        if "nearest feasible" in str(error):
            nearest = str(error).split(": ")[2].split(" is the nearest")[0]
            for budget in nearest.split(" or "):
                assert enumerated(problem._replace(budget=int(budget)), granularity)
        return
    assert space.size == len(expected)
    assert [space.schedule_at(number) for number in range(space.size)] == expected
    assert [space.schedule(space.units_removed(schedule)) for schedule in expected] == expected


def test_sampling_is_uniform() -> None:
    problem = Problem((6, 4, 8), (2, 1, 3), (1, 1, 1), 6)
    space = problem.space(1)
    random = Generator(PCG64(7))
    schedules = enumerated(problem, 1)
    seen = Counter(space.sample(random) for _ in range(100 * len(schedules)))
    assert set(seen) == set(schedules)
    assert len(seen) > 3
    assert chisquare(list(seen.values())).pvalue > 0.01


def test_counts_are_exact_beyond_fp64() -> None:
    # without caps in reach there are C(B + L - 1, L - 1) ways
    space = Problem((128,) * 48, (8,) * 48, (1,) * 48, 100).space(1)
    assert space.size == comb(147, 47) > 2**53
    assert space.schedule_at(space.size - 1) == (100, *[0] * 47)


@pytest.mark.parametrize(
    ("problem", "granularity", "message"),
    [
        (
            Problem((8, 8), (2, 2), (1, 1), 5),
            2,
            r"multiple of 2 .*: 4 or 6 is the nearest.*smaller .*granularity\)",
        ),
        (
            Problem((8, 8), (2, 7), (4, 4), 4),
            3,
            r"MoE layer 0 \(counted from 0\) has 8 .*multiple of 12",
        ),
    ],
)
def test_impossible_search_spaces_are_refused(
    problem: Problem, granularity: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        problem.space(granularity)


# ---- the first population


def space(layers: int, experts: int, fewest: int, budget: int, granularity: int = 1) -> Space:
    """The space of layers that are alike."""
    problem = Problem((experts,) * layers, (fewest,) * layers, (1,) * layers, budget)
    return problem.space(granularity)


# 8 layers of 16 experts lose 32. By hand, e.g. up: weights 1..8 of 36, shares 8i/9 = .89 1.78 2.67
# 3.56 4.44 5.33 6.22 7.11, whole parts 0 1 2 3 4 5 6 7 = 28, the 4 left go to the fractions .89 .78
# .67 .56.
BY_HAND = {
    "uniform": (4, 4, 4, 4, 4, 4, 4, 4),
    "up": (1, 2, 3, 4, 4, 5, 6, 7),
    "down": (7, 6, 5, 4, 4, 3, 2, 1),
    # weights 1 2 3 4 4 3 2 1 of 20: 1.6 3.2 4.8 6.4 6.4 4.8 3.2 1.6, whole 28, left to .8 .8 .6 .6
    "mid": (2, 3, 5, 6, 6, 5, 3, 2),
    # weights 4.5 3.5 2.5 1.5 and mirrored, of 24: 6 4.67 3.33 2 2 3.33 4.67 6, whole 30, left to
    # .67 .67
    "mid_neg": (6, 5, 3, 2, 2, 3, 5, 6),
    # weights 1.0001 .7001 .4901 .3431 .2402 .1682 .1177 .0825 of 3.1420 : 10.19 7.13 4.99 3.49 2.45
    # 1.71 1.20 .84,
    # whole 10 7 4 3 2 1 1 0 = 28, left to .99 .84 .71 .49
    "front_heavy": (10, 7, 5, 4, 2, 2, 1, 1),
    # weights 1 1.3 1.69 2.197 2.8561 3.7129 4.8268 6.2749 of 23.8577: 1.34 1.74 2.27 2.95 3.83 4.98
    # 6.47 8.42,
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


def test_patterns_as_computed_by_hand() -> None:
    layers = space(8, 16, 2, 32)
    for name, expected in BY_HAND.items():
        assert pattern(name, layers, Generator(PCG64(0))) == expected, name


def test_random_pattern_is_of_random_weights() -> None:
    weights = [float(value) + 1e-4 for value in Generator(PCG64(3)).random(8)]
    schedule = pattern("random", space(8, 16, 2, 32), Generator(PCG64(3)))
    for lost, weight in zip(schedule, weights, strict=True):
        share = 32 * weight / sum(weights)
        assert abs(lost - share) < 1


def test_projections_with_caps() -> None:
    # shares 12 2.4 .8 .8, cap 6: 6 2 0 0, then one each to .8 .8 .4, then again from the first
    # layer with room
    assert project([15, 3, 1, 1], space(4, 8, 2, 16)) == (6, 5, 3, 2)


def test_projections_in_pairs() -> None:
    # an odd number of experts loses an odd number: 3 pairs beyond one each
    odd = space(3, 9, 2, 9, granularity=2)
    assert project([1, 1, 2], odd) == (3, 3, 3)


# ---- evolution

PAPER = Problem((128,) * 48, (8,) * 48, (1,) * 48, 3072)


def rugged(seed: int) -> Callable[[Schedule], float]:
    """A fitness with interactions between neighbouring layers, different for every seed."""
    tables = Generator(PCG64(seed)).random((6, 129, 129))

    def fitness(schedule: Schedule) -> float:
        pairs = pairwise((*schedule, 0))
        return float(sum(table[pair] for table, pair in zip(tables, pairs, strict=False)))

    return fitness


def run(
    problem: Problem, settings: SearchSettings, fitness: Callable[[Schedule], float]
) -> list[dict[str, Any]]:
    """A search whose every evaluation is checked."""
    seen: set[Schedule] = set()
    feasible = set(enumerated(problem, settings.granularity))

    def evaluate(schedules: Sequence[Schedule]) -> list[float]:
        assert feasible.issuperset(schedules)
        assert len(set(schedules)) == len(schedules), "evaluated twice"
        assert not seen.intersection(schedules), "evaluated twice"
        seen.update(schedules)
        return [fitness(schedule) for schedule in schedules]

    history = evolve(problem.space(settings.granularity), settings, evaluate)
    assert {tuple(row["schedule"]) for row in history} == seen
    return history


@pytest.mark.parametrize(
    ("problem", "granularity"),
    [
        (Problem((8, 8, 8, 8), (2, 2, 2, 2), (1, 1, 1, 1), 12), 1),
        (Problem((8, 8, 8, 8), (2, 2, 2, 2), (1, 1, 1, 1), 12), 2),
        (Problem((8, 7, 5), (2, 1, 2), (2, 2, 2), 8), 1),
    ],
)
def test_history_says_who_the_parents_and_elites_were(problem: Problem, granularity: int) -> None:
    chosen = SearchSettings(granularity=granularity, generations=6, population=16)
    history = run(problem, chosen, rugged(1))
    known: dict[Schedule, float] = {}
    elites: list[Schedule] = []
    for generation in range(history[-1]["generation"] + 1):
        rows = [row for row in history if row["generation"] == generation]
        for row in rows:
            schedule = tuple(row["schedule"])
            known.setdefault(schedule, row["fitness"])
            assert row["fitness"] == known[schedule]
            assert (row["parent"] is None) == (generation == 0)
            if generation:
                assert tuple(row["parent"]) in elites
                assert row["origin"] == "mutation"
        elites = sorted(known, key=lambda known_schedule: -known[known_schedule])[:4]
        assert all(row["elite"] == (tuple(row["schedule"]) in elites) for row in rows)


def test_generations_are_all_populations_that_are_evaluated() -> None:
    """EvoESAP, Algorithm 1, whose text evaluates T + 1: `generations` counts the first one."""
    problem = Problem((8, 8, 8, 8), (2, 2, 2, 2), (1, 1, 1, 1), 12)
    history = run(problem, SearchSettings(generations=6, population=16), rugged(1))
    assert {row["generation"] for row in history} == set(range(6))


def test_the_search_ends_when_everything_is_known() -> None:
    problem = Problem((4, 4), (2, 2), (1, 1), 2)
    history = run(problem, SearchSettings(granularity=1), rugged(0))
    assert [row["generation"] for row in history] == [0] * 32
    assert len({tuple(row["schedule"]) for row in history}) == 3


def test_mutations_are_one_to_three_even_transfers() -> None:
    """tau = min of two out of {1, 2, 3} is 1, 2, 3 in 5, 3, 1 of 9; each transfer moves 2 or 4 from
    one to another."""
    space = PAPER.space(2)
    random = Generator(PCG64(0))
    parent = (64,) * 48
    moved: Counter[int] = Counter()
    for _ in range(2000):
        child = mutate(parent, space, SearchSettings(), random)
        changes = [new - old for new, old in zip(child, parent, strict=True) if new != old]
        assert sum(changes) == 0
        assert all(change % 2 == 0 and abs(change) <= 12 for change in changes)
        # layers meet in different transfers in a few of a hundred
        moved[(min(6, len(changes)) + 1) // 2] += 1
    shares = [moved[transfers] / 2000 for transfers in (1, 2, 3)]
    assert shares == pytest.approx([5 / 9, 3 / 9, 1 / 9], abs=0.03)


def test_transfer_equals_resampling_until_feasible() -> None:
    space = Problem((8, 8, 8), (2, 2, 2), (1, 1, 1), 8).space(1)
    random = Generator(PCG64(5))
    parent = (1, 6, 1)
    chosen = SearchSettings(granularity=1, max_transfer=3, max_transfers=1)
    expected = set()
    for (source, target), size in product(permutations(range(3), 2), (1, 2, 3)):
        child = list(parent)
        child[source] -= size
        child[target] += size
        if min(child) >= 0 and max(child) <= 6:
            expected.add(tuple(child))
    drawn = Counter(mutate(parent, space, chosen, random) for _ in range(4000))
    assert drawn.keys() == expected
    assert len(expected) == 8
    assert all(count / 4000 == pytest.approx(1 / 8, abs=0.02) for count in drawn.values())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("population", {"population": 0}),
        ("generation", {"generation": 3}),
        ("elites", {"elites": 32}),
        ("patterns", {"patterns": ["uniform", "front-heavy"]}),
        ("shift=false", {"fitness": "nll", "shift": False}),
    ],
)
def test_settings_that_cannot_work(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"allocation\.parameters.*\b{field}\b"):
        parse(values)


def test_transfers_move_at_least_what_layers_lose_at_once() -> None:
    arguments = {"multiple_of": 1, "ratio": 0.5}
    with pytest.raises(UserError, match="max_transfer=4"):
        space_to_search(arguments, {"layers": {0: layer(16)}}, SearchSettings(granularity=8))


def test_search_of_the_paper_has_little_overhead() -> None:
    """Up to 1,404 evaluations on Qwen3's 48 x 128 experts in 50 generations."""
    sizes: list[int] = []

    def evaluate(schedules: Sequence[Schedule]) -> list[float]:
        sizes.append(len(schedules))
        return [float(sum(a * b for a, b in enumerate(schedule))) for schedule in schedules]

    with time_limit(2):
        history = evolve(PAPER.space(2), SearchSettings(), evaluate)
    assert len(sizes) == 50 == history[-1]["generation"] + 1
    assert sizes[0] <= 32
    assert max(sizes[1:]) <= 28
    assert len(history) == 32 + 49 * 28
    assert 1300 < len({tuple(row["schedule"]) for row in history}) == sum(sizes) <= 1404
    assert [row["origin"] for row in history[:12]] == list(PATTERNS)
    assert {row["origin"] for row in history[12:32]} == {"uniform_feasible"}
