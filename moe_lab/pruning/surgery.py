"""Structural pruning in memory: experts, their channels, router rows and correction biases are gone, the model is
smaller."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.families import COUNT_FIELDS
from moe_lab.pruning.channels import check_channels, narrow
from moe_lab.pruning.configuration import describe
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.ragged import RaggedExperts

Model = TypeVar("Model", bound=nn.Module)


def prune(model: Model, plan: Plan) -> Model:
    """A smaller copy of `model` that has only the experts and channels `plan` keeps.

    `model` stays as it is. Weights that do not change are shared with it, not copied: the copy costs the memory of
    the kept experts. Layers whose experts keep equally many channels stay modules of the family, others become
    RaggedExperts. What differs by layer is in the configuration's `per_layer_config`; where everything has one number
    for all layers, `save_pretrained` writes a stock checkpoint. UserError when the plan does not fit the model.
    """
    before = moe_layers(model)
    check_fit(plan, before)
    tensors = [*model.parameters(), *model.buffers()]
    pruned = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for layer in moe_layers(pruned):
        kept = plan.experts[layer.index]
        prune_layer(layer, kept)
        if plan.channels:
            narrow(layer, plan.channels[layer.index][list(kept)])
    counts = {len(kept) for kept in plan.experts.values()}
    if len(counts) == 1:  # the balancing loss, which has no meaning for layers of different counts, and refuses them
        for name in count_attributes(pruned, before[0].n_experts):
            setattr(pruned, name, *counts)
    ragged = {layer.index for layer in before if isinstance(pruned.get_submodule(layer.name), RaggedExperts)}
    describe(pruned.config.get_text_config(), plan, before, ragged)  # type: ignore[union-attr, operator]
    if ragged:
        pruned.save_pretrained = _refuse_to_save  # type: ignore[assignment]
    return pruned


def prune_layer(layer: MoELayer, kept: Iterable[int]) -> None:
    """Cut one layer down to the experts `kept`, in place: its experts' tensors, routing tensors and counts."""
    ids = torch.tensor(list(kept))
    for path, tensor in list(layer.experts.named_parameters()):
        owner, _, name = path.rpartition(".")
        replace_tensor(layer.experts.get_submodule(owner), name, rows(tensor, 0, ids))
    for part in layer.routing:
        replace_tensor(part.module, part.name, rows(part.tensor, part.axis, ids))
    for module in (layer.block, layer.experts, *layer.router.modules()):
        for name in count_attributes(module, layer.n_experts):
            setattr(module, name, len(ids))


def check_fit(plan: Plan, layers: list[MoELayer]) -> None:
    """UserError unless `plan` is for exactly these layers and their routers work with what it keeps."""
    expected = {layer.index: layer.n_experts for layer in layers}
    if plan.n_experts != expected:
        raise UserError(
            f"plan is for another model: it is about {_shape(plan.n_experts)}, this model has {_shape(expected)}"
        )
    for layer in layers:
        plan.check(layer.top_k, layer.n_group, layer.topk_group)
    if plan.channels:
        check_channels(plan, layers)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Stands in for save_pretrained: without code of its own, the checkpoint would be loaded with random experts."""
    raise UserError("a model with experts of different widths cannot be saved by save_pretrained: export its plan")


def count_attributes(module: nn.Module, n_experts: int) -> list[str]:
    """Names of a module's own attributes that hold its number of experts (`out_features` of a linear router
    included)."""
    names = (*COUNT_FIELDS, "out_features")
    return [name for name in names if vars(module).get(name) == n_experts]


def rows(tensor: torch.Tensor, axis: int, ids: torch.Tensor) -> torch.Tensor:
    """The entries `ids` of `tensor` along `axis`, as a copy of the same kind (parameter or plain tensor)."""
    chosen = tensor.detach().index_select(axis, ids.to(tensor.device))
    return nn.Parameter(chosen, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else chosen


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put `tensor` in the place of a parameter or buffer of any shape."""
    store = module._parameters if name in module._parameters else module._buffers
    store[name] = tensor  # type: ignore[assignment]


def _shape(counts: dict[int, int]) -> str:
    sizes = sorted(set(counts.values()))
    return f"{len(counts)} MoE layers ({min(counts)} to {max(counts)}) of {' or '.join(map(str, sizes))} experts"
