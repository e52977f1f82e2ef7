"""Structural pruning in memory: remove experts, channels, router rows and correction biases from a
loaded model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import RaggedExperts, replace_tensor, set_counts
from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers, routed_layers
from moe_lab.models.families import COUNT_FIELDS, GATE_UP, WIDTH_FIELDS, split
from moe_lab.models.rows import at_least_fp32
from moe_lab.pruning import LayerForm, make_form
from moe_lab.pruning.layer_plan import LayerPlan, StoredExpert
from moe_lab.pruning.plan import Plan

Model = TypeVar("Model", bound=nn.Module)
WIDTH_ATTRIBUTES = ("intermediate_dim", "intermediate_size")
"""Attributes of experts modules that hold the channels per expert."""


def prune(model: Model, plan: Plan) -> Model:
    """A smaller copy of `model` that only has the experts and channels that `plan` retains. The
    copy shares all other weights with `model`.

    If the experts module of the family cannot hold the retained channels of a layer (see
    `fits_family_module`), RaggedExperts replaces this module. `save_pretrained` of the copy works
    only if all layers retain equally many experts with all their channels. UserError when the plan
    does not fit the model, when channels of merged experts still have to be matched, and when
    weights are offloaded.
    """
    layers = moe_layers(model)
    plan.check_model(layers)
    plan.check_aligned()
    # weights that accelerate has offloaded are on meta too; then the model has a `_hf_hook`
    is_on_meta = all(weight.is_meta for weight in model.parameters()) and not hasattr(
        model, "_hf_hook"
    )
    if not is_on_meta:
        for layer in layers:
            check_in_memory(layer)
    # the shape "natural" stores only what is retained, without padding
    form = make_form(plan, "natural")
    pruned = share_copy(model)
    for layer in moe_layers(pruned):
        layer_form = form[layer.index]
        prune_experts(layer, layer_form)
        slice_router(layer, layer_form.experts)
    _update_config(pruned)
    return pruned


def _update_config(pruned: Any) -> None:
    """Write the number of experts into the configuration, if all layers have the same number. If a
    layer differs from the configuration, `save_pretrained` will raise UserError: transformers would
    load the checkpoint with random experts."""
    config = pruned.config.get_text_config()
    layers = routed_layers(pruned)
    counts = {layer.n_experts for layer in layers}
    if len(counts) == 1:
        (count,) = counts
        for owner in (config, pruned):  # the model stores the number for its load-balancing loss
            for field in COUNT_FIELDS:
                if isinstance(vars(owner).get(field), int):
                    setattr(owner, field, count)
    # the first of these fields that the configuration has is the width of routed experts
    config_width = next(
        (vars(config)[field] for field in WIDTH_FIELDS if isinstance(vars(config).get(field), int)),
        None,
    )
    widths = {width for layer in layers for width in layer.widths}
    if len(counts) == 1 and widths == {config_width}:
        # an earlier pruning of the same model may have replaced `save_pretrained`
        vars(pruned).pop("save_pretrained", None)
    else:
        pruned.save_pretrained = _refuse_to_save


def share_copy(model: Model) -> Model:
    """A copy of `model` that shares its tensors."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)  # the memo: deepcopy takes tensors from it


def prune_experts(layer: MoELayer, form: LayerForm) -> None:
    """Replace the experts of `layer` by the experts of `form`."""
    if form.widths is not None:  # experts with a width each are packed
        setattr(layer.block, layer.name.rpartition(".")[2], _pack_experts(layer, form))
        return
    experts: Any = layer.experts
    stacks: dict[str, torch.Tensor]
    copied = [expert.copied for expert in form.stored]
    if None in copied:  # some experts are merged, or lose channels
        stacks = {name: restack(layer, form, name) for name in layer.family.stacks}
    else:  # all experts are copies: slice all parameters, also those that moe_lab does not know
        ids = torch.tensor(copied)
        stacks = {
            name: tensor.detach().index_select(0, ids.to(tensor.device))
            for name, tensor in experts.named_parameters()
        }
    for path, stack in stacks.items():
        owner, _, name = path.rpartition(".")
        replace_tensor(experts.get_submodule(owner), name, stack)
    for attribute in WIDTH_ATTRIBUTES:
        if form.width is not None and vars(experts).get(attribute) == layer.width:
            setattr(experts, attribute, form.width)


def restack(layer: MoELayer, form: LayerForm, name: str) -> nn.Parameter:
    """The stored experts of `form`, as a stack to replace the stack `name` of the experts
    module."""
    stack = getattr(layer.experts, name)
    axes = layer.family.stacks[name]
    shape = [len(form.stored), *stack.shape[1:]]
    if form.width is not None and axes.channels is not None:
        # in a stack of gate and up, the axis has the channels of gate and those of up
        shape[axes.channels] = form.width * len(axes.roles)
    new_stack = stack.detach().new_empty(shape)
    for tensor, stored in zip(new_stack, form.stored, strict=True):
        write_expert(split(tensor, axes), stored, layer)
    return nn.Parameter(new_stack, stack.requires_grad)


def _pack_experts(layer: MoELayer, form: LayerForm) -> RaggedExperts:
    """The experts of `form` in packed matrices."""
    packed = RaggedExperts(
        layer.experts,
        form.widths or (),  # never None here
        constants=form.constants is not None,
        owners=form.owners,
    )
    with torch.no_grad():
        for position, stored in enumerate(form.stored):
            gate_up, down = packed.weights(position)
            write_expert({**split(gate_up, GATE_UP), "down": down}, stored, layer)
        if packed.constants is not None:
            packed.constants.copy_(torch.from_numpy(form.constants))
    return packed


def write_expert(views: Mapping[str, torch.Tensor], stored: StoredExpert, layer: MoELayer) -> None:
    """Write the weights of `stored` into `views`: role -> view (W, H) with channels as rows.
    `layer`: the layer of the source experts."""
    # source expert -> role -> projection
    sources = {member.expert: layer.projections(member.expert) for member in stored.members}
    for role, view in views.items():
        projections = {expert: roles[role].detach() for expert, roles in sources.items()}
        if stored.is_sum:
            projections = {expert: at_least_fp32(part) for expert, part in projections.items()}
        view.copy_(stored.projection(projections.__getitem__))


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Replacement of a model's `save_pretrained`."""
    raise UserError(
        "a model whose layers differ in shape cannot be saved by save_pretrained: export its plan"
    )


def merged_weights(layer: MoELayer, plan: LayerPlan) -> dict[int, dict[str, torch.Tensor]]:
    """Id of an owner in `plan.merged` -> name of a stack in the experts module -> the weighted sum
    of the group's experts, in the shape of one expert."""
    merged = {}
    for owner in plan.merged:
        tensors = {name: torch.empty_like(tensor) for name, tensor in layer.tensors(0).items()}
        write_expert(layer.family.split(tensors), plan.stored_expert(owner), layer)
        merged[owner] = tensors
    return merged


def slice_router(layer: MoELayer, retained: Sequence[int]) -> None:
    """Reduce the router of `layer` to the experts `retained`, in place."""
    ids = torch.tensor(retained)
    for part in layer.routing:
        tensor = part.tensor.detach()
        sliced = tensor.index_select(part.axis, ids.to(tensor.device))
        replace_tensor(part.module, part.name, sliced)
    set_counts((layer.block, layer.experts, *layer.router.modules()), layer.n_experts, len(ids))
