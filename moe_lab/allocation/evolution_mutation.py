"""A child of a schedule: a few experts' worth of pruning moved from layer to layer. No torch."""

from __future__ import annotations

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from moe_lab.allocation.evolution_settings import Settings
from moe_lab.allocation.evolution_space import Schedule, Space


def mutate(parent: Schedule, space: Space, settings: Settings, random: Generator) -> Schedule:
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
    found = numpy.flatnonzero(feasible)
    size, source, destination = numpy.unravel_index(found[random.integers(len(found))], feasible.shape)
    return int(source), int(destination), int(size) + 1
