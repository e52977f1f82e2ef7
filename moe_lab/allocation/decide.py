"""Decide how many experts each layer loses, or how many channels each expert keeps, by the allocation in settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from moe_lab.allocation import align, grouping, uniform
from moe_lab.allocation.parameters import own
from moe_lab.allocation.problem import (
    Budgets,
    Channels,
    Evidence,
    Experts,
    RatioTooLarge,
    budget,
    check_ratio,
    finite,
    limits,
    or_nearest,
)
from moe_lab.allocation.registry import Granularity, get, zero_expert
from moe_lab.errors import UserError
from moe_lab.models.config_json import fewest_experts

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
    of the model, for ratio_basis=model. UserError for scores of another model, NaN or Inf, and for infeasible settings,
    naming the nearest feasible ones.
    """
    function = _function(settings, "expert")
    n_experts = {layer: int(facts["n_experts"]) for layer, facts in layers.items()}
    scored = {layer: len(row) for layer, row in scores.items()}
    if scored != n_experts:
        raise UserError(f"scores are of another model: experts per layer {scored}, expected {n_experts}")
    values = {layer: finite("scores", layer, scores[layer], (count,)) for layer, count in n_experts.items()}
    by_layer = limits(layers, settings["multiple_of"])

    def decide(ratio: float) -> dict[int, int]:
        problem = Experts(
            ratio=_of_routed(ratio, settings, model),
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

    As `allocate`, with `scores`: layer -> (E, I). Rounded to whole blocks if parameters.align is set. With
    zero_expert=drop, UserError when a layer would be left with fewer experts than its router needs, naming the largest
    feasible ratio.
    """
    function = _function(settings, "channel")
    if set(scores) != set(layers):
        raise UserError(f"scores are of another model: layers {sorted(scores)}, expected {sorted(layers)}")
    values = {
        layer: finite("scores", layer, scores[layer], (facts["n_experts"], facts["width"]))
        for layer, facts in layers.items()
    }
    alignment = align.parse(settings["parameters"].get("align"))
    protected = _protected(layers)
    if alignment is not None:
        for layer in protected:
            align.check_protected(alignment, layer, layers[layer]["width"])
    raised = dict(values)
    for layer, experts in protected.items():
        raised[layer] = values[layer].copy()
        raised[layer][experts] = numpy.inf

    def decide(ratio: float) -> Budgets:
        share = _of_routed(ratio, settings, model)
        check_ratio(share)
        if alignment is not None:
            align.check_fits(alignment, layers, share)
        problem = Channels(
            ratio=share, scores=raised, evidence=evidence or {}, path=settings.get("path"), protected=protected
        )
        if problem.fixed.sum() > problem.keep:
            raise RatioTooLarge(f"keeps {problem.keep} channels, but allocation.protect needs {problem.fixed.sum()}")
        kept = function(problem, **own(function, settings["parameters"]))
        if alignment is not None:
            kept = align.align(kept, values, alignment)
        if zero_expert(settings) == "drop":
            _check_survivors(kept, layers)
        return kept

    return or_nearest(decide, settings["ratio"])


def fits(settings: Mapping[str, Any], layers: Layers, granularity: Granularity) -> None:
    """Raise UserError when ratio, multiple_of or block is infeasible in these layers, as far as known without scores.

    `layers` as in `allocate`; for channels, blocks are checked only in layers that also have a width. Nothing is
    checked with ratio_basis=model, which needs the parameters of the model.
    """
    if settings.get("ratio_basis", "routed") != "routed":
        return

    def check(ratio: float) -> None:
        if granularity == "channel":
            _fits_channels(settings, layers, ratio)
        elif settings["name"] != "list":
            _fits_experts(settings, layers, ratio)

    or_nearest(check, settings["ratio"])


def _fits_channels(settings: Mapping[str, Any], layers: Layers, ratio: float) -> None:
    check_ratio(ratio)
    alignment = align.parse(settings["parameters"].get("align"))
    if alignment is not None:
        align.check_fits(alignment, {n: facts for n, facts in layers.items() if "width" in facts}, ratio)


def _fits_experts(settings: Mapping[str, Any], layers: Layers, ratio: float) -> None:
    by_layer = limits(layers, settings["multiple_of"])
    if settings["name"] in ("uniform", "reconstruction", "sequential"):
        uniform.same_share(by_layer, ratio)
    else:
        budget(by_layer, ratio)
    for layer, limit in by_layer.items():
        grouping.fits(settings, limit.count, limit.even(ratio), len(layers[layer].get("protected", ())))


def routed_ratio(ratio: float, basis: str, facts: Mapping[str, Any]) -> float:
    """Convert `ratio` to a share of the routed experts' parameters.

    basis=routed: it already is one. basis=model: it is a share of all `facts["parameters"]`. RatioTooLarge when the
    routed experts do not have more parameters than that.
    """
    if basis == "routed":
        return ratio
    routed = sum(layer["n_experts"] * layer["expert_parameters"] for layer in facts["layers"].values())
    share = float(routed / facts["parameters"])
    if ratio >= share:
        raise RatioTooLarge(
            f"with allocation.ratio_basis=model expected less than {share:.4f}, the share of the routed experts in the "
            "parameters of the model"
        )
    return ratio / share


def _of_routed(ratio: float, settings: Mapping[str, Any], model: Mapping[str, Any] | None) -> float:
    """The share of routed parameters that is `ratio` of what settings["ratio_basis"] names."""
    basis = settings.get("ratio_basis", "routed")
    if basis == "model" and model is None:
        raise UserError("allocation.ratio_basis=model needs the number of the model's parameters, and none was given")
    return routed_ratio(ratio, basis, model or {})


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


def _check_survivors(kept: Budgets, layers: Layers) -> None:
    """Raise RatioTooLarge when dropping experts without channels leaves a router too few, or with unequal groups."""
    for layer, facts in layers.items():
        groups = int(facts["n_group"])
        left = numpy.count_nonzero(kept[layer].reshape(groups, -1), axis=1)
        fewest = fewest_experts(facts)
        if left.sum() < fewest or len(set(left.tolist())) > 1:
            wanted = f"the same number in each of its {groups} groups, " if groups > 1 else ""
            raise RatioTooLarge(
                f"allocation.parameters.zero_expert=drop leaves {left.sum()} of {facts['n_experts']} experts in layer "
                f"{layer}, but its router needs {wanted}at least {fewest}: zero_expert=keep_null keeps them routable"
            )
