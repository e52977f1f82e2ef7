"""allocation=coverage (MoE-Slimming): divide channels among layers, then experts, by the share of
their scores that is retained.

CBA (Coverage-Maximized Budget Allocation, Algorithms 1-4) divides a budget of channels among groups
such that each group covers its target share of its own scores. phi_g is the target of group g and
S_g(n) the sum of its n highest scores, where negative scores count as 0. The least number of
channels that covers the share rho is N_g(rho) = min{n : S_g(n) >= rho S_g}. CBA finds the alpha
with sum_g N_g(min(alpha phi_g, 1)) = budget.

AAR rounds widths to whole blocks, as low-bit kernels need, and empties experts with few channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from moe_lab.allocation.problem import (
    Array,
    Budget,
    Budgets,
    Channels,
    Evidence,
    RatioTooLarge,
    RatioTooSmall,
    apportion,
    count_highest,
    measurement,
)
from moe_lab.allocation.shapes import Floor, Smoothing, layer_losses, loss_needs, smooth, u_shape
from moe_lab.config.base import SETTINGS, Count, Positive, valid
from moe_lab.errors import UserError

BY_LOSS = ("coverage", "loss_based")
"""Values of `inter` that use the losses of layers."""
BY_PRIOR = ("coverage", "proportional")
"""Values of `intra` that use the priors of experts."""

Prior: TypeAlias = Literal[
    "ala1", "ala2", "true_ablation", "loss", "usage", "router_weight", "ala_lm", "none"
]


def coverage(
    problem: Channels,
    *,
    inter: Literal["coverage", "uniform", "u_shaped", "loss_based"] = "coverage",
    intra: Literal["coverage", "proportional", "uniform", "ranking"] = "coverage",
    layer_prior: Literal["loss", "nll", "none"] = "loss",
    prior: Prior = "ala1",
    layer_smoothing: Smoothing = "sqrt",
    expert_smoothing: Smoothing = "sqrt",
    beta: float = 0.02,
    floor: Floor = 0.1,
) -> Budgets:
    """Layer -> number of channels that each expert retains (E,).

    First `inter` gives each layer its budget:

    coverage    by CBA over the pooled channels of each layer; target: the smoothed layer loss that
                `layer_prior` names
    uniform     the same share for every layer
    u_shaped    a U over the depth, with `beta` and `floor`
    loss_based  in proportion to the smoothed layer loss

    Then `intra` divides the budget of each layer among its experts:

    coverage      by CBA; target: the smoothed `prior`
    proportional  in proportion to the smoothed `prior`
    uniform       evenly
    ranking       by the best channels of the layer

    `layer_smoothing` is varied in MoE-Slimming's Tables 7 and 15.
    """
    scores = problem.scores
    shares = numpy.ones(len(scores))  # equal for uniform, and for layer_prior none
    if inter in BY_LOSS and layer_prior != "none":
        shares = smooth(layer_losses(problem.evidence, scores.keys(), layer_prior), layer_smoothing)
    elif inter == "u_shaped":
        shares = u_shape(len(scores), 1 - problem.ratio, beta, floor)
    if inter == "coverage":
        layer_budgets = _cover_layers(problem, shares)
    else:
        layer_budgets = problem.layer_budgets(shares)
    budgets = {}
    for (layer, values), fixed in zip(scores.items(), problem.fixed.tolist(), strict=True):
        budgets[layer] = numpy.full(len(values), values.shape[1], dtype=numpy.int64)
        experts = problem.unprotected(layer)
        if not len(experts):
            continue  # every expert keeps its full width
        targets = None
        if intra in BY_PRIOR:
            priors = expert_prior(prior, problem.evidence, layer, len(values))
            targets = smooth(priors[experts], expert_smoothing)
        budget = layer_budgets[layer] - fixed
        budgets[layer][experts] = _divide_layer(intra, values[experts], targets, budget)
    return budgets


def _divide_layer(intra: str, scores: Array, targets: Array | None, budget: int) -> Budget:
    """Channels that each expert of one layer retains (E,); they sum to `budget`. `scores`: (E, I).
    `targets`: smoothed priors (E,); None for a value of `intra` that uses no priors."""
    if intra == "ranking":
        return count_highest(scores, budget)
    if targets is None:
        targets = numpy.ones(len(scores))
    if intra == "coverage":
        return cover(list(scores), targets, budget)
    # proportional to the priors, or uniform
    return apportion(targets, budget, 0, scores.shape[1])


def _cover_layers(problem: Channels, shares: Array) -> dict[int, int]:
    """Layer -> number of channels that the layer retains. All channels of protected experts are
    retained. CBA divides the rest of the budget among the pooled other channels of each layer, with
    the targets `shares` (L,)."""
    budgets = problem.fixed  # a new array
    has_room = problem.sizes > problem.fixed
    if has_room.any():
        pools = []
        for layer, values in problem.scores.items():
            pool = values[problem.unprotected(layer)].ravel()
            if len(pool):
                pools.append(pool)
        budgets[has_room] += cover(pools, shares[has_room], problem.keep - int(budgets.sum()))
    return dict(zip(problem.scores, budgets.tolist(), strict=True))


def needs(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the steps that measure the evidence for allocation=coverage with `parameters`,
    sorted."""
    steps: set[str] = set()
    if parameters.get("inter", "coverage") in BY_LOSS and parameters.get("layer_prior") != "none":
        steps.update(loss_needs(parameters))
    if parameters.get("intra", "coverage") in BY_PRIOR:
        prior = parameters.get("prior", "ala1")
        if prior in PRIORS:  # all but "none"
            step, _name, _read = PRIORS[prior]
            steps.add(step)
    return tuple(sorted(steps))


BEYOND = 1e300
"""A finite threshold above every alpha of a group with phi > 0."""


def cover(groups: Sequence[Array], prior: Array, budget: int) -> Budget:
    """Number of channels that each of G groups retains (G,), if CBA divides `budget` channels among
    the groups. `groups`: the scores of each group (n_g,). `prior`: the targets phi >= 0 (G,).

    S_g is the sum of the scores of group g, and S_g(n) that of its n highest scores. CBA raises a
    level alpha from 0. Group g takes its channel n+1 as soon as alpha phi_g S_g > S_g(n). So the
    channels of all groups are sorted by S_g(n) / (S_g phi_g), and the first `budget` channels are
    retained. Of channels
    with equal values, the channel of the group with the larger phi comes first, and for equal phi
    the channel of the earlier group. The channels of groups with phi = 0 come after all others, and
    channels with scores <= 0 come last of all.
    """
    order = numpy.argsort(-prior, kind="stable")
    thresholds = [_thresholds(groups[group], prior[group]) for group in order]
    group_ids = numpy.repeat(order, [len(threshold) for threshold in thresholds])
    flat = numpy.concatenate(thresholds)
    ranking = numpy.argsort(flat, kind="stable")
    return numpy.bincount(group_ids[ranking[:budget]], minlength=len(groups))


def _thresholds(scores: Array, prior: float) -> Array:
    """For each channel of a group (n,), by descending score, the alpha above which it is retained:
    infinity for scores <= 0. `prior`: the target phi of the group."""
    descending = numpy.sort(numpy.maximum(scores, 0))[::-1]
    sums = numpy.cumsum(descending)
    if sums[-1] <= 0:
        return numpy.full(len(scores), numpy.inf)
    share = (sums - descending) / sums[-1]  # S_g(n) / S_g before channel n+1
    threshold = share / prior if prior > 0 else BEYOND * (1 + share)
    thresholds: Array = numpy.where(descending > 0, threshold, numpy.inf)
    return thresholds


def expert_prior(prior: Prior, evidence: Evidence, layer: int, n_experts: int) -> Array:
    """The prior of each expert of `layer` (E,), >= 0, up to a factor that all experts share.

    docs/allocations.md has the formulas. The prior of an expert with a negative attribution, which
    opposes the other experts, is 0. UserError when the evidence is missing.
    """
    if prior == "none":
        return numpy.ones(n_experts)
    need, name, read = PRIORS[prior]
    positive: Array = numpy.maximum(read(measurement(evidence, need, layer, name)), 0)
    return positive


PRIORS: Mapping[str, tuple[str, str, Callable[[Array], Array]]] = {
    "ala1": ("statistics", "ala_first", numpy.asarray),
    "ala2": ("statistics", "ala_second", numpy.asarray),
    "true_ablation": ("statistics", "ala_second", numpy.asarray),
    "loss": ("ablation", "ablation", numpy.asarray),
    "usage": ("statistics", "tokens", numpy.asarray),
    "router_weight": ("statistics", "sums_model", lambda sums: sums[:, 1, 0]),
    "ala_lm": ("gradients", "channel_product", lambda product: -product.sum(axis=1)),
}
"""Prior -> the step that measures it, the name of an array among the step's results, and the
function that turns this array into the prior."""


@dataclass(config=SETTINGS, frozen=True)
class Alignment:
    """Rounding of widths: allocation.parameters.align."""

    block: Positive
    """The number of retained channels of an expert is a multiple of this number."""
    min_channels: Count | None = None
    """Experts with fewer channels than this number lose all their channels; null stands for the
    value of `block`."""
    order: Literal["remainder", "scores"] = "remainder"
    """Order in which experts get the blocks that rounding down leaves over: see `align`."""

    @property
    def fewest(self) -> int:
        """The smallest number of channels that an expert can retain, except 0."""
        return self.block if self.min_channels is None else self.min_channels


def alignment_of(settings: Mapping[str, Any]) -> Alignment | None:
    """The alignment that parameters.align of `settings`, the fields of AllocationConfig, describes;
    None if it is not set. UserError for invalid values."""
    value = settings["parameters"].get("align")
    return None if value is None else valid(Alignment, value, "allocation.parameters.align")


def check_fits(alignment: Alignment, layers: Mapping[int, Mapping[str, Any]], ratio: float) -> None:
    """Raise UserError when experts are narrower than a block or min_channels. Raise RatioTooSmall
    when whole blocks hold fewer channels than `ratio` retains. `layers`: layer -> facts, of which
    n_experts and width are read. A width need not be a multiple of the block."""
    block = alignment.block
    width = min((facts["width"] for facts in layers.values()), default=block)
    for name, least in (("block", block), ("min_channels", alignment.fewest)):
        if least > width:
            raise UserError(
                f"allocation.parameters.align.{name}={least}: experts have {width} channels, the "
                "most it can be"
            )
    channels = sum(facts["n_experts"] * facts["width"] for facts in layers.values())
    in_blocks = sum(
        facts["n_experts"] * (facts["width"] // block * block) for facts in layers.values()
    )
    if int(channels * (1 - ratio)) > in_blocks:
        raise RatioTooSmall(
            f"keeps {int(channels * (1 - ratio))} of {channels} channels, and whole blocks of "
            f"allocation.parameters.align.block={block} hold only {in_blocks}"
        )


def align(budgets: Budgets, scores: Mapping[int, Array], alignment: Alignment) -> Budgets:
    """Round budgets to whole blocks: layer -> (E,). `scores`: layer -> (E, I).

    Every budget is rounded down; a budget below `min_channels` becomes 0. The channels that
    rounding takes from a layer make leftover blocks. These are dealt to the experts whose budget is
    not 0, one block per expert and round, until no block is left or every such expert is full. The
    paper deals one round. `order` says which experts come first in a round:

    remainder (l-r-c)  the experts that lost most channels by rounding
    scores (l-r-s)     the experts that lost the largest sum of scores by rounding

    RatioTooLarge when a layer that had channels would retain none.
    """
    aligned = {}
    for layer, budget in budgets.items():
        aligned[layer] = _align_layer(budget, scores[layer], alignment)
        if budget.any() and not aligned[layer].any():
            raise RatioTooLarge(
                f"allocation.parameters.align (block={alignment.block}, "
                f"min_channels={alignment.fewest}) retains no channel in layer {layer}: expected "
                f"both at most {int(budget.max())}, the budget of its largest expert"
            )
    return aligned


def _align_layer(budgets: Budget, scores: Array, alignment: Alignment) -> Budget:
    """The budgets (E,) of one layer, rounded to whole blocks as `align` says. `scores`: (E, I)."""
    block = alignment.block
    is_retained = (budgets >= alignment.fewest) & (budgets > 0)
    rounded = numpy.where(is_retained, budgets // block * block, 0)
    # what each expert loses by rounding: a number of channels, or the sum of their scores
    losses: NDArray[Any] = budgets - rounded
    leftover = int(losses.sum()) // block
    if alignment.order == "scores":
        descending = -numpy.sort(-scores, axis=1)
        rank = numpy.arange(scores.shape[1])
        is_lost = (rank >= rounded[:, None]) & (rank < budgets[:, None])
        losses = (descending * is_lost).sum(axis=1)
    # blocks that each expert can get
    room = numpy.where(is_retained, (scores.shape[1] - rounded) // block, 0)
    order = numpy.argsort(-losses, kind="stable")
    added = numpy.zeros_like(room)
    while leftover > 0:
        experts = order[(added < room)[order]][:leftover]
        if not experts.size:
            break
        added[experts] += 1
        leftover -= len(experts)
    aligned: Budget = rounded + block * added
    return aligned
