"""A plan from scores; and what takes the place of the experts that it drops: nothing, constants, or kept experts.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy
from numpy.typing import ArrayLike

from moe_lab import allocation
from moe_lab.allocation import grouping
from moe_lab.errors import UserError
from moe_lab.pruning.plan import Plan, make_channel_plan, make_plan, merge_experts, replace_by_constants
from moe_lab.statistics.sums import mean_output

Evidence = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Pass, such as statistics or similarity -> layer -> sums by name."""


def plan_from_scores(
    settings: Mapping[str, Any],
    scores: Mapping[int, Any],
    granularity: Literal["expert", "channel"],
    model: Mapping[str, Any],
    evidence: Evidence | None = None,
    *,
    layers: Mapping[int, Mapping[str, Any]] | None = None,
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan of the experts, or the channels, with the lowest scores, as many in each layer as an allocation says.

    `settings`: fields of AllocationConfig and the ratio. `scores`: layer -> (E,), or (E, I) for channels. `model`: its
    facts, with `protected` experts. `evidence`: what `allocation.needs` names. `layers`: facts of the layers to prune,
    if these are not all. Raises UserError as `allocation.allocate` and `allocation.budgets` do.
    """
    layers, evidence = layers or model["layers"], evidence or {}
    if granularity == "channel":
        keep = allocation.budgets(settings, layers, scores, evidence, model)
        zero = allocation.zero_expert(settings)
        return make_channel_plan(scores, keep, layers, zero_expert=zero, provenance=provenance)
    remove = allocation.allocate(settings, layers, scores, evidence, model)
    plan = make_plan(scores, remove, layers, provenance=provenance)
    return replace_dropped(plan, settings, scores, evidence, layers)


def check_aligned(plan: Plan) -> None:
    """Raise UserError for a plan that merges experts by a way that matches their channels first, if that is still to
    be done."""
    about = plan.provenance.get("allocation")
    replacement = about.get("replacement", "none") if isinstance(about, dict) else "none"
    chosen = grouping.GROUPINGS.get(replacement)
    unmatched = sorted(set(plan.merged) - set(plan.alignments))
    if chosen is not None and chosen.align is not None and unmatched:
        alone = f"{replacement}_unaligned"
        others = f", or a plan of replacement={alone}" if alone in grouping.GROUPINGS else ""
        raise UserError(
            f"plan: replacement={replacement} matches the channels of experts before they are merged, which was not "
            f"done in layer {unmatched[0]}: expected what moe_lab.align makes of this plan{others}"
        )


def replace_dropped(
    plan: Plan,
    settings: Mapping[str, Any],
    scores: Mapping[int, ArrayLike],
    evidence: Evidence,
    layers: Mapping[int, Mapping[str, Any]],
) -> Plan:
    """`plan`, one of whole experts, with its dropped experts replaced as settings["replacement"] says.

    `settings`: fields of AllocationConfig. `scores`: layer -> (E,), by which experts were dropped. `evidence`: the sums
    that `grouping.needs` names. `layers`: layer -> facts, of which width is read, and protected, the experts that must
    stay as they are. Raises UserError for routers that a grouping cannot compare.
    """
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
    return merge_experts(merged, widths, rows=grouping.GROUPINGS[replacement].rows, provenance=plan.provenance)
