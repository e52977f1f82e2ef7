"""Budgets of layers that follow a rule: the same share, a U over the depth, or the layer's measured loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy

from moe_lab.allocation.problem import Array, Budgets, Channels, Evidence, Experts, apportion, budget, measured
from moe_lab.allocation.ranking import best
from moe_lab.allocation.smoothing import Smoothing, smooth
from moe_lab.errors import UserError

LayerLoss: TypeAlias = Literal["loss", "nll"]
LAYER_LOSSES: Mapping[str, tuple[str, str]] = {"loss": ("statistics", "layer_loss"), "nll": ("scaling", "scaling")}
"""How a layer's loss is measured -> the step that measures it, and the name of the number."""


def u_shaped_experts(problem: Experts, *, beta: float = 0.02, floor: float = 0.1) -> dict[int, int]:
    """Layer -> experts to remove: the first and last layers keep more, as `u_shape`."""
    return _experts(problem, u_shape(len(problem.limits), 1 - problem.ratio, beta, floor))


def loss_based_experts(
    problem: Experts, *, layer_prior: LayerLoss = "loss", smoothing: Smoothing = "sqrt"
) -> dict[int, int]:
    """Layer -> experts to remove: layers keep in proportion to their smoothed loss."""
    return _experts(problem, smooth(layer_losses(problem.evidence, problem.limits, layer_prior), smoothing))


def u_shaped_channels(problem: Channels, *, beta: float = 0.02, floor: float = 0.1) -> Budgets:
    """Layer budgets as `u_shape`; the best channels of each layer stay."""
    return _channels(problem, u_shape(len(problem.scores), 1 - problem.ratio, beta, floor))


def loss_based_channels(
    problem: Channels, *, layer_prior: LayerLoss = "loss", smoothing: Smoothing = "sqrt"
) -> Budgets:
    """Layer budgets in proportion to the smoothed layer loss; the best channels of each layer stay."""
    return _channels(problem, smooth(layer_losses(problem.evidence, problem.scores, layer_prior), smoothing))


def layerwise(problem: Channels) -> Budgets:
    """HEAPr-L: every layer loses the same share, its lowest channels whichever expert they are of."""
    return _channels(problem, numpy.ones(len(problem.scores)))


def u_shape(layers: int, keep: float, beta: float, floor: float) -> Array:
    """Relative kept share of each MoE layer (L,): max(floor, keep (1 + beta z)), z the standardised (x - 1/2)^2 at
    depth x = i / (L - 1). Equal shares when the depth cannot tell layers apart (L < 3)."""
    if not 0 < floor < 1:
        raise UserError(f"allocation.parameters.floor={floor}: expected a share between 0 and 1, such as 0.1")
    bend = (numpy.linspace(0, 1, layers) - 0.5) ** 2
    spread = bend.std()
    standardised = (bend - bend.mean()) / spread if spread > 1e-12 else numpy.zeros(layers)
    shares: Array = numpy.maximum(floor, keep * (1 + beta * standardised))
    return shares


def layer_losses(evidence: Evidence, layers: Iterable[int], prior: LayerLoss) -> Array:
    """The loss of each layer (L,), >= 0. UserError unless one is above 0.

    loss  sum_t ||m||^2 / (||y||^2 + eps), m the routed output and y the residual stream after the layer: MoE-Slimming's
          released code, up to a factor
    nll   rise of the language model's loss when m is scaled in that layer alone, a fall counting as 0: its Appendix A.1
    """
    need, name = LAYER_LOSSES[prior]
    losses: Array = numpy.array([float(measured(evidence, need, layer, name, ())) for layer in layers])
    if prior == "nll":
        losses = numpy.maximum(losses, 0)
    if (losses < 0).any() or not losses.any():
        raise UserError(f"{name} is {losses.tolist()}: expected numbers of which none is below and one above 0")
    return losses


def loss_needs(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """The step that measures the layer losses of loss_based."""
    return (LAYER_LOSSES[parameters.get("layer_prior", "loss")][0],)


def layer_budgets(problem: Channels, shares: Array) -> dict[int, int]:
    """Layer -> channels it keeps, in proportion to share * size, all together `problem.keep` to the channel."""
    kept = apportion(shares * problem.sizes, problem.keep, 0, problem.sizes)
    return dict(zip(problem.scores, kept.tolist(), strict=True))


def _experts(problem: Experts, shares: Array) -> dict[int, int]:
    limits = problem.limits.values()
    count = numpy.array([limit.count for limit in limits])
    kept = apportion(
        shares * count,
        int(count.sum()) - budget(problem.limits, problem.ratio),
        [limit.smallest for limit in limits],
        [limit.largest for limit in limits],
        [limit.step for limit in limits],
    )
    return dict(zip(problem.limits, (count - kept).tolist(), strict=True))


def _channels(problem: Channels, shares: Array) -> Budgets:
    kept = layer_budgets(problem, shares)
    return {layer: best(scores, kept[layer]) for layer, scores in problem.scores.items()}
