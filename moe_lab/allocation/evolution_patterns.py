"""The schedules a search begins with: twelve shapes of pruning mass over depth, made feasible. No torch.

Layer i of L gets the weight of the formula; "front" and "early" are the layers next to the input. Weights are pruning
mass: front_heavy prunes early layers most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from numpy.random import Generator

from moe_lab.allocation.evolution_space import Schedule, Space

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
"""Name -> weight of layer i of n."""

PATTERNS = ("uniform", "random", *list(_SHAPES)[1:])
"""All twelve; random draws its weights, U(0, 1) + 1e-4 (which is not uniform over the feasible schedules)."""


def pattern(name: str, space: Space, random: Generator) -> Schedule:
    """The feasible schedule nearest to the pattern called `name`, by `project`."""
    layers = len(space.capacity)
    if name == "random":
        return project([float(value) + 1e-4 for value in random.random(layers)], space)
    return project([_SHAPES[name](layer, layers) for layer in range(layers)], space)


def project(weights: Sequence[float], space: Space) -> Schedule:
    """A feasible schedule whose units are in proportion to `weights` (L,), which are positive.

    Every layer gets the whole part of its share, within its capacity. What is left goes out one unit each, to the
    largest fractions first (ties: lower layer), then round-robin from the first layer on.
    """
    total = sum(weights)
    shares = [space.units * weight / total for weight in weights]
    taken = [min(int(share), room) for share, room in zip(shares, space.capacity, strict=True)]
    left = space.units - sum(taken)
    order = sorted(range(len(shares)), key=lambda layer: int(shares[layer]) - shares[layer])
    while left:
        for layer in order:
            if left and taken[layer] < space.capacity[layer]:
                taken[layer] += 1
                left -= 1
        order = list(range(len(shares)))
    return space.schedule(tuple(taken))
