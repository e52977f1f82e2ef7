"""Every layer loses the same share of its experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, lcm

from moe_lab.errors import UserError
from moe_lab.models.routing import fewest_experts


def uniform(
    n_experts: Mapping[int, int],
    ratio: float,
    *,
    top_k: int,
    multiple_of: int = 1,
    n_group: int = 1,
    topk_group: int | None = None,
) -> dict[int, int]:
    """How many experts each layer loses: int(n * ratio), the papers' rule, or the next smaller number that leaves a
    multiple of `multiple_of` (and of `n_group`, for group-limited routers).

    `n_experts`: layer -> number of routed experts. UserError, naming the nearest feasible ratio, when `ratio` is outside
    [0, 1), leaves fewer experts than the router needs, or when no such multiple exists.
    """
    if multiple_of < 1:
        raise UserError(f"allocation.multiple_of={multiple_of}: expected 1 or more")
    step = lcm(multiple_of, n_group)
    fewest = fewest_experts(top_k, n_group, topk_group)
    most = {layer: count - step * ceil(fewest / step) for layer, count in n_experts.items()}
    for layer, removable in most.items():
        if removable < 0:
            raise UserError(
                f"allocation.multiple_of={multiple_of}: layer {layer} has {n_experts[layer]} experts and cannot keep a "
                f"multiple of {step} that is at least {fewest}: choose a smaller multiple"
            )
    largest = min(ceil(10_000 * most[layer] / count) / 10_000 for layer, count in n_experts.items())
    if not 0 <= ratio < 1:
        raise UserError(
            f"ratio={ratio}: expected a number in [0, 1), {0 if ratio < 0 else largest} is the nearest feasible"
        )
    remove = {}
    for layer, count in n_experts.items():
        kept = step * ceil((count - int(count * ratio)) / step)
        if kept < fewest:
            raise UserError(
                f"ratio={ratio} leaves {kept} of {count} experts in layer {layer}, but its router needs at least {fewest} "
                f"(top_k={top_k}): {largest} is the largest feasible ratio"
            )
        if kept > count:
            smallest = ceil(10_000 * (count % step) / count) / 10_000
            raise UserError(
                f"ratio={ratio} leaves {count - int(count * ratio)} of {count} experts in layer {layer}, and no more can be "
                f"kept as a multiple of {step}: {smallest} is the smallest feasible ratio"
            )
        remove[layer] = count - kept
    return remove
