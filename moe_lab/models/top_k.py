"""Change how many experts the routers of a model give each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, routed_layers
from moe_lab.models.families import TOP_K_FIELDS

ATTRIBUTES = ("top_k", *TOP_K_FIELDS)
"""What routers and MoE blocks call the number of experts of a token."""


def set_top_k(model: Any, top_k: int | None) -> None:
    """Let every router of `model` choose `top_k` experts, in place; None leaves the model as it was trained.

    Gates follow the router's own rule, normalised over the chosen ones where it normalises. The configuration says the
    new number too. Works on the meta device. UserError unless every router has so many experts to choose from, and for
    one whose number is fixed by its formula.
    """
    if top_k is None:
        return
    for layer in routed_layers(model):
        most = layer.n_experts // layer.n_group * layer.topk_group
        if not 1 <= top_k <= most:
            raise UserError(f"model.top_k={top_k}: layer {layer.index} gives a token 1 to {most} experts")
        for module in (layer.block, *layer.router.modules()):
            _set(module, layer, top_k)
        if (chosen := _chosen(layer)) != top_k:
            raise UserError(
                f"model.top_k={top_k}: the router of {layer.name} gives a token {chosen} experts, whatever it is told"
            )
    config = model.config.get_text_config()
    for field in TOP_K_FIELDS:
        stated = vars(config).get(field)
        if stated is not None:
            setattr(config, field, [top_k] * len(stated) if isinstance(stated, list) else top_k)


def _set(module: nn.Module, layer: MoELayer, top_k: int) -> None:
    for name in ATTRIBUTES:
        if vars(module).get(name) == layer.top_k:
            setattr(module, name, top_k)


@torch.no_grad()
def _chosen(layer: MoELayer) -> int:
    """Experts that the router of `layer` gives a token."""
    weight = layer.routing[0].tensor
    hidden = torch.zeros(2, layer.hidden, dtype=weight.dtype, device=weight.device)
    passed = [part.tensor for part in layer.routing if part.module is layer.block]
    try:
        _, _, index = layer.router(hidden, *passed)
    except ValueError:  # it takes a batch
        _, _, index = layer.router(hidden[None], *passed)
    return int(index.shape[-1])
