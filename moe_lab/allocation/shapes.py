"""Allocations by a rule: the same share, one ranking over all layers, a U over the depth, or the
loss of each layer.

Also the enumeration of the subsets of experts that a layer can retain at a given share, which
allocation=reconstruction (NAEE) searches. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, combinations, product
from math import comb, prod
from typing import Annotated, Any, Literal, TypeAlias

import numpy
from pydantic import Field, Strict

from moe_lab.allocation.problem import (
    Array,
    Budgets,
    Channels,
    Evidence,
    Experts,
    Limits,
    RatioTooLarge,
    RatioTooSmall,
    budget,
    check_ratio,
    flag_highest,
    limits,
    measurement,
    or_suggest_ratio,
    round_down,
)
from moe_lab.errors import UserError

Smoothing: TypeAlias = Literal["sqrt", "log", "huber", "clip", "none"]
Floor: TypeAlias = Annotated[float, Strict(), Field(gt=0, lt=1)]
LayerLoss: TypeAlias = Literal["loss", "nll"]
LAYER_LOSSES: Mapping[str, tuple[str, str]] = {
    "loss": ("statistics", "layer_loss"),
    "nll": ("scaling", "scaling"),
}
"""Value of layer_prior -> (the step that measures this loss of each layer, the name of the loss
among the step's results)."""
LIMIT = 10_000
"""Largest number of subsets per layer that are tried by default."""


def uniform_experts(problem: Experts) -> dict[int, int]:
    """Layer -> number of experts to remove: the same share of each layer."""
    return same_share(problem.limits, problem.ratio)


def same_share(layers: Mapping[int, Limits], ratio: float) -> dict[int, int]:
    """Layer -> number of experts to remove: int(n * ratio) of n experts, which is the papers' rule,
    or the next smaller number that the limits of the layer allow. `layers`: layer -> limits.
    RatioTooLarge or RatioTooSmall when the limits of a layer allow no such number."""
    check_ratio(ratio)
    removed = {}
    for layer, limit in layers.items():
        retained = limit.retained_at(ratio)
        if retained < limit.fewest:
            raise RatioTooLarge(
                f"retains {retained} of {limit.count} experts in layer {layer}, but its router "
                f"(top_k={limit.top_k}) and allocation.protect need at least {limit.fewest}"
            )
        if retained > limit.count:
            raise RatioTooSmall(
                f"retains {limit.count - int(limit.count * ratio)} of {limit.count} experts in "
                f"layer {layer}, and a multiple of {limit.step} is at most {limit.largest}"
            )
        removed[layer] = limit.count - retained
    return removed


def uniform_channels(problem: Channels) -> Budgets:
    """Layer -> number of channels that each expert retains (E,): int(I * (1 - ratio)) of I for
    every expert. RatioTooLarge when this number is 0."""
    budgets = {}
    for layer, scores in problem.scores.items():
        count, width = scores.shape
        retained = round_down(width * (1 - problem.ratio))
        if not retained:
            raise RatioTooLarge(
                f"retains no channel of {width} in the experts of layer {layer} with "
                "allocation=uniform"
            )
        budgets[layer] = numpy.full(count, retained, dtype=numpy.int64)
    return budgets


def u_shaped(
    problem: Experts | Channels, *, beta: float = 0.02, floor: Floor = 0.1
) -> dict[int, Any]:
    """Layer -> number of experts to remove, or of channels that each expert retains (E,). Each
    layer retains in proportion to `u_shape`, with its `beta` and `floor`. If `beta` is above 0,
    this is largest for the first and the last layer."""
    return problem.in_proportion(u_shape(len(problem.scores), 1 - problem.ratio, beta, floor))


def loss_based(
    problem: Experts | Channels, *, layer_prior: LayerLoss = "loss", smoothing: Smoothing = "sqrt"
) -> dict[int, Any]:
    """Layer -> number of experts to remove, or of channels that each expert retains (E,). Each
    layer retains in proportion to its loss, the loss that `layer_prior` names in `layer_losses`,
    smoothed by the function that `smoothing` names in `smooth`."""
    losses = layer_losses(problem.evidence, problem.scores.keys(), layer_prior)
    return problem.in_proportion(smooth(losses, smoothing))


def layerwise(problem: Channels) -> Budgets:
    """Layer -> number of channels that each expert retains (E,), by HEAPr-L. Every layer loses the
    same share of its channels: those with the lowest scores among all experts of the layer."""
    return problem.in_proportion(numpy.ones(len(problem.scores)))


def global_channels(problem: Channels) -> Budgets:
    """Layer -> number of channels that each expert retains (E,), by HEAPr-G: one threshold for the
    scores of all channels of the model. An expert may retain no channel."""
    pooled = numpy.concatenate([scores.ravel() for scores in problem.scores.values()])
    flags = flag_highest(pooled, problem.keep)
    parts = numpy.split(flags, numpy.cumsum(problem.sizes)[:-1])
    budgets = {}
    for (layer, scores), part in zip(problem.scores.items(), parts, strict=True):
        budgets[layer] = part.reshape(scores.shape).sum(axis=1)
    return budgets


def global_experts(problem: Experts) -> dict[int, int]:
    """Layer -> number of experts to remove, by one threshold over the experts of all layers
    (EvoESAP, Fig. 1).

    Experts are ranked by evidence["by"], the scores of another criterion. Without such scores they
    are ranked by `scores`. If `multiple_of` or a group-limited router only lets a layer lose
    several experts at once, such steps are ranked by their mean score. When the steps of layers
    differ in size, the sum may be below the budget by less than the largest step.
    """
    ranking_scores = problem.evidence.get("by", problem.scores)
    # first what each layer must lose, so that a multiple of its step remains
    removed = {layer: limit.count - limit.largest for layer, limit in problem.limits.items()}
    remaining = budget(problem.limits, problem.ratio) - sum(removed.values())
    for _mean, layer, _number in sorted(_steps(problem, ranking_scores)):
        limit = problem.limits[layer]
        if limit.step <= remaining and limit.count - removed[layer] - limit.step >= limit.smallest:
            removed[layer] += limit.step
            remaining -= limit.step
    return removed


def _steps(problem: Experts, ranking_scores: Mapping[int, Array]) -> list[tuple[float, int, int]]:
    """(mean score, layer, number of the step in its layer) of every step of every layer. A step is
    a set of experts that the layer can only lose together: equally many from each group of the
    router. Steps are numbered by ascending score. Experts that the layer must lose, so that a
    multiple of the step remains, belong to no step."""
    steps = []
    for layer, limit in problem.limits.items():
        scores = numpy.array(ranking_scores[layer], dtype=numpy.float64)
        scores[list(problem.protected.get(layer, ()))] = numpy.inf
        forced = (limit.count - limit.largest) // limit.n_group  # experts each group must lose
        rows = numpy.sort(scores.reshape(limit.n_group, -1), axis=1)[:, forced:]
        means = rows.reshape(limit.n_group, -1, limit.step // limit.n_group).mean(axis=(0, 2))
        steps += [(float(mean), layer, number) for number, mean in enumerate(means)]
    return steps


def u_shape(layers: int, retained_share: float, beta: float, floor: float) -> Array:
    """Relative share that each MoE layer retains (L,): max(floor, retained_share (1 + beta z)).
    Here z is the standardised (x - 1/2)^2 at depth x = i / (L - 1), and L is `layers`, the number
    of MoE layers. The shares are equal for L < 3, where (x - 1/2)^2 is the same in all layers."""
    bend = (numpy.linspace(0, 1, layers) - 0.5) ** 2
    deviation = bend.std()
    standardised = (bend - bend.mean()) / deviation if deviation > 1e-12 else numpy.zeros(layers)
    shares: Array = numpy.maximum(floor, retained_share * (1 + beta * standardised))
    return shares


def layer_losses(evidence: Evidence, layers: Iterable[int], prior: LayerLoss) -> Array:
    """The loss of each of `layers` (L,), >= 0. UserError when a loss is missing or negative, or all
    losses are 0. `prior` names the loss; m is the routed output of the layer:

    loss  sum_t ||m||^2 / (||y||^2 + eps), where y is the residual stream after the layer; equal to
          MoE-Slimming's released code, up to a factor
    nll   rise of the language model's loss when m is multiplied by 0.9 in that layer alone
          (Appendix A.1); 0 if the loss falls
    """
    step, name = LAYER_LOSSES[prior]
    losses: Array = numpy.array(
        [float(measurement(evidence, step, layer, name)) for layer in layers]
    )
    if prior == "nll":
        losses = numpy.maximum(losses, 0)
    if (losses < 0).any() or not losses.any():
        raise UserError(
            f"{name} is {losses.tolist()}: expected numbers >= 0, at least one of them above 0"
        )
    return losses


def loss_needs(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Name of the step that measures the layer losses which `parameters` choose, as a tuple of one
    name."""
    step, _name = LAYER_LOSSES[parameters.get("layer_prior", "loss")]
    return (step,)


def smooth(values: Array, name: Smoothing) -> Array:
    """Smoothed `values` >= 0, (n,): g(x) for x = values / mean(values). A result below 1e-6 of the
    sum of all results is raised to that number, so that no result is zero. If all values are zero,
    all results are 1. `name` chooses g; mean and std are those of x, std of the population:

    sqrt   x^(1/2), as in MoE-Slimming's paper; its code takes four roots, with clipping
    log    ln(1 + 5x)
    huber  x up to d = mean + std/2, above it d + (d (x - d))^(1/2)
    clip   x within mean +- std/2
    none   x
    """
    total = values.sum()
    if total <= 0:
        return numpy.ones_like(values)
    smoothed = FUNCTIONS[name](values * (len(values) / total))
    clamped: Array = numpy.maximum(smoothed, 1e-6 * smoothed.sum())
    return clamped


def _huber(x: Array) -> Array:
    """The function g called huber in `smooth`."""
    delta = x.mean() + 0.5 * x.std()
    return numpy.where(x <= delta, x, delta + numpy.sqrt(delta * numpy.maximum(x - delta, 0)))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sqrt": numpy.sqrt,
    "log": lambda x: numpy.log1p(5 * x),
    "huber": _huber,
    "clip": lambda x: numpy.clip(x, x.mean() - 0.5 * x.std(), x.mean() + 0.5 * x.std()),
    "none": numpy.asarray,
}


def removals_within_limit(
    layers: Mapping[int, Mapping[str, Any]],
    ratio: float,
    *,
    limit: int = LIMIT,
    multiple_of: int = 1,
) -> dict[int, int]:
    """Layer -> number of experts that it loses, the same share in all layers. `layers`: layer ->
    facts. UserError, with the nearest feasible ratio, if `ratio` is infeasible, or if a layer has
    more than `limit` choices of the experts that it loses."""
    layer_limits = limits(layers, multiple_of)

    def decide(ratio: float) -> dict[int, int]:
        """Layer -> number of experts to remove at `ratio`. RatioTooLarge if a layer has more than
        `limit` choices."""
        removed = same_share(layer_limits, ratio)
        for layer, facts in layers.items():
            n_experts = facts["n_experts"]
            protected = facts.get("protected", ())
            choices = count_subsets(n_experts, removed[layer], facts["n_group"], protected)
            if choices > limit:
                raise RatioTooLarge(
                    f"allocation=reconstruction tries {choices:.4g} choices of {removed[layer]} "
                    f"out of {n_experts} experts in layer {layer}, more than "
                    f"allocation.parameters.limit={limit}"
                )
        return removed

    return or_suggest_ratio(decide, ratio)


def count_subsets(
    n_experts: int, removed: int, n_group: int = 1, protected: Collection[int] = ()
) -> int:
    """Number of ways to remove `removed` of `n_experts` experts, equally many from each of
    `n_group` groups of adjacent experts, and no expert in `protected`."""
    return prod(
        comb(len(group), removed // n_group) for group in _groups(n_experts, n_group, protected)
    )


def _groups(n_experts: int, n_group: int, protected: Collection[int]) -> list[list[int]]:
    """For each group, the ids of its experts that are not `protected`."""
    size = n_experts // n_group
    groups = [range(first, first + size) for first in range(0, n_experts, size)]
    return [[expert for expert in group if expert not in protected] for group in groups]


def retained_subsets(
    n_experts: int, removed: int, n_group: int = 1, protected: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """For each choice that `count_subsets` counts, the ids of the retained experts, ascending. The
    first choice drops the lowest ids."""
    groups = _groups(n_experts, n_group, protected)
    subsets = []
    for choice in product(*(combinations(group, removed // n_group) for group in groups)):
        dropped = set(chain.from_iterable(choice))
        subsets.append(tuple(expert for expert in range(n_experts) if expert not in dropped))
    return subsets
