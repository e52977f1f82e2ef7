"""Whole numbers in given proportions: the water level that fills a total between bounds, then largest remainders."""

from __future__ import annotations

import numpy
from numpy.typing import ArrayLike, NDArray


def apportion(
    weights: ArrayLike, total: int, low: ArrayLike, high: ArrayLike, step: ArrayLike = 1
) -> NDArray[numpy.int64]:
    """Whole numbers near `level * weights`, each within [low, high] and low plus a multiple of `step`, summing to
    `total`.

    `weights` > 0; `low`, `high` and `step` one number or one each, low <= high a multiple of the step apart, sum(low)
    <= total <= sum(high). The level is the one at which the clipped shares sum to `total`; they are rounded down, and
    largest remainders get one step more (ties: first). When steps differ, the sum may stay below `total` by less than
    the largest step.
    """
    weight = numpy.asarray(weights, dtype=numpy.float64)
    least, most, steps = (numpy.broadcast_to(numpy.asarray(x, numpy.int64), weight.shape) for x in (low, high, step))
    levels = numpy.sort(numpy.concatenate([least / weight, most / weight]))
    filled = [numpy.clip(level * weight, least, most).sum() for level in levels]
    share = numpy.clip(numpy.interp(total, filled, levels) * weight, least, most)
    found: NDArray[numpy.int64] = least + numpy.floor((share - least) / steps + 1e-9).astype(numpy.int64) * steps
    found = numpy.minimum(found, most)
    remainder = numpy.round((share - found) / steps, 9)
    left = total - int(found.sum())
    for index in numpy.argsort(-remainder, kind="stable"):
        if steps[index] <= min(left, most[index] - found[index]):
            found[index] += steps[index]
            left -= int(steps[index])
    return found
