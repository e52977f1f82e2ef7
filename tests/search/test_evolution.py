"""The evolution of schedules, and going on with one from the file of its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from budgets import within
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import PCG64, Generator
from test_schedules import enumerated

from moe_lab.errors import UserError
from moe_lab.search.evolution import EvolutionSettings, Outcome, Recorded, evolve, mutate, parse, space_to_search
from moe_lab.search.schedules import PATTERNS, Problem, Schedule, space_of

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


def rugged(seed: int) -> Callable[[Schedule], float]:
    """A fitness with interactions between neighbouring layers, different for every seed."""
    tables = Generator(PCG64(seed)).random((6, 129, 129))
    return lambda schedule: float(
        sum(table[a, b] for table, a, b in zip(tables, schedule, (*schedule[1:], 0), strict=False))
    )


def run(problem: Problem, settings: EvolutionSettings, fitness: Callable[[Schedule], float]) -> Outcome:
    """A search whose every evaluation is checked."""
    seen: set[Schedule] = set()
    feasible = set(enumerated(problem, settings.granularity)) if sum(problem.n_experts) < 40 else None

    def evaluate(schedules: Sequence[Schedule]) -> list[float]:
        assert feasible is None or feasible.issuperset(schedules)
        assert len(set(schedules)) == len(schedules) and not seen.intersection(schedules), "evaluated twice"
        seen.update(schedules)
        return [fitness(schedule) for schedule in schedules]

    found = evolve(problem, settings, evaluate)
    assert found.counts["evaluated"] == len(seen)
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TINY)
def test_finds_what_enumeration_finds(name: str, seed: int) -> None:
    problem, granularity = TINY[name]
    fitness = rugged(seed)
    best = max(map(fitness, enumerated(problem, granularity)))
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


def test_history_says_who_the_parents_and_elites_were() -> None:
    found = run(TINY["equal"][0], EvolutionSettings(granularity=1, generations=6, population=16), rugged(1))
    known: dict[Schedule, float] = {}
    elites: list[Schedule] = []
    for generation in range(found.counts["generations"]):
        rows = [row for row in found.history if row["generation"] == generation]
        for row in rows:
            schedule = tuple(row["schedule"])
            assert row["evaluated"] == (schedule not in known)
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
    assert found.counts == {"generations": 1, "made": 32, "evaluated": 3, "known": 29}


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


# ---- bad input


@pytest.mark.parametrize(
    ("field", "value"),
    [("population", 0), ("generations", 2.5), ("elites", 32), ("patterns", ["uniform", "front-heavy"]), ("seed", -1)],
)
def test_settings_that_cannot_work(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"allocation\.parameters\.{re.escape(field)}\b"):
        parse({field: value})


def test_transfers_move_at_least_what_layers_lose_at_once() -> None:
    with pytest.raises(UserError, match="max_transfer=4"):
        space_to_search(PAPER, EvolutionSettings(granularity=8))


# ---- the file of answers

GENERATIONS = 5
PROBLEM, GOAL = Problem((16,) * 6, (4,) * 6, (1,) * 6, 24), (0, 12, 0, 12, 0, 0)


class Hill:
    """Counts calls. A long climb over broad steps, so that ties among new elites are common."""

    calls = 0

    def __call__(self, schedules: Sequence[Schedule]) -> list[float]:
        self.calls += 1
        return [
            -float(sum(abs(lost - goal) for lost, goal in zip(schedule, GOAL, strict=True)) // 5)
            for schedule in schedules
        ]


def search(judge: Hill, file: Path) -> Outcome:
    return evolve(PROBLEM, EvolutionSettings(population=14, generations=GENERATIONS), Recorded(judge, file, {"a": [1]}))


@given(st.data())
@settings(max_examples=40)
def test_a_search_goes_on_from_its_file(data: st.DataObject) -> None:
    """It asks for the rest, or for all if the file is damaged, and ends with the same file as one never stopped."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "answers"
        whole, content = search(Hill(), file), file.read_bytes()
        known = json.loads(content)
        done, place = data.draw(st.integers(0, GENERATIONS)), data.draw(st.integers(0, len(content) - 2))
        stopped = json.dumps({**known, "answers": known["answers"][:done]}).encode()
        other = json.dumps({**known, "answers": [*known["answers"][:done], {"schedules": [], "values": []}]}).encode()
        damaged = content[:place] + data.draw(st.sampled_from([b"", b"\xff", b"{}", b"0,"]))
        for left, calls in ((stopped, GENERATIONS - done), (other, GENERATIONS - done), (damaged, GENERATIONS)):
            file.write_bytes(left)
            judge = Hill()
            assert search(judge, file) == whole and (file.read_bytes() == content or not calls)
            assert judge.calls == calls


def test_a_search_of_the_papers_and_what_its_bookkeeping_costs(tmp_path: Path) -> None:
    """Up to 1,404 evaluations on Qwen3's 48 x 128 experts, with a line in the file for each of 50 generations."""
    sizes: list[int] = []

    def evaluate(schedules: Sequence[Schedule]) -> list[float]:
        sizes.append(len(schedules))
        return [float(sum(a * b for a, b in enumerate(each))) for each in schedules]

    with within(2):
        found = evolve(PAPER, EvolutionSettings(), Recorded(evaluate, tmp_path / "answers", {}))
    assert len(sizes) == 50 == found.counts["generations"] and sizes[0] <= 32 and max(sizes[1:]) <= 28
    assert len(found.history) == 32 + 49 * 28 == found.counts["made"]
    assert 1300 < found.counts["evaluated"] == sum(sizes) <= 1404
    assert [row["origin"] for row in found.history[:12]] == list(PATTERNS)
    assert {row["origin"] for row in found.history[12:32]} == {"uniform_feasible"}
