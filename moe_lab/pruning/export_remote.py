"""What transformers has to know about a checkpoint whose layers differ. No torch."""

from __future__ import annotations

from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.families import COUNT_FIELDS, WIDTH_FIELDS, Family, port_of, read_family
from moe_lab.pruning.export_form import Form
from moe_lab.pruning.remote.generate import code
from moe_lab.pruning.widths import RAGGED_FIELD


def differing(config: dict[str, Any], form: Form) -> tuple[dict[str, Any], str, dict[str, str]]:
    """config.json, kind and code files for layers that differ from each other or from what the family can say.

    What differs goes into `per_layer_config`, under the canonical names of the fields: then a stock class that reads
    one raises an error. Under another name it would build all layers alike. Ragged experts get a model type of their
    own instead, because nothing in a stock class would look at their widths; so does a family that moe_lab has ported,
    because transformers prefers a port to code beside the weights.
    """
    family, kind = native_family(config), config["model_type"]
    known = next(field for field in COUNT_FIELDS if field in config)
    count, width = family.canonical.get(known, known), width_field(config)
    if isinstance(config[known], list):
        config[known] = max(config[known])
    name = f"modeling_pruned_{kind}"
    model = f"{name}.Pruned{family.base}ForCausalLM"
    config["architectures"] = [f"Pruned{family.base}ForCausalLM"]
    port = port_of(kind)
    own_type = form.ragged or bool(port)
    described = {"AutoConfig": f"{name}.Pruned{family.config}"} if own_type else {}
    config["auto_map"] = {**described, "AutoModelForCausalLM": model}
    config["per_layer_config"] = _per_layer(config, form, count, width)
    if form.count is None and config.get("output_router_logits"):
        config["output_router_logits"] = False  # the loss it is for needs layers of the same number of experts
    if own_type:
        config["model_type"] = f"pruned_{kind}"
    if form.ragged:
        config[RAGGED_FIELD] = {str(index): list(layer.widths) for index, layer in form.layers.items() if layer.ragged}
    home = next((f".{file.removesuffix('.py')}" for file in port), "transformers")
    names = {"base": family.base, "config": family.config, "model_type": kind, "count": count, "width": width}
    text = code(**names, home=home, own_type=own_type)
    return config, "ragged" if form.ragged else "per_layer", {f"{name}.py": text, **port}


def native_family(config: dict[str, Any]) -> Family:
    """The family of the model type; UserError unless there is a causal language model of it without the folder's
    code."""
    kind = config.get("model_type", "")
    family = read_family(kind)
    if family is None:
        from moe_lab.models.ports import ask_family  # loads torch, for what cannot be read

        family = ask_family(kind)
    if family is None:
        raise UserError(
            f"model_type={kind}: layers and experts of another shape can be exported for causal language models that "
            "transformers knows itself only, evaluate the plan with a mask"
        )
    return family


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


def width_field(config: dict[str, Any]) -> str:
    """The field of config.json that holds the channels per expert; UserError when there is none."""
    field = next((field for field in WIDTH_FIELDS if isinstance(config.get(field), int)), None)
    if field is None:
        raise UserError(f"config.json has no width of experts: expected one of {', '.join(WIDTH_FIELDS)}")
    return field
