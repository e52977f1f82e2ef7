"""EvoESAP's evolutionary search for the number of experts each layer loses that maximises a fitness. No torch.

**Problem.** Given are L layers, layer l with n_l experts, and a budget B. A schedule r = (r_1, ..., r_L) is the number
of experts each layer loses; which ones is decided by a ranking outside this module. The search is for

    argmax f(r)   subject to   sum_l r_l = B,   0 <= r_l <= n_l - fewest_l,   n_l - r_l a multiple of step

where step is the least common multiple of the problem's steps (allocation.multiple_of, the groups of a group-limited
router) and of `granularity`. The paper's "even only" is granularity=2; when n_l is odd, then so is r_l. The caller
gives f (ESAP, KL, NLL, ...), and **higher is always better**: negate a loss.

**Search** (EvoESAP, Algorithm 1).

1. The first population, P schedules: one for each of `patterns`, then schedules drawn uniformly from *all* feasible
   ones, as the paper says. (The released code instead repeats its pattern `random`, which is proportional to random
   weights and so close to uniform over layers; to do the same, name it several times in `patterns`.)
2. Evaluate what has not been evaluated before.
3. The m best of all schedules so far are the elites; of equal ones, that evaluated first ranks higher.
4. P - m children: a parent drawn uniformly from the elites, then tau = min(U{1..tau_max}, U{1..tau_max}) transfers. A
   transfer draws an ordered pair of distinct layers and Delta out of {step, 2 step, ... <= Delta_max}, again until the
   outcome is feasible; the first layer loses Delta experts fewer, the second Delta more. (The released code gives a
   child up to 32 attempts and lets it be its parent when they fail.) Go to 2.

T generations are T populations evaluated, the first one included, as in the released code; the paper's Algorithm 1
would evaluate T + 1. So at most P + (T - 1)(P - m) schedules are evaluated: 1,404 for OLMoE. Usually there are fewer,
because known children are not evaluated again. The search ends early when all feasible schedules are known.

| model | P | m | T | Delta_max | tau_max | granularity | B at 25 % / 50 % |
|---|---|---|---|---|---|---|---|
| OLMoE-1B-7B | 32 | 4 | 50 | 4 | 3 | 2 | 256 / 512 |
| DeepSeek-V2-Lite | 32 | 4 | 30 | 4 | 3 | 2 | 416 / 832 |
| ERNIE-4.5-21B-A3B | 32 | 4 | 20 | 4 | 3 | 2 | 432 / 864 |
| Qwen3-30B-A3B | 32 | 4 | 10 | 4 | 3 (5 with REAP) | 2 | 1536 / 3072 |

**Elites** are distinct schedules. The papers do not specify this; copies of one schedule would only narrow the search.

**Halving** (`proposals` > 1, not in the paper). In step 4, proposals * (P - m) children are made, and `evaluate` leaves
out all but the best P - m of those that are not known yet. Children that were left out are in the history without a
fitness.

**Resuming.** A search is deterministic: with the same values it asks for the same schedules again. So `Recorded` writes
the values that were asked for, one line a generation, and a search that was killed asks again and gets them from there.
It gives the same history, result and file as one that was never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from moe_lab.errors import UserError
from moe_lab.json_files import Number, fits
from moe_lab.search.schedules import Problem, Schedule, Space, pattern, space_of
from moe_lab.search.settings import EvolutionSettings

Judge: TypeAlias = Callable[[Sequence[Schedule], int], Sequence[float | None]]
"""Distinct schedules and how many of them to evaluate -> a finite number for each of these, higher is better, and None
for the others."""


@dataclass(frozen=True)
class Outcome:
    """Result of a search: the best schedule, and all schedules that were tried."""

    best: Schedule
    fitness: float
    history: list[dict[str, Any]]
    """One row for each schedule that was made, in order; see `evolve`."""
    counts: dict[str, int]
    """Numbers: generations; schedules made (rows), evaluated, known (made again), skipped (left out)."""


class _Proposal(NamedTuple):
    """A schedule and its origin."""

    schedule: Schedule
    origin: str
    parent: Schedule | None = None


def check(problem: Problem, settings: EvolutionSettings) -> None:
    """Raise UserError for settings that cannot work, alone or on this problem, and for an infeasible budget."""
    _space(problem, settings)


def evolve(problem: Problem, settings: EvolutionSettings, evaluate: Judge) -> Outcome:
    """Search for the schedule of highest fitness, as this module describes.

    `evaluate` is called once per generation, with schedules that it has not been given before.

    Rows of the history: generation (from 0), schedule and parent (lists of int; None without a parent), origin (a
    pattern's name, uniform_feasible or mutation), evaluated (bool: in this generation, for the first time), fitness
    (float; None if it was left out), elite (bool: among the m best once the generation was evaluated).

    Raises UserError for what `check` rejects.
    """
    space = _space(problem, settings)
    state = _State(Generator(PCG64(settings.seed)))
    while state.generations < settings.generations and len(state.known) < space.size:
        make = _children if state.generations else _first
        _judge_generation(make(space, settings, state), settings, state, evaluate)
    (best,) = state.elites(1)
    return Outcome(best, state.known[best], state.history, _counts(state))


@dataclass
class _State:
    """State of a search, on which the next generation depends."""

    random: Generator
    generations: int = 0
    """Populations evaluated."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """A row for every schedule that was made, as `evolve` describes it."""
    known: dict[Schedule, float] = field(default_factory=dict)
    """Evaluated schedules and their fitness, in the order of evaluation."""

    def elites(self, count: int) -> list[Schedule]:
        """The best schedules so far, best first; of equal ones, that evaluated first comes first."""
        return sorted(self.known, key=lambda schedule: -self.known[schedule])[:count]


def _space(problem: Problem, settings: EvolutionSettings) -> Space:
    settings.check()
    space = space_of(problem, settings.granularity)
    if settings.max_transfer < space.step:
        raise UserError(
            f"allocation.parameters.max_transfer={settings.max_transfer}: layers lose multiples of {space.step} "
            f"experts, expected {space.step} or more"
        )
    return space


def _first(space: Space, settings: EvolutionSettings, state: _State) -> list[_Proposal]:
    """The first population: patterns, then schedules drawn uniformly from all feasible ones."""
    names = settings.patterns[: settings.population]
    drawn = settings.population - len(names)
    return [
        *(_Proposal(pattern(name, space, state.random), name) for name in names),
        *(_Proposal(space.sample(state.random), "uniform_feasible") for _ in range(drawn)),
    ]


def _children(space: Space, settings: EvolutionSettings, state: _State) -> list[_Proposal]:
    """Children of random elites: `proposals` for each place in the population that is not an elite's."""
    elites = state.elites(settings.elites)
    parents = state.random.integers(len(elites), size=settings.proposals * (settings.population - settings.elites))
    return [
        _Proposal(mutate(elites[parent], space, settings, state.random), "mutation", elites[parent])
        for parent in parents
    ]


def _judge_generation(
    proposals: Sequence[_Proposal], settings: EvolutionSettings, state: _State, evaluate: Judge
) -> None:
    """Evaluate the schedules that are not known yet, or the best of them, and add the generation to the history."""
    new = [schedule for schedule in dict.fromkeys(each.schedule for each in proposals) if schedule not in state.known]
    places = settings.population - (settings.elites if state.generations else 0)
    values = evaluate(new, min(places, len(new))) if new else []
    fresh = {schedule: value for schedule, value in zip(new, values, strict=True) if value is not None}
    state.known.update(fresh)
    elites = set(state.elites(settings.elites))
    for proposal in proposals:
        state.history.append(
            {
                "generation": state.generations,
                "schedule": list(proposal.schedule),
                "origin": proposal.origin,
                "parent": None if proposal.parent is None else list(proposal.parent),
                "evaluated": fresh.pop(proposal.schedule, None) is not None,
                "fitness": state.known.get(proposal.schedule),
                "elite": proposal.schedule in elites,
            }
        )
    state.generations += 1


def _counts(state: _State) -> dict[str, int]:
    evaluated = len(state.known)
    skipped = sum(row["fitness"] is None for row in state.history)
    made = len(state.history)
    return {
        "generations": state.generations,
        "made": made,
        "evaluated": evaluated,
        "known": made - evaluated - skipped,
        "skipped": skipped,
    }


def mutate(parent: Schedule, space: Space, settings: EvolutionSettings, random: Generator) -> Schedule:
    """Level-switch mutation: tau = min(U{1..tau_max}, U{1..tau_max}) transfers, one after the other.

    `space` has at least two schedules. The child can be the parent again when transfers cancel out.
    """
    taken = numpy.array(space.taken(parent))
    capacity = numpy.array(space.capacity)
    largest = settings.max_transfer // space.step
    for _ in range(random.integers(1, settings.max_transfers, size=2, endpoint=True).min()):
        source, destination, size = _transfer(taken, capacity, largest, random)
        taken[source] -= size
        taken[destination] += size
    return space.schedule(tuple(taken.tolist()))


def _transfer(
    taken: NDArray[numpy.int64], capacity: NDArray[numpy.int64], largest: int, random: Generator
) -> tuple[int, int, int]:
    """(layer that gets units back, another one that loses them, how many units).

    The paper draws ordered pairs of distinct layers and sizes until one is feasible. That is the same as one uniform
    draw from all feasible ones. There is always one of size 1 when the space has two schedules.
    """
    sizes = numpy.arange(1, largest + 1)[:, None]
    gives, takes = taken >= sizes, taken + sizes <= capacity
    feasible = gives[:, :, None] & takes[:, None, :] & ~numpy.eye(len(taken), dtype=bool)
    transfers = numpy.flatnonzero(feasible)
    size, source, destination = numpy.unravel_index(transfers[random.integers(len(transfers))], feasible.shape)
    return int(source), int(destination), int(size) + 1


class Recorded:
    """A judge that writes its answers to a file, and takes those of an interrupted search from there.

    The first line is `search`, JSON data about all that the answers depend on: problem, settings, model, data, scores.
    Each other line is {"schedules", "values"}, a question and its answer, in the order in which they were asked. The
    file of another search is begun again; from a line on that is damaged or answers another question, all are dropped.
    """

    def __init__(self, judge: Judge, path: Path, search: Mapping[str, Any]) -> None:
        self.judge, self.path, self.asked = judge, path, 0
        self.search = json.dumps(search, sort_keys=True)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        self.lines = lines[1:] if lines[:1] == [self.search] else []

    def __call__(self, schedules: Sequence[Schedule], count: int) -> list[float | None]:
        """The answer of the judge, from the file if the search was here before."""
        question = [list(schedule) for schedule in schedules]
        values = self._known(question)
        if values is None:
            values = list(self.judge(schedules, count))
            answer = json.dumps({"schedules": question, "values": values}, allow_nan=False)
            self.lines = [*self.lines[: self.asked], answer]
            self._save()
        self.asked += 1
        return values

    def _known(self, question: list[list[int]]) -> list[float | None] | None:
        """The answer in the file, if the next one there is to this question."""
        try:
            line = json.loads(self.lines[self.asked])
        except (IndexError, ValueError):
            return None
        if not fits(line, {"schedules": [[int]], "values": [Number | None]}) or line["schedules"] != question:
            return None
        values: list[float | None] = line["values"]
        return values if len(values) == len(question) else None

    def _save(self) -> None:
        """Write all lines atomically: a search that is killed leaves the old file or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.partial")
        beside.write_text("".join(f"{line}\n" for line in (self.search, *self.lines)))
        beside.replace(self.path)
