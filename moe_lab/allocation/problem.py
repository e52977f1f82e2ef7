"""What an allocation is asked: the layers, the ratio, the scores, and whatever else is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from moe_lab.allocation.limits import Limits
from moe_lab.errors import UserError

Array: TypeAlias = NDArray[numpy.float64]
Budget: TypeAlias = NDArray[numpy.int64]
"""Kept channels of each expert of a layer (E,)."""
Budgets: TypeAlias = dict[int, Budget]
Evidence: TypeAlias = Mapping[str, Mapping[int, Any]]
"""What was measured besides the scores: need -> layer -> arrays by name ("by": layer -> scores)."""


class Infeasible(UserError):
    """What cannot be had at this ratio, and perhaps can at a smaller one."""


@dataclass(frozen=True)
class Experts:
    """Whole experts are to go: how many of each layer?"""

    ratio: float
    """Share of the routed experts to remove."""
    limits: dict[int, Limits]
    scores: dict[int, Array]
    """Layer -> (E,), higher means keep."""
    evidence: Evidence
    path: str | None = None
    """The file of allocation=list."""


@dataclass(frozen=True)
class Channels:
    """Channels are to go: how many does each expert keep?"""

    ratio: float
    """Share of the routed experts' channels to remove."""
    scores: dict[int, Array]
    """Layer -> (E, I), higher means keep."""
    evidence: Evidence
    path: str | None = None
    """The file of allocation=list."""

    @property
    def sizes(self) -> NDArray[numpy.int64]:
        """Channels of each layer, E * I (L,)."""
        return numpy.array([scores.size for scores in self.scores.values()], dtype=numpy.int64)

    @property
    def keep(self) -> int:
        """Channels all layers keep together: int(all of them * (1 - ratio))."""
        return whole(int(self.sizes.sum()) * (1 - self.ratio))


def whole(value: float) -> int:
    """int(value), forgiving the rounding of 1 - ratio: 1000 * (1 - 0.9) is 100, not 99."""
    return int(value + 1e-6)


def measured(evidence: Evidence, need: str, layer: int, name: str, shape: tuple[int, ...]) -> Array:
    """The array `name` that the step `need` left for `layer`, fp64. UserError when it is missing, of another model, or
    not finite (naming the expert)."""
    if need not in evidence:
        raise UserError(f"allocation needs {name}, which the step {need} measures, and was given none of its results")
    arrays = evidence[need].get(layer, {})
    if name not in arrays:
        raise UserError(
            f"allocation: layer {layer} has no {name} among the results of {need} "
            f"(it has: {', '.join(sorted(arrays)) or 'nothing'}): run the {need} step again"
        )
    found: Array = numpy.asarray(arrays[name], dtype=numpy.float64)
    return finite(name, layer, found, shape)


def finite(name: str, layer: int, values: Any, shape: tuple[int, ...]) -> Array:
    """`values` as fp64. UserError, naming layer and expert, unless they have that shape and are finite."""
    found: Array = numpy.asarray(values, dtype=numpy.float64)
    if found.shape != shape:
        raise UserError(
            f"{name} of layer {layer} has the shape {found.shape}, expected {shape}: it is of another model"
        )
    bad = numpy.argwhere(~numpy.isfinite(found))
    if len(bad):
        where = f", expert {bad[0][0]}" if shape else ""
        raise UserError(f"{name}: layer {layer}{where} is {found[tuple(bad[0])]}: expected a finite number")
    return found
