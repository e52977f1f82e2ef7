"""Statistics of a forward pass by layer: variance of hidden states, entropies of routing, loss of routed outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers, routed_layers
from moe_lab.models.partial_forward import run
from moe_lab.pruning.mask import mask, mask_layers
from moe_lab.pruning.plan import Plan
from moe_lab.statistics.forward import EPSILON
from moe_lab.statistics.observe import Batch


def profile(model: PreTrainedModel, plan: Plan | None, batches: Sequence[Batch]) -> list[tuple[Any, ...]]:
    """Rows of `results.PROFILES`, one per decoder layer, of `model` under `plan` (None: unpruned) over `batches`.

    Takes one forward pass, and with a plan one of the unpruned model for the output losses. Raises UserError when there
    are no batches, when the plan does not fit, and when hidden states are not finite (naming the layer).
    """
    if not batches:
        raise UserError("profile: no batches to read, expected at least one")
    routed = routed_layers(model)
    seen = _Seen()
    masked = mask(model, plan) if plan is not None else nullcontext()
    with masked, torch.no_grad(), ExitStack() as hooks:
        for index, layer in enumerate(model.get_submodule(routed[0].stack).children()):
            hooks.callback(layer.register_forward_hook(partial(seen.stream, index)).remove)
        for moe_layer in routed:
            hooks.callback(moe_layer.router.register_forward_hook(partial(seen.routed, moe_layer)).remove)
        for ids, valid in batches:
            seen.valid = valid.flatten()
            run(model, ids, valid)
    losses = output_losses(model, plan, batches) if plan is not None else {}
    return [(*row, losses.get(row[0], float("nan"))) for row in seen.rows()]


def output_losses(model: PreTrainedModel, plan: Plan, batches: Sequence[Batch]) -> dict[int, float]:
    """MoE layer -> output_loss (see `results.PROFILES`) of `plan` in that layer alone."""
    losses = [_Loss(model, layer, plan) for layer in moe_layers(model)]
    with torch.no_grad(), ExitStack() as hooks:
        for loss in losses:
            around = model.get_submodule(f"{loss.layer.stack}.{loss.layer.index}")
            hooks.callback(loss.layer.experts.register_forward_hook(loss.after_experts).remove)
            hooks.callback(loss.layer.block.register_forward_hook(loss.after_block, with_kwargs=True).remove)
            hooks.callback(around.register_forward_hook(loss.after_layer).remove)
        for ids, valid in batches:
            for loss in losses:
                loss.valid = valid.flatten()
            run(model, ids, valid)
    return {loss.layer.index: loss.total / loss.tokens for loss in losses}


class _Loss:
    """Runs the MoE block of one layer a second time under the mask, and sums the squared error of its routed output."""

    def __init__(self, model: PreTrainedModel, layer: MoELayer, plan: Plan) -> None:
        self.model, self.layer, self.plan = model, layer, plan
        self.valid = torch.zeros(0, dtype=torch.bool)
        self.again = False
        self.total, self.tokens = 0.0, 0

    def after_experts(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the routed output (T, H)."""
        self.routed = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)

    def after_block(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        """Run the block again on the same input under the mask, and compare."""
        if self.again:  # this is the call under the mask, below
            return
        whole, self.again = self.routed, True
        with mask_layers(self.model, [self.layer], self.plan):
            module(*inputs, **named)
        self.again = False
        self.off = (whole.double() - self.routed.double()).square().sum(-1)

    def after_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the error relative to the residual stream (B, S, H) after the layer."""
        stream = (output[0] if isinstance(output, tuple) else output).flatten(0, -2).double()
        valid = self.valid.to(stream.device)
        off = self.off.to(stream.device) / (stream.square().sum(-1) + EPSILON)
        self.total += float(off[valid].sum())
        self.tokens += int(valid.sum())


class _Seen:
    """Sums over the valid tokens, in fp64, of each layer's hidden states and of the entropies of its router."""

    def __init__(self) -> None:
        self.valid = torch.zeros(0, dtype=torch.bool)
        self.load: dict[int, torch.Tensor] = {}
        """MoE layer -> (E,): the tokens routed to each expert."""
        self.tokens: dict[int, int] = {}
        self.sums: dict[int, torch.Tensor] = {}
        self.squares: dict[int, torch.Tensor] = {}
        self.entropies: dict[int, tuple[float, float, int]] = {}

    def stream(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the residual stream (B, S, H) after a decoder layer."""
        hidden = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)
        valid = hidden[self.valid.to(hidden.device)].double()
        for sums, part in ((self.sums, valid.sum(0)), (self.squares, valid.square().sum(0))):
            sums[layer] = sums.get(layer, 0) + part.cpu()
        self.tokens[layer] = self.tokens.get(layer, 0) + len(valid)

    def routed(self, layer: MoELayer, module: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        """Add the entropies of a router's logits (T, E) and gates (T, K), and count its choices (T, K)."""
        logits, gates = (part.detach().flatten(0, -2).double() for part in output[:2])
        valid = self.valid.to(logits.device)
        chosen = output[2].flatten(0, -2)[valid].flatten()
        load = torch.bincount(chosen, minlength=layer.n_experts).cpu()
        self.load[layer.index] = self.load.get(layer.index, torch.zeros_like(load)) + load
        sums = self.entropies.get(layer.index, (0.0, 0.0, 0))
        entropies = (_entropy(logits[valid].softmax(-1)), _entropy(_shares(gates[valid])))
        self.entropies[layer.index] = (sums[0] + entropies[0], sums[1] + entropies[1], logits.shape[-1])

    def rows(self) -> list[tuple[Any, ...]]:
        """A row per layer, without the last column (output_loss)."""
        return [(layer, self._variance(layer), *self._routing(layer)) for layer in sorted(self.sums)]

    def _variance(self, layer: int) -> float:
        count = self.tokens[layer]
        value = float((self.squares[layer] / count - (self.sums[layer] / count).square()).mean())
        if not torch.isfinite(torch.tensor(value)):
            raise UserError(f"NaN or Inf in layer {layer}: its hidden states are not finite")
        return value

    def _routing(self, layer: int) -> tuple[float, float, float, int]:
        if layer not in self.entropies:
            return (float("nan"),) * 3 + (0,)
        router, gate, experts = self.entropies[layer]
        count = self.tokens[layer]
        return router / count, gate / count, _entropy(_shares(self.load[layer].double())[None]), experts


def _shares(values: torch.Tensor) -> torch.Tensor:
    return values / values.sum(-1, keepdim=True)


def _entropy(shares: torch.Tensor) -> float:
    """The sum over rows of the entropy of each, in nats."""
    return float(torch.special.entr(shares).sum())
