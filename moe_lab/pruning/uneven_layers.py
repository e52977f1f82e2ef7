"""Give every MoE layer of a model the shape its configuration says. Needs nothing but torch and transformers.

Its text stands in the code file of exported checkpoints.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def build_stock(build: Any, config: Any) -> None:
    """Run `build(config)`, which makes all layers alike, although `config` says that they differ.

    transformers refuses to read a number for all layers that differs by layer. That is what keeps its own classes
    from loading such a checkpoint wrongly, so it is allowed for this moment only and not saved.
    """
    config.allow_global_per_layer_attribute_access = True
    try:
        build(config)
    finally:
        vars(config).pop("allow_global_per_layer_attribute_access")


def shape_layers(model: nn.Module, config: Any, count_field: str, width_field: str, ragged: Any = None) -> None:
    """Rebuild, in place and without weights, what differs in the MoE layers of `model`.

    `count_field` and `width_field` name experts per layer and channels per expert in `config`; `ragged` is the class
    of experts of unequal width, which `config.expert_widths` lists by layer; in the layers that
    `config.expert_constants` names, those of width 0 put out constants, and `config.expert_owners` lists, by layer,
    with whose weights each is computed. Shared experts keep their width, even where the family derives it from
    `width_field`.
    """
    stock = {field: vars(config)[field] for field in (count_field, width_field)}
    unequal = getattr(config, "expert_widths", None) or {}
    constant = getattr(config, "expert_constants", None) or []
    owners = getattr(config, "expert_owners", None) or {}
    for name, block in list(model.named_modules()):
        if not hasattr(getattr(block, "experts", None), "is_transposed"):
            continue
        index = next(int(part) for part in name.split(".") if part.isdigit())
        own = config.per_layer_config[index]
        count, width = getattr(own, count_field), getattr(own, width_field)
        if count != stock[count_field]:
            setattr(own, width_field, stock[width_field])
            block = _again(block, own, config, index)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, block)
        if str(index) in unequal:
            block.experts = ragged(block.experts, unequal[str(index)], index in constant, owners.get(str(index)))
        elif width != stock[width_field]:
            setattr(own, width_field, width)
            block.experts = _again(block.experts, own, config, index)


def _again(module: nn.Module, own: Any, shared: Any, index: int) -> Any:
    """A new module of the same class, built from the configuration `own` of layer `index`.

    Afterwards it refers to the configuration `shared` by all layers, where the experts implementation is chosen.
    """
    named = {"layer_idx": index} if "layer_idx" in inspect.signature(type(module)).parameters else {}
    new = type(module)(own, **named)
    for part in new.modules():
        if getattr(part, "config", None) is own:
            part.config = shared
    return new
