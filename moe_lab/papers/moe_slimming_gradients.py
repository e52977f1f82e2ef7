"""Gradients of the loss that MoE-Slimming's released code has for its Table 13 (arXiv 2606.18304,
Appendix C.3.1). The paper does not name a loss.

It is the relative error of one decoder layer when the outputs of its routed experts are multiplied
by SCALE:

    L = sum over valid tokens of ||y' - y||^2 / (||y||^2 + EPSILON)

y is the residual stream after the layer, and y' the stream with scaled experts. With the routed
output m, y' - y = (SCALE - 1) m, so that the gradient with respect to m is known without a second
forward pass, and nothing is propagated through other layers.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_lab.statistics.forward import EPSILON
from moe_lab.statistics.gradients import LOSS_SCALE, GradientHook, WeightGradientHook
from moe_lab.statistics.observe import StatisticsHook

SCALE = 0.9


class LayerLossHook(StatisticsHook):
    """Gives another hook the gradients of L in place of those of the model's loss."""

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
        stream = (result[0] if isinstance(result, tuple) else result).detach().flatten(0, -2)
        routed = self.routed.detach().to(torch.float64)
        energy = stream.to(torch.float64).square().sum(-1, keepdim=True) + EPSILON
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
