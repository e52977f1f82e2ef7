"""Structural pruning in memory: remove experts, channels, router rows and correction biases from a loaded model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers
from moe_lab.models.experts import wide
from moe_lab.models.families import COUNT_FIELDS, GATE_UP, split
from moe_lab.pruning.export.remote import width_field
from moe_lab.pruning.form import (
    CONSTANT_FIELD,
    OWNERS_FIELD,
    RAGGED_FIELD,
    Arithmetic,
    LayerForm,
    Part,
    make_form,
    part_of,
    rows,
)
from moe_lab.pruning.plan import Plan
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
        down: Any = layer.experts.down_proj
        form = make_form(plan, "natural", down.element_size()).layers[layer.index]
        install(layer, form)
        keep_rows(layer, form.experts)
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


def install(layer: MoELayer, form: LayerForm) -> None:
    """Put the experts that `form` says in the place of those of `layer`."""
    if form.widths is not None:
        setattr(layer.block, layer.name.rpartition(".")[2], _packed(layer, form))
        return
    experts: Any = layer.experts
    stacks: dict[str, torch.Tensor]
    if form.changed:
        stacks = {name: _restacked(layer, form, name) for name in layer.family.stacks}
    else:  # also of parameters that moe_lab does not know
        ids = torch.tensor([part.whole for part in form.parts])
        stacks = {name: rows_of(tensor, 0, ids) for name, tensor in experts.named_parameters()}
    for path, stack in stacks.items():
        owner, _, name = path.rpartition(".")
        replace_tensor(experts.get_submodule(owner), name, stack)
    for name in WIDTH_ATTRIBUTES:
        if form.width is not None and vars(experts).get(name) == layer.width:
            setattr(experts, name, form.width)


def _restacked(layer: MoELayer, form: LayerForm, name: str) -> nn.Parameter:
    """The stack `name` of the experts that `form` says."""
    stack, axes = getattr(layer.experts, name), layer.family.stacks[name]
    shape = [len(form.parts), *stack.shape[1:]]
    if form.width is not None and axes.channels is not None:
        shape[axes.channels] = form.width * len(axes.roles)
    changed = stack.detach().new_empty(shape)
    for tensor, part in zip(changed, form.parts, strict=True):
        fill(split(tensor, axes), part, layer)
    return nn.Parameter(changed, stack.requires_grad)


def _packed(layer: MoELayer, form: LayerForm) -> RaggedExperts:
    """The experts that `form` says, each with a width of its own."""
    packed = RaggedExperts(layer.experts, form.widths or (), form.constants is not None, form.owners)
    with torch.no_grad():
        for position, part in enumerate(form.parts):
            gate_up, down = packed.weights(position)
            fill({**split(gate_up, GATE_UP), "down": down}, part, layer)
        if packed.constants is not None:
            packed.constants.copy_(torch.from_numpy(form.constants))
    return packed


def fill(views: Mapping[str, torch.Tensor], part: Part, layer: MoELayer) -> None:
    """Write the projections `views` (role -> (W, H), channels as rows) of one stored expert of `layer`."""
    for role, view in views.items():
        view.copy_(rows(part, lambda one, role=role: layer.projections(one)[role].detach(), IN_MEMORY))  # type: ignore[misc]


IN_MEMORY = Arithmetic(
    index=lambda indices, tensor: torch.from_numpy(indices).to(tensor.device),
    wide=wide,
    narrow=lambda total, tensor: total.to(tensor.dtype),
)


def keep_rows(layer: MoELayer, kept: Iterable[int]) -> None:
    """Cut the router of one layer down to the experts `kept`, in place: its routing tensors, and all counts."""
    ids = torch.tensor(list(kept))
    for part in layer.routing:
        replace_tensor(part.module, part.name, rows_of(part.tensor, part.axis, ids))
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


def rows_of(tensor: torch.Tensor, axis: int, ids: torch.Tensor) -> torch.Tensor:
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


def merged_weights(layer: MoELayer, plan: Plan) -> dict[int, dict[str, torch.Tensor]]:
    """Expert that others are merged into -> name -> tensor of its group, shaped as that of one expert."""
    merged = {}
    for owner in plan.merged.get(layer.index, {}):
        merged[owner] = {name: torch.empty_like(tensor) for name, tensor in layer.tensors(owner).items()}
        fill(layer.family.split(merged[owner]), part_of(plan, layer.index, owner), layer)
    return merged


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
