from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from budgets import within
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import PCG64, Generator

from moe_lab.errors import UserError
from moe_lab.search.evolution import Outcome, check, evolve, mutate
from moe_lab.search.schedules import Problem, Schedule, space_of
from moe_lab.search.settings import EvolutionSettings

TINY = {
    "equal": (Problem((8, 8, 8, 8), (2, 2, 2, 2), (1, 1, 1, 1), 12), 1),
    "pairs": (Problem((8, 8, 8, 8), (2, 2, 2, 2), (1, 1, 1, 1), 12), 2),
    "multiples": (Problem((8, 7, 5), (2, 1, 2), (2, 2, 2), 8), 1),
    "unlike": (Problem((8, 4, 6), (1, 2, 3), (1, 1, 1), 7), 1),
    "one layer": (Problem((8,), (2,), (1,), 3), 1),
    "nothing to remove": (Problem((8, 8), (2, 2), (1, 1), 0), 1),
    "all there is": (Problem((8, 8), (2, 2), (1, 1), 12), 1),
}
PAPER = Problem((128,) * 48, (8,) * 48, (1,) * 48, 3072)


def feasible(problem: Problem, granularity: int) -> list[Schedule]:
    """Every feasible schedule, by trying all."""
    layers = zip(problem.n_experts, problem.fewest, problem.steps, strict=True)
    choices = [
        [count - kept for kept in range(few, count + 1) if kept % step == 0 and kept % granularity == 0]
        for count, few, step in layers
    ]
    return [each for each in product(*choices) if sum(each) == problem.budget]


def rugged(seed: int) -> Callable[[Schedule], float]:
    """A fitness with interactions between neighbouring layers, different for every seed."""
    tables = Generator(PCG64(seed)).random((6, 129, 129))
    return lambda schedule: float(
        sum(table[a, b] for table, a, b in zip(tables, schedule, (*schedule[1:], 0), strict=False))
    )


def run(problem: Problem, settings: EvolutionSettings, fitness: Callable[[Schedule], float], **more: Any) -> Outcome:
    """A search without checkpoint, whose every evaluation is checked."""
    seen: set[Schedule] = set()

    def evaluate(schedules: Sequence[Schedule]) -> list[float]:
        for schedule in schedules:
            assert schedule not in seen, "evaluated twice"
            seen.add(schedule)
            assert sum(schedule) == problem.budget
            for lost, count, few, step in zip(schedule, problem.n_experts, problem.fewest, problem.steps, strict=True):
                assert 0 <= lost <= count - few
                assert (count - lost) % step == 0 and (count - lost) % settings.granularity == 0
        return [fitness(schedule) for schedule in schedules]

    found = evolve(problem, settings, evaluate, checkpoint=None, fingerprint={}, **more)
    assert found.counts["evaluated"] == len(seen)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", TINY)
def test_finds_what_enumeration_finds(name: str, seed: int) -> None:
    problem, granularity = TINY[name]
    fitness = rugged(seed)
    best = max(map(fitness, feasible(problem, granularity)))
    found = run(problem, EvolutionSettings(granularity=granularity, generations=30, population=16, seed=seed), fitness)
    assert found.fitness == best == fitness(found.best)


def test_not_by_trying_everything() -> None:
    """A hill to climb: its top is found among a million schedules and more, with under a thousandth evaluated."""
    problem = Problem((24,) * 6, (0,) * 6, (1,) * 6, 48)
    space, goal = space_of(problem, 1), (0, 24, 3, 1, 17, 3)
    found = run(
        problem,
        EvolutionSettings(granularity=1),
        lambda each: -float(sum(abs(a - b) for a, b in zip(each, goal, strict=True))),
    )
    assert space.size > 10**6 and found.best == goal
    assert found.counts["evaluated"] < space.size / 1000


@given(
    st.lists(st.tuples(st.integers(4, 12), st.integers(1, 4)), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.floats(0, 1),
    st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_every_schedule_evaluated_is_feasible(
    layers: list[tuple[int, int]], step: int, granularity: int, share: float, seed: int
) -> None:
    counts, fewest = zip(*layers, strict=True)
    unit = step * granularity if step != granularity else step
    most = [(count - few - count % unit) // unit for count, few in layers]
    if min(most) < 0:
        return
    budget = sum(count % unit for count in counts) + unit * int(share * sum(most))
    problem = Problem(counts, fewest, (step,) * len(counts), budget)
    how = EvolutionSettings(granularity=granularity, generations=5, population=16, elites=2, seed=seed, max_transfer=6)
    run(problem, how, rugged(seed))


def test_generations_are_populations_evaluated() -> None:
    sizes: list[int] = []

    def evaluate(schedules: Sequence[Schedule]) -> list[float]:
        sizes.append(len(schedules))
        return [sum(schedule[:10]) / 1000 for schedule in schedules]

    found = evolve(PAPER, EvolutionSettings(generations=6), evaluate, checkpoint=None, fingerprint={})
    assert len(sizes) == 6 == found.counts["generations"] and sizes[0] <= 32 and max(sizes[1:]) <= 28
    assert len(found.history) == 32 + 5 * 28 == found.counts["made"]
    assert found.counts["evaluated"] == sum(sizes)
    assert [row["origin"] for row in found.history[:13]][-3:] == ["alt", "deep_flat", "uniform_feasible"]
    assert {row["origin"] for row in found.history[12:32]} == {"uniform_feasible"}


def test_history_says_who_the_parents_and_elites_were() -> None:
    found = run(TINY["equal"][0], EvolutionSettings(granularity=1, generations=6, population=16), rugged(1))
    known: dict[Schedule, float] = {}
    elites: list[Schedule] = []
    for generation in range(found.counts["generations"]):
        rows = [row for row in found.history if row["generation"] == generation]
        for row in rows:
            schedule = tuple(row["schedule"])
            assert row["evaluated"] == (schedule not in known) and row["screened"] is None
            known.setdefault(schedule, row["fitness"])
            assert row["fitness"] == known[schedule]
            assert (row["parent"] is None) == (generation == 0)
            if generation:
                assert tuple(row["parent"]) in elites and row["origin"] == "mutation"
        elites = sorted(known, key=lambda each: -known[each])[:4]
        assert all(row["elite"] == (tuple(row["schedule"]) in elites) for row in rows)
    assert found.best == elites[0] and found.fitness == known[elites[0]]


def test_the_search_ends_when_everything_is_known() -> None:
    problem = Problem((4, 4), (2, 2), (1, 1), 2)
    found = run(problem, EvolutionSettings(granularity=1), rugged(0))
    assert found.counts == {"generations": 1, "made": 32, "evaluated": 3, "known": 29, "skipped": 0}


def test_one_seed_one_history() -> None:
    first, again, other = (
        run(TINY["equal"][0], EvolutionSettings(granularity=1, generations=3, seed=seed), rugged(0)).history
        for seed in (1, 1, 2)
    )
    assert first == again != other


# ---- mutation


def test_mutations_are_one_to_three_even_transfers() -> None:
    """tau = min of two out of {1, 2, 3} is 1, 2, 3 in 5, 3, 1 of 9; each transfer moves 2 or 4 from one to another."""
    space, random = space_of(PAPER, 2), Generator(PCG64(0))
    parent = (64,) * 48
    moved = {1: 0, 2: 0, 3: 0}
    for _ in range(2000):
        child = mutate(parent, space, EvolutionSettings(), random)
        changes = [new - old for new, old in zip(child, parent, strict=True) if new != old]
        assert sum(changes) == 0 and all(change % 2 == 0 and abs(change) <= 12 for change in changes)
        ends = min(6, len(changes))
        moved[(ends + 1) // 2] += 1  # layers meet in different transfers in a few of a hundred
    assert moved[1] / 2000 == pytest.approx(5 / 9, abs=0.05)
    assert moved[2] / 2000 == pytest.approx(3 / 9, abs=0.05)
    assert moved[3] / 2000 == pytest.approx(1 / 9, abs=0.03)


def test_a_transfer_is_as_if_resampled_until_feasible() -> None:
    problem = Problem((8, 8, 8), (2, 2, 2), (1, 1, 1), 8)
    space, random, parent = space_of(problem, 1), Generator(PCG64(5)), (1, 6, 1)
    how = EvolutionSettings(granularity=1, max_transfer=3, max_transfers=1)
    pairs = [(a, b, size) for a in range(3) for b in range(3) for size in (1, 2, 3) if a != b]
    expected: list[Schedule] = []
    for source, destination, size in pairs:
        child = list(parent)
        child[source] -= size
        child[destination] += size
        if min(child) >= 0 and max(child) <= 6:
            expected.append((child[0], child[1], child[2]))
    drawn = [mutate(parent, space, how, random) for _ in range(4000)]
    assert set(drawn) == set(expected) and len(expected) == len(set(expected)) == 8
    for child in expected:
        assert drawn.count(child) / 4000 == pytest.approx(1 / 8, abs=0.02)


# ---- screening


def test_only_the_best_screened_are_evaluated() -> None:
    fitness, calls = rugged(3), []

    def screen(schedules: Sequence[Schedule]) -> list[float]:
        calls.append(list(schedules))
        return [fitness(schedule) for schedule in schedules]

    how = EvolutionSettings(granularity=1, generations=4, population=16, proposals=3)
    problem = Problem((8,) * 4, (1,) * 4, (1,) * 4, 14)
    found = run(problem, how, fitness, screen=screen)
    assert len(calls) == 3 and all(len(each) == len(set(each)) for each in calls)
    for generation in (1, 2, 3):
        rows = [row for row in found.history if row["generation"] == generation]
        assert len(rows) == 3 * 12
        new = [row for row in rows if row["screened"] is not None]
        assert {tuple(row["schedule"]) for row in new} == set(calls[generation - 1])
        evaluated = [row for row in new if row["evaluated"]]
        skipped = [row for row in new if row["fitness"] is None]
        assert len(evaluated) == 12 and skipped
        assert min(row["screened"] for row in evaluated) >= max(row["screened"] for row in skipped)
        assert not any(row["elite"] or row["evaluated"] for row in skipped)
    assert found.counts["skipped"] == sum(row["fitness"] is None for row in found.history) > 0
    assert sum(value for name, value in found.counts.items() if name in ("evaluated", "known", "skipped")) == len(
        found.history
    )


def test_without_proposals_nothing_is_screened() -> None:
    def screen(schedules: Sequence[Schedule]) -> list[float]:
        raise AssertionError

    run(TINY["equal"][0], EvolutionSettings(granularity=1, generations=3), rugged(0), screen=screen)


# ---- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 0}, "population=0: expected a whole number of at least 1"),
        ({"generations": 2.5}, "generations=2.5: expected a whole number"),
        ({"elites": True}, "elites=True: expected a whole number"),
        ({"elites": 32}, "elites=32: expected fewer than the population of 32, at most 31"),
        ({"patterns": ("uniform", "front-heavy")}, "patterns=front-heavy is unknown: did you mean front_heavy"),
        ({"patterns": "uniform"}, "patterns=uniform: expected a list"),
        ({"granularity": 8}, "max_transfer=4: layers lose multiples of 8 experts, expected 8 or more"),
        ({"seed": -1}, "seed=-1: expected a whole number of at least 0"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(PAPER, EvolutionSettings(**changes))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_fitness_that_is_no_number_names_the_schedule(value: float) -> None:
    with pytest.raises(UserError, match=re.escape(f"schedule [0, 6, 2] is {value}: expected a finite number")):
        run(
            Problem((8, 8, 8), (2, 2, 2), (1, 1, 1), 8),
            EvolutionSettings(granularity=1),
            lambda schedule: value if schedule == (0, 6, 2) else 0.0,
        )


def test_proposals_need_a_screen() -> None:
    with pytest.raises(UserError, match="proposals=2 needs a filter"):
        run(PAPER, EvolutionSettings(proposals=2), rugged(0))


# ---- cost


def test_bookkeeping_costs_little(tmp_path: Any) -> None:
    """OLMoE's 1,404 evaluations on Qwen3's 48 x 128 experts, with a checkpoint per generation."""
    with within(2):
        found = evolve(
            PAPER,
            EvolutionSettings(),
            lambda schedules: [float(sum(a * b for a, b in enumerate(each))) for each in schedules],
            checkpoint=tmp_path / "search.json",
            fingerprint={},
        )
    assert 1300 < found.counts["evaluated"] <= 1404
