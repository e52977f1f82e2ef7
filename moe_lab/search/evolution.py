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
from functools import cached_property
from itertools import accumulate
from math import fsum, lcm
from random import Random
from typing import Any, Literal, Self, TypeAlias

import numpy
from numpy.random import PCG64, Generator
from pydantic import model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from moe_lab import progress
from moe_lab.allocation.problem import Limits, budget, call_or_suggest_ratio, limits
from moe_lab.config.base import SETTINGS, Count, Positive, validated
from moe_lab.errors import UserError, check_known

# The space of feasible schedules, and patterns to start a search.


Schedule: TypeAlias = tuple[int, ...]
"""Experts removed per MoE layer, in layer order."""


@dataclass(frozen=True)
class Space:
    """All feasible schedules. In a feasible schedule, layer l loses lowest[l] experts and u_l units
    of `step` experts. The u_l satisfy 0 <= u_l <= capacity[l] and sum_l u_l = units."""

    step: int
    lowest: tuple[int, ...]
    """Smallest number of experts each layer loses: n modulo step, so that the layer keeps a
    multiple of `step`."""
    capacity: tuple[int, ...]
    """Units that each layer can lose beyond `lowest`."""
    units: int
    """Units that all layers together lose beyond `lowest`."""

    def schedule(self, units: tuple[int, ...]) -> Schedule:
        """The schedule in which layer l loses lowest[l] + step * units[l] experts."""
        return tuple(low + self.step * count for low, count in zip(self.lowest, units, strict=True))

    def units_removed(self, schedule: Schedule) -> tuple[int, ...]:
        """Number of units u_l that each layer loses in `schedule`, beyond `lowest`."""
        return tuple(
            (lost - low) // self.step for low, lost in zip(self.lowest, schedule, strict=True)
        )

    @cached_property
    def _ways(self) -> list[list[int]]:
        """Entry [l][u]: number of ways in which layers l, l + 1, ... can lose u units together."""
        # after the last layer, there is one way to lose 0 units, and none to lose more
        rows = [[1] + [0] * self.units]
        for most in reversed(self.capacity):
            sums = list(accumulate(rows[-1]))
            # the later layers lose u - most to u units: sum their ways over this range
            rows.append(
                [total - (sums[u - most - 1] if u > most else 0) for u, total in enumerate(sums)]
            )
        return rows[::-1]

    @property
    def size(self) -> int:
        """Number of feasible schedules."""
        return self._ways[0][self.units]

    def schedule_at(self, number: int) -> Schedule:
        """The feasible schedule at position `number` (from 0) in lexicographic order."""
        units = []  # that each layer loses
        remaining = self.units
        for ways in self._ways[1:]:
            # ways[u]: number of ways in which the layers after this layer can lose u units. The
            # schedules in which this layer loses fewer units come first.
            count = 0
            while number >= ways[remaining - count]:
                number -= ways[remaining - count]
                count += 1
            units.append(count)
            remaining -= count
        return self.schedule(tuple(units))

    def sample(self, random: numpy.random.Generator) -> Schedule:
        """A feasible schedule, drawn uniformly."""
        # numpy draws integers of at most 64 bits, and `size` may be larger
        bits = random.bytes(16 + self.size.bit_length() // 8)
        return self.schedule_at(Random(bits).randrange(self.size))


def feasible_space(layers: Sequence[Limits], budget: int, granularity: int) -> Space:
    """The space of schedules that remove `budget` experts.

    The number of experts that a layer retains is a multiple of one step: the least common multiple
    of `granularity` and of the steps in the limits of all layers. UserError when a layer cannot
    retain any multiple of it, and when `budget` is infeasible.
    """
    step = lcm(granularity, *(limit.step for limit in layers))
    lowest = tuple(limit.n_experts % step for limit in layers)
    capacity = tuple(
        (limit.n_experts - low - limit.minimum_experts) // step
        for limit, low in zip(layers, lowest, strict=True)
    )
    for position, (limit, room) in enumerate(zip(layers, capacity, strict=True)):
        if room < 0:
            raise UserError(
                f"allocation=evolutionary: MoE layer {position} (counted from 0) has "
                f"{limit.n_experts} experts and cannot keep a multiple of {step} that is at least "
                f"{limit.minimum_experts}: choose a smaller multiple"
            )
    return Space(step, lowest, capacity, _units(budget, sum(lowest), sum(capacity), step))


def _units(budget: int, lowest: int, capacity: int, step: int) -> int:
    """Number of units of `step` experts to remove, beyond the `lowest` experts that all layers
    together must lose. `capacity`: largest number of units."""
    units, remainder = divmod(budget - lowest, step)
    if remainder == 0 and 0 <= units <= capacity:
        return units
    # the feasible numbers just below and just above the budget
    feasible = sorted(
        {lowest + step * min(max(count, 0), capacity) for count in (units, units + 1)}
    )
    raise UserError(
        f"allocation=evolutionary: {budget} experts cannot be removed when every layer loses a "
        f"multiple of {step} and keeps what its router needs: {' or '.join(map(str, feasible))} is "
        "the nearest feasible number"
        + (" (or choose a smaller allocation.parameters.granularity)" if remainder else "")
    )


_SHAPES: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda i, n: 1.0,
    "up": lambda i, n: i + 1.0,
    "down": lambda i, n: float(n - i),
    "mid": lambda i, n: (n - 1) / 2 - abs(i - (n - 1) / 2) + 1,
    "mid_neg": lambda i, n: abs(i - (n - 1) / 2) + 1,
    "front_heavy": lambda i, n: 0.7**i + 1e-4,
    "back_heavy": lambda i, n: 1.3**i,
    "block_early": lambda i, n: 2.0 if i < max(1, n // 4) else 1.0,
    "block_late": lambda i, n: 2.0 if i >= n - max(1, n // 4) else 1.0,
    "alt": lambda i, n: 2.0 if i % 2 == 0 else 1.0,
    "deep_flat": lambda i, n: 0.5 + 0.5 * (1 - abs(2 * i / max(1, n - 1) - 1)),
}
"""Name of a pattern -> weight of layer i of n layers."""

PATTERNS = ("uniform", "random", *list(_SHAPES)[1:])
"""All twelve patterns. The schedules of "random" are not drawn uniformly."""


def pattern(name: str, space: Space, random: numpy.random.Generator) -> Schedule:
    """The feasible schedule of the pattern `name`. Layers lose experts nearly in proportion to the
    weights of the pattern."""
    n_layers = len(space.capacity)
    if name == "random":
        # weights must be greater than 0
        return project([float(value) + 1e-4 for value in random.random(n_layers)], space)
    return project([_SHAPES[name](layer, n_layers) for layer in range(n_layers)], space)


def project(weights: Sequence[float], space: Space) -> Schedule:
    """A feasible schedule in which the units that layers lose are nearly proportional to the
    positive `weights` (L,).

    Each layer's share of `space.units` is rounded down. The remaining units go first to the layers
    with the largest fractional parts.
    """
    total = fsum(weights)  # results of `sum` differ between versions of Python
    shares = [space.units * weight / total for weight in weights]
    removed = [min(int(share), room) for share, room in zip(shares, space.capacity, strict=True)]
    remaining = space.units - sum(removed)
    # the largest fractional part first
    order = sorted(range(len(shares)), key=lambda layer: int(shares[layer]) - shares[layer])
    while remaining:
        for layer in order:
            if remaining and removed[layer] < space.capacity[layer]:
                removed[layer] += 1
                remaining -= 1
        order = list(range(len(shares)))
    return space.schedule(tuple(removed))


# The search.


UNSHIFTED = ("esap", "sap", "kl", "kl_reversed")
"""Fitness functions that EvoESAP's code computes at the answer tokens, not at the positions that
predict them."""


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
    patterns: list[str] = field(default_factory=lambda: list(PATTERNS))
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
        """Raise ValueError for unknown patterns, and for fields that do not fit each other."""
        for name in self.patterns:
            check_known("patterns", name, PATTERNS)
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


_Proposal: TypeAlias = tuple[Schedule, str, Schedule | None]
"""A schedule, its origin, and its parent, if any."""


def evolve(space: Space, settings: SearchSettings, evaluate: Evaluate) -> list[dict[str, Any]]:
    """Search for the schedule of highest fitness, by EvoESAP's Algorithm 1 (docs/search.md).

    `evaluate` is called at most once per generation, with schedules that no earlier call had.

    Returns the history of the search, a row for each proposed schedule:

    generation  number from 0
    schedule    list of int
    origin      name of a pattern, uniform_feasible or mutation
    parent      list of int; None for a schedule without a parent
    fitness     fitness of the schedule
    elite       whether the schedule is one of the best `settings.elites` after this generation
    """
    random = Generator(PCG64(settings.seed))
    fitness: dict[Schedule, float] = {}
    history: list[dict[str, Any]] = []
    elites: list[Schedule] = []
    for generation in range(settings.generations):
        if len(fitness) == space.size:  # all schedules are known
            break
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
        for schedule, origin, parent in proposals:
            history.append(
                {
                    "generation": generation,
                    "schedule": list(schedule),
                    "origin": origin,
                    "parent": None if parent is None else list(parent),
                    "fitness": fitness[schedule],
                    "elite": schedule in elites,
                }
            )
        progress.update(generation + 1, settings.generations, "generations")
    return history


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
    """A child of `parent` by level-switch mutation: transfers, each drawn uniformly from the
    feasible ones, move units of removed experts from a source to a destination. The number of
    transfers is the smaller of two uniform draws. `space` must have at least two schedules.

    The paper draws source, destination and size until the transfer is feasible: transfers have the
    same distribution."""
    units = numpy.array(space.units_removed(parent))
    sizes = numpy.arange(1, settings.max_transfer // space.step + 1)[:, None]  # in units
    are_different = ~numpy.eye(len(units), dtype=bool)
    for _ in range(random.integers(1, settings.max_transfers, size=2, endpoint=True).min()):
        can_give = units >= sizes
        can_take = units + sizes <= numpy.array(space.capacity)
        # (sizes, L, L): size, source, destination
        feasible = can_give[:, :, None] & can_take[:, None, :] & are_different
        transfers = numpy.flatnonzero(feasible)
        size, source, destination = numpy.unravel_index(
            transfers[random.integers(len(transfers))], feasible.shape
        )
        units[source] -= size + 1  # sizes begin with 1
        units[destination] += size + 1
    return space.schedule(tuple(units.tolist()))
