"""Every layer loses the same share of its experts, or every expert the same share of its channels. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from moe_lab.allocation.problem import (
    Budgets,
    Channels,
    Experts,
    Limits,
    RatioTooLarge,
    RatioTooSmall,
    check_ratio,
    whole,
)


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
            raise RatioTooLarge(f"leaves {kept} of {limit.count} experts in layer {layer}, but {limit.reason}")
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
