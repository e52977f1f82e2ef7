"""How a measured importance becomes a target: less unequal, still in order (MoE-Slimming)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy
from numpy.typing import NDArray

Array: TypeAlias = NDArray[numpy.float64]
Smoothing: TypeAlias = Literal["sqrt", "log", "huber", "clip", "none"]


def smooth(values: Array, name: Smoothing) -> Array:
    """g(x) for x = values / mean(values), values >= 0 (n,); then at least 1e-6 of the sum, so that nothing is at zero.

    sqrt: x^(1/2). log: ln(1 + 5x). huber: x up to d = mean + std/2, above it d + (d (x - d))^(1/2). clip: x within
    mean +- std/2. none: x. std is that of the population. Dividing by the mean makes log, too, independent of how many
    tokens were summed. All-zero values give equal targets.
    """
    total = values.sum()
    if total <= 0:
        return numpy.ones_like(values)
    smoothed = FUNCTIONS[name](values * (len(values) / total))
    clamped: Array = numpy.maximum(smoothed, 1e-6 * smoothed.sum())
    return clamped


def _log(x: Array) -> Array:
    return numpy.log1p(5 * x)


def _huber(x: Array) -> Array:
    delta = x.mean() + 0.5 * x.std()
    return numpy.where(x <= delta, x, delta + numpy.sqrt(delta * numpy.maximum(x - delta, 0)))


def _clip(x: Array) -> Array:
    return numpy.clip(x, x.mean() - 0.5 * x.std(), x.mean() + 0.5 * x.std())


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sqrt": numpy.sqrt,
    "log": _log,
    "huber": _huber,
    "clip": _clip,
    "none": numpy.asarray,
}
