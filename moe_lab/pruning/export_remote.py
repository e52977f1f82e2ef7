"""What transformers has to know about a checkpoint whose layers differ, or whose experts are narrower."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.families import COUNT_FIELDS
from moe_lab.models.ports import causal_language_model
from moe_lab.pruning.configuration import RAGGED_FIELD, WIDTH_FIELDS
from moe_lab.pruning.export_config import port_of
from moe_lab.pruning.export_form import Form
from moe_lab.pruning.remote.generate import code


def narrowed(config: dict[str, Any], width: int) -> dict[str, Any] | None:
    """`config` with experts of `width` channels, if a stock model can have them, or None.

    It cannot where the same field sizes something else, such as shared experts: then another parameter of the model
    changes its shape with it. UserError when transformers does not know the model type.
    """
    _native_type(config)
    field = _width_field(config)
    edited = {**config, field: width}
    before, after = _shapes(config), _shapes(edited)
    return edited if before == after else None


def differing(config: dict[str, Any], form: Form) -> tuple[dict[str, Any], str, dict[str, str]]:
    """config.json, kind and code files for layers that differ from each other or from what the family can say.

    What differs goes into `per_layer_config`, under the canonical names of the fields: then a stock class that reads
    one raises an error. Under another name it would build all layers alike. Ragged experts get a model type of their
    own instead, because nothing in a stock class would look at their widths; so does a family that moe_lab has ported,
    because transformers prefers a port to code beside the weights.
    """
    kind, base = _native_type(config)
    family = CONFIG_MAPPING[kind]
    known = next(field for field in COUNT_FIELDS if field in config)
    count, width = family.attribute_map.get(known, known), _width_field(config)
    if isinstance(config[known], list):
        config[known] = max(config[known])
    name = f"modeling_pruned_{kind}"
    model = f"{name}.Pruned{base}ForCausalLM"
    config["architectures"] = [f"Pruned{base}ForCausalLM"]
    port = port_of(kind)
    own_type = form.ragged or bool(port)
    described = {"AutoConfig": f"{name}.Pruned{family.__name__}"} if own_type else {}
    config["auto_map"] = {**described, "AutoModelForCausalLM": model}
    config["per_layer_config"] = _per_layer(config, form, count, width)
    if form.count is None and config.get("output_router_logits"):
        config["output_router_logits"] = False  # the loss it is for needs layers of the same number of experts
    if own_type:
        config["model_type"] = f"pruned_{kind}"
    if form.ragged:
        config[RAGGED_FIELD] = {str(index): list(layer.widths) for index, layer in form.layers.items() if layer.ragged}
    home = next((f".{file.removesuffix('.py')}" for file in port), "transformers")
    names = {"base": base, "config": family.__name__, "model_type": kind, "count": count, "width": width}
    text = code(**names, home=home, own_type=own_type)
    return config, "ragged" if form.ragged else "per_layer", {f"{name}.py": text, **port}


def _native_type(config: dict[str, Any]) -> tuple[str, str]:
    """The model type, and how its classes begin, if there is a causal language model of it without the folder's
    code."""
    kind = config.get("model_type", "")
    if (name := causal_language_model(kind)) is None:
        raise UserError(
            f"model_type={kind}: layers and experts of another shape can be exported for causal language models that "
            "transformers knows itself only, evaluate the plan with a mask"
        )
    return str(kind), name.removesuffix("ForCausalLM")


def _per_layer(config: dict[str, Any], form: Form, count: str, width: str) -> dict[str, dict[str, int]]:
    """What each layer has instead of the number for all layers. A ragged layer is as wide as its widest expert."""
    said: dict[str, dict[str, int]] = {}
    for index, layer in form.layers.items():
        own = {count: len(layer.experts)} if form.count is None else {}
        if form.width_of(index) != form.width:
            own[width] = form.width_of(index) or 0
        if own:
            said[str(index)] = own
    return said


def _width_field(config: dict[str, Any]) -> str:
    field = next((field for field in WIDTH_FIELDS if isinstance(config.get(field), int)), None)
    if field is None:
        raise UserError(f"config.json has no width of experts: expected one of {', '.join(WIDTH_FIELDS)}")
    return field


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters of the model that `config` describes, without its routed experts."""
    made = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    experts = {id(weight) for layer in moe_layers(model) for weight in layer.experts.parameters()}
    return {name: tuple(weight.shape) for name, weight in model.named_parameters() if id(weight) not in experts}
