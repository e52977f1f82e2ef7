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
    """The rows of `results.PROFILES`, one for each decoder layer of `model`. The model is masked by
    `plan`. If `plan` is None, the column `output_loss` is NaN. UserError when the plan does not
    fit, or when hidden states are not finite."""
    routed = {layer.index: layer for layer in routed_layers(model)}
    # each layer has the same `stack`, the path of the list of decoder layers
    decoder_layers = list(model.get_submodule(next(iter(routed.values())).stack).children())
    observers = [_Sums(index, routed.get(index)) for index in range(len(decoder_layers))]
    with mask(model, plan) if plan is not None else nullcontext(), ExitStack() as hooks:
        for observer, module in zip(observers, decoder_layers, strict=True):
            hooks.callback(module.register_forward_hook(observer.after_layer).remove)
            if observer.moe is not None:
                hooks.callback(
                    observer.moe.router.register_forward_hook(observer.after_router).remove
                )
        _run(model, batches, observers)
    losses = output_losses(model, plan, batches) if plan is not None else {}
    return [(*observer.row(), losses.get(observer.index, float("nan"))) for observer in observers]


def output_losses(model: PreTrainedModel, plan: Plan, batches: Sequence[Batch]) -> dict[int, float]:
    """Number of each MoE layer -> relative squared error of the layer's output, mean over tokens,
    if `plan` masks this layer alone."""
    losses = [_Loss(layer, plan) for layer in moe_layers(model)]
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
    """Run the model on each batch, with the batch's mask (B * S,) of measured tokens as `valid` of
    every observer."""
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
    """Measures how much the routed output of one MoE layer changes if `plan` masks this layer
    alone. The error of a token is the squared distance between the outputs without and with the
    mask, divided by the squared norm of the token's hidden state after the decoder layer."""

    valid: torch.Tensor
    total = 0.0
    tokens = 0

    def __init__(self, layer: MoELayer, plan: Plan) -> None:
        self.layer = layer
        self.plan = plan

    def after_experts(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the routed output (T, H)."""
        self.routed = _hidden(output)

    def after_block(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        """Run the block again under the mask. Record the squared distance (T,) between the two
        routed outputs."""
        unmasked = self.routed
        with mask_layers([self.layer], self.plan):
            # `after_experts` records the masked output. module() would call this hook again.
            module.forward(*inputs, **keywords)
        self.square_error = (unmasked.double() - self.routed.double()).square().sum(-1)

    def after_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the error of each valid token to `total`."""
        stream = _hidden(output).double()
        valid = self.valid.to(stream.device)
        error = self.square_error.to(stream.device) / (stream.square().sum(-1) + EPSILON)
        self.total += float(error[valid].sum())
        self.tokens += int(valid.sum())


class _Sums:
    """Sums over the valid tokens of one decoder layer, in fp64. `states` (H,): the hidden states
    after the layer. `squares` (H,): the squares of these states. `router_entropy`: the entropy of
    the softmax of the router's logits. `gate_entropy`: the entropy of a token's K gates after
    division by their sum. `load` (E,): the number of tokens routed to each expert."""

    valid: torch.Tensor
    states: Any = 0
    squares: Any = 0
    load: Any = 0
    router_entropy = gate_entropy = 0.0
    tokens = n_experts = 0

    def __init__(self, index: int, moe: MoELayer | None) -> None:
        """`moe`: MoE layer of the decoder layer; None without routed experts."""
        self.index = index
        self.moe = moe

    def after_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the hidden states and their squares."""
        hidden = _hidden(output)
        states = hidden[self.valid.to(hidden.device)].double()
        self.states = self.states + states.sum(0).cpu()
        self.squares = self.squares + states.square().sum(0).cpu()
        self.tokens += len(states)

    def after_router(
        self, module: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]
    ) -> None:
        """Add the entropies and the load. `output`: (logits (T, E'), gates (T, K), ids of the
        chosen experts (T, K)). A mask makes E', the number of experts to choose from, smaller than
        E."""
        assert self.moe is not None
        logits, gates, chosen = (part.detach().flatten(0, -2) for part in output)
        logits = logits.double()
        gates = gates.double()
        valid = self.valid.to(logits.device)
        chosen = chosen[valid].flatten()
        self.load = self.load + torch.bincount(chosen, minlength=self.moe.n_experts).cpu()
        self.router_entropy += _total_entropy(logits[valid].softmax(-1))
        self.gate_entropy += _total_entropy(_normalized_rows(gates[valid]))
        self.n_experts = logits.shape[-1]  # E'

    def row(self) -> tuple[Any, ...]:
        """The row of the layer in `results.PROFILES`, without the last column, output_loss.
        UserError if a hidden state is not finite."""
        # mean over coordinates of the variance over tokens, mean(x^2) - mean(x)^2
        variance = float((self.squares / self.tokens - (self.states / self.tokens).square()).mean())
        if not math.isfinite(variance):
            raise UserError(f"NaN or Inf in layer {self.index}: its hidden states are not finite")
        if self.moe is None:
            return (self.index, variance, *(float("nan"),) * 3, 0)  # 3 entropies, 0 experts
        load_entropy = _total_entropy(_normalized_rows(self.load.double()[None]))
        return (
            self.index,
            variance,
            self.router_entropy / self.tokens,
            self.gate_entropy / self.tokens,
            load_entropy,
            self.n_experts,
        )


def _normalized_rows(values: torch.Tensor) -> torch.Tensor:
    return values / values.sum(-1, keepdim=True)


def _total_entropy(distributions: torch.Tensor) -> float:
    """The sum of the entropies of all rows, in nats."""
    return float(torch.special.entr(distributions).sum())
