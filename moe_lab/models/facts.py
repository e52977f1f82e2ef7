"""Facts of a model from its configuration alone: layers, experts, parameters by part, and the rule of each router."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moe_lab.config import ExpectedConfig, ModelConfig
from moe_lab.models.checkpoint import INDEX, SINGLE
from moe_lab.models.config_json import compare
from moe_lab.models.discover import MoELayer, is_ragged, linears, part_of, route, routed_layers
from moe_lab.models.files import local_folder
from moe_lab.models.load import check_sizes, set_top_k, skeleton
from moe_lab.paths import local

BYTES_LOADED = 2
"""Bytes a parameter takes in bfloat16, the precision in which the papers state loading memory."""
_TOKENS = 64
_SAME = 1e-4
"""A router follows a rule if the ratios of its gates to those of the rule have at most this relative spread."""
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")


def facts(settings: ModelConfig) -> dict[str, Any]:
    """Count layers, experts and parameters of the model, built on the meta device: no weight is read.

    `layers`: decoder layer -> n_experts, top_k, n_group, topk_group, hidden, width and the parameters of one routed
    expert, from which the size of any plan follows. `decoder_layers` includes layers without experts. `shared_width`:
    channels of all shared experts of a layer together, 0 if there are none. `parameters`: of the whole model. Where
    experts of a layer have unequal widths, `width` and `expert_parameters` are rounded means, and `widths` lists all
    widths. Raises UserError for a model that is not supported, differs from `model.expected`, or has weights of
    another size.
    """
    folder = local_folder(settings)
    model = skeleton(folder, trust_remote_code=settings.trust_remote_code)
    check_sizes(model, folder, settings)
    compare(asdict(architecture(model)), settings)
    set_top_k(model, settings.top_k)
    return {"model": settings.name, **model_facts(model)}


def model_facts(model: Any) -> dict[str, Any]:
    """The facts of a model object, with weights or on the meta device."""
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
    """The sizes of a model in the form of `model.expected`; where layers differ, the largest of each."""
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


def describe(folder: Path, settings: ModelConfig) -> dict[str, Any]:
    """Describe a model from its configuration alone; it is built on the meta device.

    `model_type`; `layers`: number of decoder layers; `moe`: layer -> its experts and gate rule in words;
    `parameters`: part -> number of parameters, each counted once; `shape`: see `architecture`; `moe_layers`: its
    MoELayer objects, without weights; `routing`: names of all tensors that decide where tokens go. UserError, with the
    reason, for a model that is not supported, differs from `model.expected`, or is a folder whose weights are those of
    another one.
    """
    model = skeleton(folder, trust_remote_code=settings.trust_remote_code)
    shape = architecture(model)
    compare(asdict(shape), settings)
    if local(settings.path).is_dir() and any((folder / name).is_file() for name in (SINGLE, INDEX)):
        check_sizes(model, folder, settings)
    set_top_k(model, settings.top_k)
    layers = routed_layers(model)
    paths = {id(module): path for path, module in model.named_modules()}
    moe: dict[int, str] = {}
    routing: list[str] = []
    for layer, rule in zip(layers, _gate_rules(layers), strict=True):
        least, most = min(layer.widths), max(layer.widths)
        channels = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        experts = f"{layer.n_experts} experts of {channels} channels, hidden size {layer.hidden:,}"
        moe[layer.index] = f"{experts}; {rule}"
        routing += [f"{paths[id(part.module)]}.{part.name}" for part in layer.routing]
    return {
        "model_type": model.config.model_type,
        "layers": model.config.get_text_config().num_hidden_layers,
        "moe": moe,
        "parameters": _parameters_by_part(model, layers),
        "shape": shape,
        "moe_layers": layers,
        "routing": routing,
    }


def _gate_rules(layers: list[MoELayer]) -> list[str]:
    """The gate rule of each layer. Routers of one class and the same sizes share it, so only one of them is run."""
    by_router: dict[tuple[object, ...], str] = {}
    rules = []
    for layer in layers:
        router = (type(layer.router), layer.n_experts, layer.top_k, layer.n_group, layer.topk_group)
        if router not in by_router:
            by_router[router] = gate_rule(layer)
        rules.append(by_router[router])
    return rules


def _parameters_by_part(model: Any, layers: list[MoELayer]) -> dict[str, int]:
    routers = {id(part.tensor) for layer in layers for part in layer.routing}
    counted = dict.fromkeys(("routed experts", "shared experts", "routers", "attention", "rest"), 0)
    words = {"experts": "routed experts", "shared_experts": "shared experts"}
    for name, weight in model.named_parameters():
        part = part_of(name)
        counted["routers" if id(weight) in routers else words.get(part, part)] += weight.numel()
    return {part: count for part, count in counted.items() if count}


def gate_rule(layer: MoELayer) -> str:
    """The rule of a router in words, such as "softmax of all experts, the best 8, renormalized".

    A copy of the router with random weights routes random tokens on the CPU, so the model may be on the meta device.
    Its gates are compared with the softmax and the sigmoid of its logits, plain or renormalized over the chosen
    experts, times a constant; "a rule of its own" if none of them fits.
    """
    draws = torch.Generator().manual_seed(0)
    router = copy.deepcopy(layer.router).to_empty(device="cpu").float().eval()
    for tensor in [*router.parameters(), *router.buffers()]:
        tensor.data.normal_(generator=draws)
    passed = [torch.randn(part.tensor.shape, generator=draws) for part in layer.routing if part.module is layer.block]
    hidden = torch.randn(_TOKENS, layer.hidden, generator=draws) / layer.hidden**0.5
    with torch.no_grad():
        gates, chosen = route(router, hidden, *passed)
        logits = _logits(layer, router, hidden)
    words = [_formula(gates.double(), chosen, logits), f"the best {layer.top_k}"]
    if any(part.name in _CORRECTIONS for part in layer.routing):
        words.append("chosen with a correction bias")
    if layer.n_group > 1:
        words.append(f"from {layer.topk_group} of {layer.n_group} groups")
    return ", ".join(words)


def _logits(layer: MoELayer, router: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits (T, E): the output of the router's linear map."""
    parameters = dict(router.named_parameters())
    paths = {id(module): path for path, module in layer.router.named_modules()}
    linear = {}
    for part in layer.routing:
        if part.name in ("weight", "bias") and part.module is not layer.block:
            path = f"{paths[id(part.module)]}.{part.name}"
            linear[part.name] = parameters[path.lstrip(".")]
    return torch.nn.functional.linear(hidden, linear["weight"], linear.get("bias")).double()


def _formula(gates: torch.Tensor, chosen: torch.Tensor, logits: torch.Tensor) -> str:
    for name, weights in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        plain = weights.gather(1, chosen)
        for words, rule in ((name, plain), (f"renormalized {name}", plain / plain.sum(-1, keepdim=True))):
            ratio = gates / rule
            factor = float(ratio.mean())
            if float(ratio.std()) <= _SAME * abs(factor):
                return words if abs(factor - 1) < _SAME else f"{words} times {factor:.4g}"
    return "a rule of its own"
