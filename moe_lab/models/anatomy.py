"""What a model is made of, from its configuration: parameters by part, and each MoE layer in words."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.models.discover import MoELayer, routed_layers
from moe_lab.models.expected import compare
from moe_lab.models.facts import architecture
from moe_lab.models.gate import gate_rule
from moe_lab.models.load import skeleton
from moe_lab.models.parts import part_of
from moe_lab.models.top_k import set_top_k


def anatomy(folder: Path, settings: ModelConfig) -> dict[str, Any]:
    """model_type; `layers`, the number of decoder layers; `moe`: number of such a layer -> its experts and gate rule in
    words; `parameters`: part -> how many, each counted once.

    `shape`: what model.expected would say of it; `moe_layers`: its MoE layers, without weights; `routing`: names of
    all tensors that decide where tokens go. The model is built on the meta device. UserError, with the reason, for one
    that is not supported, or is not what is expected.
    """
    model = skeleton(folder, trust_remote_code=settings.trust_remote_code)
    shape = architecture(model)
    compare(asdict(shape), settings)
    set_top_k(model, settings.top_k)
    layers = routed_layers(model)
    return {
        "model_type": model.config.model_type,
        "layers": model.config.get_text_config().num_hidden_layers,
        "moe": {layer.index: f"{_experts(layer)}; {rule}" for layer, rule in zip(layers, _rules(layers), strict=True)},
        "parameters": _parameters(model, layers),
        "shape": shape,
        "moe_layers": layers,
        "routing": [name for layer in layers for name in _routing(layer)],
    }


def _experts(layer: MoELayer) -> str:
    least, most = min(layer.widths), max(layer.widths)
    channels = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{layer.n_experts} experts of {channels} channels, hidden size {layer.hidden:,}"


def _rules(layers: list[MoELayer]) -> list[str]:
    """The gate rule of each layer; routers of one class and the same numbers have one, and are run once."""
    known: dict[tuple[object, ...], str] = {}
    found = []
    for layer in layers:
        alike = (type(layer.router), layer.n_experts, layer.top_k, layer.n_group, layer.topk_group)
        if alike not in known:
            known[alike] = gate_rule(layer)
        found.append(known[alike])
    return found


def _routing(layer: MoELayer) -> list[str]:
    places = {id(module): path for path, module in layer.block.named_modules(prefix=layer.name.rpartition(".")[0])}
    return [f"{places[id(part.module)]}.{part.name}" for part in layer.routing]


def _parameters(model: Any, layers: list[MoELayer]) -> dict[str, int]:
    routers = {id(part.tensor) for layer in layers for part in layer.routing}
    counted = dict.fromkeys(("routed experts", "shared experts", "routers", "attention", "rest"), 0)
    words = {"experts": "routed experts", "shared_experts": "shared experts"}
    for name, weight in model.named_parameters():
        part = part_of(name)
        counted["routers" if id(weight) in routers else words.get(part, part)] += weight.numel()
    return {part: count for part, count in counted.items() if count}
