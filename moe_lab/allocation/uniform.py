"""Every layer loses the same share of its experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, lcm

from moe_lab.errors import UserError
from moe_lab.models.routing import PerLayer, at, fewest_experts


def uniform(
    n_experts: Mapping[int, int],
    ratio: float,
    *,
    top_k: PerLayer,
    multiple_of: int = 1,
    n_group: PerLayer = 1,
    topk_group: PerLayer | None = None,
) -> dict[int, int]:
    """How many experts each layer loses: int(n * ratio), the papers' rule, or the next smaller number that leaves a
    multiple of `multiple_of` (and of `n_group`, for group-limited routers).

    `n_experts`: layer -> number of routed experts. UserError, naming the nearest feasible ratio, when `ratio` is
    outside [0, 1), leaves fewer experts than the router needs, or when no such multiple exists.
    """
    if multiple_of < 1:
        raise UserError(f"allocation.multiple_of={multiple_of}: expected 1 or more")
    steps = {layer: lcm(multiple_of, at(n_group, layer)) for layer in n_experts}
    fewest = {
        layer: fewest_experts(at(top_k, layer), at(n_group, layer), at(topk_group or n_group, layer))
        for layer in n_experts
    }
    largest = _largest_ratio(n_experts, steps, fewest)
    if not 0 <= ratio < 1:
        nearest = 0 if ratio < 0 else largest
        raise UserError(f"ratio={ratio}: expected a number in [0, 1), {nearest} is the nearest feasible")
    remove = {}
    for layer, count in n_experts.items():
        left = count - int(count * ratio)
        kept = steps[layer] * ceil(left / steps[layer])
        if kept < fewest[layer]:
            raise UserError(
                f"ratio={ratio} leaves {kept} of {count} experts in layer {layer}, but its router needs at least "
                f"{fewest[layer]} (top_k={at(top_k, layer)}): {largest} is the largest feasible ratio"
            )
        if kept > count:
            raise UserError(
                f"ratio={ratio} leaves {left} of {count} experts in layer {layer}, and no more can be kept as a "
                f"multiple of {steps[layer]}: {_rounded_up(count % steps[layer], count)} is the smallest feasible "
                "ratio"
            )
        remove[layer] = count - kept
    return remove


def _largest_ratio(n_experts: Mapping[int, int], steps: Mapping[int, int], fewest: Mapping[int, int]) -> float:
    """The largest ratio every layer can bear; UserError when a layer cannot keep any multiple."""
    ratios = []
    for layer, count in n_experts.items():
        smallest = steps[layer] * ceil(fewest[layer] / steps[layer])
        if smallest > count:
            raise UserError(
                f"allocation.multiple_of: layer {layer} has {count} experts and cannot keep a multiple of "
                f"{steps[layer]} that is at least {fewest[layer]}: choose a smaller multiple"
            )
        ratios.append(_rounded_up(count - smallest, count))
    return min(ratios)


def _rounded_up(part: int, whole: int) -> float:
    """part / whole to four digits, such that int(whole * ratio) is still `part`."""
    return ceil(10_000 * part / whole) / 10_000
