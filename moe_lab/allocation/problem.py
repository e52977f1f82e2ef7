"""Inputs of an allocation: ratio, scores, other evidence, and limits on the numbers of experts that
layers retain."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, lcm
from typing import Any, TypeAlias, TypeVar, get_type_hints

import numpy
from numpy.typing import ArrayLike, NDArray

from moe_lab.errors import UserError
from moe_lab.models.config_json import fewest_experts

Array: TypeAlias = NDArray[numpy.float64]
Budget: TypeAlias = NDArray[numpy.int64]
"""Retained channels of each expert of a layer (E,)."""
Budgets: TypeAlias = dict[int, Budget]
Evidence: TypeAlias = Mapping[str, Mapping[int, Any]]
"""Measurements besides the scores: step -> layer -> arrays by name ("by": layer -> scores)."""


def keyword_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Name -> type, for each keyword-only argument of `function`."""
    hints = get_type_hints(function, include_extras=True)
    arguments = inspect.signature(function).parameters.values()
    return {
        keyword.name: hints[keyword.name]
        for keyword in arguments
        if keyword.kind is keyword.KEYWORD_ONLY
    }


def accepted_parameters(
    function: Callable[..., Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The items of `parameters` whose names are keyword-only arguments of `function`."""
    return {name: value for name, value in parameters.items() if name in keyword_types(function)}


Result = TypeVar("Result")


class RatioTooLarge(UserError):
    """Infeasible at this ratio and all larger ratios."""


class RatioTooSmall(UserError):
    """Infeasible at this ratio and all smaller ratios."""


def call_or_suggest_ratio(decide: Callable[[float], Result], ratio: float) -> Result:
    """The result of `decide(ratio)`. If `ratio` is infeasible, raise a UserError that suggests the
    nearest feasible multiple of 0.001."""

    def side(thousandths: int) -> int:
        """Whether the ratio thousandths / 1000 is too small (-1), feasible (0) or too large (1)."""
        try:
            decide(thousandths / 1000)
        except RatioTooSmall:
            return -1
        except RatioTooLarge:
            return 1
        return 0

    thousandths = range(1000)
    reason: UserError
    try:
        return decide(ratio)
    except RatioTooLarge as error:
        reason = error
        extreme, direction = "largest", "smaller"
        # below `ratio`, as alignment need not refuse all larger ratios; -1: all are too large
        end = ceil(1000 * min(1, ratio))  # 1000 for NaN
        nearest = bisect_left(thousandths, 1, hi=end, key=side) - 1
    except RatioTooSmall as error:
        reason = error
        extreme, direction = "smallest", "larger"
        start = max(0, floor(1000 * max(-1, ratio)) + 1)
        nearest = bisect_left(thousandths, 0, lo=start, key=side)  # 1000: all are too small
    if nearest in thousandths and side(nearest) == 0:
        raise UserError(
            f"ratio={ratio:g}: {reason}; {nearest / 1000:g} is the {extreme} feasible ratio"
        )
    raise UserError(f"ratio={ratio:g}: {reason}; no {direction} ratio is feasible either")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The input of every allocation."""

    ratio: float
    """Share of the routed experts, or of their channels, to remove."""
    scores: dict[int, Array]
    """Layer -> a score per expert (E,), or per channel (E, I); higher means retain."""
    evidence: Evidence
    path: str | None = None
    """The file of allocation=list."""
    protected: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layer -> ids of experts that must be retained, with all their channels
    (allocation.protect)."""


@dataclass(frozen=True, kw_only=True)
class Experts(Problem):
    """The input of an allocation of experts."""

    limits: dict[int, Limits]

    def proportional_allocation(self, shares: Array) -> dict[int, int]:
        """Layer -> number of experts to remove. `shares` (L,): the relative share of its experts
        that each layer retains, as far as the limits of the layer allow."""
        limits = self.limits.values()
        count = numpy.array([limit.n_experts for limit in limits])
        retained = apportion(
            shares * count,
            int(count.sum()) - budget(self.limits, self.ratio),
            low=[limit.smallest for limit in limits],
            high=[limit.largest for limit in limits],
            step=[limit.step for limit in limits],
        )
        return dict(zip(self.limits, (count - retained).tolist(), strict=True))


class Channels(Problem):
    """The input of an allocation of channels. Scores of protected experts are infinite, so that all
    their channels are retained."""

    @property
    def layer_channels(self) -> NDArray[numpy.int64]:
        """Number of channels of each layer (L,)."""
        return numpy.array([scores.size for scores in self.scores.values()])

    @property
    def protected_channels(self) -> NDArray[numpy.int64]:
        """Number of channels of all protected experts of each layer (L,)."""
        counts = [
            len(self.protected.get(layer, ())) * scores.shape[1]
            for layer, scores in self.scores.items()
        ]
        return numpy.array(counts)

    def unprotected(self, layer: int) -> NDArray[numpy.int64]:
        """Ids of the unprotected experts of a layer, ascending."""
        return numpy.setdiff1d(numpy.arange(len(self.scores[layer])), self.protected.get(layer, ()))

    @property
    def total_retained(self) -> int:
        """Number of channels to retain in all layers together."""
        return round_down(int(self.layer_channels.sum()) * (1 - self.ratio))

    def layer_budgets(self, shares: Array) -> dict[int, int]:
        """Layer -> number of channels that the layer retains. `shares` (L,): the relative share of
        its channels that each layer retains."""
        retained = apportion(
            shares * self.layer_channels,
            self.total_retained,
            low=self.protected_channels,
            high=self.layer_channels,
        )
        return dict(zip(self.scores, retained.tolist(), strict=True))

    def proportional_allocation(self, shares: Array) -> Budgets:
        """Layer -> number of channels that each expert retains (E,). Each layer retains the
        channels with the highest scores among all its experts. `shares` (L,): as in
        `layer_budgets`."""
        budgets = self.layer_budgets(shares)
        return {
            layer: count_highest(scores, budgets[layer]) for layer, scores in self.scores.items()
        }


def count_highest(scores: Array, n_retained: int) -> Budget:
    """Number of channels that each expert retains (E,), if the `n_retained` channels with the
    highest scores among all experts are retained. `scores`: (E, I)."""
    counts: Budget = flag_highest(scores.ravel(), n_retained).reshape(scores.shape).sum(axis=1)
    return counts


def flag_highest(scores: Array, n_retained: int) -> Budget:
    """Flags (n,): 1 for the `n_retained` highest of `scores` (n,), 0 for all other scores. Of equal
    scores, the score with the higher index counts as higher."""
    flags: Budget = numpy.ones(len(scores), dtype=numpy.int64)
    flags[numpy.argsort(scores, kind="stable")[: len(scores) - n_retained]] = 0
    return flags


def round_down(value: float) -> int:
    """`value`, rounded down to an integer. A value just below an integer because of a rounding
    error, such as 1000 * (1 - 0.9), gives that integer (100, not 99)."""
    return int(value + 1e-6)


def measurement(evidence: Evidence, step: str, layer: int, name: str) -> Array:
    """The array `name` (fp64) that the step `step` measured for `layer`."""
    arrays = evidence.get(step, {}).get(layer, {})
    if name not in arrays:
        raise UserError(
            f"allocation needs {name} of layer {layer}, which the step {step} measures, and has "
            "none"
        )
    return numpy.asarray(arrays[name], dtype=numpy.float64)


def apportion(
    weights: ArrayLike, total: int, low: ArrayLike, high: ArrayLike, step: ArrayLike = 1
) -> NDArray[numpy.int64]:
    """Divide `total` into n whole numbers (n,), which are about proportional to `weights` (n,) > 0.

    Number i is low[i] plus a multiple of step[i], and at most high[i]. `low`, `high` and `step` are
    scalars or (n,), with sum(low) <= total <= sum(high). The numbers are found in three steps:

    1. The exact shares are level * weights, clipped to [low, high], where `level` makes them sum
       to `total`.
    2. Each share is rounded down to low plus a multiple of step.
    3. What is left of `total` is given to the shares with the largest remainders, one `step` each.

    When steps differ, the result may sum to less than `total`, by less than the largest step.
    """
    weight = numpy.asarray(weights, dtype=numpy.float64)
    least, most, steps = (
        numpy.broadcast_to(numpy.asarray(x, numpy.int64), weight.shape) for x in (low, high, step)
    )
    # the sum of the clipped shares is piecewise linear in the level, and bends at these levels
    levels = numpy.sort(numpy.concatenate([least / weight, most / weight]))
    totals = [numpy.clip(level * weight, least, most).sum() for level in levels]
    share = numpy.clip(numpy.interp(total, totals, levels) * weight, least, most)
    parts: NDArray[numpy.int64] = (
        least + numpy.floor((share - least) / steps + 1e-9).astype(numpy.int64) * steps
    )
    parts = numpy.minimum(parts, most)
    # rounded, so that remainders that are equal but for rounding errors are ties
    remainder = numpy.round((share - parts) / steps, 9)
    unassigned = total - int(parts.sum())
    for index in numpy.argsort(-remainder, kind="stable"):
        if steps[index] <= min(unassigned, most[index] - parts[index]):
            parts[index] += steps[index]
            unassigned -= int(steps[index])
    return parts


@dataclass(frozen=True)
class Limits:
    """Limits on the number of experts that a layer retains. The number must be a multiple of
    `step`, at least `minimum_experts`, and at most `n_experts`."""

    n_experts: int
    """Routed experts of the layer."""
    top_k: int
    n_group: int
    """Groups of a group-limited router, which must all lose the same number of experts; 1 for other
    routers."""
    step: int
    minimum_experts: int
    """Fewest experts that are enough for the router and all protected experts."""

    @property
    def smallest(self) -> int:
        """The smallest multiple of `step` that is at least `minimum_experts`. It may be above
        `n_experts`."""
        return self.step * ceil(self.minimum_experts / self.step)

    @property
    def largest(self) -> int:
        """The largest multiple of `step` that is at most `n_experts`."""
        return self.step * (self.n_experts // self.step)

    def retained_at(self, ratio: float) -> int:
        """Number of experts that the layer retains if `ratio` is the share of experts to remove,
        rounded up to a multiple of `step`. It may be above `n_experts`."""
        return self.step * ceil((self.n_experts - int(self.n_experts * ratio)) / self.step)


def limits(layers: Mapping[int, Mapping[str, Any]], multiple_of: int = 1) -> dict[int, Limits]:
    """Layer -> limits on the number of experts that the layer retains, a multiple of `multiple_of`.
    `layers`: layer -> facts (see moe_lab/models/facts.py). UserError when a router needs more
    experts than its layer has, or when no number of experts is within the limits."""
    layer_limits = {}
    for layer, facts in layers.items():
        n_experts = int(facts["n_experts"])
        top_k = int(facts["top_k"])
        n_group = int(facts["n_group"])
        router_minimum = fewest_experts(facts)
        if router_minimum > n_experts:
            raise UserError(
                f"model.top_k={top_k}: layer {layer} has {n_experts} experts in the model's "
                "config.json"
            )
        protected_counts = Counter(  # group -> number of protected experts in the group
            expert * n_group // n_experts for expert in facts.get("protected", ())
        )
        # all groups retain equally many experts, so the group with most protected experts decides
        minimum = max(router_minimum, n_group * max(protected_counts.values(), default=0))
        step = lcm(multiple_of, n_group)
        limit = Limits(n_experts, top_k, n_group, step, minimum)
        if limit.smallest > n_experts:
            raise UserError(
                f"allocation.multiple_of: layer {layer} has {n_experts} experts and cannot keep "
                f"a multiple of {limit.step} that is at least {limit.minimum_experts}: choose a "
                "smaller multiple"
            )
        layer_limits[layer] = limit
    return layer_limits


def budget(layers: Mapping[int, Limits], ratio: float) -> int:
    """Number of experts to remove in all layers together: as many as allocation=uniform removes.
    `ratio`: share of the experts to remove. RatioTooLarge when the limits allow only a smaller
    number, RatioTooSmall when they require a larger number."""
    check_ratio(ratio)
    removed = sum(limit.n_experts - limit.retained_at(ratio) for limit in layers.values())
    least = sum(limit.n_experts - limit.largest for limit in layers.values())
    most = sum(limit.n_experts - limit.smallest for limit in layers.values())
    if removed > most:
        raise RatioTooLarge(
            f"removes {removed} experts, but routers, allocation.protect and "
            f"allocation.multiple_of allow {most} at most"
        )
    if removed < least:
        raise RatioTooSmall(
            # negative if multiple_of rounds retained experts up to more than a layer has
            f"removes {max(removed, 0)} experts, but allocation.multiple_of requires {least} "
            "at least"
        )
    return removed


def check_ratio(ratio: float) -> None:
    """Raise RatioTooSmall or RatioTooLarge when `ratio` is not in [0, 1)."""
    if ratio < 0:
        raise RatioTooSmall("expected a number in [0, 1)")
    if not ratio < 1:
        raise RatioTooLarge("expected a number in [0, 1)")
