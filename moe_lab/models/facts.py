"""What a configuration alone tells about a model: its MoE layers and where its parameters are."""

from __future__ import annotations

from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.models.discover import MoELayer, is_ragged, routed_layers
from moe_lab.models.files import local_folder
from moe_lab.models.load import skeleton

BYTES_LOADED = 2
"""Bytes a parameter takes in bfloat16, the precision in which the papers state loading memory."""


def facts(settings: ModelConfig) -> dict[str, Any]:
    """Layers, experts and parameters of the model, built on the meta device: no weight is read.

    `layers`: decoder layer -> n_experts, top_k, n_group, topk_group, hidden, width. `parameters`: all of them, and
    those of one routed expert by layer, so that the size of any plan follows. Where experts of a layer have unequal
    widths, `width` and `expert_parameters` are rounded means, and `widths` lists them all. Raises UserError for a model
    that is not supported.
    """
    model = skeleton(local_folder(settings), trust_remote_code=settings.trust_remote_code)
    return {
        "model": settings.name,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "bytes_per_parameter": BYTES_LOADED,
        "layers": {layer.index: _about(layer) for layer in routed_layers(model)},
    }


def _about(layer: MoELayer) -> dict[str, Any]:
    about = {
        "n_experts": layer.n_experts,
        "top_k": layer.top_k,
        "n_group": layer.n_group,
        "topk_group": layer.topk_group,
        "hidden": layer.hidden,
        "width": round(sum(layer.widths) / layer.n_experts),
        "expert_parameters": round(sum(weight.numel() for weight in layer.experts.parameters()) / layer.n_experts),
        "router_parameters_per_expert": sum(part.tensor.numel() for part in layer.routing) // layer.n_experts,
    }
    return {**about, "widths": list(layer.widths)} if is_ragged(layer.experts) else about
