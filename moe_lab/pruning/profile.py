"""Statistics of a forward pass by layer: variance of hidden states, entropies of routing, loss of
routed outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers, routed_layers
from moe_lab.models.experts import run
from moe_lab.pruning.mask import mask, mask_layers
from moe_lab.pruning.plan import Plan
from moe_lab.statistics.forward import EPSILON
from moe_lab.statistics.observe import Batch


def profile(
    model: PreTrainedModel, plan: Plan | None, batches: Sequence[Batch]
) -> list[tuple[Any, ...]]:
    """Rows of `results.PROFILES`, one per decoder layer, for `model` under `plan` (None: unpruned)
    over `batches`. This takes one forward pass. With a plan, a second pass of the unpruned model
    measures the output losses; without a plan they are NaN. UserError when the plan does not fit,
    and when hidden states are not finite (naming the layer)."""
    routed = {layer.index: layer for layer in routed_layers(model)}
    # `stack`: path of the list of all decoder layers
    modules = list(model.get_submodule(next(iter(routed.values())).stack).children())
    layers = [_Sums(index, routed.get(index)) for index in range(len(modules))]
    with mask(model, plan) if plan is not None else nullcontext(), ExitStack() as hooks:
        for layer, module in zip(layers, modules, strict=True):
            hooks.callback(module.register_forward_hook(layer.after_layer).remove)
            if layer.moe is not None:
                hooks.callback(layer.moe.router.register_forward_hook(layer.after_router).remove)
        _run(model, batches, layers)
    losses = output_losses(model, plan, batches) if plan is not None else {}
    return [(*layer.row(), losses.get(layer.index, float("nan"))) for layer in layers]


def output_losses(model: PreTrainedModel, plan: Plan, batches: Sequence[Batch]) -> dict[int, float]:
    """MoE layer -> its output_loss (see `results.PROFILES`) if `plan` is applied to this layer
    alone."""
    losses = [_Loss(model, layer, plan) for layer in moe_layers(model)]
    with ExitStack() as hooks:
        for loss in losses:
            decoder_layer = model.get_submodule(f"{loss.layer.stack}.{loss.layer.index}")
            hooks.callback(loss.layer.experts.register_forward_hook(loss.after_experts).remove)
            hooks.callback(
                loss.layer.block.register_forward_hook(loss.after_block, with_kwargs=True).remove
            )
            hooks.callback(decoder_layer.register_forward_hook(loss.after_layer).remove)
        _run(model, batches, losses)
    return {loss.layer.index: loss.total / loss.tokens for loss in losses}


def _run(
    model: PreTrainedModel, batches: Sequence[Batch], observers: Sequence[_Sums] | Sequence[_Loss]
) -> None:
    """Run the model on each batch. Before each run, set the attribute `valid` (B * S,) of every
    observer to the mask of the tokens of the batch that count."""
    for ids, valid in batches:
        for observer in observers:
            observer.valid = valid.flatten()
        with torch.no_grad():
            run(model, ids, valid)


def _hidden(output: Any) -> torch.Tensor:
    """The hidden states (T, H) in the output of a layer or of its experts."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states.flatten(0, -2)


class _Loss:
    """The output loss of one layer, which is masked by `plan` alone. Hooks run the MoE block a
    second time under the mask, and sum the relative squared error of the routed output over
    tokens."""

    valid: torch.Tensor
    total = 0.0
    tokens = 0

    def __init__(self, model: PreTrainedModel, layer: MoELayer, plan: Plan) -> None:
        """`layer`: the only layer that is masked, by its part of `plan`."""
        self.model = model
        self.layer = layer
        self.plan = plan

    def after_experts(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the routed output (T, H)."""
        self.routed = _hidden(output)

    def after_block(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        """Run the block again on the same input under the mask. Record the squared difference (T,)
        of the routed outputs without and with the mask."""
        unmasked = self.routed
        with mask_layers([self.layer], self.plan):
            # sets `routed` again; module() instead of forward() would call this hook again
            module.forward(*inputs, **keywords)
        self.square_error = (unmasked.double() - self.routed.double()).square().sum(-1)

    def after_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the squared errors of all valid tokens, each divided by the squared norm of the
        residual stream after the layer."""
        stream = _hidden(output).double()
        valid = self.valid.to(stream.device)
        error = self.square_error.to(stream.device) / (stream.square().sum(-1) + EPSILON)
        self.total += float(error[valid].sum())
        self.tokens += int(valid.sum())


class _Sums:
    """Sums over the valid tokens of a decoder layer, in fp64: hidden states (H,) and their squares,
    entropies of the router's logits and gates, and `load` (E,), the tokens routed to each
    expert."""

    valid: torch.Tensor
    states: Any = 0
    squares: Any = 0
    load: Any = 0
    router_entropy = gate_entropy = 0.0
    tokens = n_experts = 0

    def __init__(self, index: int, moe: MoELayer | None) -> None:
        self.index = index
        self.moe = moe

    def after_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the hidden states after the layer, their squares and their number to the sums."""
        hidden = _hidden(output)
        states = hidden[self.valid.to(hidden.device)].double()
        self.states = self.states + states.sum(0).cpu()
        self.squares = self.squares + states.square().sum(0).cpu()
        self.tokens += len(states)

    def after_router(
        self, module: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]
    ) -> None:
        """Add the entropies of the softmax of the router's logits (T, E) and of its normalised
        gates (T, K) to the sums, and count the chosen experts (T, K)."""
        assert self.moe is not None
        logits, gates, chosen = (part.detach().flatten(0, -2) for part in output)
        logits = logits.double()
        gates = gates.double()
        valid = self.valid.to(logits.device)
        chosen = chosen[valid].flatten()
        self.load = self.load + torch.bincount(chosen, minlength=self.moe.n_experts).cpu()
        self.router_entropy += _entropy(logits[valid].softmax(-1))
        self.gate_entropy += _entropy(_shares(gates[valid]))
        self.n_experts = logits.shape[-1]

    def row(self) -> tuple[Any, ...]:
        """The row of the layer in `results.PROFILES`, without the last column (output_loss): NaN
        entropies and 0 experts for a layer without a router. UserError if a hidden state is not
        finite."""
        variance = float((self.squares / self.tokens - (self.states / self.tokens).square()).mean())
        if not math.isfinite(variance):
            raise UserError(f"NaN or Inf in layer {self.index}: its hidden states are not finite")
        if self.moe is None:
            return (self.index, variance, *(float("nan"),) * 3, 0)
        load_entropy = _entropy(_shares(self.load.double())[None])
        return (
            self.index,
            variance,
            self.router_entropy / self.tokens,
            self.gate_entropy / self.tokens,
            load_entropy,
            self.n_experts,
        )


def _shares(values: torch.Tensor) -> torch.Tensor:
    """The rows of `values`, each divided by its sum."""
    return values / values.sum(-1, keepdim=True)


def _entropy(shares: torch.Tensor) -> float:
    """The sum of the entropies of all rows, in nats."""
    return float(torch.special.entr(shares).sum())
