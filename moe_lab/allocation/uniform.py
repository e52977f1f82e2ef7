"""Every layer loses the same share of its experts, or every expert the same share of its channels. No torch.

And all choices of the experts that a layer loses, among which allocation=reconstruction (NAEE) searches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations, product
from math import comb, prod
from typing import Any

import numpy

from moe_lab.allocation.problem import (
    Budgets,
    Channels,
    Experts,
    Limits,
    RatioTooLarge,
    RatioTooSmall,
    check_ratio,
    limits,
    or_nearest,
    whole,
)

LIMIT = 10_000
"""Largest number of subsets per layer that are tried by default."""


def experts(problem: Experts) -> dict[int, int]:
    """Layer -> experts to remove: the same share of each layer."""
    return same_share(problem.limits, problem.ratio)


def same_share(layers: Mapping[int, Limits], ratio: float) -> dict[int, int]:
    """Layer -> experts to remove: int(n * ratio), the papers' rule, or the next smaller number that the limits allow.

    RatioTooLarge or RatioTooSmall when `ratio` is outside [0, 1), leaves fewer experts than the router needs, or when a
    layer has no such number.
    """
    check_ratio(ratio)
    remove = {}
    for layer, limit in layers.items():
        kept = limit.even(ratio)
        if kept < limit.fewest:
            raise RatioTooLarge(
                f"leaves {kept} of {limit.count} experts in layer {layer}, but its router (top_k={limit.top_k}) and "
                f"allocation.protect need at least {limit.fewest}"
            )
        if kept > limit.count:
            raise RatioTooSmall(
                f"keeps {limit.count - int(limit.count * ratio)} of {limit.count} experts in layer {layer}, and a "
                f"multiple of {limit.step} is at most {limit.largest}"
            )
        remove[layer] = limit.count - kept
    return remove


def channels(problem: Channels) -> Budgets:
    """Every expert keeps the same int(I * (1 - ratio)) channels, so that all widths of a layer stay equal.

    This rounds down once per expert, so up to one channel per expert fewer is kept than with other allocations.
    RatioTooLarge when an expert would keep none.
    """
    budgets = {}
    for layer, scores in problem.scores.items():
        count, width = scores.shape
        kept = whole(width * (1 - problem.ratio))
        if not kept:
            raise RatioTooLarge(f"leaves no channel of {width} in the experts of layer {layer} with allocation=uniform")
        budgets[layer] = numpy.full(count, kept, dtype=numpy.int64)
    return budgets


def check_removals(
    layers: Mapping[int, Mapping[str, Any]], ratio: float, *, limit: int = LIMIT, multiple_of: int = 1
) -> dict[int, int]:
    """Number of experts that each layer loses, the same share in all, checked to leave at most `limit` choices a layer.

    `layers`: layer -> n_experts, top_k, n_group, topk_group, perhaps protected, as in a model's facts. Raises UserError
    for an infeasible ratio, and for a layer with more choices; both name the nearest feasible ratio.
    """
    by_layer = limits(layers, multiple_of)

    def decide(ratio: float) -> dict[int, int]:
        removed = same_share(by_layer, ratio)
        for layer, about in layers.items():
            choices = count_subsets(about["n_experts"], removed[layer], about["n_group"], about.get("protected", ()))
            if choices > limit:
                raise RatioTooLarge(
                    f"allocation=reconstruction tries {choices:.4g} choices of {removed[layer]} out of "
                    f"{about['n_experts']} experts in layer {layer}, more than allocation.parameters.limit={limit}"
                )
        return removed

    return or_nearest(decide, ratio)


def count_subsets(n_experts: int, removed: int, n_group: int = 1, protected: Collection[int] = ()) -> int:
    """Number of ways to remove `removed` of `n_experts`, equally many from each group of adjacent experts and none of
    the `protected`."""
    return prod(comb(len(group), removed // n_group) for group in _groups(n_experts, n_group, protected))


def _groups(n_experts: int, n_group: int, protected: Collection[int]) -> list[list[int]]:
    """The experts of each group that can be removed."""
    size = n_experts // n_group
    groups = [range(first, first + size) for first in range(0, n_experts, size)]
    return [[expert for expert in group if expert not in protected] for group in groups]


def kept_subsets(
    n_experts: int, removed: int, n_group: int = 1, protected: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """The kept ids, ascending, of all choices that `count_subsets` counts; first the one that loses the lowest ids."""
    groups = _groups(n_experts, n_group, protected)
    lost = product(*(combinations(group, removed // n_group) for group in groups))
    subsets = []
    for choice in lost:
        gone = {expert for group in choice for expert in group}
        subsets.append(tuple(expert for expert in range(n_experts) if expert not in gone))
    return subsets
