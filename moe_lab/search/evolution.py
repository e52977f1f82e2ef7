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

**Screening** (`proposals` > 1, not in the paper). In step 4, proposals * (P - m) children are made, `screen` ranks
those that are not known yet by a cheap estimate, and the best P - m of them are evaluated. Skipped children are in the
history with their screened values. The first population is not screened.

**Resuming.** With a `checkpoint`, the state is written after every generation: generations done, random state, history.
Population, elites and cache follow from the history, so they are not written separately. A search that resumes from its
checkpoint gives the same history, result and file as one that was never stopped.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from moe_lab.errors import UserError
from moe_lab.json_files import Number, read_json
from moe_lab.search.schedules import Problem, Schedule, Space, pattern, space_of
from moe_lab.search.settings import EvolutionSettings

Judge: TypeAlias = Callable[[Sequence[Schedule]], Sequence[float]]
"""Distinct schedules -> a number for each, in order; higher is better."""


@dataclass(frozen=True)
class Outcome:
    """Result of a search: the best schedule, and all schedules that were tried."""

    best: Schedule
    fitness: float
    history: list[dict[str, Any]]
    """One row for each schedule that was made, in order; see `evolve`."""
    counts: dict[str, int]
    """Numbers: generations; schedules made (rows), evaluated, known (made again), skipped (screened, not evaluated)."""


class _Proposal(NamedTuple):
    """A schedule and its origin."""

    schedule: Schedule
    origin: str
    parent: Schedule | None = None


def check(problem: Problem, settings: EvolutionSettings) -> None:
    """Raise UserError for settings that cannot work, alone or on this problem, and for an infeasible budget."""
    _space(problem, settings)


def evolve(
    problem: Problem,
    settings: EvolutionSettings,
    evaluate: Judge,
    *,
    screen: Judge | None = None,
    checkpoint: Path | None,
    fingerprint: Mapping[str, Any],
) -> Outcome:
    """Search for the schedule of highest fitness, as this module describes.

    `evaluate` is called once per generation, with schedules that it has not been given before; `screen` likewise, with
    children that have not been evaluated (a later generation may give it the same child again). `checkpoint` is a file
    that is written after every generation, and from which the search resumes if it exists (None: neither).
    `fingerprint` is JSON data about all that `evaluate` depends on: model, data, scores.

    Rows of the history: generation (from 0), schedule and parent (lists of int; None without a parent), origin (a
    pattern's name, uniform_feasible or mutation), screened (float; None if it was not screened), evaluated (bool: in
    this generation, for the first time), fitness (float; None if it was skipped), elite (bool: among the m best once
    the generation was evaluated).

    Raises UserError for what `check` rejects, a fitness that is not finite (naming the schedule), `proposals` without
    `screen`, and a checkpoint of another search (naming the setting that differs, with both values).
    """
    space = _space(problem, settings)
    if settings.proposals > 1 and screen is None:
        raise UserError(
            f"allocation.parameters.proposals={settings.proposals} needs a filter that ranks the proposals: choose "
            "allocation.parameters.filter, or proposals=1"
        )
    document = {"problem": asdict(problem), "settings": asdict(settings), "fingerprint": dict(fingerprint)}
    search = json.loads(json.dumps(document))  # in the form that is read from a checkpoint
    state = (load(checkpoint, search) if checkpoint else None) or State(Generator(PCG64(settings.seed)))
    while state.generations < settings.generations and len(state.known) < space.size:
        if state.generations == 0:
            _judge_generation(_first(space, settings, state), settings, state, evaluate, None)
        else:
            children = _children(space, settings, state)
            _judge_generation(children, settings, state, evaluate, screen if settings.proposals > 1 else None)
        if checkpoint:
            save(checkpoint, search, state)
    (best,) = state.elites(1)
    return Outcome(best, state.known[best], state.history, _counts(state))


def _space(problem: Problem, settings: EvolutionSettings) -> Space:
    settings.check()
    space = space_of(problem, settings.granularity)
    if settings.max_transfer < space.step:
        raise UserError(
            f"allocation.parameters.max_transfer={settings.max_transfer}: layers lose multiples of {space.step} "
            f"experts, expected {space.step} or more"
        )
    return space


def _first(space: Space, settings: EvolutionSettings, state: State) -> list[_Proposal]:
    """The first population: patterns, then schedules drawn uniformly from all feasible ones."""
    names = settings.patterns[: settings.population]
    drawn = settings.population - len(names)
    return [
        *(_Proposal(pattern(name, space, state.random), name) for name in names),
        *(_Proposal(space.sample(state.random), "uniform_feasible") for _ in range(drawn)),
    ]


def _children(space: Space, settings: EvolutionSettings, state: State) -> list[_Proposal]:
    """Children of random elites: `proposals` for each place in the population that is not an elite's."""
    elites = state.elites(settings.elites)
    parents = state.random.integers(len(elites), size=settings.proposals * (settings.population - settings.elites))
    return [
        _Proposal(mutate(elites[parent], space, settings, state.random), "mutation", elites[parent])
        for parent in parents
    ]


def _judge_generation(
    proposals: Sequence[_Proposal], settings: EvolutionSettings, state: State, evaluate: Judge, screen: Judge | None
) -> None:
    """Evaluate new schedules, or the best of them by `screen`, and add the generation to the history."""
    new = [
        schedule
        for schedule in dict.fromkeys(proposal.schedule for proposal in proposals)
        if schedule not in state.known
    ]
    screened = _values(new, screen, "screened value") if screen else {}
    if screen:
        best = sorted(new, key=lambda schedule: -screened[schedule])[: settings.population - settings.elites]
        new = sorted(best, key=new.index)  # in the order of the history, from which a resumed search breaks ties
    fitness = _values(new, evaluate, "fitness")
    state.known.update(fitness)
    elites = set(state.elites(settings.elites))
    for proposal in proposals:
        state.history.append(
            {
                "generation": state.generations,
                "schedule": list(proposal.schedule),
                "origin": proposal.origin,
                "parent": None if proposal.parent is None else list(proposal.parent),
                "screened": screened.get(proposal.schedule),
                "evaluated": fitness.pop(proposal.schedule, None) is not None,
                "fitness": state.known.get(proposal.schedule),
                "elite": proposal.schedule in elites,
            }
        )
    state.generations += 1


def _values(schedules: Sequence[Schedule], judge: Judge, word: str) -> dict[Schedule, float]:
    """The value that `judge` gives each schedule. Raises UserError naming a schedule whose value is not finite."""
    if not schedules:
        return {}
    values = {schedule: float(value) for schedule, value in zip(schedules, judge(schedules), strict=True)}
    for schedule, value in values.items():
        if not isfinite(value):
            raise UserError(
                f"allocation=evolutionary: {word} of the schedule {list(schedule)} is {value}: expected a finite number"
            )
    return values


def _counts(state: State) -> dict[str, int]:
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


_ROW = {"schedule": [int], "evaluated": bool, "fitness": Number | None}
_SHAPE = {"search": dict, "generations": int, "random": dict, "history": [_ROW]}


@dataclass
class State:
    """State of a search, on which the next generation depends."""

    random: Generator
    generations: int = 0
    """Populations evaluated."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """A row for every schedule that was made, as `evolve` describes it."""
    known: dict[Schedule, float] = field(default_factory=dict)
    """Evaluated schedules and their fitness, in the order of evaluation; derived from the history."""

    def elites(self, count: int) -> list[Schedule]:
        """The best schedules so far, best first; of equal ones, that evaluated first comes first."""
        return sorted(self.known, key=lambda schedule: -self.known[schedule])[:count]


def save(path: Path, search: Mapping[str, Any], state: State) -> None:
    """Write the state atomically: a search that is killed leaves the old file or the new one."""
    document = {
        "search": search,
        "generations": state.generations,
        "random": state.random.bit_generator.state,
        "history": state.history,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json.dumps(document, allow_nan=False))  # keys are not sorted, so that a resumed history is equal
    beside.replace(path)


def load(path: Path, search: Mapping[str, Any]) -> State | None:
    """The state that `save` wrote; None when there is none, or when the file is damaged.

    A damaged file is renamed, with a printed message. Raises UserError when the file is of a search with other
    settings, problem or data (naming what differs).
    """
    try:
        document = read_json(path, _SHAPE)
        state = State(Generator(PCG64()), document["generations"], document["history"])
        state.random.bit_generator.state = document["random"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # not the expected document, or not a state of PCG64
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:6]}.damaged")
        path.rename(aside)
        print(f"{path} is damaged: moved to {aside}, and the search begins again", flush=True)
        return None
    for name, old, new in _differences(document["search"], search):
        raise UserError(
            f"{path} is of a search with {name}={_shown(old)}, not {_shown(new)}: go on with the old value, or remove "
            "the file to begin again"
        )
    state.known = {tuple(row["schedule"]): row["fitness"] for row in state.history if row["evaluated"]}
    return state


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, old value, new value) wherever two JSON documents differ; None for what one of them lacks."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def _shown(value: Any) -> str:
    """A value as text for a message; cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
