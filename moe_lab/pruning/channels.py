"""Cut the channels of experts out of their weights: what remains of a layer after a plan about channels."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer
from moe_lab.pruning.layer import Mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.ragged import RaggedExperts
from moe_lab.pruning.widths import is_stock

WIDTH_ATTRIBUTES = ("intermediate_dim", "intermediate_size")
"""Names under which experts modules keep their own width."""


def check_channels(plan: Plan, layers: list[MoELayer]) -> None:
    """UserError unless the channels of `plan` are those of exactly these layers and can be removed from them."""
    for layer in layers:
        if reason := refusal(layer.experts):
            raise UserError(
                f"plan: channels of {layer.name} ({type(layer.experts).__name__}) cannot be removed, because its "
                f"experts {reason}: use a criterion of whole experts"
            )
        width = plan.channels[layer.index].shape[1]
        if width != layer.width:
            raise UserError(
                f"plan is for another model: it is about {width} channels per expert in layer {layer.index}, this "
                f"model has {layer.width}"
            )


def narrow(layer: MoELayer, mask: Mask) -> None:
    """Cut the experts of one layer down to the channels of `mask` (E', I), in place.

    `layer.experts` holds E' experts already. If all keep equally many channels the module stays the family's own, only
    narrower; otherwise, and where transformers' kernels could not work with that width, RaggedExperts replaces it.
    """
    widths = mask.sum(1)
    if widths.min() == layer.width:
        return
    down: Any = layer.experts.down_proj
    if is_stock(widths.tolist(), down.element_size()):
        _narrow_stock(layer, mask)
    else:
        setattr(layer.block, layer.name.rpartition(".")[2], _ragged(layer.experts, mask))


def refusal(experts: Any) -> str | None:
    """Why no channels can be removed from an experts module, in words that follow "its experts"; None if they can."""
    reasons = {
        "have biases": experts.has_bias,
        "have no gate projection": not experts.has_gate,
        "are stored transposed": experts.is_transposed,
        "interleave gate and up projection": not experts.is_concatenated,
        "are followed by a norm": experts.has_post_expert_norm,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _narrow_stock(layer: MoELayer, mask: Mask) -> None:
    experts: Any = layer.experts
    parts = [_cut(experts, expert, row) for expert, row in enumerate(mask)]
    trainable = experts.down_proj.requires_grad
    experts.gate_up_proj = nn.Parameter(torch.stack([gate_up for gate_up, _ in parts]), trainable)
    experts.down_proj = nn.Parameter(torch.stack([down.t() for _, down in parts]), trainable)
    for name in WIDTH_ATTRIBUTES:
        if vars(experts).get(name) == layer.width:
            setattr(experts, name, int(mask[0].sum()))


def _ragged(experts: nn.Module, mask: Mask) -> RaggedExperts:
    packed = RaggedExperts(experts, mask.sum(1).tolist())
    with torch.no_grad():
        for expert, row in enumerate(mask):
            for place, part in zip(packed.weights(expert), _cut(experts, expert, row), strict=True):
                place.copy_(part)
    return packed


def _cut(experts: Any, expert: int, row: numpy.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up (2 I', H) and transposed down (I', H) projection of one expert on the channels `row` (I,) keeps."""
    gate_up, down = experts.gate_up_proj.detach()[expert], experts.down_proj.detach()[expert]
    kept = torch.from_numpy(numpy.flatnonzero(row)).to(down.device)
    return gate_up[torch.cat((kept, kept + len(row)))], down[:, kept].t()
