"""allocation=coverage (MoE-Slimming): channels to layers, then to experts, by how much of their scores they cover."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy

from moe_lab.allocation.apportion import apportion
from moe_lab.allocation.cba import TOLERANCE, Search, cover
from moe_lab.allocation.priors import NEEDS, Prior, expert_prior
from moe_lab.allocation.problem import Array, Budget, Budgets, Channels
from moe_lab.allocation.ranked import best
from moe_lab.allocation.shapes import layer_budgets, layer_losses, loss_needs, u_shape
from moe_lab.allocation.smoothing import Smoothing, smooth

BY_LOSS = ("coverage", "loss_based")
"""Ways to give layers their budgets that look at the layers' losses."""


def coverage(
    problem: Channels,
    *,
    inter: Literal["coverage", "uniform", "u_shaped", "loss_based"] = "coverage",
    intra: Literal["coverage", "proportional", "uniform", "ranking"] = "coverage",
    layer_prior: Literal["loss", "nll", "none"] = "loss",
    prior: Prior = "ala1",
    layer_smoothing: Smoothing = "sqrt",
    expert_smoothing: Smoothing = "sqrt",
    search: Search = "exact",
    beta: float = 0.02,
    floor: float = 0.1,
) -> Budgets:
    """Layer -> channels each expert keeps (E,).

    First `inter` gives each layer its budget: CBA over the pooled channels of the layers with the smoothed layer loss
    that `layer_prior` names as target, the same share, a U over the depth (`beta`, `floor`), or in proportion to that
    loss.
    Then `intra` divides it among the experts: CBA with the smoothed `prior` as target, in proportion to it, evenly, or
    the best channels of the layer. `layer_smoothing` is of the layer loss, which MoE-Slimming's Tables 7 and 15 vary;
    `expert_smoothing` is of `prior`. search=exact meets every budget to the channel; search=paper stops within 1 %,
    half of it in each stage when both stages search.
    """
    searching = (inter, intra).count("coverage")
    tolerance = TOLERANCE / max(searching, 1)
    scores = problem.scores
    shares = numpy.ones(len(scores))
    if inter in BY_LOSS and layer_prior != "none":
        shares = smooth(layer_losses(problem.evidence, scores, layer_prior), layer_smoothing)
    elif inter == "u_shaped":
        shares = u_shape(len(scores), 1 - problem.ratio, beta, floor)
    if inter == "coverage":
        pools = [values.ravel() for values in scores.values()]
        kept = cover(pools, shares, problem.keep, search=search, tolerance=tolerance)
        budgets = dict(zip(scores, kept.tolist(), strict=True))
    else:
        budgets = layer_budgets(problem, shares)

    def divide(layer: int, values: Array) -> Budget:
        if intra == "uniform":
            return apportion(numpy.ones(len(values)), budgets[layer], 0, values.shape[1])
        if intra == "ranking":
            return best(values, budgets[layer])
        measured = expert_prior(prior, problem.evidence, layer, (values.shape[0], values.shape[1]))
        target = smooth(measured, expert_smoothing)
        if intra == "proportional":
            return apportion(target, budgets[layer], 0, values.shape[1])
        return cover(list(values), target, budgets[layer], search=search, tolerance=tolerance)

    return {layer: divide(layer, values) for layer, values in scores.items()}


def needs(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Which steps measure what these parameters read."""
    found: set[str] = set()
    if parameters.get("inter", "coverage") in BY_LOSS and parameters.get("layer_prior") != "none":
        found.update(loss_needs(parameters))
    if parameters.get("intra", "coverage") in ("coverage", "proportional"):
        found.update({NEEDS[prior] for prior in [parameters.get("prior", "ala1")] if prior in NEEDS})
    return tuple(sorted(found))
