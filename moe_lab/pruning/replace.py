"""A plan from scores; and what takes the place of experts that it drops: nothing, constants, kept
experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy
from numpy.typing import ArrayLike, NDArray

from moe_lab import allocation
from moe_lab.allocation import grouping
from moe_lab.allocation.problem import Evidence
from moe_lab.errors import UserError
from moe_lab.pruning.plan import Plan, finite, make_channel_plan, make_plan
from moe_lab.statistics import mean_output


def plan_from_scores(
    settings: Mapping[str, Any],
    scores: Mapping[int, Any],
    granularity: Literal["expert", "channel"],
    layers: Mapping[int, Mapping[str, Any]],
    evidence: Evidence,
    *,
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan of the experts, or the channels, with the lowest scores, as many in each layer as an
    allocation says.

    `settings`: fields of AllocationConfig and the ratio. `scores`: layer -> (E,), or (E, I) for
    channels. `layers`: facts of the layers to prune, with `protected` experts. `evidence`: what
    `allocation.needs` names. Raises UserError as `allocation.allocate` and `allocation.budgets` do.
    """
    if granularity == "channel":
        keep = allocation.budgets(settings, layers, scores, evidence)
        zero = allocation.zero_expert(settings)
        return make_channel_plan(scores, keep, layers, zero_expert=zero, provenance=provenance)
    remove = allocation.allocate(settings, layers, scores, evidence)
    plan = make_plan(scores, remove, layers, provenance=provenance)
    return replace_dropped(plan, settings, scores, evidence, layers)


def replace_by_constants(
    plan: Plan, outputs: Mapping[int, NDArray[numpy.float64]], widths: Mapping[int, int]
) -> Plan:
    """The plan in which the experts that `plan`, one of whole experts, drops stay routable and put
    out constants. `outputs`: layer -> (E, H), the constant of each expert; with the mean output of
    each, this is MoNE (arXiv 2507.00390): a token that is routed to a replaced expert j with gate
    g_j gets g_j c_j. `widths`: layer -> channels of an expert. UserError for outputs that are not
    finite."""
    channels = {}
    constants = {}
    for layer, kept in plan.experts.items():
        values = finite(layer, outputs[layer])
        channels[layer] = numpy.zeros((plan.n_experts[layer], widths[layer]), dtype=numpy.bool_)
        channels[layer][list(kept)] = True
        if len(kept) < plan.n_experts[layer]:
            constants[layer] = values[~channels[layer].any(1)].astype(numpy.float32)
    everything = {layer: tuple(range(count)) for layer, count in plan.n_experts.items()}
    return Plan(everything, plan.n_experts, plan.provenance, channels, constants)


def merge_experts(
    groups: Mapping[int, Mapping[int, Mapping[int, float]]],
    widths: Mapping[int, int],
    *,
    rows: str = "all",
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that merges experts.

    `groups`: layer -> expert -> {expert: weight} of those that it stands for, as in `Plan.merged`;
    every expert is in one group, and one that stays as it is has a group of its own. `widths`:
    layer -> channels of an expert. `rows`: "all" if the router stays whole, so that tokens are
    routed to all members of a group, or "kept" if it only keeps the rows of the experts that stand
    for a group.
    """
    n_experts = {layer: sum(map(len, of_layer.values())) for layer, of_layer in groups.items()}
    channels = {}
    merged = {}
    for layer, of_layer in groups.items():
        channels[layer] = numpy.zeros((n_experts[layer], widths[layer]), dtype=numpy.bool_)
        channels[layer][list(of_layer)] = True
        if several := {owner: dict(group) for owner, group in of_layer.items() if len(group) > 1}:
            merged[layer] = several
    experts = {
        layer: tuple(range(count)) if rows == "all" else tuple(sorted(groups[layer]))
        for layer, count in n_experts.items()
    }
    return Plan(experts, n_experts, dict(provenance), channels, merged=merged)


def check_aligned(plan: Plan) -> None:
    """Raise UserError for a plan that merges experts by a way that matches their channels first, if
    that is still to be done."""
    if plan.merged and not plan.aligned:
        raise UserError(
            f"plan: aligned=false, and the channels of experts that layer {min(plan.merged)} "
            "merges were not matched: "
            "expected what moe_lab.align makes of this plan"
        )


def replace_dropped(
    plan: Plan,
    settings: Mapping[str, Any],
    scores: Mapping[int, ArrayLike],
    evidence: Evidence,
    layers: Mapping[int, Mapping[str, Any]],
) -> Plan:
    """`plan`, one of whole experts, with its dropped experts replaced as settings["replacement"]
    says; other arguments as in `plan_from_scores`. UserError for routers that a grouping cannot
    compare."""
    replacement = settings.get("replacement", "none")
    widths = {layer: int(facts["width"]) for layer, facts in layers.items()}
    if replacement == "mean_output":
        outputs = {layer: mean_output(evidence["statistics"][layer]) for layer in plan.experts}
        return replace_by_constants(plan, outputs, widths)
    if replacement not in grouping.GROUPINGS:
        return plan
    merged = {}
    for layer, kept in plan.experts.items():
        sums: dict[str, Any] = {}
        for name in grouping.needs(replacement):
            sums |= evidence[name][layer]
        values = numpy.asarray(scores[layer], dtype=float)
        groups = grouping.groups(settings, sums, values, kept, layers[layer].get("protected", ()))
        merged[layer] = grouping.weighted(replacement, groups, sums, values, kept)
    how = grouping.GROUPINGS[replacement]
    made = merge_experts(merged, widths, rows=how.rows, provenance=plan.provenance)
    return replace(made, aligned=how.align is None)
