"""Structural pruning in memory: remove experts, channels, router rows and correction biases from a
loaded model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import RaggedExperts, replace_tensor, set_counts
from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers, routed_layers
from moe_lab.models.experts import wide
from moe_lab.models.families import COUNT_FIELDS, GATE_UP, WIDTH_FIELDS, split
from moe_lab.pruning import LayerForm, Part, make_form, part_of, rows
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.replace import check_aligned

Model = TypeVar("Model", bound=nn.Module)
WIDTH_ATTRIBUTES = ("intermediate_dim", "intermediate_size")
"""Attributes of experts modules that hold their width, the channels per expert."""


def prune(model: Model, plan: Plan) -> Model:
    """A smaller copy of `model` that has only the experts and channels `plan` keeps; it shares all
    other weights.

    Layers whose experts keep equal numbers of channels keep the family's module, others get
    RaggedExperts. Where all layers keep equally many whole experts, the configuration says so and
    `save_pretrained` writes a stock checkpoint; other models are written by `export`. A model on
    the meta device gives one there. UserError when the plan does not fit the model or still has to
    be aligned, and when weights are offloaded.
    """
    before = moe_layers(model)
    check_fit(plan, before)
    check_aligned(plan)
    on_meta = all(weight.is_meta for weight in model.parameters()) and not hasattr(
        model, "_hf_hook"
    )
    # accelerate, which sets that attribute, would bring whole weights back
    for layer in [] if on_meta else before:
        check_in_memory(layer)
    pruned = share_copy(model)
    down = cast(torch.Tensor, before[0].experts.down_proj)
    form = make_form(plan, "natural", down.element_size())
    for layer in moe_layers(pruned):
        install(layer, form[layer.index])
        keep_rows(layer, plan.experts[layer.index])
    _describe(pruned)
    return pruned


def _describe(pruned: Any) -> None:
    """Write the number of experts into the configuration of a pruned model, if all layers have the
    same one; unless it then describes the model, refuse `save_pretrained`, whose checkpoint would
    be loaded with random experts."""
    config = pruned.config.get_text_config()
    layers = routed_layers(pruned)
    counts = {layer.n_experts for layer in layers}
    if len(counts) == 1:
        for module in (config, pruned):  # the model's own number is that of the balancing loss
            for field in COUNT_FIELDS:
                if isinstance(vars(module).get(field), int):
                    setattr(module, field, *counts)
    stated = next(
        (vars(config)[field] for field in WIDTH_FIELDS if isinstance(vars(config).get(field), int)),
        None,
    )
    if len(counts) == 1 and {width for layer in layers for width in layer.widths} == {stated}:
        vars(pruned).pop("save_pretrained", None)  # of a model that was pruned before
    else:
        pruned.save_pretrained = _refuse_to_save


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
    stack = getattr(layer.experts, name)
    axes = layer.family.stacks[name]
    shape = [len(form.parts), *stack.shape[1:]]
    if form.width is not None and axes.channels is not None:
        shape[axes.channels] = form.width * len(axes.roles)
    changed = stack.detach().new_empty(shape)
    for tensor, part in zip(changed, form.parts, strict=True):
        fill(split(tensor, axes), part, layer)
    return nn.Parameter(changed, stack.requires_grad)


def _packed(layer: MoELayer, form: LayerForm) -> RaggedExperts:
    """The experts that `form` says, each with a width of its own."""
    packed = RaggedExperts(
        layer.experts, form.widths or (), form.constants is not None, form.owners
    )
    with torch.no_grad():
        for position, part in enumerate(form.parts):
            gate_up, down = packed.weights(position)
            fill({**split(gate_up, GATE_UP), "down": down}, part, layer)
        if packed.constants is not None:
            packed.constants.copy_(torch.from_numpy(form.constants))
    return packed


def fill(views: Mapping[str, torch.Tensor], part: Part, layer: MoELayer) -> None:
    """Write the projections `views` (role -> (W, H), channels as rows) of one stored expert of
    `layer`."""
    roles = {member.expert: layer.projections(member.expert) for member in part.members}
    for role, view in views.items():
        of_role = {expert: found[role].detach() for expert, found in roles.items()}
        view.copy_(
            rows(part, of_role.__getitem__, wide, lambda total, tensor: total.to(tensor.dtype))
        )


def keep_rows(layer: MoELayer, kept: Iterable[int]) -> None:
    """Cut the router of one layer down to the experts `kept`, in place: its routing tensors, and
    all counts."""
    ids = torch.tensor(list(kept))
    for part in layer.routing:
        replace_tensor(part.module, part.name, rows_of(part.tensor, part.axis, ids))
    set_counts((layer.block, layer.experts, *layer.router.modules()), layer.n_experts, len(ids))


def check_fit(plan: Plan, layers: list[MoELayer]) -> None:
    """Raise UserError unless `plan` is for exactly these layers, what it drops can be removed, and
    their routers work with what it keeps."""
    if set(plan.n_experts) != {layer.index for layer in layers}:
        raise UserError(
            f"plan is for another model: it is about layers {sorted(plan.n_experts)}, this model "
            "has experts in "
            f"layers {[layer.index for layer in layers]}"
        )
    for layer in layers:
        mask = plan.channels.get(layer.index)
        constants = plan.constants.get(layer.index)
        width = layer.width if mask is None else mask.shape[1]
        hidden = layer.hidden if constants is None else constants.shape[1]
        stated = (plan.n_experts[layer.index], width, hidden)
        found = (layer.n_experts, layer.width, layer.hidden)
        if stated != found:
            raise UserError(
                "plan is for another model: experts, channels of each and hidden size of layer "
                f"{layer.index} are "
                f"{stated} in the plan, and {found} in this model"
            )
        if mask is not None and (reason := layer.family.unfit):
            raise UserError(
                f"plan: channels of {layer.name} ({type(layer.experts).__name__}) cannot be "
                "removed, because its "
                f"experts {reason}: use a criterion of whole experts"
            )
    plan.check({layer.index: vars(layer) for layer in layers})


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Replaces save_pretrained."""
    raise UserError(
        "a model whose layers differ in shape cannot be saved by save_pretrained: export its plan"
    )


def rows_of(tensor: torch.Tensor, axis: int, ids: torch.Tensor) -> torch.Tensor:
    """The entries `ids` of `tensor` along `axis`, as a copy of the same kind (parameter or plain
    tensor)."""
    chosen = tensor.detach().index_select(axis, ids.to(tensor.device))
    return (
        nn.Parameter(chosen, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else chosen
    )


def merged_weights(layer: MoELayer, plan: Plan) -> dict[int, dict[str, torch.Tensor]]:
    """Expert that others are merged into -> name -> tensor of its group, shaped as that of one
    expert."""
    merged = {}
    for owner in plan.merged.get(layer.index, {}):
        merged[owner] = {
            name: torch.empty_like(tensor) for name, tensor in layer.tensors(owner).items()
        }
        fill(layer.family.split(merged[owner]), part_of(plan, layer.index, owner), layer)
    return merged
