"""All subsets of experts that a layer can keep, and the check that there are not too many. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations, product
from math import comb, prod
from typing import Any

from moe_lab.allocation.problem import RatioTooLarge, limits, or_nearest
from moe_lab.allocation.uniform import same_share
from moe_lab.errors import UserError

LIMIT = 10_000
"""Largest number of subsets per layer that are tried by default."""


def check_removals(
    layers: Mapping[int, Mapping[str, Any]], ratio: float, *, limit: int = LIMIT, multiple_of: int = 1
) -> dict[int, int]:
    """Number of experts that each layer loses, the same share in all, checked to leave at most `limit` choices a layer.

    `layers`: layer -> n_experts, top_k, n_group, topk_group, perhaps protected, as in a model's facts. Raises UserError
    for an infeasible ratio, and for a layer with more choices; both name the nearest feasible ratio.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise UserError(f"allocation.parameters.limit={limit}: expected a whole number of at least 1")
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
