"""Facts of a model from its configuration alone: layers, experts, routers, and parameters by
part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from moe_lab.config import ExpectedConfig, ModelConfig
from moe_lab.config.base import validated
from moe_lab.errors import UserError, user_errors
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.config_json import check_expected
from moe_lab.models.discover import MoELayer, is_ragged, linear_modules, part_of, routed_layers
from moe_lab.models.experts import check_first_layer
from moe_lab.models.files import local_folder
from moe_lab.models.load import checked_names, load_tokenizer, set_top_k, skeleton
from moe_lab.models.stored_weights import StoredWeights, stored_routing
from moe_lab.models.transformers_private import NameMapping

STREAMED = "calibration.engine=streamed"


def check_use(folder: str, settings: Mapping[str, Any], streams: bool) -> None:
    """Raise UserError if `describe` states an obstacle to running the model in `folder`.
    `settings`: fields of its ModelConfig. `streams`: whether it is run layer by layer."""
    obstacles = describe(Path(folder), ModelConfig(**settings))["obstacles"]
    for use, sentence in obstacles.items():
        if streams or use != STREAMED:
            raise UserError(sentence)


def facts(settings: ModelConfig) -> dict[str, Any]:
    """The sizes of a model.

    model           name of the model
    model_type      model_type of its configuration
    parameters      number of all parameters
    decoder_layers  number of layers, including layers without experts
    shared_width    number of channels of all shared experts of a layer together
    layers          index of a layer with routed experts -> its sizes. If widths differ, `width` and
                    `expert_parameters` are rounded means, and `widths` lists all widths.

    UserError for a model that is not supported, that differs from `model.expected`, or whose weight
    files do not fit its config.json."""
    model, _ = _build(local_folder(settings), settings)
    return {"model": settings.name, **model_facts(model)}


def _build(folder: Path, settings: ModelConfig) -> tuple[Any, dict[str, int]]:
    """(the model in `folder`, on the meta device and checked against `model.expected` and its
    weight files, its `stored_routing`). UserError as from `stored_routing`."""
    model = skeleton(folder, trust_remote_code=settings.trust_remote_code)
    routed_layers(model)  # raises UserError for models that are not supported
    if any(folder.glob("*.safetensors")):
        weights = StoredWeights(open_checkpoint(folder))
        checked_names(weights, model)
        names = NameMapping(model, weights.stored.tensors)
    else:  # as transformers would name its tensors
        names = NameMapping(model, NameMapping(model, ()).to_checkpoint(model.state_dict()))
    routing = stored_routing(names)
    check_expected(asdict(architecture(model)), settings)
    set_top_k(model, settings.top_k)
    return model, routing


def model_facts(model: Any) -> dict[str, Any]:
    """What `facts` returns, without the name of the model. `model`: a model object."""
    sizes = architecture(model)
    return {
        "model_type": model.config.model_type,
        "parameters": sizes.parameters,
        "decoder_layers": sizes.layers,
        "shared_width": sizes.shared_width,
        "layers": {layer.index: _layer_facts(layer) for layer in routed_layers(model)},
    }


def architecture(model: Any) -> ExpectedConfig:
    """The sizes of a model in the form of `model.expected`. If layers differ in a size, the largest
    value counts, but `shared_width` is the mean over layers, rounded down. SettingsError for a size
    that `model.expected` does not accept."""
    layers = routed_layers(model)
    hidden = max(layer.hidden for layer in layers)
    shared = sum(linear.weight.numel() for _, linear in linear_modules(model, "shared_experts"))
    sizes = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "layers": model.config.get_text_config().num_hidden_layers,
        "moe_layers": len(layers),
        "experts": max(layer.n_experts for layer in layers),
        "top_k": max(layer.top_k for layer in layers),
        "hidden": hidden,
        "width": max(layer.width for layer in layers),
        # a channel has `hidden` weights in each of gate, up and down
        "shared_width": shared // (3 * hidden * len(layers)),
    }
    return validated(ExpectedConfig, sizes, group="", origin="config.json of the model")


def _layer_facts(layer: MoELayer) -> dict[str, Any]:
    """The sizes of one layer, by name."""
    parameters = sum(weight.numel() for weight in layer.experts.parameters())
    facts_of_layer: dict[str, Any] = {
        "n_experts": layer.n_experts,
        "top_k": layer.top_k,
        "n_group": layer.n_group,
        "topk_group": layer.topk_group,
        "hidden": layer.hidden,
        "width": round(sum(layer.widths) / layer.n_experts),
        "expert_parameters": round(parameters / layer.n_experts),
    }
    if is_ragged(layer.experts):
        facts_of_layer["widths"] = list(layer.widths)
    return facts_of_layer


def describe(folder: Path, settings: ModelConfig) -> dict[str, Any]:
    """A description of the model in `folder`.

    model_type  model_type of its configuration
    layers      number of decoder layers
    moe         index of a layer -> text about its experts and router
    parameters  part of the model -> number of its parameters
    moe_layers  MoELayer objects, without weights
    routing     as from `stored_routing`
    obstacles   what the model cannot be used for -> a sentence with the reason
    """
    model, routing = _build(folder, settings)
    layers = routed_layers(model)
    moe: dict[int, str] = {}
    for layer in layers:
        least = min(layer.widths)
        most = max(layer.widths)
        channels = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        experts = f"{layer.n_experts} experts of {channels} channels, hidden size {layer.hidden:,}"
        moe[layer.index] = f"{experts}; {_describe_router(layer, model.config.get_text_config())}"
    checks = {
        "texts and benchmarks": partial(load_tokenizer, folder, settings),
        STREAMED: partial(check_first_layer, model),
    }
    return {
        "model_type": model.config.model_type,
        "layers": model.config.get_text_config().num_hidden_layers,
        "moe": moe,
        "obstacles": {use: text for use, check in checks.items() for text in user_errors(check)},
        "parameters": _parameters_by_part(model, layers),
        "moe_layers": layers,
        "routing": routing,
    }


def _describe_router(layer: MoELayer, config: Any) -> str:
    """A description of the router, such as "Qwen3MoeTopKRouter, the best 8,
    norm_topk_prob=True"."""
    properties = [type(layer.router).__name__, f"the best {layer.top_k}"]
    if any(part.name.endswith("_bias") for part in layer.routing):
        properties.append("chosen with a correction bias")
    if layer.n_group > 1:
        properties.append(f"from {layer.topk_group} of {layer.n_group} groups")
    fields = [field for field in ("scoring_func", "norm_topk_prob") if hasattr(config, field)]
    properties += [f"{field}={getattr(config, field)}" for field in fields]
    return ", ".join(properties)


def _parameters_by_part(model: Any, layers: list[MoELayer]) -> dict[str, int]:
    """Part of the model -> its number of parameters."""
    routers = {id(part.tensor) for layer in layers for part in layer.routing}
    counts: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        part = "routers" if id(weight) in routers else part_of(model, name)
        counts[part.replace("_", " ")] += weight.numel()
    return dict(counts)
