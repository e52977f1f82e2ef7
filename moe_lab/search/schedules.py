"""Schedules (the number of experts each layer loses): the space of feasible schedules, and patterns
to start a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import fsum, lcm
from random import Random
from typing import TypeAlias

import numpy

from moe_lab.allocation.problem import Limits
from moe_lab.errors import UserError

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
    def budget(self) -> int:
        """Number of experts that all layers together lose."""
        return sum(self.lowest) + self.step * self.units

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

    The number of experts that a layer retains is a multiple of the layer's step: the least common
    multiple of `granularity` and of the step in the layer's limits. UserError when the steps of the
    layers differ, when a layer cannot retain any multiple of its step, and when `budget` is
    infeasible.
    """
    steps = {lcm(limit.step, granularity) for limit in layers}
    if len(steps) != 1:
        raise UserError(
            "allocation=evolutionary: numbers of retained experts are multiples of "
            f"{sorted(steps)} in different layers, expected the same in all: choose "
            "allocation.multiple_of such that it is a multiple of every router's groups"
        )
    step = steps.pop()
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
