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
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_lab.exported_code.ragged import constant_output, count_attributes, replace_tensor
from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers
from moe_lab.models.experts import (
    ExpertsFunction,
    are_replaced,
    replace_experts,
    routed_output,
    sort_by_expert,
)
from moe_lab.models.transformers_private import activation, experts_implementation, with_activation
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import check_fit, merged_weights, rows_of
from moe_lab.pruning.replace import check_aligned


@contextmanager
def mask(model: PreTrainedModel, plan: Plan) -> Iterator[None]:
    """A context in which `model` computes what `prune(model, plan)` would compute.

    Equal bit for bit under eager experts for plans of whole experts, and within 1e-5 (fp32) for
    plans of channels. Each router runs on the rows and biases of its kept experts only, and the ids
    it returns are mapped back. Expert weights are neither copied nor changed, but merged experts
    have weights of their own meanwhile. Contexts of the same model cannot be nested. UserError when
    the plan does not fit the model or still has to be aligned, or when weights of MoE blocks are
    offloaded.
    """
    layers = moe_layers(model)
    check_fit(plan, layers)
    check_aligned(plan)
    with mask_layers(layers, plan):
        yield


@contextmanager
def mask_layers(layers: Sequence[MoELayer], plan: Plan) -> Iterator[None]:
    """Mask `layers` only, for models whose other layers are not in memory. Does not check that the
    plan fits."""
    with ExitStack() as undo:
        for layer in layers:
            _keep(layer, plan.experts[layer.index], undo)
            if plan.channels:
                if are_replaced(layer):
                    raise RuntimeError(
                        f"{layer.name} is observed already, or under another plan of channels"
                    )
                replace_experts(layer, lambda _, layer=layer: planned(layer, plan), undo)  # type: ignore[misc]
        yield


@contextmanager
def sliced_router(layer: MoELayer, kept: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """While open, the router of `layer` has the rows and biases of the experts `kept` (ascending
    ids) only, and returns positions in `kept`. Yields the id of each whole tensor -> its slice, for
    blocks that pass biases to their router.
    """
    check_in_memory(layer)
    ids = torch.tensor(kept)
    slices = {}
    with ExitStack() as undo:
        for part in layer.routing:
            whole = part.tensor
            slices[id(whole)] = rows_of(whole, part.axis, ids)
            undo.callback(replace_tensor, part.module, part.name, whole)
            replace_tensor(part.module, part.name, slices[id(whole)])
        for module in layer.router.modules():
            for name in count_attributes(module, layer.n_experts):
                undo.enter_context(patch.object(module, name, len(kept)))
        yield slices


def _keep(layer: MoELayer, kept: tuple[int, ...], undo: ExitStack) -> None:
    """Cut the router of `layer` down to the experts `kept`, and map the ids it returns back to the
    original ids. RuntimeError when the experts are called with others, as by a block that does not
    call its router."""
    undo.enter_context(sliced_router(layer, kept))
    ids = torch.tensor(kept, device=layer.routing[0].tensor.device)
    issued: list[torch.Tensor] = []

    def after_router(
        router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits, gates, chosen = output
        issued[:] = [ids[chosen]]
        return logits, gates, issued[0]

    def before_experts(experts: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        _, index, _ = (*inputs, *named.values())
        if not issued or index is not issued[0]:
            raise RuntimeError(
                f"the mask is not in force: {layer.name} got a routing that its masked router did "
                "not give"
            )

    # the router's hook is prepended, so that all other hooks see original ids
    undo.callback(layer.router.register_forward_hook(after_router, prepend=True).remove)
    undo.callback(layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True).remove)


def planned(layer: MoELayer, plan: Plan) -> ExpertsFunction:
    """What the experts of a layer compute under `plan`, one with channels; they keep their original
    ids. Channels that are not kept are 0 before the down projection, null experts put out their
    constants, and merged ones are computed with the weights of their group. Experts that keep all
    channels give the bits of the eager forward; models that use grouped_mm still use it, except in
    layers with merged experts."""
    mask = plan.channels[layer.index]
    owners = plan.owners(layer.index)
    dropped = torch.from_numpy(~mask).to(layer.routing[0].tensor.device)
    counts = mask.sum(-1).tolist()
    if layer.index not in plan.merged and experts_implementation(layer.experts) == "grouped_mm":
        return _with_constants(_grouped(layer, dropped), layer, plan)
    merged = {
        owner: layer.weights(owner, tensors)
        for owner, tensors in merged_weights(layer, plan).items()
    }

    def compute(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        def of_expert(expert: int, _: slice, states: torch.Tensor) -> torch.Tensor | None:
            owner = owners[expert]
            if not counts[owner]:
                return None
            own = merged[owner] if owner in merged else layer.weights(owner)
            phi = layer.phi(states, own)
            if counts[owner] < layer.width:
                # not multiplied by 0, because Inf x 0 is NaN
                phi = phi.masked_fill(dropped[owner], 0)
            return layer.output(phi, own)

        return routed_output(hidden, sort_by_expert(index, layer.n_experts), gates, of_expert)

    return _with_constants(compute, layer, plan)


def _with_constants(function: ExpertsFunction, layer: MoELayer, plan: Plan) -> ExpertsFunction:
    """`function`, for which null experts put out 0, with the constants that `plan` gives them
    added."""
    if layer.index not in plan.constants:
        return function
    weights = cast(torch.Tensor, layer.experts.down_proj)
    device = layer.routing[0].tensor.device
    vectors = torch.from_numpy(plan.constants[layer.index]).to(device, weights.dtype)
    experts = plan.null_experts(layer.index)

    def compute(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        mixed = function(hidden, index, gates)
        mixed += constant_output(index, gates, layer.n_experts, experts, vectors)
        return mixed

    return compute


def _grouped(layer: MoELayer, dropped: torch.Tensor) -> ExpertsFunction:
    """Experts whose channels `dropped` (E, I) are 0, by transformers' grouped matrix products of
    all experts at once: every row is masked with its expert's channels right after the
    activation."""
    experts: Any = layer.experts

    def compute(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        activate = activation(experts)
        expert = index.reshape(-1).sort().values  # the order in which grouped_mm processes rows

        def masked(gate_up: torch.Tensor) -> torch.Tensor:
            return activate(gate_up).masked_fill(dropped[expert], 0)

        with with_activation(experts, masked):
            mixed: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](
                experts, hidden, index, weights
            )
            return mixed

    return compute
