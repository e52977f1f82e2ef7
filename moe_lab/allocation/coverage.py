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
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import numpy
from pydantic import AfterValidator
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
    round_down,
)
from moe_lab.allocation.shapes import (
    Floor,
    Smoothing,
    layer_loss_steps,
    layer_losses,
    smooth,
    u_shape,
)
from moe_lab.config.base import SETTINGS, Count, Positive, validated
from moe_lab.errors import Registry, UserError

BY_LOSS = ("coverage", "loss_based")
"""Values of `inter` that use the losses of layers."""
BY_PRIOR = ("coverage", "proportional")
"""Values of `intra` that use the priors of experts."""

Prior: TypeAlias = Annotated[
    str,
    AfterValidator(lambda name: name if name == "none" else PRIORS.known(name)),
]
"""Name of a prior in `PRIORS`, or none."""


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

    First, the channels to retain are divided among the layers, by the rule `inter`:

    coverage    `cover` decides, from the scores of each layer and the losses of the layers
    uniform     the same share of every layer
    u_shaped    in proportion to the curve `u_shape` over the depth, with `beta` and `floor`
    loss_based  in proportion to the losses of the layers

    Then the channels of each layer are divided among its experts, by the rule `intra`:

    coverage      `cover` decides, from the scores of each expert and the priors of the experts
    proportional  in proportion to the priors of the experts
    uniform       equal numbers
    ranking       the channels of highest score in the layer

    `layer_prior`: the loss in `layer_losses`; "none": equal losses. `prior`: as in `expert_prior`.
    `layer_smoothing`, `expert_smoothing`: how `smooth` changes losses and priors before their use.
    """
    scores = problem.scores
    # (L,): relative share of each layer
    shares = numpy.ones(len(scores))
    if inter in BY_LOSS and layer_prior != "none":
        shares = smooth(layer_losses(problem.evidence, scores.keys(), layer_prior), layer_smoothing)
    elif inter == "u_shaped":
        shares = u_shape(len(scores), 1 - problem.ratio, beta, floor)
    if inter == "coverage":
        layer_budgets = _cover_layers(problem, shares)
    else:
        layer_budgets = problem.layer_budgets(shares)
    budgets = {}
    for (layer, values), n_protected in zip(
        scores.items(), problem.protected_channels.tolist(), strict=True
    ):
        budgets[layer] = numpy.full(len(values), values.shape[1], dtype=numpy.int64)
        experts = problem.unprotected(layer)
        if not len(experts):
            continue  # all experts are protected
        targets = None
        if intra in BY_PRIOR:
            priors = expert_prior(prior, problem.evidence, layer, len(values))
            targets = smooth(priors[experts], expert_smoothing)
        budget = layer_budgets[layer] - n_protected
        budgets[layer][experts] = _divide_layer(intra, values[experts], targets, budget)
    return budgets


def _divide_layer(intra: str, scores: Array, targets: Array | None, budget: int) -> Budget:
    """Number of channels that each expert of one layer retains (E,), by the rule `intra` of
    `coverage`. `scores`: (E, I). `targets`: the smoothed prior of each expert (E,)."""
    if intra == "ranking":
        return count_highest(scores, budget)
    if targets is None:
        targets = numpy.ones(len(scores))
    if intra == "coverage":
        return cover(list(scores), targets, budget)
    return apportion(targets, budget, low=0, high=scores.shape[1])


def _cover_layers(problem: Channels, targets: Array) -> dict[int, int]:
    """Layer -> number of channels that the layer retains, as `cover` divides them among the
    unprotected experts of each layer. `targets`: the target of each layer (L,)."""
    budgets = problem.protected_channels  # a new array at each access, so that it may be changed
    # whether a layer has unprotected experts
    has_room = problem.layer_channels > problem.protected_channels
    if has_room.any():
        groups = []
        for layer, values in problem.scores.items():
            group = values[problem.unprotected(layer)].ravel()
            if len(group):
                groups.append(group)
        budgets[has_room] += cover(
            groups, targets[has_room], problem.total_retained - int(budgets.sum())
        )
    return dict(zip(problem.scores, budgets.tolist(), strict=True))


def needs(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Sorted names of the steps whose measurements allocation=coverage needs with `parameters`."""
    steps: set[str] = set()
    if parameters.get("inter", "coverage") in BY_LOSS and parameters.get("layer_prior") != "none":
        steps.update(layer_loss_steps(parameters))
    if parameters.get("intra", "coverage") in BY_PRIOR:
        prior = parameters.get("prior", "ala1")
        if prior in PRIORS:  # all but "none"
            step, _name, _to_prior = PRIORS[prior]
            steps.add(step)
    return tuple(sorted(steps))


BEYOND = 1e300
"""A finite threshold above every alpha of a group with phi > 0."""


def cover(groups: Sequence[Array], targets: Array, budget: int) -> Budget:
    """Divide `budget` channels among groups by CBA. Returns the number of channels that each of the
    G groups retains (G,). `groups`: for each group, the scores of its channels (n_g,). `targets`:
    the target phi_g >= 0 of each group (G,).

    Each channel has a threshold, the alpha of CBA above which it is retained. The channels with the
    lowest thresholds are retained.
    """
    # groups with larger targets first: the stable sort below then prefers them in ties
    order = numpy.argsort(-targets, kind="stable")
    thresholds = [_thresholds(groups[group], targets[group]) for group in order]
    group_ids = numpy.repeat(order, [len(threshold) for threshold in thresholds])
    flat = numpy.concatenate(thresholds)
    ranking = numpy.argsort(flat, kind="stable")
    return numpy.bincount(group_ids[ranking[:budget]], minlength=len(groups))


def _thresholds(scores: Array, target: float) -> Array:
    """Thresholds (n,) of the channels of one group, as in `cover`, by descending score."""
    descending = numpy.sort(numpy.maximum(scores, 0))[::-1]
    sums = numpy.cumsum(descending)
    if sums[-1] <= 0:
        return numpy.full(len(scores), numpy.inf)
    # share of the group's scores that the channels before this one cover
    share = (sums - descending) / sums[-1]
    # with target 0: above the thresholds of all groups with a target > 0, but below infinity
    threshold = share / target if target > 0 else BEYOND * (1 + share)
    thresholds: Array = numpy.where(descending > 0, threshold, numpy.inf)
    return thresholds


def expert_prior(prior: Prior, evidence: Evidence, layer: int, n_experts: int) -> Array:
    """How much each expert of `layer` matters (E,), >= 0, by the measure `prior`;
    docs/allocations.md has the formulas. Only the ratios between experts have a meaning."""
    if prior == "none":
        return numpy.ones(n_experts)
    step, name, to_prior = PRIORS[prior]
    positive: Array = numpy.maximum(to_prior(measurement(evidence, step, layer, name)), 0)
    return positive


PRIORS: Registry[tuple[str, str, Callable[[Array], Array]]] = Registry(
    {
        "ala1": ("statistics", "ala_first", numpy.asarray),
        "ala2": ("statistics", "ala_second", numpy.asarray),
        "true_ablation": ("statistics", "ala_second", numpy.asarray),
        "loss": ("ablation", "ablation", numpy.asarray),
        "usage": ("statistics", "tokens", numpy.asarray),
        "router_weight": ("statistics", "sums_model", lambda sums: sums[:, 1, 0]),
        "ala_lm": ("gradients", "channel_product", lambda product: -product.sum(axis=1)),
    }
)
"""Prior -> the step that measures it, the name of an array among the step's results, and the
function that turns this array into the prior."""


@dataclass(config=SETTINGS, frozen=True)
class Alignment:
    """The setting allocation.parameters.align, by which numbers of channels are rounded."""

    block: Positive
    """The number of retained channels of an expert is a multiple of this number."""
    min_channels: Count | None = None
    """Experts with fewer channels than this number lose all their channels; null: `block`."""
    order: Annotated[str, AfterValidator(lambda name: ORDERS.known(name))] = "remainder"
    """How the blocks that rounding down leaves over are given to experts: see `align`."""

    @property
    def minimum_channels(self) -> int:
        """The smallest number of channels above 0 that an expert can retain."""
        return self.block if self.min_channels is None else self.min_channels


def alignment_of(settings: Mapping[str, Any]) -> Alignment | None:
    """The setting parameters.align, or None if it is not set. `settings`: fields of
    AllocationConfig."""
    value = settings["parameters"].get("align")
    return None if value is None else validated(Alignment, value, "allocation.parameters.align")


def check_fits(alignment: Alignment, layers: Mapping[int, Mapping[str, Any]], ratio: float) -> None:
    """Raise UserError when experts have fewer channels than one block, or fewer than min_channels.
    Raise RatioTooSmall when more channels are to be retained than the whole blocks of all experts
    have. `layers`: layer -> facts."""
    if not layers:
        return
    block = alignment.block
    width = min(facts["width"] for facts in layers.values())
    for name, minimum in (("block", block), ("min_channels", alignment.minimum_channels)):
        if minimum > width:
            raise UserError(
                f"allocation.parameters.align.{name}={minimum}: experts have {width} channels, the "
                "most it can be"
            )
    channels = sum(facts["n_experts"] * facts["width"] for facts in layers.values())
    # number of channels in whole blocks
    capacity = sum(
        facts["n_experts"] * (facts["width"] // block * block) for facts in layers.values()
    )
    retained = round_down(channels * (1 - ratio))
    if retained > capacity:
        raise RatioTooSmall(
            f"keeps {retained} of {channels} channels, and whole blocks of "
            f"allocation.parameters.align.block={block} hold only {capacity}"
        )


def align(budgets: Budgets, scores: Mapping[int, Array], alignment: Alignment) -> Budgets:
    """The `budgets`, rounded to whole blocks: layer -> number of channels of each expert (E,).
    `scores`: layer -> scores of channels (E, I).

    A budget below `min_channels` becomes 0, and every other budget is rounded down. The channels
    that a layer loses by this make new blocks, which are given out in rounds. In each round, every
    expert that had at least `min_channels` gets one block if it has room, until no block is left.
    `alignment.order` says which experts come first in a round:

    remainder  the experts that lost most channels by rounding
    scores     the experts that lost the largest sum of scores by rounding

    moe_lab.papers.moe_slimming has the rules of MoE-Slimming's text and code.
    """
    aligned = ORDERS[alignment.order](budgets, scores, alignment)
    for layer, budget in budgets.items():
        if budget.any() and not aligned[layer].any():
            raise RatioTooLarge(
                f"allocation.parameters.align (block={alignment.block}, "
                f"min_channels={alignment.minimum_channels}) retains no channel in layer {layer}: "
                f"expected both at most {int(budget.max())}, the budget of its largest expert"
            )
    return aligned


def lost_channels(budgets: Budget, rounded: Budget, scores: Array) -> Array:
    """Number of channels that each expert loses by rounding (E,). scores: not read."""
    return (budgets - rounded).astype(float)


def lost_scores(budgets: Budget, rounded: Budget, scores: Array) -> Array:
    """Sum of the scores of the channels that each expert loses by rounding (E,). `scores`:
    (E, I)."""
    # the channel of rank 0 has the highest score
    descending = -numpy.sort(-scores, axis=1)
    rank = numpy.arange(scores.shape[1])
    is_lost = (rank >= rounded[:, None]) & (rank < budgets[:, None])
    losses: Array = (descending * is_lost).sum(axis=1)
    return losses


def in_rounds(
    budgets: Budgets,
    scores: Mapping[int, Array],
    alignment: Alignment,
    losses_of: Callable[[Budget, Budget, Array], Array],
    most: int | None = None,
) -> Budgets:
    """Layer -> number of channels of each expert (E,): rounded down, and the blocks that the layer
    loses given out in rounds, see `align`.

    `losses_of`: function (budgets, rounded budgets, scores) of one layer that returns the number by
    which experts come first (E,). `most`: most blocks that an expert gets; None: any number.
    """
    block = alignment.block
    aligned = {}
    for layer, budget in budgets.items():
        is_retained = budget >= max(alignment.minimum_channels, 1)
        rounded = numpy.where(is_retained, budget // block * block, 0)
        leftover_blocks = int((budget - rounded).sum()) // block
        # (E,): number of blocks that each expert can get
        room = numpy.where(is_retained, (scores[layer].shape[1] - rounded) // block, 0)
        if most is not None:
            room = numpy.minimum(room, most)
        # experts, those with the largest losses first
        order = numpy.argsort(-losses_of(budget, rounded, scores[layer]), kind="stable")
        added = numpy.zeros_like(room)
        while leftover_blocks > 0:
            has_room = added < room
            experts = order[has_room[order]][:leftover_blocks]
            if not experts.size:
                break
            added[experts] += 1
            leftover_blocks -= len(experts)
        aligned[layer] = rounded + block * added
    return aligned


ORDERS: Registry[Callable[[Budgets, Mapping[int, Array], Alignment], Budgets]] = Registry(
    remainder=partial(in_rounds, losses_of=lost_channels),
    scores=partial(in_rounds, losses_of=lost_scores),
)
"""Value of align.order -> function (budgets, scores, alignment) that returns aligned budgets."""
