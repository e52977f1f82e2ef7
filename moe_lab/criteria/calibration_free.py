"""Criteria that read no text: weights alone, or nothing at all.

w is the concatenation of an expert's gate, up and down weights (biases and router left out), P its length.
"""

from __future__ import annotations

import numpy

from moe_lab.criteria.layer import Array, Layer
from moe_lab.criteria.registry import criterion

AIMER = "AIMER, arXiv 2603.18492"


@criterion("aimer", needs=("weights",), reference=AIMER)
def aimer(layer: Layer) -> Array:
    """-(||w||_1 / P) / sqrt(||w||_2^2 / P), in [-1, -1/sqrt(P)]; the flattest weights go first, so the ratio is
    negated.

    An expert of zeros scores 0, as in the released code: it is never pruned first.
    """
    absolute, square, count = layer["abs_sum"], layer["square_sum"], layer["count"]
    return -absolute / numpy.where(square > 0, numpy.sqrt(count * square), 1)


@criterion("magnitude", needs=("weights",), reference=AIMER)
def magnitude(layer: Layer) -> Array:
    """||w||_1 / P: the mean absolute weight."""
    return layer["abs_sum"] / layer["count"]


@criterion("random", needs=(), reference=AIMER, uses_seed=True)
def random(layer: Layer) -> Array:
    """Uniform on [0, 1): numpy's PCG64(seed), one draw of E numbers per layer, in layer order."""
    return layer.random.random(layer.n_experts)
