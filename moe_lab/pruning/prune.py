"""Structural pruning in memory: remove experts, channels, router rows and correction biases from a loaded model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy
import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers
from moe_lab.models.experts import wide
from moe_lab.models.families import COUNT_FIELDS
from moe_lab.pruning.export.form import CONSTANT_FIELD, OWNERS_FIELD, RAGGED_FIELD, is_stock
from moe_lab.pruning.export.remote import width_field
from moe_lab.pruning.plan import Mask, Plan
from moe_lab.pruning.ragged import RaggedExperts
from moe_lab.pruning.replace import check_aligned

Model = TypeVar("Model", bound=nn.Module)
WIDTH_ATTRIBUTES = ("intermediate_dim", "intermediate_size")
"""Attributes of experts modules that hold their width, the channels per expert."""


def prune(model: Model, plan: Plan) -> Model:
    """A smaller copy of `model` that has only the experts and channels `plan` keeps.

    `model` is not changed. Weights that do not change are shared with it, so the copy takes only the memory of the kept
    experts. Layers whose experts keep equal numbers of channels keep the family's module, others get RaggedExperts.
    What differs between layers is written to the configuration's `per_layer_config`; where all layers have one shape,
    `save_pretrained` writes a stock checkpoint. Raises UserError when the plan does not fit the model or still has to
    be aligned, and when weights are offloaded. A model on the meta device is pruned to one on the meta device.
    """
    before = moe_layers(model)
    check_fit(plan, before)
    check_aligned(plan)
    on_meta = all(weight.is_meta for weight in model.parameters()) and not hasattr(model, "_hf_hook")
    for layer in [] if on_meta else before:  # accelerate, which sets that attribute, would bring whole weights back
        check_in_memory(layer, experts=True)
    pruned = share_copy(model)
    for layer in moe_layers(pruned):
        kept = plan.experts[layer.index]
        merge_layer(layer, plan)
        prune_layer(layer, kept)
        if plan.channels:
            narrow(layer, plan)
    counts = {len(kept) for kept in plan.experts.values()}
    if len(counts) == 1:  # for the balancing loss, which is undefined for layers with different counts
        for name in count_attributes(pruned, before[0].n_experts):
            setattr(pruned, name, *counts)
    ragged = {layer.index for layer in before if isinstance(pruned.get_submodule(layer.name), RaggedExperts)}
    update_configuration(pruned.config.get_text_config(), plan, before, ragged)  # type: ignore[union-attr, operator]
    if ragged:
        pruned.save_pretrained = _refuse_to_save  # type: ignore[assignment]
    return pruned


def share_copy(model: Model) -> Model:
    """A copy of `model` that shares its tensors."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)  # deepcopy does not copy what its memo holds


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
    """Raise UserError unless `plan` is for exactly these layers and their routers work with what it keeps."""
    expected = {layer.index: layer.n_experts for layer in layers}
    if plan.n_experts != expected:
        raise UserError(
            f"plan is for another model: it is about {_shape(plan.n_experts)}, this model has {_shape(expected)}"
        )
    plan.check({layer.index: vars(layer) for layer in layers})
    if plan.channels:
        check_channels(plan, layers)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Replaces save_pretrained: without its own code, the checkpoint would be loaded with random experts."""
    raise UserError("a model with experts of different widths cannot be saved by save_pretrained: export its plan")


def count_attributes(module: nn.Module, n_experts: int) -> list[str]:
    """Names of a module's own attributes that hold its number of experts, such as `out_features` of a router."""
    names = (*COUNT_FIELDS, "out_features")
    return [name for name in names if vars(module).get(name) == n_experts]


def rows(tensor: torch.Tensor, axis: int, ids: torch.Tensor) -> torch.Tensor:
    """The entries `ids` of `tensor` along `axis`, as a copy of the same kind (parameter or plain tensor)."""
    chosen = tensor.detach().index_select(axis, ids.to(tensor.device))
    return nn.Parameter(chosen, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else chosen


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer of `module` by `tensor`, whose shape may differ."""
    store = module._parameters if name in module._parameters else module._buffers
    store[name] = tensor  # type: ignore[assignment]


def _shape(counts: dict[int, int]) -> str:
    sizes = sorted(set(counts.values()))
    return f"{len(counts)} MoE layers ({min(counts)} to {max(counts)}) of {' or '.join(map(str, sizes))} experts"


def check_channels(plan: Plan, layers: list[MoELayer]) -> None:
    """Raise UserError unless the channels of `plan` are those of exactly these layers and can be removed from them."""
    for layer in layers:
        if reason := layer.family.unfit:
            raise UserError(
                f"plan: channels of {layer.name} ({type(layer.experts).__name__}) cannot be removed, because its "
                f"experts {reason}: use a criterion of whole experts"
            )
        width = plan.channels[layer.index].shape[1]
        if width != layer.width:
            raise UserError(
                f"plan is for another model: it is about {width} channels per expert in layer {layer.index}, this "
                f"model has {layer.width}"
            )
        constants = plan.constants.get(layer.index)
        if constants is not None and constants.shape[1] != layer.hidden:
            raise UserError(
                f"plan is for another model: its constants of layer {layer.index} have {constants.shape[1]} numbers "
                f"each, this model's hidden states have {layer.hidden}"
            )


def narrow(layer: MoELayer, plan: Plan) -> None:
    """Cut the experts of one layer down to the channels that `plan` keeps, in place.

    `layer.experts` already holds only the E' kept experts. If all of them keep the same number of channels, the
    family's module gets that width; otherwise, or if transformers' kernels do not support the width, RaggedExperts
    replaces it, with the constants of the plan, and experts that are computed with the weights of others.
    """
    mask = plan.channels[layer.index][list(plan.experts[layer.index])]
    widths = mask.sum(1)
    if widths.min() == layer.width:
        return
    down: Any = layer.experts.down_proj
    if is_stock(widths.tolist(), down.element_size()):
        _narrow_stock(layer, mask)
    else:
        setattr(layer.block, layer.name.rpartition(".")[2], _ragged(layer, mask, plan))


def merge_layer(layer: MoELayer, plan: Plan) -> None:
    """Give the experts of one layer that stand for others the weights of their groups, in place.

    The layer's tensors are replaced by others; its number of experts stays.
    """
    merged = merged_weights(layer, plan)
    for position, name in enumerate(("gate_up_proj", "down_proj")) if merged else ():
        stack = getattr(layer.experts, name)
        changed = stack.detach().clone()
        for owner, weights in merged.items():
            changed[owner] = weights[position]
        replace_tensor(layer.experts, name, nn.Parameter(changed, stack.requires_grad))


def merged_weights(layer: MoELayer, plan: Plan) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Expert that stands for others -> gate and up (2 I, H) and down projection (H, I) of its group.

    They are the sums of the members' weights times their shares, with the channels of each member in the order of its
    alignment, added in fp32 by ascending id.
    """
    experts: Any = layer.experts
    stacks = experts.gate_up_proj.detach(), experts.down_proj.detach()
    merged = {}
    for owner, group in plan.merged.get(layer.index, {}).items():
        gate_up, down = (torch.zeros_like(wide(stack[owner])) for stack in stacks)
        for member, share in sorted(group.items()):
            orders = _channel_order(plan, layer, member, down.device)
            gate_up += wide(stacks[0][member][torch.cat((orders, orders + layer.width))]) * share
            down += wide(stacks[1][member][:, orders]) * share
        merged[owner] = (gate_up.to(stacks[0].dtype), down.to(stacks[1].dtype))
    return merged


def _channel_order(plan: Plan, layer: MoELayer, expert: int, device: torch.device) -> torch.Tensor:
    order = plan.channel_order(layer.index, expert)
    return torch.arange(layer.width, device=device) if order is None else torch.from_numpy(order).long().to(device)


def _narrow_stock(layer: MoELayer, mask: Mask) -> None:
    experts: Any = layer.experts
    parts = [_cut(experts, expert, row) for expert, row in enumerate(mask)]
    trainable = experts.down_proj.requires_grad
    experts.gate_up_proj = nn.Parameter(torch.stack([gate_up for gate_up, _ in parts]), trainable)
    experts.down_proj = nn.Parameter(torch.stack([down.t() for _, down in parts]), trainable)
    for name in WIDTH_ATTRIBUTES:
        if vars(experts).get(name) == layer.width:
            setattr(experts, name, int(mask[0].sum()))


def _ragged(layer: MoELayer, mask: Mask, plan: Plan) -> RaggedExperts:
    constants = plan.constants.get(layer.index)
    packed = RaggedExperts(layer.experts, mask.sum(1).tolist(), constants is not None, plan.computed_as(layer.index))
    with torch.no_grad():
        if packed.constants is not None:
            packed.constants.copy_(torch.from_numpy(constants))
        for expert, row in enumerate(mask):
            for place, part in zip(packed.weights(expert), _cut(layer.experts, expert, row), strict=True):
                place.copy_(part)
    return packed


def _cut(experts: Any, expert: int, row: numpy.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up (2 I', H) and transposed down (I', H) projection of one expert on the channels `row` (I,) keeps."""
    gate_up, down = experts.gate_up_proj.detach()[expert], experts.down_proj.detach()[expert]
    kept = torch.from_numpy(numpy.flatnonzero(row)).to(down.device)
    return gate_up[torch.cat((kept, kept + len(row)))], down[:, kept].t()


def update_configuration(config: Any, plan: Plan, layers: list[MoELayer], ragged: set[int]) -> None:
    """Write the shapes of the pruned model into `config`, the configuration of the language model, in place.

    `layers` are the MoE layers before pruning, `ragged` the indices of those that now have RaggedExperts. If all layers
    keep the same number of experts, it replaces the old number. What differs between layers goes into transformers'
    `per_layer_config`; reading such a field for the whole model then raises an error instead of giving a wrong number.
    The widths of ragged layers go into `expert_widths`, and the largest into the layer's own configuration.
    """
    different = _counts(config, {layer.index: len(plan.experts[layer.index]) for layer in layers})
    for layer in layers if plan.channels else []:
        widths = plan.widths(layer.index)
        if min(widths) < layer.width:
            different.setdefault(layer.index, {})[width_field(vars(config))] = max(widths)
    if ragged:
        setattr(config, RAGGED_FIELD, {str(index): list(plan.widths(index)) for index in sorted(ragged)})
        if plan.constants:
            setattr(config, CONSTANT_FIELD, sorted(plan.constants))
        if plan.shares_experts:
            owners = {str(index): plan.computed_as(index) for index in sorted(ragged)}
            setattr(config, OWNERS_FIELD, {index: list(one) for index, one in owners.items() if one})
    if different:
        config.per_layer_config = different


def _counts(config: Any, counts: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Set the number of experts if all layers have the same; returns the fields of each layer otherwise."""
    fields = [field for field in COUNT_FIELDS if isinstance(vars(config).get(field), int)]
    if len(set(counts.values())) == 1 and not config.is_heterogeneous:
        for field in fields:
            setattr(config, field, next(iter(counts.values())))
        return {}
    stated = config.to_dict().get("per_layer_config", {})
    per_layer = {int(index): dict(own) for index, own in stated.items()}
    for index, count in counts.items():
        per_layer.setdefault(index, {}).update(dict.fromkeys(fields, count))
    return per_layer
