"""Statistics that only MoE-Slimming's tables need (arXiv 2606.18304)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_lab.statistics.forward import EPSILON, ForwardHook
from moe_lab.statistics.gradients import LOSS_SCALE, GradientHook, WeightGradientHook
from moe_lab.statistics.observe import StatisticsHook, hidden_states

SCALE = 0.9
"""Factor of the outputs of the experts in the loss of the released code."""
DECAY = 0.9
"""Weight of the earlier batches in a moving average, as in the released code."""


class LayerLossHook(StatisticsHook):
    """Gives another hook the gradients of the loss L that the released code has for Table 13
    (Appendix C.3.1), in place of those of the model's loss. The paper does not name a loss.

    L is the relative error of one decoder layer when the outputs of its routed experts are
    multiplied by SCALE:

        L = sum over valid tokens of ||y' - y||^2 / (||y||^2 + EPSILON)

    y is the residual stream after the layer, and y' the stream with scaled experts. With the routed
    output m, y' - y = (SCALE - 1) m, so that the gradient with respect to m is known without a
    second forward pass, and nothing is propagated through other layers.
    """

    routed: torch.Tensor
    """The routed output m (T, H) of the last call, with its graph."""

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H)."""
        with torch.enable_grad():
            self.routed = super().experts(hidden.detach().requires_grad_(), index, weights)
        return self.routed.detach()

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Propagate the gradient of L back to the activations and weights of the experts."""
        stream = hidden_states(result).detach().double()
        routed = self.routed.detach().double()
        energy = stream.square().sum(-1, keepdim=True) + EPSILON
        gradient = LOSS_SCALE * 2 * SCALE * (SCALE - 1) * routed / energy
        ignored = self.ignored_tokens(routed)
        if ignored is not None:
            gradient[ignored] = 0
        self.routed.backward(gradient.to(self.routed.dtype))
        del self.routed


class ActivationHook(LayerLossHook, GradientHook):
    """Statistics of the gradients with respect to activations."""

    kind = "layer_loss_gradients"


class WeightHook(LayerLossHook, WeightGradientHook):
    """Statistics of the gradients with respect to weights."""

    kind = "layer_loss_weight_gradients"


class MovingAverageHook(ForwardHook):
    """Adds `moving_average` (2, E): the exponential moving average over batches (Section 4.1) of
    `ala_first` per valid token, and the number of batches in it. A batch counts for the experts
    that it uses, and the first of them as it is."""

    kind = "moving_averages"
    tokens: torch.Tensor
    """(E,): number of valid tokens of each expert in the batch."""

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add a batch, of which `sums` has the statistics of `ForwardHook`."""
        if "ala_first" not in sums:
            self.tokens = sums["tokens"]
            return
        valid = self.observer.valid
        assert valid is not None
        value = sums["ala_first"].double() / valid.sum()
        start = torch.zeros(2, len(value), dtype=torch.float64)
        average, batches = self.sums.get("moving_average", start).to(value.device)
        later = DECAY * average + (1 - DECAY) * value
        is_used = self.tokens > 0
        average = torch.where(is_used, torch.where(batches > 0, later, value), average)
        self.sums["moving_average"] = torch.stack([average, batches + is_used])
