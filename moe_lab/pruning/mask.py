"""Virtual pruning: a plan applied to a loaded model without touching expert weights, and undone
afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_lab.exported_code.ragged import constant_output, count_attributes, replace_tensor
from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers
from moe_lab.models.experts import ExpertsFunction, are_replaced, replace_experts
from moe_lab.models.rows import GroupedRows, OneExpert, Rows, is_grouped
from moe_lab.pruning import LayerForm
from moe_lab.pruning.layer_plan import LayerPlan, Mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import merged_weights, restack


@contextmanager
def mask(model: PreTrainedModel, plan: Plan | None) -> Iterator[None]:
    """A context in which `model` computes what `prune(model, plan)` would compute; without a plan,
    what it always computes.

    Results are equal bit for bit under eager experts for plans of whole experts, and within 1e-5
    (fp32) for plans of channels. Expert weights are not changed. If the plan merges experts, their
    summed weights are additional memory; with grouped_mm, the weights of all stored experts.
    Contexts of one model cannot be nested. UserError when the plan does not fit the model or still
    has to be aligned, or when weights of MoE blocks are offloaded.
    """
    if plan is None:
        yield
        return
    layers = moe_layers(model)
    plan.check_model(layers)
    plan.check_aligned()
    with mask_layers(layers, plan):
        yield


@contextmanager
def mask_layers(layers: Sequence[MoELayer], plan: Plan) -> Iterator[None]:
    """A context in which the MoE layers `layers` are masked. `plan` may have more layers. It is not
    checked whether the plan fits."""
    with ExitStack() as undo:
        for layer in layers:
            check_in_memory(layer)
            layer_plan = plan.layers[layer.index]
            if layer_plan.channels is not None:
                if are_replaced(layer):
                    raise RuntimeError(
                        f"{layer.name} is observed already, or under another plan of channels"
                    )
                function = planned_experts(layer, layer_plan)
                # the argument is the experts' own function, which is not called
                replace_experts(layer, lambda _: function, undo)  # noqa: B023 - called at once
            undo.enter_context(masked_router(layer, layer_plan.retained))
        yield


def planned_experts(layer: MoELayer, plan: LayerPlan) -> ExpertsFunction:
    """A function that computes the experts of a layer under `plan`, a plan of channels. The
    function gets original ids of experts. Without grouped_mm, experts that retain all channels give
    the results of the eager forward bit for bit."""
    function = (_grouped_experts if is_grouped(layer) else _sequential_experts)(layer, plan)
    if plan.constants is None:
        return function
    weights = cast(torch.Tensor, layer.experts.down_proj)
    device = layer.routing[0].tensor.device
    constants = torch.from_numpy(plan.constants).to(device, weights.dtype)

    def compute(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        # in `function`, null experts put out 0
        output = function(hidden, index, gates)
        output += constant_output(index, gates, layer.n_experts, plan.null_experts, constants)
        return output

    return compute


def _dropped_channels(layer: MoELayer, plan: LayerPlan) -> torch.Tensor:
    """(E, I) bool: whether each channel is dropped, on the device of the router."""
    return torch.from_numpy(~cast(Mask, plan.channels)).to(layer.routing[0].tensor.device)


def _sequential_experts(layer: MoELayer, plan: LayerPlan) -> ExpertsFunction:
    """A function that computes one expert after the other under `plan`, a plan of channels. Null
    experts put out 0."""
    dropped = _dropped_channels(layer, plan)
    owners = plan.owners
    widths = cast(Mask, plan.channels).sum(1).tolist()
    # owner of a group -> the summed weights of the group
    group_weights = {
        owner: layer.weights(owner, tensors)
        for owner, tensors in merged_weights(layer, plan).items()
    }

    def compute_expert(part: OneExpert, states: torch.Tensor) -> torch.Tensor | None:
        """The output (n, H) of an expert for its `states` (n, H); None for a null expert."""
        owner = owners[part.experts]
        if not widths[owner]:
            return None
        weights = group_weights[owner] if owner in group_weights else layer.weights(owner)
        phi = layer.phi(states, weights)
        if widths[owner] < layer.width:
            phi = phi.masked_fill(dropped[owner], 0)  # not multiplied by 0, because Inf x 0 is NaN
        return layer.output(phi, weights)

    def compute(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return Rows(index, layer.n_experts).output(hidden, gates, compute_expert)

    return compute


def _grouped_experts(layer: MoELayer, plan: LayerPlan) -> ExpertsFunction:
    """A function that computes all experts at once under `plan`, a plan of channels. If the plan
    merges experts, the weights of all stored experts are copied."""
    stored: Sequence[int] = range(layer.n_experts)
    tensors = None  # the layer's own
    if plan.merged:
        stored = sorted({plan.owners[expert] for expert in plan.retained})
        form = LayerForm(tuple(stored), tuple(map(plan.stored_expert, stored)))
        tensors = {name: restack(layer, form, name).detach() for name in layer.family.stacks}
    dropped = _dropped_channels(layer, plan)[list(stored)]
    # for each expert, the position of its owner in `stored`; experts that are dropped get no tokens
    numbers = {owner: number for number, owner in enumerate(stored)}
    positions = torch.tensor(
        [numbers.get(owner, 0) for owner in plan.owners], device=dropped.device
    )

    def compute(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        rows = GroupedRows(positions[index], len(stored))

        def compute_experts(part: GroupedRows, states: torch.Tensor) -> torch.Tensor:
            weights = part.weights(layer, tensors)
            phi = layer.phi(states, weights)
            return layer.output(phi.masked_fill(dropped[rows.expert], 0), weights)

        return rows.output(hidden, gates, compute_experts)

    return compute


@contextmanager
def masked_router(layer: MoELayer, retained: tuple[int, ...]) -> Iterator[None]:
    """A context in which the router of `layer` only has the rows and biases of the experts
    `retained` (ascending ids), and returns their original ids. RuntimeError when the block calls
    its experts with other ids than the router returned."""
    retained_ids = torch.tensor(retained, device=layer.routing[0].tensor.device)
    last_ids: torch.Tensor | None = None  # the ids that the router returned last

    def after_router(
        router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        nonlocal last_ids
        logits, gates, positions = output
        last_ids = retained_ids[positions]
        return logits, gates, last_ids

    def before_experts(
        experts: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        # hidden states, ids and gates: in this order, each by position or by keyword
        _, expert_ids, _ = (*inputs, *keywords.values())
        if last_ids is None or expert_ids is not last_ids:
            raise RuntimeError(
                f"the mask has no effect: {layer.name} got a routing that its masked router did "
                "not return"
            )

    with ExitStack() as undo:
        for part in layer.routing:
            original = part.tensor
            rows = original.detach().index_select(part.axis, retained_ids.to(original.device))
            undo.callback(replace_tensor, part.module, part.name, original)
            replace_tensor(part.module, part.name, rows)
        for module in layer.router.modules():
            for name in count_attributes(module, layer.n_experts):
                undo.enter_context(patch.object(module, name, len(retained)))
        # the router's hook is prepended, so that all other hooks see original ids
        undo.callback(layer.router.register_forward_hook(after_router, prepend=True).remove)
        undo.callback(
            layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True).remove
        )
        yield
