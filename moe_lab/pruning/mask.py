"""Virtual pruning: a plan applied to a loaded model without touching expert weights, and undone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.experts import intermediate, output, sort_by_expert
from moe_lab.models.transformers_private import activation, experts_implementation, with_activation
from moe_lab.pruning.plan import Mask, Plan
from moe_lab.pruning.prune import check_fit, count_attributes, replace_tensor, rows
from moe_lab.statistics.observe import ExpertsFunction, replaced_experts


@contextmanager
def mask(model: PreTrainedModel, plan: Plan) -> Iterator[None]:
    """Let `model` compute what `prune(model, plan)` would, while this context is open.

    Bit for bit under eager experts for plans of whole experts, within 1e-5 (fp32) for plans of channels. Each router
    runs on the rows and biases of its kept experts only, whatever its formula, and the ids it gives are mapped back to
    the original ones; channels that are not kept are set to 0 before the down projection. Expert weights are neither
    copied nor changed; layers may keep different numbers. The model is restored on exit, with the very tensors it had.
    Contexts of one model do not nest.

    UserError when the plan does not fit the model; RuntimeError when experts are called with a routing that did not
    come from the masked router, or past the mask.
    """
    layers = moe_layers(model)
    check_fit(plan, layers)
    with ExitStack() as undo:
        for layer in layers:
            _keep(layer, plan.experts[layer.index], undo)
        if plan.channels:
            undo.enter_context(channel_masks(model, layers, plan))
        yield


@contextmanager
def mask_layer(model: PreTrainedModel, layer: MoELayer, plan: Plan) -> Iterator[None]:
    """The mask on one layer alone, for models that have only that one in memory. The plan must be for the model."""
    with ExitStack() as undo:
        _keep(layer, plan.experts[layer.index], undo)
        if plan.channels:
            undo.enter_context(channel_masks(model, [layer], plan))
        yield


@contextmanager
def mask_logits(model: nn.Module, drop: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While this context is open, dropped experts have logits and correction biases of minus infinity.

    `drop`: layer -> bool, True for dropped, of shape (E,), or (T, E) for a choice per token, where T counts the rows
    the router sees (batch x length, row-major); so several candidates fit in one batch. Layers left out are
    untouched. Within rounding of structural pruning (2e-5 in fp32; the softmax sums more terms). Restored on exit.
    UserError for unknown layers, wrong shapes, or fewer experts left than the router needs.
    """
    layers = {layer.index: layer for layer in moe_layers(model)}
    if strange := sorted(set(drop) - set(layers)):
        raise UserError(f"mask names layer {strange[0]}: expected one of {sorted(layers)}")
    for index, dropped in drop.items():
        _check_drop(layers[index], dropped)
    with ExitStack() as undo:
        for index, dropped in drop.items():
            _mask_router(layers[index], dropped, undo)
        yield


def slice_router(layer: MoELayer, kept: Sequence[int], undo: ExitStack) -> dict[int, torch.Tensor]:
    """Leave the router of `layer` only the rows, biases and counts of the experts `kept`, until `undo` is closed.

    `kept` are ascending ids; the ids the router gives are then places in `kept`. Returns id of each of its tensors ->
    the slice that replaces it, because some blocks hand their router its biases. UserError when the router's weights
    are not in memory.
    """
    if any(part.tensor.is_meta for part in layer.routing):
        raise UserError(f"the router of {layer.name} is offloaded: load the model without offloading to mask it")
    ids = torch.tensor(kept)
    sliced = {}
    for part in layer.routing:
        whole = part.tensor
        undo.callback(replace_tensor, part.module, part.name, whole)
        sliced[id(whole)] = rows(whole, part.axis, ids)
        replace_tensor(part.module, part.name, sliced[id(whole)])
    for module in layer.router.modules():
        for name in count_attributes(module, layer.n_experts):
            undo.callback(setattr, module, name, layer.n_experts)
            setattr(module, name, len(kept))
    return sliced


def _keep(layer: MoELayer, kept: tuple[int, ...], undo: ExitStack) -> None:
    """Slice the router of `layer`; its experts go on being called with their original ids."""
    slice_router(layer, kept, undo)
    for handle in _map_ids(layer, torch.tensor(kept, device=layer.routing[0].tensor.device)):
        undo.callback(handle.remove)


def _map_ids(layer: MoELayer, ids: torch.Tensor) -> list[Any]:
    """Hooks that turn a sliced router's ids into original ones, and prove that the experts are called with those."""
    issued: list[torch.Tensor] = []

    def after_router(router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, gates, chosen = output
        issued[:] = [ids[chosen]]
        return logits, gates, issued[0]

    def before_experts(experts: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        chosen = named.get("top_k_index", inputs[1] if len(inputs) > 1 else None)
        if not issued or chosen is not issued[0]:
            raise RuntimeError(
                f"the mask is not in force: {layer.name} got a routing that its masked router did not give"
            )

    return [
        # first of all hooks, so that others see original ids
        layer.router.register_forward_hook(after_router, prepend=True),
        layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True),
    ]


def _check_drop(layer: MoELayer, dropped: torch.Tensor) -> None:
    if dropped.dtype != torch.bool or dropped.dim() not in (1, 2) or dropped.shape[-1] != layer.n_experts:
        raise UserError(
            f"mask of layer {layer.index} is {dropped.dtype} of shape {tuple(dropped.shape)}: expected torch.bool of "
            f"shape ({layer.n_experts},) or (tokens, {layer.n_experts})"
        )
    left = int((~dropped).sum(-1).min())
    if left < layer.top_k:
        raise UserError(
            f"mask of layer {layer.index} leaves {left} experts, but its router needs at least {layer.top_k}"
        )


def _mask_router(layer: MoELayer, dropped: torch.Tensor, undo: ExitStack) -> None:
    router: Any = layer.router
    weight = next(part for part in layer.routing if part.name == "weight")
    dropped = dropped.to(weight.tensor.device)
    for part in layer.routing:
        # a router's own `bias` is added to the logits before they are masked; the others act on what follows
        if part.name not in ("weight", "bias"):
            undo.callback(replace_tensor, part.module, part.name, part.tensor)
            replace_tensor(part.module, part.name, _minus_infinity(part.tensor, dropped))
    original: Callable[..., Any] = router.forward

    def masked(*inputs: Any, **named: Any) -> Any:
        with _LogitMask(dropped) as logits:
            output = original(*inputs, **named)
        if logits.masked != 1:
            raise RuntimeError(
                f"the mask is not in force: the router of {layer.name} computed {logits.masked} logits, not one"
            )
        return output

    had_own = "forward" in vars(router)
    undo.callback(lambda: setattr(router, "forward", original) if had_own else delattr(router, "forward"))
    router.forward = masked


def _minus_infinity(bias: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """`bias`, (E,) or (1, E), with -inf at dropped experts: (E,), (1, E) or (T, E)."""
    masked = bias.detach().masked_fill(dropped, float("-inf"))
    return nn.Parameter(masked, requires_grad=False) if isinstance(bias, nn.Parameter) else masked


class _LogitMask(TorchFunctionMode):
    """Sets the logits of dropped experts to -inf as the router's linear map gives them."""

    def __init__(self, dropped: torch.Tensor) -> None:
        super().__init__()
        self.dropped = dropped
        self.masked = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.masked += 1
            return output.masked_fill(self.dropped, float("-inf"))
        return output


@contextmanager
def channel_masks(model: PreTrainedModel, layers: list[MoELayer], plan: Plan) -> Iterator[None]:
    """While open, channels of `layers` that `plan` does not keep are 0 before the down projection.

    Ids are the original ones.

    Models that run grouped_mm stay with it; others compute expert after expert, sorted once: what experts with all
    channels give is bit for bit that of the eager forward. RuntimeError when experts are called past the mask.
    """
    calls = {layer.index: _Call(layer, plan.channels[layer.index]) for layer in layers}
    with ExitStack() as undo:
        undo.enter_context(replaced_experts(model, layers, {index: call.compute for index, call in calls.items()}))
        for call in calls.values():
            undo.callback(call.layer.experts.register_forward_hook(call.check).remove)
        yield


class _Call:
    """One layer's experts function, which remembers that it ran."""

    def __init__(self, layer: MoELayer, mask: Mask) -> None:
        self.layer = layer
        grouped = experts_implementation(layer.experts) == "grouped_mm"
        self.function = (grouped_function if grouped else sorted_function)(layer, mask)
        self.ran = False

    def compute(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        self.ran = True
        return self.function(hidden, index, gates)

    def check(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        if not self.ran:
            raise RuntimeError(f"the mask is not in force: {self.layer.name} did not run the masked experts")
        self.ran = False


def sorted_function(layer: MoELayer, mask: Mask) -> ExpertsFunction:
    """The routed output (T, H) of experts whose channels outside `mask` (E, I) are 0, one expert after the other."""
    dropped = torch.from_numpy(~mask).to(layer.routing[0].tensor.device)
    kept = mask.sum(1).tolist()

    def compute(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = sort_by_expert(index, layer.n_experts)
        gates = weights[rows.token, rows.column, None]
        mixed = torch.zeros_like(hidden)
        for expert, part in rows.parts():
            if kept[expert]:
                token = rows.token[part]
                phi = intermediate(layer.experts, hidden[token], expert)
                if kept[expert] < layer.width:
                    phi = phi.masked_fill(dropped[expert], 0)  # not a product: Inf x 0 is NaN
                gated = output(layer.experts, phi, expert) * gates[part]
                mixed.index_add_(0, token, gated.to(mixed.dtype))
        return mixed

    return compute


def grouped_function(layer: MoELayer, mask: Mask) -> ExpertsFunction:
    """The same by transformers' grouped matrix products.

    They do not handle experts one by one, so the mask of each row's expert follows the activation.
    """
    dropped = torch.from_numpy(~mask).to(layer.routing[0].tensor.device)
    experts: Any = layer.experts

    def compute(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        activate = activation(experts)
        expert = index.reshape(-1).sort().values  # its order of rows

        def masked(gate_up: torch.Tensor) -> torch.Tensor:
            return activate(gate_up).masked_fill(dropped[expert], 0)

        with with_activation(experts, masked):
            mixed: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, index, weights)
            return mixed

    return compute
