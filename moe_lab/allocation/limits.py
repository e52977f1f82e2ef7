"""How few and how many experts a layer can keep, and how many go at a ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.routing import fewest_experts


@dataclass(frozen=True)
class Limits:
    """What a layer's router and `multiple_of` allow. Kept counts are `smallest`, then on in steps up to `largest`."""

    count: int
    """Routed experts of the layer."""
    top_k: int
    n_group: int
    """Groups of a group-limited router, which must lose equally; 1 for other routers."""
    step: int
    """Kept counts are multiples of this."""
    fewest: int
    """The router works with no fewer experts than this."""

    @property
    def smallest(self) -> int:
        """The smallest feasible kept count; above `count` when there is none."""
        return self.step * ceil(self.fewest / self.step)

    @property
    def largest(self) -> int:
        """The largest multiple of `step` that is not above `count`."""
        return self.step * (self.count // self.step)

    def even(self, ratio: float) -> int:
        """Kept when int(count * ratio) experts go, the papers' rule, or the next larger multiple of `step`."""
        return self.step * ceil((self.count - int(self.count * ratio)) / self.step)


def limits(layers: Mapping[int, Mapping[str, Any]], multiple_of: int = 1) -> dict[int, Limits]:
    """The limits of every layer. `layers`: layer -> facts (n_experts, top_k, n_group, topk_group).

    UserError when a layer cannot keep any multiple of `multiple_of`.
    """
    if multiple_of < 1:
        raise UserError(f"allocation.multiple_of={multiple_of}: expected 1 or more")
    found = {}
    for layer, facts in layers.items():
        count, top_k, n_group = int(facts["n_experts"]), int(facts["top_k"]), int(facts["n_group"])
        fewest = fewest_experts(top_k, n_group, facts["topk_group"])
        limit = found[layer] = Limits(count, top_k, n_group, lcm(multiple_of, n_group), fewest)
        if limit.smallest > count:
            raise UserError(
                f"allocation.multiple_of: layer {layer} has {count} experts and cannot keep a multiple of "
                f"{limit.step} that is at least {fewest}: choose a smaller multiple"
            )
    return found


def budget(layers: Mapping[int, Limits], ratio: float) -> int:
    """How many experts all layers lose together at `ratio`: what allocation=uniform removes, layer by layer.

    So every allocation removes the same number at one ratio. UserError, naming the nearest feasible ratio, when the
    layers together cannot lose that many.
    """
    check_ratio(ratio, largest_ratio(layers))
    removed = _even(layers, ratio)
    least = sum(limit.count - limit.largest for limit in layers.values())
    most = sum(limit.count - limit.smallest for limit in layers.values())
    if removed > most:
        raise UserError(
            f"ratio={ratio} removes {removed} experts, but routers and allocation.multiple_of let only {most} go: "
            f"{_nearest(layers, least, most)[1]} is the largest feasible ratio"
        )
    if removed < least:
        raise UserError(
            f"ratio={ratio} removes {max(removed, 0)} experts, but allocation.multiple_of makes at least {least} go: "
            f"{_nearest(layers, least, most)[0]} is the smallest feasible ratio"
        )
    return removed


def largest_ratio(layers: Mapping[int, Limits]) -> float:
    """The largest ratio that every layer can bear on its own."""
    return min(rounded_up(limit.count - limit.smallest, limit.count) for limit in layers.values())


def check_ratio(ratio: float, largest: float) -> None:
    """UserError unless `ratio` is in [0, 1)."""
    if not 0 <= ratio < 1:
        nearest = 0 if ratio < 0 else largest
        raise UserError(f"ratio={ratio}: expected a number in [0, 1), {nearest} is the nearest feasible")


def rounded_up(part: int, whole: int) -> float:
    """part / whole to four digits, such that int(whole * ratio) is still `part`."""
    return ceil(10_000 * part / whole) / 10_000


def _even(layers: Mapping[int, Limits], ratio: float) -> int:
    return sum(limit.count - limit.even(ratio) for limit in layers.values())


def _nearest(layers: Mapping[int, Limits], least: int, most: int) -> tuple[float, float]:
    """The smallest and the largest ratio whose budget is within `least` and `most`."""
    counts = {limit.count for limit in layers.values()}
    ratios = sorted({rounded_up(part, count) for count in counts for part in range(count)})
    feasible = [ratio for ratio in ratios if least <= _even(layers, ratio) <= most]
    if not feasible:
        raise UserError(
            f"allocation.multiple_of: no ratio makes the layers lose between {least} and {most} experts together: "
            "choose a smaller multiple"
        )
    return feasible[0], feasible[-1]
