"""allocation.protect: experts that every plan keeps whole, whatever the criterion and the allocation say: super experts
(arXiv 2507.23279) or those that a file lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
from numpy.typing import ArrayLike

from moe_lab.allocation.problem import measured, read_setting
from moe_lab.errors import UserError
from moe_lab.json_files import fits

SUPER = "super"
"""Value of allocation.protect that selects super experts."""
STATISTIC = "output_abs_max"
"""What super experts are recognised by, measured by the step `statistics`."""
PERCENTILE = 99.5
"""A super expert is above this percentile of all experts ..."""
FRACTION = 10
"""... and above the largest value over all experts divided by this: equation 8."""


def super_experts(largest: Mapping[int, ArrayLike], end: int) -> dict[int, list[int]]:
    """Layer -> ids of its super experts (2507.23279, equation 8), for layers that have any.

    `largest`: layer -> (E,), the largest absolute value a of an expert's output over tokens and hidden entries. An
    expert is super if a is above the 99.5th percentile of all experts of all layers (linear interpolation), a is above
    a tenth of the largest a, both strictly, and its layer is before the layer `end`. The paper's condition on layers,
    that massive activations form in them, has no numeric rule.
    """
    values = {layer: numpy.asarray(row, dtype=numpy.float64) for layer, row in largest.items()}
    everything = numpy.concatenate(list(values.values()))
    bound = max(float(numpy.percentile(everything, PERCENTILE)), float(everything.max()) / FRACTION)
    chosen = {layer: numpy.flatnonzero(row > bound).tolist() for layer, row in values.items() if layer < end}
    return {layer: experts for layer, experts in chosen.items() if experts}


def identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies the protection among the fields of AllocationConfig; {} without one. A file counts by content.
    UserError for one that cannot be used."""
    protect = settings["protect"]
    if protect is None:
        return {}
    if protect == SUPER:
        return {"protect": SUPER, "protect_layers": settings["protect_layers"]}
    return {"protect": _read(protect)}


def needs(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The step that measures by what experts are protected."""
    return ("statistics",) if settings.get("protect") == SUPER else ()


def with_protected(
    settings: Mapping[str, Any], model: Mapping[str, Any], statistics: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """The facts of a model in which each layer that has protected experts lists their ids, as `protected`. `settings`:
    as from `identity`, among others. `statistics`: layer -> sums by name, for super experts. UserError for experts that
    the model does not have."""
    protect = settings.get("protect")
    layers = model["layers"]
    if protect is None:
        return dict(model)
    if protect == SUPER:
        end = round(settings["protect_layers"] * model["decoder_layers"])
        evidence = {"statistics": statistics}
        largest = {layer: measured(evidence, "statistics", layer, STATISTIC) for layer in layers}
        chosen = super_experts(largest, end)
    else:
        chosen = {int(layer): ids for layer, ids in protect.items()}
        for layer, ids in chosen.items():
            count = layers[layer]["n_experts"] if layer in layers else 0
            if ids and not 0 <= min(ids) <= max(ids) < count:
                raise UserError(
                    f"allocation.protect lists experts {ids} of layer {layer}: it has {count} routed experts"
                )
    marked = {layer: {**facts, "protected": chosen.get(layer, [])} for layer, facts in layers.items()}
    return {**model, "layers": marked}


def provenance(model: Mapping[str, Any]) -> dict[str, Any]:
    """`protected`: layer -> ids, for the provenance of a plan; {} when `with_protected` had nothing to look for."""
    lists = {str(layer): facts["protected"] for layer, facts in model["layers"].items() if "protected" in facts}
    return {"protected": {layer: experts for layer, experts in lists.items() if experts}} if lists else {}


def _read(path: str) -> dict[str, list[int]]:
    """Layer -> ids of its protected experts, ascending. UserError when it is missing, damaged or not such a list."""
    expected = 'expected super, or a file such as {"1": [68], "2": [92]} (layer: experts)'
    content = read_setting("allocation.protect", path)
    if not content or not fits(content, {str: [int]}) or not all(layer.isdecimal() for layer in content):
        raise UserError(f"allocation.protect={path}: {expected}")
    return {layer: sorted(set(experts)) for layer, experts in sorted(content.items(), key=lambda item: int(item[0]))}
