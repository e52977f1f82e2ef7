"""Super experts (arXiv 2507.23279), by the rule of the released code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy
from numpy.typing import ArrayLike

from moe_lab.allocation.protection import DIVISOR, PERCENTILE, PROTECTIONS


def released(largest: Mapping[int, ArrayLike], end: int) -> dict[int, list[int]]:
    """Layer -> ids of its super experts, for layers that have any; arguments as in `super_experts`.

    The percentile is that of the peaks in the layers below `end` only, and a tenth of the largest
    peak is rounded down. The released code counts the peaks of shared experts too, which moe_lab
    does not observe.
    """
    peaks = {
        layer: numpy.asarray(row, dtype=numpy.float64)
        for layer, row in largest.items()
        if layer < end
    }
    pooled = numpy.concatenate(list(peaks.values()))
    threshold = max(float(numpy.percentile(pooled, PERCENTILE)), pooled.max() // DIVISOR)
    super_ids = {layer: numpy.flatnonzero(row > threshold).tolist() for layer, row in peaks.items()}
    return {layer: experts for layer, experts in super_ids.items() if experts}


PROTECTIONS["super_experts.released"] = released
