"""What a configuration alone tells about a model: its MoE layers and where its parameters are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moe_lab.config import ExpectedConfig, ModelConfig
from moe_lab.models.discover import MoELayer, is_ragged, routed_layers
from moe_lab.models.expected import compare
from moe_lab.models.files import local_folder
from moe_lab.models.load import check_sizes, skeleton
from moe_lab.models.parts import linears
from moe_lab.models.top_k import set_top_k

BYTES_LOADED = 2
"""Bytes a parameter takes in bfloat16, the precision in which the papers state loading memory."""


def facts(settings: ModelConfig) -> dict[str, Any]:
    """Layers, experts and parameters of the model, built on the meta device: no weight is read.

    `layers`: decoder layer -> n_experts, top_k, n_group, topk_group, hidden, width; `decoder_layers` counts those
    without experts too. `shared_width`: channels of a layer's shared experts together, 0 where there are none.
    `parameters`: all of them, and those of one routed expert by layer, so that the size of any plan follows. Where
    experts of a layer have unequal widths, `width` and `expert_parameters` are rounded means, and `widths` lists them
    all. Raises UserError for a model that is not supported, is not what is expected, or has weights of another size.
    """
    folder = local_folder(settings)
    model = skeleton(folder, trust_remote_code=settings.trust_remote_code)
    check_sizes(model, folder, settings)
    compare(asdict(architecture(model)), settings)
    set_top_k(model, settings.top_k)
    return {"model": settings.name, **model_facts(model)}


def model_facts(model: Any) -> dict[str, Any]:
    """The facts of a model that is built, with weights or on the meta device."""
    shape = architecture(model)
    return {
        "model_type": model.config.model_type,
        "parameters": _parameters(model),
        "bytes_per_parameter": BYTES_LOADED,
        "decoder_layers": shape.layers,
        "shared_width": shape.shared_width,
        "layers": {layer.index: _about(layer) for layer in routed_layers(model)},
    }


def architecture(model: Any) -> ExpectedConfig:
    """What `model.expected` would have to say of a model; of layers that differ, the most of each number."""
    layers = routed_layers(model)
    hidden = max(layer.hidden for layer in layers)
    shared = sum(linear.weight.numel() for _, linear in linears(model, "shared_experts"))
    return ExpectedConfig(
        parameters=_parameters(model),
        layers=model.config.get_text_config().num_hidden_layers,
        moe_layers=len(layers),
        experts=max(layer.n_experts for layer in layers),
        top_k=max(layer.top_k for layer in layers),
        hidden=hidden,
        width=max(layer.width for layer in layers),
        shared_width=shared // (3 * hidden * len(layers)),
    )


def _parameters(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


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
