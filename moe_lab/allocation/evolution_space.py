"""Which schedules a search may choose from: how many there are, and any one of them by its number. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm
from typing import TypeAlias

from numpy.random import Generator

from moe_lab.errors import UserError

Schedule: TypeAlias = tuple[int, ...]
"""Experts removed per MoE layer, in layer order."""


@dataclass(frozen=True)
class Problem:
    """What is to be allocated: `budget` experts, over MoE layers in layer order."""

    n_experts: tuple[int, ...]
    """Routed experts of each layer."""
    fewest: tuple[int, ...]
    """Experts each layer keeps at least, as its router needs."""
    steps: tuple[int, ...]
    """Kept counts are multiples of this, per layer: the lcm of allocation.multiple_of and the router's groups."""
    budget: int
    """Experts removed from all layers together."""


@dataclass(frozen=True)
class Space:
    """The feasible schedules of a problem, in units of `step` experts.

    Layer l loses lowest[l] + step * u_l experts with 0 <= u_l <= capacity[l] and sum u_l = units.
    """

    step: int
    lowest: tuple[int, ...]
    """What a layer loses at the least: n modulo step, so that a multiple of `step` is left."""
    capacity: tuple[int, ...]
    """How many units a layer can lose."""
    units: int
    """How many units all layers lose together."""

    def schedule(self, taken: tuple[int, ...]) -> Schedule:
        """Units taken from each layer, as experts removed."""
        return tuple(low + self.step * count for low, count in zip(self.lowest, taken, strict=True))

    def taken(self, schedule: Schedule) -> tuple[int, ...]:
        """The inverse of `schedule`."""
        return tuple((lost - low) // self.step for low, lost in zip(self.lowest, schedule, strict=True))

    @cached_property
    def _ways(self) -> list[list[int]]:
        """[l][u]: in how many ways the layers from l on lose u units; exact integers, by dynamic programming."""
        rows = [[1] + [0] * self.units]
        for size in reversed(self.capacity):
            sums = list(accumulate(rows[-1]))
            rows.append([total - (sums[u - size - 1] if u > size else 0) for u, total in enumerate(sums)])
        return rows[::-1]

    @property
    def size(self) -> int:
        """How many feasible schedules there are."""
        return self._ways[0][self.units]

    def nth(self, number: int) -> Schedule:
        """Feasible schedule `number` of `size`, in lexicographic order."""
        taken, left = [], self.units
        for rest in self._ways[1:]:
            count = 0
            while number >= rest[left - count]:
                number -= rest[left - count]
                count += 1
            taken.append(count)
            left -= count
        return self.schedule(tuple(taken))

    def sample(self, random: Generator) -> Schedule:
        """A feasible schedule, each with the same probability 1 / size."""
        return self.nth(_below(self.size, random))


def space_of(problem: Problem, granularity: int) -> Space:
    """The schedules that leave multiples of the problem's steps and of `granularity` in every layer.

    UserError when a layer can keep no such number, when layers need different steps (a transfer between them would
    need steps of both), and when the budget cannot be reached, naming the nearest that can.
    """
    steps = {lcm(step, granularity) for step in problem.steps}
    if len(steps) != 1:
        raise UserError(
            f"allocation=evolutionary: kept counts are multiples of {sorted(steps)} in different layers, expected the "
            "same in all: choose allocation.multiple_of such that it is a multiple of every router's groups"
        )
    step = steps.pop()
    lowest = tuple(count % step for count in problem.n_experts)
    capacity = tuple(
        (count - few - low) // step for count, few, low in zip(problem.n_experts, problem.fewest, lowest, strict=True)
    )
    for place, room in enumerate(capacity):
        if room < 0:
            raise UserError(
                f"allocation=evolutionary: MoE layer {place} (counted from 0) has {problem.n_experts[place]} experts "
                f"and cannot keep a multiple of {step} that is at least {problem.fewest[place]}: choose a smaller "
                "multiple"
            )
    return Space(step, lowest, capacity, _units(problem.budget, sum(lowest), sum(capacity), step))


def _units(budget: int, lowest: int, capacity: int, step: int) -> int:
    """The budget in units beyond what must go. UserError, naming the nearest feasible budgets, when that is not whole
    or not within the layers' capacity."""
    units, rest = divmod(budget - lowest, step)
    if rest == 0 and 0 <= units <= capacity:
        return units
    around = sorted({lowest + step * min(max(near, 0), capacity) for near in (units, units + 1)})
    raise UserError(
        f"allocation=evolutionary: {budget} experts cannot be removed when every layer loses a multiple of {step} and "
        f"keeps what its router needs: {' or '.join(map(str, around))} is the nearest feasible number"
        + (" (or choose a smaller allocation.parameters.granularity)" if rest else "")
    )


def _below(limit: int, random: Generator) -> int:
    """A number out of 0 ... limit - 1, each as likely as any other, however large: bits, drawn again when too large."""
    bits = (limit - 1).bit_length()
    length = (bits + 7) // 8
    while True:
        number = int.from_bytes(random.bytes(length), "little") >> (8 * length - bits)
        if number < limit:
            return number
