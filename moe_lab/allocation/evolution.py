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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from moe_lab.allocation.evolution_mutation import mutate
from moe_lab.allocation.evolution_patterns import PATTERNS, pattern
from moe_lab.allocation.evolution_settings import Settings
from moe_lab.allocation.evolution_space import Problem, Schedule, Space, space_of
from moe_lab.allocation.evolution_state import State, begin, identity, load, save
from moe_lab.errors import UserError

__all__ = ["PATTERNS", "Outcome", "Problem", "Schedule", "Settings", "check", "evolve"]

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


@dataclass(frozen=True)
class _Made:
    """A schedule and where it comes from."""

    schedule: Schedule
    origin: str
    parent: Schedule | None = None


def check(problem: Problem, settings: Settings) -> None:
    """UserError for settings that cannot work, alone or on this problem, and for a budget that is not feasible."""
    _space(problem, settings)


def evolve(
    problem: Problem,
    settings: Settings,
    evaluate: Judge,
    *,
    screen: Judge | None = None,
    checkpoint: Path | None,
    fingerprint: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Search for the schedule of highest fitness, as this module describes.

    `evaluate` is called once per generation, with schedules that it has not seen before; `screen` likewise, with
    children nobody has evaluated yet (it may see one again in a later generation). `checkpoint` is a file, written
    after every generation and gone on from when it is there (None: neither). `fingerprint` is JSON that says what
    `evaluate` depends on: model, data, scores. `progress` is called with (generations done, of how many).

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
    search = identity(problem, settings, fingerprint)
    state = (load(checkpoint, search) if checkpoint else None) or begin(settings.seed)
    while state.generations < settings.generations and len(state.known) < space.size:
        made = _children(space, settings, state) if state.generations else _first(space, settings, state)
        _judge(made, settings, state, evaluate, screen if settings.proposals > 1 and state.generations else None)
        if checkpoint:
            save(checkpoint, search, state)
        if progress:
            progress(state.generations, settings.generations)
    (best,) = state.elites(1)
    return Outcome(best, state.known[best], state.history, _counts(state))


def _space(problem: Problem, settings: Settings) -> Space:
    settings.check()
    space = space_of(problem, settings.granularity)
    if settings.max_transfer < space.step:
        raise UserError(
            f"allocation.parameters.max_transfer={settings.max_transfer}: layers lose multiples of {space.step} "
            f"experts, expected {space.step} or more"
        )
    return space


def _first(space: Space, settings: Settings, state: State) -> list[_Made]:
    """The first population: patterns, then uniform over what is feasible."""
    names = settings.patterns[: settings.population]
    drawn = settings.population - len(names)
    return [
        *(_Made(pattern(name, space, state.random), name) for name in names),
        *(_Made(space.sample(state.random), "uniform_feasible") for _ in range(drawn)),
    ]


def _children(space: Space, settings: Settings, state: State) -> list[_Made]:
    """`proposals` children for each place beside the elites."""
    elites = state.elites(settings.elites)
    parents = state.random.integers(len(elites), size=settings.proposals * (settings.population - settings.elites))
    return [
        _Made(mutate(elites[parent], space, settings, state.random), "mutation", elites[parent]) for parent in parents
    ]


def _judge(made: Sequence[_Made], settings: Settings, state: State, evaluate: Judge, screen: Judge | None) -> None:
    """Evaluate what is new, or the best of it by `screen`, and note down the generation."""
    new = [schedule for schedule in dict.fromkeys(each.schedule for each in made) if schedule not in state.known]
    screened = _values(new, screen, "screened value") if screen else {}
    if screen:
        best = sorted(new, key=lambda schedule: -screened[schedule])[: settings.population - settings.elites]
        new = sorted(best, key=new.index)  # in the order of the history, which is where ties are read from again
    fitness = _values(new, evaluate, "fitness")
    state.known.update(fitness)
    elites = set(state.elites(settings.elites))
    for each in made:
        state.history.append(
            {
                "generation": state.generations,
                "schedule": list(each.schedule),
                "origin": each.origin,
                "parent": None if each.parent is None else list(each.parent),
                "screened": screened.get(each.schedule),
                "evaluated": fitness.pop(each.schedule, None) is not None,
                "fitness": state.known.get(each.schedule),
                "elite": each.schedule in elites,
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
