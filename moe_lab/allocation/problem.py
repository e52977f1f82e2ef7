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
"""Measurements besides the scores: need -> layer -> arrays by name ("by": layer -> scores)."""


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only argument of `function` -> type; these arguments are the parameters that users
    set."""
    hints = get_type_hints(function, include_extras=True)
    arguments = inspect.signature(function).parameters.values()
    return {
        keyword.name: hints[keyword.name]
        for keyword in arguments
        if keyword.kind is keyword.KEYWORD_ONLY
    }


def accepted(function: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The items of `parameters` whose names are keyword-only arguments of `function`."""
    return {name: value for name, value in parameters.items() if name in keywords(function)}


Result = TypeVar("Result")


class RatioTooLarge(UserError):
    """Infeasible at this ratio and all larger ratios, but perhaps feasible at a smaller ratio."""


class RatioTooSmall(UserError):
    """Infeasible at this ratio and all smaller ratios, but perhaps feasible at a larger ratio."""


def or_suggest_ratio(decide: Callable[[float], Result], ratio: float) -> Result:
    """The result of `decide(ratio)`. If `decide` raises RatioTooLarge or RatioTooSmall: UserError
    with the nearest feasible ratio of whole thousandths, if there is one."""

    def refusal(thousandths: int) -> UserError | None:
        """The error of `decide` at a ratio in thousandths; None if that ratio is feasible."""
        try:
            decide(thousandths / 1000)
        except (RatioTooLarge, RatioTooSmall) as error:
            return error
        return None

    reason: UserError
    try:
        return decide(ratio)
    except RatioTooLarge as error:
        reason = error
        extreme = "largest"
        # only smaller ratios: rounding to blocks may make a larger ratio feasible
        smaller = range(ceil(1000 * ratio) if ratio < 1 else 1000)
        # bisect finds the first ratio that is too large
        nearest = (
            bisect_left(smaller, True, key=lambda n: isinstance(refusal(n), RatioTooLarge)) - 1
        )
    except RatioTooSmall as error:
        reason = error
        extreme = "smallest"
        larger = range(floor(1000 * ratio) + 1 if ratio > 0 else 0, 1000)
        nearest = larger.start + bisect_left(
            larger, True, key=lambda n: not isinstance(refusal(n), RatioTooSmall)
        )
    if 0 <= nearest < 1000 and refusal(nearest) is None:
        raise UserError(
            f"ratio={ratio:g}: {reason}; {nearest / 1000:g} is the {extreme} feasible ratio"
        )
    raise UserError(f"ratio={ratio:g}: {reason}; no other ratio is feasible either")


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
    """The input of an allocation of experts, which decides how many each layer loses."""

    limits: dict[int, Limits]

    def in_proportion(self, shares: Array) -> dict[int, int]:
        """Layer -> number of experts to remove. Each layer retains experts in proportion to its
        entry of `shares` (L,) times its number of experts, as far as its limits allow."""
        limits = self.limits.values()
        count = numpy.array([limit.count for limit in limits])
        retained = apportion(
            shares * count,
            int(count.sum()) - budget(self.limits, self.ratio),
            [limit.smallest for limit in limits],
            [limit.largest for limit in limits],
            [limit.step for limit in limits],
        )
        return dict(zip(self.limits, (count - retained).tolist(), strict=True))


class Channels(Problem):
    """The input of an allocation of channels per expert. Scores of protected experts are
    infinite."""

    @property
    def sizes(self) -> NDArray[numpy.int64]:
        """Number of channels of each layer, E * I (L,)."""
        return numpy.array([scores.size for scores in self.scores.values()], dtype=numpy.int64)

    @property
    def fixed(self) -> NDArray[numpy.int64]:
        """Number of channels that the protected experts of each layer have together (L,)."""
        counts = [
            len(self.protected.get(layer, ())) * scores.shape[1]
            for layer, scores in self.scores.items()
        ]
        return numpy.array(counts, dtype=numpy.int64)

    def unprotected(self, layer: int) -> NDArray[numpy.int64]:
        """Ids of the experts of a layer that are not protected, ascending."""
        return numpy.setdiff1d(numpy.arange(len(self.scores[layer])), self.protected.get(layer, ()))

    @property
    def keep(self) -> int:
        """Total number of channels to retain: int(all channels * (1 - ratio))."""
        return round_down(int(self.sizes.sum()) * (1 - self.ratio))

    def layer_budgets(self, shares: Array) -> dict[int, int]:
        """Layer -> number of channels that the layer retains; the numbers sum to `keep`. They are
        in proportion to `shares` (L,) times the layers' numbers of channels, but a layer retains at
        least all channels of its protected experts."""
        retained = apportion(shares * self.sizes, self.keep, self.fixed, self.sizes)
        return dict(zip(self.scores, retained.tolist(), strict=True))

    def in_proportion(self, shares: Array) -> Budgets:
        """Layer -> number of channels that each expert retains (E,). Each layer retains its
        channels of highest score, as many as `layer_budgets` gives it for `shares` (L,)."""
        budgets = self.layer_budgets(shares)
        return {
            layer: count_highest(scores, budgets[layer]) for layer, scores in self.scores.items()
        }


def count_highest(scores: Array, keep: int) -> Budget:
    """For each expert (E,), how many of the `keep` highest of all `scores` (E, I) it has. Of equal
    scores, the later one counts as higher."""
    counts: Budget = flag_highest(scores.ravel(), keep).reshape(scores.shape).sum(axis=1)
    return counts


def flag_highest(scores: Array, keep: int) -> Budget:
    """Flags (n,): 1 for the `keep` highest of `scores` (n,), 0 for the others. Of equal scores, the
    later one counts as higher."""
    flags: Budget = numpy.ones(len(scores), dtype=numpy.int64)
    flags[numpy.argsort(scores, kind="stable")[: len(scores) - keep]] = 0
    return flags


def round_down(value: float) -> int:
    """int(value), tolerating the rounding error of 1 - ratio: 1000 * (1 - 0.9) is 100, not 99."""
    return int(value + 1e-6)


def measurement(evidence: Evidence, need: str, layer: int, name: str) -> Array:
    """The array `name` that the step `need` measured for `layer`, fp64. UserError when the array is
    missing."""
    arrays = evidence.get(need, {}).get(layer, {})
    if name not in arrays:
        raise UserError(
            f"allocation needs {name} of layer {layer}, which the step {need} measures, and has "
            "none"
        )
    return numpy.asarray(arrays[name], dtype=numpy.float64)


def apportion(
    weights: ArrayLike, total: int, low: ArrayLike, high: ArrayLike, step: ArrayLike = 1
) -> NDArray[numpy.int64]:
    """Divide `total` into whole numbers near `level * weights`, each in [low, high] and low plus a
    multiple of `step`.

    `weights` (n,) > 0. `low`, `high` and `step` are one number each, or one per weight, with
    sum(low) <= total <= sum(high). The level is chosen such that the shares `level * weights`,
    clipped to [low, high], sum to `total`. Each share is rounded down to low plus a multiple of
    `step`. Then the shares with the largest remainders get one step more; of equal remainders, the
    first. When steps differ, the sum may be below `total` by less than the largest step.
    """
    weight = numpy.asarray(weights, dtype=numpy.float64)
    least, most, steps = (
        numpy.broadcast_to(numpy.asarray(x, numpy.int64), weight.shape) for x in (low, high, step)
    )
    # the sum of the clipped shares is piecewise linear in the level, with these corners
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
    """The numbers of experts that a layer can retain, given its router and `multiple_of`:
    `smallest` to `largest`, in steps of `step`."""

    count: int
    """Routed experts of the layer."""
    top_k: int
    n_group: int
    """Groups of a group-limited router, which must all lose the same number of experts; 1 for other
    routers."""
    step: int
    """Numbers of retained experts are multiples of this."""
    fewest: int
    """The smallest number of experts that is enough for the router and for all protected
    experts."""

    @property
    def smallest(self) -> int:
        """The smallest feasible number of retained experts; above `count` when no number is
        feasible."""
        return self.step * ceil(self.fewest / self.step)

    @property
    def largest(self) -> int:
        """The largest multiple of `step` that is not above `count`."""
        return self.step * (self.count // self.step)

    def retained_at(self, ratio: float) -> int:
        """Number of retained experts when int(count * ratio) are removed, which is the papers'
        rule. The number is rounded up to a multiple of `step`, perhaps above `count`."""
        return self.step * ceil((self.count - int(self.count * ratio)) / self.step)


def limits(layers: Mapping[int, Mapping[str, Any]], multiple_of: int = 1) -> dict[int, Limits]:
    """Layer -> its limits. `layers`: layer -> facts (n_experts, top_k, n_group, topk_group, perhaps
    protected). UserError when a layer has fewer experts than its router needs, or cannot retain any
    multiple of `multiple_of`."""
    layer_limits = {}
    for layer, facts in layers.items():
        count = int(facts["n_experts"])
        top_k = int(facts["top_k"])
        n_group = int(facts["n_group"])
        protected_counts = Counter(  # number of the group -> its protected experts
            expert * n_group // count for expert in facts.get("protected", ())
        )
        # all groups retain equally many, so the group with most protected experts decides
        fewest = max(fewest_experts(facts), n_group * max(protected_counts.values(), default=0))
        if fewest_experts(facts) > count:
            raise UserError(
                f"model.top_k={top_k}: layer {layer} has {count} experts in the model's config.json"
            )
        # a multiple of the number of groups can be retained evenly
        limit = layer_limits[layer] = Limits(
            count, top_k, n_group, lcm(multiple_of, n_group), fewest
        )
        if limit.smallest > count:
            raise UserError(
                f"allocation.multiple_of: layer {layer} has {count} experts and cannot keep a "
                f"multiple of {limit.step} that is at least {limit.fewest}: choose a smaller "
                "multiple"
            )
    return layer_limits


def budget(layers: Mapping[int, Limits], ratio: float) -> int:
    """Total number of experts to remove at `ratio`: the sum over layers of what allocation=uniform
    removes. `layers`: layer -> limits. RatioTooLarge or RatioTooSmall when the layers together
    cannot lose that many experts."""
    check_ratio(ratio)
    removed = sum(limit.count - limit.retained_at(ratio) for limit in layers.values())
    least = sum(limit.count - limit.largest for limit in layers.values())
    most = sum(limit.count - limit.smallest for limit in layers.values())
    if removed > most:
        raise RatioTooLarge(
            f"removes {removed} experts, but routers, allocation.protect and "
            f"allocation.multiple_of allow {most} at most"
        )
    if removed < least:
        raise RatioTooSmall(
            # a layer that rounds up to more experts than it has counts as a negative removal
            f"removes {max(removed, 0)} experts, but allocation.multiple_of requires {least} "
            "at least"
        )
    return removed


def check_ratio(ratio: float) -> None:
    """Raise RatioTooLarge or RatioTooSmall when `ratio` is not in [0, 1)."""
    if ratio < 0:
        raise RatioTooSmall("expected a number in [0, 1)")
    if not ratio < 1:
        raise RatioTooLarge("expected a number in [0, 1)")
