"""Super experts (arXiv 2507.23279), by the rule of the released code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy
from numpy.typing import ArrayLike

from moe_lab.allocation.protection import DIVISOR, PERCENTILE, PROTECTIONS, experts_above


def released(largest: Mapping[int, ArrayLike], end: int) -> dict[int, list[int]]:
    """Layer -> ids of its super experts, for layers that have any; arguments as in `super_experts`.

    The percentile is that of the peaks in the layers below `end` only, and a tenth of the largest
    peak is rounded down. The released code counts the peaks of shared experts too, which moe_lab
    does not observe.
    """
    below = {layer: largest[layer] for layer in largest if layer < end}
    pooled = numpy.concatenate(list(below.values()))
    threshold = max(numpy.percentile(pooled, PERCENTILE), pooled.max() // DIVISOR)
    return experts_above(threshold, below)


PROTECTIONS["super_experts.released"] = released
