"""Statistics of a forward pass by layer: variance of hidden states, and loss of routed outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
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
from moe_lab.statistics.observe import Batch, hidden_states


def profile(
    model: PreTrainedModel, plan: Plan | None, batches: Sequence[Batch]
) -> list[tuple[Any, ...]]:
    """The rows of `result_files.PROFILES`, one for each decoder layer of `model`. The model is
    masked by `plan`. If `plan` is None, the column `output_loss` is NaN. UserError when the plan
    does not fit, or when hidden states are not finite."""
    # each layer has the same `stack`, the path of the list of decoder layers
    decoder_layers = list(model.get_submodule(routed_layers(model)[0].stack).children())
    observers = [_Variance(index) for index in range(len(decoder_layers))]
    with mask(model, plan), ExitStack() as hooks:
        for observer, module in zip(observers, decoder_layers, strict=True):
            hooks.callback(module.register_forward_hook(observer.after_layer).remove)
        _run(model, batches, observers)
    losses = output_losses(model, plan, batches) if plan is not None else {}
    return [
        (observer.index, observer.mean(), losses.get(observer.index, float("nan")))
        for observer in observers
    ]


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
    model: PreTrainedModel,
    batches: Sequence[Batch],
    observers: Sequence[_Variance] | Sequence[_Loss],
) -> None:
    """Run the model on each batch, with the batch's mask (B * S,) of measured tokens as `valid` of
    every observer."""
    for ids, valid in batches:
        for observer in observers:
            observer.valid = valid.flatten()
        with torch.no_grad():
            run(model, ids, valid)


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
        self.routed = hidden_states(output)

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
        stream = hidden_states(output).double()
        valid = self.valid.to(stream.device)
        error = self.square_error.to(stream.device) / (stream.square().sum(-1) + EPSILON)
        self.total += float(error[valid].sum())
        self.tokens += int(valid.sum())


class _Variance:
    """Sum over the valid tokens of one decoder layer of the variance of a token's hidden state, in
    fp64."""

    valid: torch.Tensor
    total: Any = 0.0
    tokens = 0

    def __init__(self, index: int) -> None:
        self.index = index

    def after_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the variance over the coordinates of each token's hidden state (H,)."""
        hidden = hidden_states(output)
        states = hidden[self.valid.to(hidden.device)].double()
        self.total = self.total + states.var(dim=-1, correction=0).sum()
        self.tokens += len(states)

    def mean(self) -> float:
        """Mean over tokens of the variance over coordinates (AIMER, Appendix C). UserError if a
        hidden state is not finite."""
        mean = float(self.total) / self.tokens
        if not math.isfinite(mean):
            raise UserError(f"NaN or Inf in layer {self.index}: its hidden states are not finite")
        return mean
