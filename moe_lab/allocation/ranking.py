"""One ranking over all layers: how many experts or channels of each are above the threshold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from moe_lab.allocation.problem import Array, Budget, Budgets, Channels, Experts, Limits, budget, finite
from moe_lab.errors import UserError


def global_experts(problem: Experts) -> dict[int, int]:
    """One threshold over the experts of all layers (EvoESAP, Fig. 1): layer -> experts to remove.

    Experts are compared by the scores in evidence["by"], of another criterion, or by their own. A layer that cannot
    lose more is skipped and the list goes on down. Where experts only go in steps (`multiple_of`, groups that lose
    equally) the list is of such steps, each by its mean score. When the steps of layers differ, the sum may stay below
    the budget by less than the largest step.
    """
    by = problem.evidence.get("by", problem.scores)
    if set(by) != set(problem.limits):
        raise UserError(f"allocation.by: scores are of layers {sorted(by)}, expected {sorted(problem.limits)}")
    remove = {layer: limit.count - limit.largest for layer, limit in problem.limits.items()}
    left = budget(problem.limits, problem.ratio) - sum(remove.values())
    for _, layer, _ in sorted(_steps(problem.limits, by)):
        limit = problem.limits[layer]
        if limit.step <= left and limit.count - remove[layer] - limit.step >= limit.smallest:
            remove[layer] += limit.step
            left -= limit.step
    return remove


def _steps(limits: Mapping[int, Limits], by: Mapping[int, Array]) -> list[tuple[float, int, int]]:
    """(mean score, layer, number) of every step of experts that a layer can lose, beyond those that must go."""
    steps = []
    for layer, limit in limits.items():
        scores = finite("allocation.by", layer, by[layer], (limit.count,))
        rows = numpy.sort(scores.reshape(limit.n_group, -1), axis=1)[
            :, (limit.count - limit.largest) // limit.n_group :
        ]
        means = rows.reshape(limit.n_group, -1, limit.step // limit.n_group).mean(axis=(0, 2))
        steps += [(float(mean), layer, number) for number, mean in enumerate(means)]
    return steps


def global_channels(problem: Channels) -> Budgets:
    """One threshold over the channels of all experts of all layers (HEAPr-G); an expert may keep none."""
    kept = _kept(numpy.concatenate([scores.ravel() for scores in problem.scores.values()]), problem.keep)
    parts = numpy.split(kept, numpy.cumsum(problem.sizes)[:-1])
    return {
        layer: part.reshape(scores.shape).sum(axis=1)
        for (layer, scores), part in zip(problem.scores.items(), parts, strict=True)
    }


def best(scores: Array, keep: int) -> Budget:
    """How many of the `keep` highest of `scores` (E, I) each expert has (E,); ties fall in order, first ones first."""
    counts: Budget = _kept(scores.ravel(), keep).reshape(scores.shape).sum(axis=1)
    return counts


def _kept(scores: Array, keep: int) -> Budget:
    """1 for the `keep` highest scores, 0 for the rest."""
    flags: Budget = numpy.ones(len(scores), dtype=numpy.int64)
    flags[numpy.argsort(scores, kind="stable")[: len(scores) - keep]] = 0
    return flags
