"""CBA (MoE-Slimming, Algorithms 1-4): budgets of groups such that each covers its target share of its own scores.

S_g(n) is the sum of the n highest scores of group g, negative ones counting nothing, and
N_g(rho) = min{n : S_g(n) >= rho S_g}. Sought is alpha with sum_g N_g(min(alpha phi_g, 1)) = budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy

from moe_lab.allocation.problem import Array, Budget, Infeasible

Search: TypeAlias = Literal["exact", "paper"]
TOLERANCE = 0.01
"""epsilon of the paper: how far the sum may be from the budget, as a share of all channels."""
ITERATIONS = 50
BEYOND = 1e300
"""Above every alpha of a group with phi > 0, below infinity."""


def cover(
    groups: Sequence[Array], prior: Array, budget: int, *, search: Search, tolerance: float = TOLERANCE
) -> Budget:
    """Channels each group keeps (G,). `groups`: scores of each group (n_g,), in any order; `prior`: phi >= 0 (G,)."""
    if search == "exact":
        return exact(groups, prior, budget)[0]
    return paper(groups, prior, budget, tolerance)[0]


def exact(groups: Sequence[Array], prior: Array, budget: int) -> tuple[Budget, float]:
    """Budgets (G,) that sum to `budget`, and the largest alpha with sum N_g <= budget.

    Group g takes its channel n+1 as soon as alpha phi_g S_g > S_g(n), so the channels of all groups are sorted by
    S_g(n) / (S_g phi_g) and the first `budget` are taken: no search, and no rounding. Where several groups take one at
    the same alpha and not all can, those have the smallest achieved / target coverage; larger phi first, then group
    order. Channels without any score, and before them groups with phi = 0, come last.
    """
    order = numpy.argsort(-prior, kind="stable")
    thresholds = [_thresholds(groups[group], prior[group]) for group in order]
    owner = numpy.repeat(order, [len(threshold) for threshold in thresholds])
    flat = numpy.concatenate(thresholds)
    taken = numpy.argsort(flat, kind="stable")
    positive = prior[prior > 0]
    top = 1 / float(positive.min()) if len(positive) else 0.0
    alpha = min(float(flat[taken[budget]]), top) if budget < len(flat) else top
    return numpy.bincount(owner[taken[:budget]], minlength=len(groups)), alpha


def _thresholds(scores: Array, prior: float) -> Array:
    """The alpha above which each channel of a group, best first, is taken."""
    descending = numpy.sort(numpy.maximum(scores, 0))[::-1]
    reached = numpy.cumsum(descending)
    if reached[-1] <= 0:
        return numpy.full(len(scores), numpy.inf)
    share = (reached - descending) / reached[-1]
    threshold = share / prior if prior > 0 else BEYOND * (1 + share)
    found: Array = numpy.where(descending > 0, threshold, numpy.inf)
    return found


def paper(groups: Sequence[Array], prior: Array, budget: int, tolerance: float = TOLERANCE) -> tuple[Budget, float]:
    """Budgets (G,) and alpha of the paper's bisection, with every group keeping at least one channel.

    alpha is sought in [0, 1 / min positive phi] (with the paper's [0, 1] a group could never be covered beyond phi),
    until the sum is within `tolerance` of all channels or after 50 halvings. Infeasible, naming the nearest number that
    can be had, when it never is.
    """
    reached = [numpy.cumsum(numpy.sort(numpy.maximum(scores, 0))[::-1]) for scores in groups]
    allowed = tolerance * sum(len(group) for group in groups)
    low, high = 0.0, 1 / float(prior[prior > 0].min()) if prior.any() else 1.0
    sums = []
    for _ in range(ITERATIONS):
        alpha = (low + high) / 2
        kept = _covered(reached, numpy.minimum(alpha * prior, 1))
        sums.append(int(kept.sum()))
        if abs(sums[-1] - budget) <= allowed:
            return kept, alpha
        low, high = (low, alpha) if sums[-1] > budget else (alpha, high)
    nearest = min(sums, key=lambda reachable: abs(reachable - budget))
    raise Infeasible(
        f"allocation.parameters.search=paper cannot keep {budget} channels: {nearest} is the nearest, since every "
        "group keeps one and channels without score cover nothing; search=exact can"
    )


def _covered(reached: Sequence[Array], share: Array) -> Budget:
    """N_g(share_g) >= 1 of every group (G,)."""
    return numpy.array(
        [1 + numpy.searchsorted(sums, part * sums[-1]) for sums, part in zip(reached, share, strict=True)],
        dtype=numpy.int64,
    )
