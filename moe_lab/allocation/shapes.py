"""Allocations by a rule: the same share, one ranking over all layers, a U over the depth, or the
loss of each layer.

Also the enumeration of the subsets of experts that allocation=reconstruction (NAEE) searches. No
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, combinations, product
from math import comb, prod
from typing import Annotated, Any, Literal, TypeAlias

import numpy
from pydantic import AfterValidator, Field, Strict

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
    call_or_suggest_ratio,
    check_ratio,
    flag_highest,
    limits,
    measurement,
    round_down,
)
from moe_lab.errors import Registry, UserError

Smoothing: TypeAlias = Annotated[str, AfterValidator(lambda name: SMOOTHINGS.known(name))]
"""Name of a smoothing in `SMOOTHINGS`."""
Floor: TypeAlias = Annotated[float, Strict(), Field(gt=0, lt=1)]
LayerLoss: TypeAlias = Literal["loss", "nll"]
LAYER_LOSSES: Mapping[str, tuple[str, str]] = {
    "loss": ("statistics", "layer_loss"),
    "nll": ("scaling", "scaling"),
}
"""Value of layer_prior -> (the step that measures this loss, the name of the loss in its
results)."""
MAX_SUBSETS = 10_000
"""Largest number of subsets per layer that are tried by default."""


def uniform_experts(problem: Experts) -> dict[int, int]:
    """Layer -> number of experts to remove: the same share of the experts of each layer."""
    return same_share(problem.limits, problem.ratio)


def same_share(layers: Mapping[int, Limits], ratio: float) -> dict[int, int]:
    """Layer -> number of experts to remove: int(n * ratio) of n experts, or fewer so that a
    multiple of `Limits.step` is left. RatioTooLarge when a layer would retain too few experts,
    RatioTooSmall when it would retain more than it has."""
    check_ratio(ratio)
    removed = {}
    for layer, limit in layers.items():
        retained = limit.retained_at(ratio)
        if retained < limit.minimum_experts:
            raise RatioTooLarge(
                f"retains {retained} of {limit.n_experts} experts in layer {layer}, but its router "
                f"(top_k={limit.top_k}) and allocation.protect need at least "
                f"{limit.minimum_experts}"
            )
        if retained > limit.n_experts:
            raise RatioTooSmall(
                f"retains {limit.n_experts - int(limit.n_experts * ratio)} of {limit.n_experts} "
                f"experts in layer {layer}, and a multiple of {limit.step} is at most "
                f"{limit.largest}"
            )
        removed[layer] = limit.n_experts - retained
    return removed


def uniform_channels(problem: Channels) -> Budgets:
    """Layer -> number of channels that each expert retains (E,), the same for every expert.
    RatioTooLarge when this number is 0."""
    budgets = {}
    for layer, scores in problem.scores.items():
        n_experts, width = scores.shape
        retained = round_down(width * (1 - problem.ratio))
        if not retained:
            raise RatioTooLarge(
                f"retains no channel of {width} in the experts of layer {layer} with "
                "allocation=uniform"
            )
        budgets[layer] = numpy.full(n_experts, retained, dtype=numpy.int64)
    return budgets


def u_shaped(
    problem: Experts | Channels, *, beta: float = 0.02, floor: Floor = 0.1
) -> dict[int, Any]:
    """For `Experts`: layer -> number of experts to remove. For `Channels`: layer -> number of
    channels that each expert retains (E,). The share that a layer retains is proportional to its
    value of `u_shape`. beta, floor: see `u_shape`."""
    return problem.proportional_allocation(
        u_shape(len(problem.scores), 1 - problem.ratio, beta, floor)
    )


def loss_based(
    problem: Experts | Channels, *, layer_prior: LayerLoss = "loss", smoothing: Smoothing = "sqrt"
) -> dict[int, Any]:
    """For `Experts`: layer -> number of experts to remove. For `Channels`: layer -> number of
    channels that each expert retains (E,). The share that a layer retains is proportional to its
    smoothed loss. layer_prior: see `layer_losses`. smoothing: see `smooth`."""
    losses = layer_losses(problem.evidence, problem.scores.keys(), layer_prior)
    return problem.proportional_allocation(smooth(losses, smoothing))


def layerwise(problem: Channels) -> Budgets:
    """Layer -> number of channels that each expert retains (E,), by HEAPr-L. Every layer loses the
    same share of its channels, those with the lowest scores."""
    return problem.proportional_allocation(numpy.ones(len(problem.scores)))


def global_channels(problem: Channels) -> Budgets:
    """Layer -> number of channels that each expert retains (E,), by HEAPr-G. The channels with the
    lowest scores in all layers are removed."""
    pooled = numpy.concatenate([scores.ravel() for scores in problem.scores.values()])
    flags = flag_highest(pooled, problem.total_retained)
    parts = numpy.split(flags, numpy.cumsum(problem.layer_channels)[:-1])
    budgets = {}
    for (layer, scores), part in zip(problem.scores.items(), parts, strict=True):
        budgets[layer] = part.reshape(scores.shape).sum(axis=1)
    return budgets


def global_experts(problem: Experts) -> dict[int, int]:
    """Layer -> number of experts to remove. The experts with the lowest scores in all layers are
    removed (EvoESAP, Fig. 1).

    The scores are those of another criterion, evidence["by"], or, if there are none,
    problem.scores. Experts that a layer can only lose together are ranked by their mean score (see
    `_removal_steps`). If `limit.step` differs between layers, the total may be below the budget, by
    less than the largest `limit.step`.
    """
    ranking_scores = problem.evidence.get("by", problem.scores)
    # Every layer must lose these experts, so that a multiple of `limit.step` is left.
    removed = {layer: limit.n_experts - limit.largest for layer, limit in problem.limits.items()}
    remaining = budget(problem.limits, problem.ratio) - sum(removed.values())
    for _mean, layer, _number in sorted(_removal_steps(problem, ranking_scores)):
        limit = problem.limits[layer]
        removable = limit.n_experts - limit.smallest - removed[layer]
        if limit.step <= min(remaining, removable):
            removed[layer] += limit.step
            remaining -= limit.step
    return removed


def _removal_steps(
    problem: Experts, ranking_scores: Mapping[int, Array]
) -> list[tuple[float, int, int]]:
    """(mean score, layer, number of the step in the layer) for every removal step of every layer.

    A removal step is a set of `limit.step` experts that a layer can only lose together. It has
    equally many experts of each group of the router. The steps of a layer are numbered by ascending
    score.
    """
    steps = []
    for layer, limit in problem.limits.items():
        scores = numpy.array(ranking_scores[layer], dtype=numpy.float64)
        # Steps with protected experts come last, and the limits of the layer forbid these steps.
        scores[list(problem.protected.get(layer, ()))] = numpy.inf
        # number of experts that each group loses in any case: they belong to no step
        forced = (limit.n_experts - limit.largest) // limit.n_group
        group_scores = numpy.sort(scores.reshape(limit.n_group, -1), axis=1)[:, forced:]
        # (groups, steps, experts that a group loses in a step)
        by_step = group_scores.reshape(limit.n_group, -1, limit.step // limit.n_group)
        means = by_step.mean(axis=(0, 2))
        steps += [(float(mean), layer, number) for number, mean in enumerate(means)]
    return steps


def u_shape(n_layers: int, retained_share: float, beta: float, floor: float) -> Array:
    """Shares that L = `n_layers` MoE layers retain (L,), before they are scaled to the budget:
    max(floor, retained_share * (1 + beta * z)).

    z is (x - 1/2)^2, standardised over the layers to mean 0 and standard deviation 1. x is the
    depth of a layer, from 0 to 1.
    """
    curve = (numpy.linspace(0, 1, n_layers) - 0.5) ** 2
    deviation = curve.std()
    z = (curve - curve.mean()) / deviation if deviation > 1e-12 else numpy.zeros(n_layers)
    shares: Array = numpy.maximum(floor, retained_share * (1 + beta * z))
    return shares


def layer_losses(evidence: Evidence, layers: Iterable[int], prior: LayerLoss) -> Array:
    """The losses (L,) of the L `layers`, all >= 0. UserError when a loss is missing or negative, or
    all losses are 0.

    `prior` names the loss. For each token t, m is the sum of the gated outputs of the layer's
    routed experts, and y is the residual stream after the layer:

    loss  sum over t of ||m||^2 / (||y||^2 + eps) (MoE-Slimming's released code)
    nll   rise of the language model's loss when m is multiplied by 0.9 in this layer alone
          (MoE-Slimming, Appendix A.1)
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


def layer_loss_steps(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the steps that measure the losses of layers. `parameters`: parameters of the
    allocation."""
    step, _name = LAYER_LOSSES[parameters.get("layer_prior", "loss")]
    return (step,)


def smooth(values: Array, name: Smoothing) -> Array:
    """The smoothed `values` (n,), which are >= 0: g(x), where x = values / mean(values). Results
    are raised to 1e-6 times the sum of g(x), so that none is 0. `name` chooses g. mean and std are
    those of x:

    sqrt   x^(1/2), as in MoE-Slimming's paper
    log    ln(1 + 5x)
    huber  x if x <= d, otherwise d + (d (x - d))^(1/2), where d = mean + std/2
    clip   x clipped to [mean - std/2, mean + std/2]
    none   x

    moe_lab.papers.moe_slimming has the forms of the released code.
    """
    mean = values.mean()
    if mean <= 0:
        return numpy.ones_like(values)
    smoothed = SMOOTHINGS[name](values / mean, mean)
    clamped: Array = numpy.maximum(smoothed, 1e-6 * smoothed.sum())
    return clamped


def _huber(x: Array, _mean: float) -> Array:
    """x (n,) where x <= d, otherwise d + sqrt(d (x - d)), where d = mean(x) + std(x) / 2."""
    d = x.mean() + 0.5 * x.std()
    # `where` also evaluates the root for x <= d: `maximum` avoids roots of negative numbers there
    return numpy.where(x <= d, x, d + numpy.sqrt(d * numpy.maximum(x - d, 0)))


def _clip(x: Array, _mean: float) -> Array:
    """x (n,), clipped to [mean(x) - std(x) / 2, mean(x) + std(x) / 2]."""
    return numpy.clip(x, x.mean() - 0.5 * x.std(), x.mean() + 0.5 * x.std())


SMOOTHINGS: Registry[Callable[[Array, float], Array]] = Registry(
    sqrt=lambda x, _mean: numpy.sqrt(x),
    log=lambda x, _mean: numpy.log1p(5 * x),
    huber=_huber,
    clip=_clip,
    none=lambda x, _mean: x,
)
"""Name -> function (x, mean of the values) that returns g(x); see `smooth`."""


def removals_within_limit(
    layers: Mapping[int, Mapping[str, Any]],
    ratio: float,
    *,
    limit: int = MAX_SUBSETS,
    multiple_of: int = 1,
) -> dict[int, int]:
    """Layer -> number of experts to remove, by `same_share`.

    `layers`: layer -> facts. `ratio`: share of the experts to remove. `limit`: the largest allowed
    number of choices of the removed experts in a layer. UserError with the nearest feasible ratio
    if `ratio` is infeasible or a layer has more choices than `limit`.
    """
    layer_limits = limits(layers, multiple_of)

    def decide(ratio: float) -> dict[int, int]:
        """Layer -> number of experts to remove at `ratio`."""
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

    return call_or_suggest_ratio(decide, ratio)


def count_subsets(n_experts: int, removed: int, n_group: int, protected: Collection[int]) -> int:
    """Number of ways to choose `removed` of `n_experts` experts: equally many from each of
    `n_group` groups of adjacent experts, and none that is `protected`."""
    groups = _removable_by_group(n_experts, n_group, protected)
    return prod(comb(len(group), removed // n_group) for group in groups)


def _removable_by_group(
    n_experts: int, n_group: int, protected: Collection[int]
) -> list[list[int]]:
    """For each of `n_group` groups of adjacent experts, the ids of its unprotected experts."""
    size = n_experts // n_group
    groups = [range(first, first + size) for first in range(0, n_experts, size)]
    return [[expert for expert in group if expert not in protected] for group in groups]


def retained_subsets(
    n_experts: int, removed: int, n_group: int = 1, protected: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """For each choice that `count_subsets` counts: ids of the retained experts, ascending. In the
    first entry, each group loses its unprotected experts with the lowest ids."""
    groups = _removable_by_group(n_experts, n_group, protected)
    subsets = []
    for choice in product(*(combinations(group, removed // n_group) for group in groups)):
        dropped = set(chain.from_iterable(choice))
        subsets.append(tuple(expert for expert in range(n_experts) if expert not in dropped))
    return subsets
