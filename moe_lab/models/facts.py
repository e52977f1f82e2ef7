"""What a configuration alone tells about a model: its MoE layers and where its parameters are."""

from __future__ import annotations

from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.models.discover import moe_layers
from moe_lab.models.files import local_folder
from moe_lab.models.load import skeleton

BYTES_LOADED = 2
"""Bytes a parameter takes in bfloat16, the precision in which the papers state loading memory."""


def facts(settings: ModelConfig) -> dict[str, Any]:
    """Layers, experts and parameters of the model, built on the meta device: no weight is read.

    `layers`: decoder layer -> n_experts, top_k, n_group, topk_group, hidden, width. `parameters`: all of them, and
    those of one routed expert by layer, so that the size of any plan follows. Raises UserError for a model that is
    not supported.
    """
    model = skeleton(local_folder(settings), trust_remote_code=settings.trust_remote_code)
    layers = {
        layer.index: {
            "n_experts": layer.n_experts,
            "top_k": layer.top_k,
            "n_group": layer.n_group,
            "topk_group": layer.topk_group,
            "hidden": layer.hidden,
            "width": layer.width,
            "expert_parameters": sum(weight.numel() for weight in layer.experts.parameters()) // layer.n_experts,
            "router_parameters_per_expert": sum(part.tensor.numel() for part in layer.routing) // layer.n_experts,
        }
        for layer in moe_layers(model)
    }
    return {
        "model": settings.name,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "bytes_per_parameter": BYTES_LOADED,
        "layers": layers,
    }
