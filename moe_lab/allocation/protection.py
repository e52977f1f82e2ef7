"""allocation.protect: super experts (arXiv 2507.23279), which every plan retains with all their
channels, whatever the criterion and the allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy
from numpy.typing import ArrayLike

from moe_lab.allocation.problem import measurement
from moe_lab.errors import Registry

STATISTIC = "output_abs_max"
"""Statistic by which super experts are recognised."""
PERCENTILE = 99.5
DIVISOR = 10


def super_experts(largest: Mapping[int, ArrayLike], end: int) -> dict[int, list[int]]:
    """Layer -> ids of its super experts (arXiv 2507.23279, equation 8), for layers that have any.

    `largest`: layer -> (E,), the peak of each expert: the largest absolute value in its outputs for
    all tokens. The peak of a super expert is strictly above the 99.5th percentile of the peaks of
    all layers, and strictly above a tenth of the largest peak. Its layer is below `end`. The paper
    also requires that massive activations form in the layer, but gives no numeric rule for this.
    """
    pooled = numpy.concatenate(list(largest.values()))
    threshold = max(numpy.percentile(pooled, PERCENTILE), pooled.max() / DIVISOR)
    return experts_above(threshold, {layer: largest[layer] for layer in largest if layer < end})


def experts_above(threshold: float, largest: Mapping[int, ArrayLike]) -> dict[int, list[int]]:
    """Layer -> ids of the experts whose peak is strictly above `threshold`, for layers that have
    any. `largest`: as in `super_experts`."""
    ids = {
        layer: numpy.flatnonzero(numpy.asarray(peaks) > threshold).tolist()
        for layer, peaks in largest.items()
    }
    return {layer: experts for layer, experts in ids.items() if experts}


Protection: TypeAlias = Callable[[Mapping[int, ArrayLike], int], dict[int, list[int]]]
PROTECTIONS: Registry[Protection] = Registry({"super": super_experts})
"""Value of allocation.protect -> function (peaks, end) that returns the protected experts, with the
arguments of `super_experts`."""


def add_super_experts(
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    statistics: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """A copy of `model` with a key "protected" in the facts of each MoE layer: the ids of the
    layer's super experts.

    `settings`: fields of AllocationConfig. `model`: facts of a model (see moe_lab/models/facts.py).
    `statistics`: layer -> name of a statistic -> array. UserError when a layer lacks the statistic
    output_abs_max (E,).
    """
    protect = settings.get("protect")
    if protect is None:
        return dict(model)
    evidence = {"statistics": statistics}
    # Only the first layers can have super experts.
    end = round(settings["protect_layers"] * model["decoder_layers"])
    protected = PROTECTIONS[protect](
        {layer: measurement(evidence, "statistics", layer, STATISTIC) for layer in model["layers"]},
        end,
    )
    layers = {
        layer: {**facts, "protected": protected.get(layer, [])}
        for layer, facts in model["layers"].items()
    }
    return {**model, "layers": layers}


def protected_entry(model: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a plan's provenance that names the protected experts: {"protected": {layer: ids
    of the protected experts}}, or {} if allocation.protect is not set. `model`: facts, as
    `add_super_experts` returns them."""
    protected = {
        str(layer): facts["protected"]
        for layer, facts in model["layers"].items()
        if "protected" in facts
    }
    if not protected:
        return {}
    return {"protected": {layer: experts for layer, experts in protected.items() if experts}}
