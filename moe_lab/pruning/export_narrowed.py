"""Whether a stock model can have experts of another width: by building it without weights."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import moe_lab.models.ports  # noqa: F401  families that transformers lacks
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.export_remote import native_family, width_field


def narrowed(config: dict[str, Any], width: int) -> dict[str, Any] | None:
    """`config` with experts of `width` channels, if a stock model can have them, or None.

    It cannot where the same field sizes something else, such as shared experts: then another parameter of the model
    changes its shape with it. UserError when transformers does not know the model type.
    """
    native_family(config)
    edited = {**config, width_field(config): width}
    return edited if _shapes(config) == _shapes(edited) else None


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters of the model that `config` describes, without its routed experts."""
    made = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    experts = {id(weight) for layer in moe_layers(model) for weight in layer.experts.parameters()}
    return {name: tuple(weight.shape) for name, weight in model.named_parameters() if id(weight) not in experts}
