"""What the configuration of a pruned model says, so that nobody reads a number from it that is no longer true."""

from __future__ import annotations

from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer
from moe_lab.models.families import COUNT_FIELDS, WIDTH_FIELDS
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.widths import RAGGED_FIELD


def describe(config: Any, plan: Plan, layers: list[MoELayer], ragged: set[int]) -> None:
    """Write the shapes of the pruned model into `config`, that of the language model, in place.

    `layers` are those before pruning, `ragged` the indices of those whose experts are now RaggedExperts. One number of
    experts for all layers goes into the fields that held the old one. What differs by layer goes into transformers'
    `per_layer_config`; reading such a field for the whole model then raises an error instead of giving a wrong number.
    Widths of ragged layers go into `expert_widths`, and the largest into the layer's configuration.
    """
    different = _counts(config, {layer.index: len(plan.experts[layer.index]) for layer in layers})
    for layer in layers if plan.channels else []:
        widths = plan.widths(layer.index)
        if min(widths) < layer.width:
            different.setdefault(layer.index, {})[_width_field(config)] = max(widths)
    if ragged:
        setattr(config, RAGGED_FIELD, {str(index): list(plan.widths(index)) for index in sorted(ragged)})
    if different:
        config.per_layer_config = different


def _counts(config: Any, counts: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Set the number of experts where all layers have one; what is to be said about single layers otherwise."""
    fields = [field for field in COUNT_FIELDS if isinstance(vars(config).get(field), int)]
    if len(set(counts.values())) == 1 and not config.is_heterogeneous:
        for field in fields:
            setattr(config, field, next(iter(counts.values())))
        return {}
    different = {int(index): dict(said) for index, said in config.to_dict().get("per_layer_config", {}).items()}
    for index, count in counts.items():
        different.setdefault(index, {}).update(dict.fromkeys(fields, count))
    return different


def _width_field(config: Any) -> str:
    for field in WIDTH_FIELDS:
        if isinstance(vars(config).get(field), int):
            return field
    raise UserError(f"config.json has no width of experts: expected one of {', '.join(WIDTH_FIELDS)}")
