"""EvoESAP's evolutionary search (its Algorithm 1) for the number of experts each layer loses that
maximises a fitness.

Given are L layers, layer l with n_l experts, and a budget B. A schedule r = (r_1, ..., r_L) is the
number of experts each layer loses; a ranking outside this module decides which experts. The search
is for

    argmax f(r)   subject to   sum_l r_l = B,   0 <= r_l <= n_l - fewest_l,
                               n_l - r_l a multiple of step

The algorithm, and where the released code differs: docs/search.md. A search is deterministic: the
same fitness values lead to the same schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy
from numpy.random import PCG64, Generator
from numpy.typing import NDArray
from pydantic import AfterValidator, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from moe_lab import progress
from moe_lab.allocation.problem import budget, call_or_suggest_ratio, limits
from moe_lab.config.base import SETTINGS, Count, Positive, validated
from moe_lab.errors import UserError, check_known
from moe_lab.search.schedules import PATTERNS, Schedule, Space, feasible_space, pattern

UNSHIFTED = ("esap", "sap", "kl", "kl_reversed")
"""Fitness functions that EvoESAP's code computes at the answer tokens, not at the positions that
predict them."""


def _validate_pattern(name: str) -> str:
    check_known("pattern", name, PATTERNS)
    return name


@pydantic_dataclass(config=SETTINGS, frozen=True)
class SearchSettings:
    """The settings in allocation.parameters for allocation=evolutionary. Defaults are the values
    published for OLMoE."""

    population: Positive = 32
    """P: schedules of the first generation; later generations have the elites and P - m
    children."""
    elites: Positive = 4
    """m: the best schedules so far, which stay in the population and are the parents."""
    generations: Positive = 50
    """T: populations that are evaluated, the first one included."""
    max_transfer: Positive = 4
    """Delta_max: the most experts one transfer moves from layer to layer."""
    max_transfers: Positive = 3
    """tau_max: the most transfers between a parent and its child."""
    granularity: Positive = 2
    """G: layers keep, and transfers move, multiples of this number of experts."""
    seed: Count = 42
    """Seed of numpy's PCG64, the only source of randomness."""
    patterns: list[Annotated[str, AfterValidator(_validate_pattern)]] = field(
        default_factory=lambda: list(PATTERNS)
    )
    """The first schedules of the first population, one per pattern; the others are drawn uniformly
    from all feasible schedules."""
    fitness: Literal["esap", "sap", "kl", "kl_reversed", "nll", "spec_dec"] = "esap"
    """esap, sap, kl (of the model from the candidate), kl_reversed, nll or spec_dec; higher is
    better for all."""
    averaging: Literal["macro", "micro"] = "macro"
    """macro: the mean over rows of the mean over their answer tokens, as in the paper; micro: over
    all tokens."""
    shift: bool = True
    """Compute the fitness where answer tokens are predicted; False: at the answer tokens, as
    EvoESAP's code does."""
    header: bool = False
    """Count the text that the chat template writes around an answer as part of the answer, as
    EvoESAP's code does."""
    max_new_tokens: Positive = 128
    """Tokens that spec_dec generates for each row."""
    memory_budget: Count = 2**31
    """Bytes for the unpruned model's log-probabilities. If they need more, every generation
    computes them again."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise ValueError for fields that do not fit each other."""
        if self.elites >= self.population:
            raise ValueError(
                f"elites={self.elites}: expected fewer than the population of {self.population}, "
                f"at most {self.population - 1}"
            )
        if not self.shift and self.fitness not in UNSHIFTED:
            raise ValueError(
                f"shift=false has no meaning for fitness={self.fitness}: expected one of "
                f"{', '.join(UNSHIFTED)}"
            )
        return self


def parse(parameters: Mapping[str, Any], seed: int = 0) -> SearchSettings:
    """The settings of a search, from `parameters` of allocation=evolutionary. `seed`: used if
    `parameters` have no seed. UserError for invalid parameters."""
    return validated(SearchSettings, {"seed": seed, **parameters}, "allocation.parameters")


def space_to_search(
    settings: Mapping[str, Any], facts: Mapping[str, Any], parameters: SearchSettings
) -> Space:
    """The space of the schedules to search. `settings`: fields of AllocationConfig and the ratio.
    UserError for an infeasible ratio, for layers without a feasible number of experts at
    `parameters.granularity`, and for a `parameters.max_transfer` below the step of the space."""
    layer_limits = limits(
        {int(layer): router for layer, router in facts["layers"].items()}, settings["multiple_of"]
    )
    n_removed = call_or_suggest_ratio(lambda ratio: budget(layer_limits, ratio), settings["ratio"])
    space = feasible_space(
        [layer_limits[layer] for layer in sorted(layer_limits)], n_removed, parameters.granularity
    )
    if parameters.max_transfer < space.step:
        raise UserError(
            f"allocation.parameters.max_transfer={parameters.max_transfer}: layers lose multiples "
            f"of {space.step} experts, expected {space.step} or more"
        )
    return space


Evaluate: TypeAlias = Callable[[Sequence[Schedule]], Sequence[float]]
"""Distinct schedules -> a finite number for each, higher is better."""


@dataclass(frozen=True)
class Outcome:
    """Result of a search."""

    best: Schedule
    fitness: float
    history: list[dict[str, Any]]
    """One row for each proposed schedule, in order; see `evolve`."""
    counts: dict[str, int]
    """generations: evaluated generations. made: proposed schedules. evaluated: schedules whose
    fitness was computed. known: proposed schedules whose fitness was known already."""


_Proposal: TypeAlias = tuple[Schedule, str, Schedule | None]
"""A schedule, its origin, and its parent, if any."""


def evolve(space: Space, settings: SearchSettings, evaluate: Evaluate) -> Outcome:
    """Search for the schedule of highest fitness, by EvoESAP's Algorithm 1 (docs/search.md).

    `evaluate` is called at most once per generation, with schedules that no earlier call had.

    Columns of the history:

    generation  number from 0
    schedule    list of int
    origin      name of a pattern, uniform_feasible or mutation
    parent      list of int; None for a schedule without a parent
    evaluated   True for the first row with this schedule
    fitness     fitness of the schedule
    elite       whether the schedule is one of the best `settings.elites` after this generation
    """
    random = Generator(PCG64(settings.seed))
    fitness: dict[Schedule, float] = {}
    history: list[dict[str, Any]] = []
    elites: list[Schedule] = []
    generation = 0
    while generation < settings.generations and len(fitness) < space.size:
        # the first generation has no elites yet
        proposals = (
            _children(space, settings, elites, random)
            if elites
            else _first_population(space, settings, random)
        )
        new_schedules = [
            schedule
            for schedule in dict.fromkeys(schedule for schedule, *_ in proposals)
            if schedule not in fitness
        ]
        if new_schedules:
            fitness |= zip(new_schedules, evaluate(new_schedules), strict=True)
        elites = sorted(fitness, key=lambda schedule: -fitness[schedule])[: settings.elites]
        unlisted_schedules = set(new_schedules)  # new schedules that have no row yet
        for schedule, origin, parent in proposals:
            history.append(
                {
                    "generation": generation,
                    "schedule": list(schedule),
                    "origin": origin,
                    "parent": None if parent is None else list(parent),
                    "evaluated": schedule in unlisted_schedules,
                    "fitness": fitness[schedule],
                    "elite": schedule in elites,
                }
            )
            unlisted_schedules.discard(schedule)
        generation += 1
        progress.update(generation, settings.generations, "generations")
    counts = {
        "generations": generation,
        "made": len(history),
        "evaluated": len(fitness),
        "known": len(history) - len(fitness),
    }
    return Outcome(elites[0], fitness[elites[0]], history, counts)


def _first_population(space: Space, settings: SearchSettings, random: Generator) -> list[_Proposal]:
    """The schedules of the first generation: one for each pattern, then uniform draws."""
    names = settings.patterns[: settings.population]
    n_draws = settings.population - len(names)
    return [
        *((pattern(name, space, random), name, None) for name in names),
        *((space.sample(random), "uniform_feasible", None) for _ in range(n_draws)),
    ]


def _children(
    space: Space, settings: SearchSettings, elites: Sequence[Schedule], random: Generator
) -> list[_Proposal]:
    """The children of a later generation. The parent of each child is a random elite."""
    parents = random.integers(len(elites), size=settings.population - settings.elites)
    return [
        (mutate(elites[parent], space, settings, random), "mutation", elites[parent])
        for parent in parents
    ]


def mutate(parent: Schedule, space: Space, settings: SearchSettings, random: Generator) -> Schedule:
    """A child of `parent` by level-switch mutation, which moves removed experts from layer to
    layer. The number of transfers is the smaller of two uniform draws. `space` must have at least
    two schedules."""
    units = numpy.array(space.units_removed(parent))
    capacity = numpy.array(space.capacity)
    largest = settings.max_transfer // space.step  # units of `step` experts that a transfer moves
    for _ in range(random.integers(1, settings.max_transfers, size=2, endpoint=True).min()):
        source, destination, size = _transfer(units, capacity, largest, random)
        units[source] -= size
        units[destination] += size
    return space.schedule(tuple(units.tolist()))


def _transfer(
    units_removed: NDArray[numpy.int64],
    capacity: NDArray[numpy.int64],
    largest: int,
    random: Generator,
) -> tuple[int, int, int]:
    """A feasible transfer, drawn uniformly: (source, destination, number of units, at most
    `largest`). The layer `source` then loses fewer units, the layer `destination` more units.
    `capacity` (L,): the most units that each layer can lose.

    The paper draws source, destination and size until the transfer is feasible: the transfer has
    the same distribution.
    """
    sizes = numpy.arange(1, largest + 1)[:, None]
    can_give = units_removed >= sizes
    can_take = units_removed + sizes <= capacity
    # (sizes, L, L): size, source, destination
    feasible = (
        can_give[:, :, None] & can_take[:, None, :] & ~numpy.eye(len(units_removed), dtype=bool)
    )
    transfers = numpy.flatnonzero(feasible)
    size, source, destination = numpy.unravel_index(
        transfers[random.integers(len(transfers))], feasible.shape
    )
    return int(source), int(destination), int(size) + 1  # sizes begin with 1
