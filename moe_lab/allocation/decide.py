"""Decide how many experts each layer loses, or how many channels each expert keeps, by the allocation in settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from moe_lab.allocation import coverage, grouping, shapes
from moe_lab.allocation.problem import (
    Budgets,
    Channels,
    Evidence,
    Experts,
    RatioTooLarge,
    budget,
    check_ratio,
    limits,
    or_nearest,
    own,
)
from moe_lab.allocation.registry import Granularity, get
from moe_lab.errors import UserError

Layers = Mapping[int, Mapping[str, Any]]


def allocate(
    settings: Mapping[str, Any],
    layers: Layers,
    scores: Mapping[int, Any],
    evidence: Evidence | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[int, int]:
    """Layer -> how many experts to remove.

    `settings`: fields of AllocationConfig and the ratio. `layers`: layer -> facts (n_experts, top_k, n_group,
    topk_group, and perhaps protected: ids of experts that must be kept). `scores`: layer -> a score per expert.
    `evidence`: each name in `needs(settings)` -> layer -> arrays by name (for "by": a score per expert). `model`: facts
    of the model, for ratio_basis=model. UserError for infeasible settings, naming the nearest feasible ones.
    """
    function = _function(settings, "expert")
    values = {layer: numpy.asarray(scores[layer], dtype=numpy.float64) for layer in layers}
    by_layer = limits(layers, settings["multiple_of"])

    def decide(ratio: float) -> dict[int, int]:
        problem = Experts(
            ratio=routed_ratio(ratio, settings.get("ratio_basis", "routed"), model),
            scores=values,
            evidence=evidence or {},
            path=settings.get("path"),
            protected=_protected(layers),
            limits=by_layer,
        )
        return function(problem, **own(function, settings["parameters"]))

    return or_nearest(decide, settings["ratio"])


def budgets(
    settings: Mapping[str, Any],
    layers: Layers,
    scores: Mapping[int, Any],
    evidence: Evidence | None = None,
    model: Mapping[str, Any] | None = None,
) -> Budgets:
    """Layer -> how many channels each expert keeps (E,) int64.

    As `allocate`, with `scores`: layer -> (E, I). Rounded to whole blocks if parameters.align is set.
    """
    function = _function(settings, "channel")
    values = {layer: numpy.asarray(scores[layer], dtype=numpy.float64) for layer in layers}
    alignment = coverage.alignment_of(settings)
    protected = _protected(layers)
    raised = dict(values)
    for layer, experts in protected.items():
        raised[layer] = values[layer].copy()
        raised[layer][experts] = numpy.inf

    def decide(ratio: float) -> Budgets:
        problem = Channels(
            ratio=_share_of_channels(ratio, settings, layers, model),
            scores=raised,
            evidence=evidence or {},
            path=settings.get("path"),
            protected=protected,
        )
        if problem.fixed.sum() > problem.keep:
            raise RatioTooLarge(f"keeps {problem.keep} channels, but allocation.protect needs {problem.fixed.sum()}")
        kept = function(problem, **own(function, settings["parameters"]))
        return kept if alignment is None else coverage.align(kept, values, alignment)

    return or_nearest(decide, settings["ratio"])


def fits(settings: Mapping[str, Any], layers: Layers, granularity: Granularity) -> None:
    """Raise UserError when ratio, multiple_of or block is infeasible in these layers, as far as known without scores.

    `layers` as in `allocate`; for channels, blocks are checked only in layers that also have a width. Nothing is
    checked with ratio_basis=model, which needs the parameters of the model.
    """
    if settings.get("ratio_basis", "routed") != "routed":
        return
    wide = {layer: facts for layer, facts in layers.items() if "width" in facts}

    def check(ratio: float) -> None:
        if granularity == "channel":
            _share_of_channels(ratio, settings, wide)
        elif settings["name"] != "list":
            _check_experts(ratio, settings, layers)

    or_nearest(check, settings["ratio"])


def _share_of_channels(
    ratio: float, settings: Mapping[str, Any], layers: Layers, model: Mapping[str, Any] | None = None
) -> float:
    """The share of channels that go. RatioTooLarge or RatioTooSmall when it is not in [0, 1), or blocks keep fewer."""
    share = routed_ratio(ratio, settings.get("ratio_basis", "routed"), model)
    check_ratio(share)
    alignment = coverage.alignment_of(settings)
    if alignment is not None:
        coverage.check_fits(alignment, layers, share)
    return share


def _check_experts(ratio: float, settings: Mapping[str, Any], layers: Layers) -> None:
    by_layer = limits(layers, settings["multiple_of"])
    if settings["name"] in ("uniform", "reconstruction", "sequential"):
        shapes.same_share(by_layer, ratio)
    else:
        budget(by_layer, ratio)
    for layer, limit in by_layer.items():
        grouping.fits(settings, limit.count, limit.even(ratio), len(layers[layer].get("protected", ())))


def routed_ratio(ratio: float, basis: str, facts: Mapping[str, Any] | None) -> float:
    """Convert `ratio` to a share of the routed experts' parameters.

    basis=routed: it already is one. basis=model: it is a share of all `facts["parameters"]`. RatioTooLarge when the
    routed experts do not have more parameters than that.
    """
    if basis == "routed":
        return ratio
    if facts is None:
        raise UserError("allocation.ratio_basis=model needs the number of the model's parameters, and none was given")
    routed = sum(layer["n_experts"] * layer["expert_parameters"] for layer in facts["layers"].values())
    share = float(routed / facts["parameters"])
    if ratio >= share:
        raise RatioTooLarge(
            f"with allocation.ratio_basis=model expected less than {share:.4f}, the share of the routed experts in the "
            "parameters of the model"
        )
    return ratio / share


def _protected(layers: Layers) -> dict[int, list[int]]:
    """Layer -> ids of its protected experts, for layers that have any."""
    return {layer: list(facts["protected"]) for layer, facts in layers.items() if facts.get("protected")}


def _function(settings: Mapping[str, Any], granularity: Granularity) -> Callable[..., dict[int, Any]]:
    allocation = get(settings["name"])
    function = allocation.functions.get(granularity)
    if function is None:
        raise UserError(
            f"allocation={allocation.name} cannot say from scores of {granularity}s alone how much goes: it is for "
            f"{' and '.join(allocation.granularities)}s, decided in the {allocation.step} step"
        )
    return function
