"""Virtual pruning: a plan applied to a loaded model without touching expert weights, and undone afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers
from moe_lab.models.experts import chosen_experts, routed_output, sort_by_expert
from moe_lab.models.transformers_private import activation, experts_implementation, with_activation
from moe_lab.pruning.plan import Mask, Plan
from moe_lab.pruning.prune import check_fit, count_attributes, merged_weights, replace_tensor, rows
from moe_lab.pruning.ragged import constant_output
from moe_lab.pruning.replace import check_aligned
from moe_lab.statistics.observe import ExpertsFunction, replaced_experts


@contextmanager
def mask(model: PreTrainedModel, plan: Plan) -> Iterator[None]:
    """A context in which `model` computes what `prune(model, plan)` would compute.

    The results are equal bit for bit under eager experts for plans of whole experts, and within 1e-5 (fp32) for plans
    of channels. Each router runs only on the rows and biases of its kept experts, whatever its formula, and the ids it
    returns are mapped back to the original ids. Channels that are not kept are set to 0 before the down projection.
    Expert weights are neither copied nor changed, but merged experts have weights of their own meanwhile. Layers may
    keep different numbers of experts. On exit the model has its original tensors again. Contexts of the same model
    cannot be nested.

    Raises UserError when the plan does not fit the model or still has to be aligned, or when weights that it reads are
    offloaded: those of routers, and of experts if it merges some. Raises RuntimeError when experts are
    called with a routing that did not come from the masked router, or when the masked experts are bypassed.
    """
    layers = moe_layers(model)
    check_fit(plan, layers)
    check_aligned(plan)
    with mask_layers(model, layers, plan):
        yield


@contextmanager
def mask_layers(model: PreTrainedModel, layers: Sequence[MoELayer], plan: Plan) -> Iterator[None]:
    """Mask `layers` only, for models whose other layers are not in memory. Does not check that the plan fits."""
    with ExitStack() as undo:
        for layer in layers:
            _keep(layer, plan.experts[layer.index], undo)
        if plan.channels:
            undo.enter_context(channel_masks(model, layers, plan))
        yield


@dataclass
class SlicedRouter:
    """The router of a layer with the rows and biases of some experts only, while it is open as a context."""

    tensors: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]
    """(module, name, whole tensor, slice)."""
    counts: list[tuple[nn.Module, str, int, int]]
    """(module, name of an attribute, number of all experts, number of the kept ones)."""

    def __enter__(self) -> None:
        for module, name, _, part in self.tensors:
            replace_tensor(module, name, part)
        for module, name, _, kept in self.counts:
            setattr(module, name, kept)

    def __exit__(self, *exception: object) -> None:
        for module, name, whole, _ in self.tensors:
            replace_tensor(module, name, whole)
        for module, name, experts, _ in self.counts:
            setattr(module, name, experts)

    def call(self, forward: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call `forward` of the whole router as that of the slice, with arguments that its block gave the whole one.

        Some blocks pass biases, which are then sliced too.
        """
        parts = {id(whole): part for _, _, whole, part in self.tensors}
        positional = [parts.get(id(value), value) for value in given]
        by_name = {name: parts.get(id(value), value) for name, value in named.items()}
        with self:
            return forward(*positional, **by_name)


def sliced_router(layer: MoELayer, kept: Sequence[int]) -> SlicedRouter:
    """The router of `layer` with the experts `kept` (ascending ids); it then returns positions in `kept`.

    Raises UserError when the router's weights are not in memory.
    """
    check_in_memory(layer)
    ids = torch.tensor(kept)
    tensors = [(part.module, part.name, part.tensor, rows(part.tensor, part.axis, ids)) for part in layer.routing]
    counts = [
        (module, name, layer.n_experts, len(kept))
        for module in layer.router.modules()
        for name in count_attributes(module, layer.n_experts)
    ]
    return SlicedRouter(tensors, counts)


def _keep(layer: MoELayer, kept: tuple[int, ...], undo: ExitStack) -> None:
    """Cut the router of `layer` down to the experts `kept`, and map the ids it returns back to the original ids.

    Raises RuntimeError when the experts are called with other ids than the router returned last, for example by a block
    that computes its routing without calling the router.
    """
    undo.enter_context(sliced_router(layer, kept))
    ids = torch.tensor(kept, device=layer.routing[0].tensor.device)
    issued: list[torch.Tensor] = []

    def after_router(router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, gates, chosen = output
        issued[:] = [ids[chosen]]
        return logits, gates, issued[0]

    def before_experts(experts: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not issued or chosen_experts(inputs, named) is not issued[0]:
            raise RuntimeError(
                f"the mask is not in force: {layer.name} got a routing that its masked router did not give"
            )

    # the router's hook is prepended, so that all other hooks see original ids
    undo.callback(layer.router.register_forward_hook(after_router, prepend=True).remove)
    undo.callback(layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True).remove)


@contextmanager
def channel_masks(model: PreTrainedModel, layers: Sequence[MoELayer], plan: Plan) -> Iterator[None]:
    """A context in which channels of `layers` that `plan` does not keep are 0 before the down projection, null experts
    put out their constants, and merged experts are computed with the weights of their group.

    Experts keep their original ids. Models that use grouped_mm still use it, except in layers with merged experts.
    Others compute one expert after the other, on rows sorted once, where experts that keep all channels give the bits
    of the eager forward. Raises RuntimeError when the masked experts are bypassed.
    """
    calls = {layer.index: _Call(layer, _experts_function(layer, plan)) for layer in layers}
    with ExitStack() as undo:
        undo.enter_context(replaced_experts(model, layers, {index: call.compute for index, call in calls.items()}))
        for call in calls.values():
            undo.callback(call.layer.experts.register_forward_hook(call.check).remove)
        yield


def _experts_function(layer: MoELayer, plan: Plan) -> ExpertsFunction:
    """The function for the routed output (T, H) of a layer under `plan`, one with channels.

    The weights of merged experts are computed here, and take memory as long as the function lives.
    """
    mask = plan.channels[layer.index]
    if layer.index in plan.merged:
        function = sorted_function(_merged(layer, plan), mask[plan.owners(layer.index)])
    elif experts_implementation(layer.experts) == "grouped_mm":
        function = grouped_function(layer, mask)
    else:
        function = sorted_function(layer, mask)
    return _with_constants(function, layer, plan)


def _merged(layer: MoELayer, plan: Plan) -> MoELayer:
    """The layer with other stacks of experts: each is that of its owner, whose weights are those of its group.

    Raises UserError when the experts are not in memory.
    """
    check_in_memory(layer, experts=True)
    experts: Any = copy.copy(layer.experts)
    experts._parameters = dict(layer.experts._parameters)
    merged, owners = merged_weights(layer, plan), plan.owners(layer.index)
    for position, name in enumerate(("gate_up_proj", "down_proj")):
        stack = experts._parameters.pop(name).detach()
        setattr(experts, name, [merged[owner][position] if owner in merged else stack[owner] for owner in owners])
    return replace(layer, experts=experts)


class _Call:
    """The masked experts function of one layer, which records that it was called."""

    def __init__(self, layer: MoELayer, function: ExpertsFunction) -> None:
        self.layer, self.function = layer, function
        self.ran = False

    def compute(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        self.ran = True
        return self.function(hidden, index, gates)

    def check(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        if not self.ran:
            raise RuntimeError(f"the mask is not in force: {self.layer.name} did not run the masked experts")
        self.ran = False


def sorted_function(layer: MoELayer, mask: Mask) -> ExpertsFunction:
    """A function for the routed output (T, H) of experts whose channels outside `mask` (E, I) are 0.

    It computes one expert after the other.
    """
    dropped = torch.from_numpy(~mask).to(layer.routing[0].tensor.device)
    counts = mask.sum(-1).tolist()

    def compute(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = sort_by_expert(index, layer.n_experts)

        def of_expert(expert: int, part: slice, states: torch.Tensor) -> torch.Tensor | None:
            if not counts[expert]:
                return None
            own = layer.weights(expert)
            phi = layer.phi(states, own)
            if counts[expert] < layer.width:
                phi = phi.masked_fill(dropped[expert], 0)  # not multiplied by 0, because Inf x 0 is NaN
            return layer.output(phi, own)

        return routed_output(hidden, rows, weights, of_expert)

    return compute


def _with_constants(function: ExpertsFunction, layer: MoELayer, plan: Plan) -> ExpertsFunction:
    """`function`, for which null experts put out 0, with the constants that `plan` gives them added."""
    if layer.index not in plan.constants:
        return function
    weights, device = cast(torch.Tensor, layer.experts.down_proj), layer.routing[0].tensor.device
    vectors = torch.from_numpy(plan.constants[layer.index]).to(device, weights.dtype)
    experts = plan.null_experts(layer.index)

    def compute(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        mixed = function(hidden, index, gates)
        mixed += constant_output(index, gates, layer.n_experts, experts, vectors)
        return mixed

    return compute


def grouped_function(layer: MoELayer, mask: Mask) -> ExpertsFunction:
    """The function of `sorted_function`, by transformers' grouped matrix products.

    These compute all experts at once, so every row is masked with its expert's channels right after the activation.
    """
    dropped = torch.from_numpy(~mask).to(layer.routing[0].tensor.device)
    experts: Any = layer.experts

    def compute(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        activate = activation(experts)
        expert = index.reshape(-1).sort().values  # the order in which grouped_mm processes rows

        def masked(gate_up: torch.Tensor) -> torch.Tensor:
            return activate(gate_up).masked_fill(dropped[expert], 0)

        with with_activation(experts, masked):
            mixed: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, index, weights)
            return mixed

    return compute
