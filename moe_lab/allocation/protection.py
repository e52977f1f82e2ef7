"""allocation.protect: super experts (arXiv 2507.23279), which every plan retains with all their
channels, whatever the criterion and the allocation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
from numpy.typing import ArrayLike

from moe_lab.allocation.problem import measurement

STATISTIC = "output_abs_max"
"""Statistic by which super experts are recognised, measured by the step `statistics`."""
PERCENTILE = 99.5
"""The statistic of a super expert is above this percentile of all experts ..."""
DIVISOR = 10
"""... and above the largest value of all experts divided by this number: equation 8."""


def super_experts(largest: Mapping[int, ArrayLike], end: int) -> dict[int, list[int]]:
    """Layer -> ids of its super experts (arXiv 2507.23279, equation 8), for layers that have any.

    `largest`: layer -> (E,), the peak of each expert: the largest absolute value in the expert's
    outputs for all tokens. An expert is a super expert if three conditions hold: its peak is
    strictly above the 99.5th percentile of the peaks of all experts in all layers (with linear
    interpolation), its peak is strictly above a tenth of the largest peak, and its layer number is
    below `end`. The paper also requires that massive activations form in the layer, but gives no
    numeric rule for this.
    """
    peaks = {layer: numpy.asarray(row, dtype=numpy.float64) for layer, row in largest.items()}
    pooled = numpy.concatenate(list(peaks.values()))
    threshold = max(float(numpy.percentile(pooled, PERCENTILE)), float(pooled.max()) / DIVISOR)
    super_ids = {
        layer: numpy.flatnonzero(row > threshold).tolist()
        for layer, row in peaks.items()
        if layer < end
    }
    return {layer: experts for layer, experts in super_ids.items() if experts}


def with_protected(
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    statistics: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """The facts of a model, with the super experts of each layer under the key `protected`.

    `model`: the facts (moe_lab/models/facts.py), which are copied. If settings["protect"] is None,
    the copy gets no such keys. `settings`: a mapping that has the fields of AllocationConfig.
    `statistics`: layer -> name -> sum. UserError when a layer has no output_abs_max.
    """
    if settings.get("protect") is None:
        return dict(model)
    evidence = {"statistics": statistics}
    # protect_layers is a share of the depth; super experts are only in layers before `end`
    end = round(settings["protect_layers"] * model["decoder_layers"])
    protected = super_experts(
        {layer: measurement(evidence, "statistics", layer, STATISTIC) for layer in model["layers"]},
        end,
    )
    layers = {
        layer: {**facts, "protected": protected.get(layer, [])}
        for layer, facts in model["layers"].items()
    }
    return {**model, "layers": layers}


def provenance(model: Mapping[str, Any]) -> dict[str, Any]:
    """{"protected": {layer: ids of its protected experts}}, for the provenance of a plan. Layers
    without protected experts are left out. The result is {} if no layer of `model`, the facts of a
    model, has the key `protected`."""
    protected = {
        str(layer): facts["protected"]
        for layer, facts in model["layers"].items()
        if "protected" in facts
    }
    if not protected:
        return {}
    return {"protected": {layer: experts for layer, experts in protected.items() if experts}}
