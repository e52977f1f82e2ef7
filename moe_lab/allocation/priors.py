"""How much of its own scores each expert should keep, before smoothing: the expert priors of MoE-Slimming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy

from moe_lab.allocation.problem import Array, Evidence, measured

Prior: TypeAlias = Literal["ala1", "ala2", "true_ablation", "loss", "usage", "router_weight", "ala_lm", "none"]
Get: TypeAlias = Callable[[str, tuple[int, ...]], Array]


def expert_prior(prior: Prior, evidence: Evidence, layer: int, shape: tuple[int, int]) -> Array:
    """The prior of each expert of `layer` (E,), >= 0, up to a factor. `shape`: (E, I).

    An expert that opposes the others (a negative attribution) counts as 0.

    ala1           sum_t g <z, m> / (||y||^2 + eps): first order, all experts scaled by a factor near one
    ala2           sum_t g^2 ||z||^2 / (||y||^2 + eps): second order
    true_ablation  the same array: the loss of ALA is quadratic in the factor of one expert, so its second order is the
                   change when that expert is switched off, exactly
    loss           increase of the language model's loss when the expert alone is switched off
    usage          tokens routed to the expert
    router_weight  sum of the gates of these tokens
    ala_lm         -sum_t <dL/dz, z>, L the language model's loss; <dL/dz, z> = sum_c phi_c dL/dphi_c
    none           1
    """
    need = NEEDS.get(prior)
    if need is None:
        return numpy.ones(shape[0])
    found = READ[prior](lambda name, extra: measured(evidence, need, layer, name, (shape[0], *extra)), shape[1])
    positive: Array = numpy.maximum(found, 0)
    return positive


NEEDS: Mapping[str, str] = {
    "ala1": "statistics",
    "ala2": "statistics",
    "true_ablation": "statistics",
    "loss": "ablation",
    "usage": "statistics",
    "router_weight": "statistics",
    "ala_lm": "gradients",
}
"""Prior -> the step that measures it."""

READ: Mapping[str, Callable[[Get, int], Any]] = {
    "ala1": lambda get, _: get("ala_first", ()),
    "ala2": lambda get, _: get("ala_second", ()),
    "true_ablation": lambda get, _: get("ala_second", ()),
    "loss": lambda get, _: get("ablation", ()),
    "usage": lambda get, _: get("tokens", ()),
    "router_weight": lambda get, _: get("sums_model", (3, 3))[:, 1, 0],
    "ala_lm": lambda get, width: -get("channel_product", (width,)).sum(axis=1),
}
