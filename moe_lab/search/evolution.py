"""EvoESAP's evolutionary search: how many experts each layer loses, so that a fitness is highest. No torch.

**Problem.** Given are L layers, n_l experts each, and a budget B. A schedule r = (r_1, ..., r_L) says how many experts
each layer loses; which ones is somebody else's order. Sought is

    argmax f(r)   subject to   sum_l r_l = B,   0 <= r_l <= n_l - fewest_l,   n_l - r_l a multiple of step

where step is the least common multiple of the problem's steps (allocation.multiple_of, the groups of a group-limited
router) and of `granularity`. The paper's "even only" is granularity=2; when n_l is odd, then so is r_l. f is the
caller's (ESAP, KL, NLL, ...) and **higher is better, always**: negate a loss.

**Search** (EvoESAP, Algorithm 1).

1. The first population, P schedules: one for each of `patterns`, then schedules drawn uniformly from *all* feasible
   ones, as the paper says. (The released code instead repeats its pattern `random`, which is proportional to random
   weights and so close to uniform over layers; `patterns` may name one several times, which gives just that.)
2. Evaluate what has not been evaluated before.
3. The m best of all schedules so far are the elites; of equals, the one evaluated first.
4. P - m children: a parent drawn uniformly from the elites, then tau = min(U{1..tau_max}, U{1..tau_max}) transfers. A
   transfer draws an ordered pair of distinct layers and Delta out of {step, 2 step, ... <= Delta_max}, again until the
   outcome is feasible; the first layer loses Delta experts fewer, the second Delta more. (The released code gives a
   child up to 32 attempts and lets it be its parent when they fail.) Go to 2.

T generations are T populations evaluated, the first one included, as in the released code; the paper's Algorithm 1
would evaluate T + 1. So no more than P + (T - 1)(P - m) schedules are evaluated: 1,404 for OLMoE. Fewer, because a
child that is already known costs nothing; and the search ends early once every feasible schedule is known.

| model | P | m | T | Delta_max | tau_max | granularity | B at 25 % / 50 % |
|---|---|---|---|---|---|---|---|
| OLMoE-1B-7B | 32 | 4 | 50 | 4 | 3 | 2 | 256 / 512 |
| DeepSeek-V2-Lite | 32 | 4 | 30 | 4 | 3 | 2 | 416 / 832 |
| ERNIE-4.5-21B-A3B | 32 | 4 | 20 | 4 | 3 | 2 | 432 / 864 |
| Qwen3-30B-A3B | 32 | 4 | 10 | 4 | 3 (5 with REAP) | 2 | 1536 / 3072 |

**Elites** are distinct schedules. The papers do not say; copies of one schedule would only narrow the search.

**Screening** (`proposals` > 1, not in the paper). In step 4, proposals * (P - m) children are made, `screen` says
cheaply how good those look that are not known yet, and the best P - m of them are evaluated. What was skipped stands
in the history with its screened value. The first population is not screened.

**Killed and resumed.** With a `checkpoint`, the state is written after every generation: generations done, random
state, history. Population, elites and cache are in the history, so they are not written a second time. A search that
finds its checkpoint goes on to the very history, result and file of one that was never stopped.
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
    """What a search found, and what it tried."""

    best: Schedule
    fitness: float
    history: list[dict[str, Any]]
    """One row for each schedule that was made, in order; see `evolve`."""
    counts: dict[str, int]
    """generations; made (rows); evaluated; known (made again, no cost); skipped (screened, then not evaluated)."""


class _Proposal(NamedTuple):
    """A schedule and where it comes from."""

    schedule: Schedule
    origin: str
    parent: Schedule | None = None


def check(problem: Problem, settings: EvolutionSettings) -> None:
    """UserError for settings that cannot work, alone or on this problem, and for a budget that is not feasible."""
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

    `evaluate` is called once per generation, with schedules that it has not seen before; `screen` likewise, with
    children nobody has evaluated yet (it may see one again in a later generation). `checkpoint` is a file, written
    after every generation and gone on from when it is there (None: neither). `fingerprint` is JSON that says what
    `evaluate` depends on: model, data, scores.

    Rows of the history: generation (from 0), schedule and parent (lists of int; None without a parent), origin (a
    pattern's name, uniform_feasible or mutation), screened (float, None when it was not), evaluated (bool: in this
    generation, for the first time), fitness (float; None for what was skipped), elite (bool: among the m best once the
    generation was evaluated).

    UserError for what `check` refuses, a fitness that is not finite (naming the schedule), `proposals` without
    `screen`, and a checkpoint of another search (naming the setting that differs, with both values).
    """
    space = _space(problem, settings)
    if settings.proposals > 1 and screen is None:
        raise UserError(
            f"allocation.parameters.proposals={settings.proposals} needs a filter that ranks the proposals: choose "
            "allocation.parameters.filter, or proposals=1"
        )
    document = {"problem": asdict(problem), "settings": asdict(settings), "fingerprint": dict(fingerprint)}
    search = json.loads(json.dumps(document))  # as it comes back from the checkpoint
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
    """The first population: patterns, then uniform over what is feasible."""
    names = settings.patterns[: settings.population]
    drawn = settings.population - len(names)
    return [
        *(_Proposal(pattern(name, space, state.random), name) for name in names),
        *(_Proposal(space.sample(state.random), "uniform_feasible") for _ in range(drawn)),
    ]


def _children(space: Space, settings: EvolutionSettings, state: State) -> list[_Proposal]:
    """`proposals` children for each place beside the elites."""
    elites = state.elites(settings.elites)
    parents = state.random.integers(len(elites), size=settings.proposals * (settings.population - settings.elites))
    return [
        _Proposal(mutate(elites[parent], space, settings, state.random), "mutation", elites[parent])
        for parent in parents
    ]


def _judge_generation(
    proposals: Sequence[_Proposal], settings: EvolutionSettings, state: State, evaluate: Judge, screen: Judge | None
) -> None:
    """Evaluate what is new, or the best of it by `screen`, and note down the generation."""
    new = [
        schedule
        for schedule in dict.fromkeys(proposal.schedule for proposal in proposals)
        if schedule not in state.known
    ]
    screened = _values(new, screen, "screened value") if screen else {}
    if screen:
        best = sorted(new, key=lambda schedule: -screened[schedule])[: settings.population - settings.elites]
        new = sorted(best, key=new.index)  # in the order of the history, which is where ties are read from again
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
    """What `judge` says of each schedule; UserError, naming the schedule, for what is not finite."""
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

    The paper draws ordered pairs of distinct layers and sizes until a feasible one comes up. That is one draw,
    uniform over all feasible ones, of which there is always one of size 1 when the space has two schedules.
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
    """What the next generation depends on."""

    random: Generator
    generations: int = 0
    """Populations evaluated."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """A row for every schedule that was made, as `evolve` describes it."""
    known: dict[Schedule, float] = field(default_factory=dict)
    """Evaluated schedules and their fitness, in the order of evaluation; the history in another form."""

    def elites(self, count: int) -> list[Schedule]:
        """The best schedules so far, best first; of equals the one evaluated first."""
        return sorted(self.known, key=lambda schedule: -self.known[schedule])[:count]


def save(path: Path, search: Mapping[str, Any], state: State) -> None:
    """Write the state, so that a killed search leaves the old one or the new one."""
    document = {
        "search": search,
        "generations": state.generations,
        "random": state.random.bit_generator.state,
        "history": state.history,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json.dumps(document, allow_nan=False))  # keys in their order, so that a resumed history is equal
    beside.replace(path)


def load(path: Path, search: Mapping[str, Any]) -> State | None:
    """The state that `save` wrote; None when there is none, or it is damaged, which is set aside and printed. UserError
    when the file is of a search with other settings, problem or data (naming what differs)."""
    try:
        document = read_json(path, _SHAPE)
        state = State(Generator(PCG64()), document["generations"], document["history"])
        state.random.bit_generator.state = document["random"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # of a wrong document, or of a wrong state of the random numbers
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
    """A value for a sentence; long ones cut."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
