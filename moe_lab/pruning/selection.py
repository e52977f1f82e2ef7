"""Make a plan from scores: select the retained experts or channels, and replace dropped experts by
constants or merge them into others. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy
from numpy.typing import ArrayLike, NDArray

from moe_lab import allocation
from moe_lab.allocation import grouping
from moe_lab.allocation.problem import Evidence
from moe_lab.errors import UserError
from moe_lab.pruning.layer_plan import LayerPlan, Mask
from moe_lab.pruning.plan import Plan, Routers
from moe_lab.statistics import mean_output, merge_passes


def plan_from_scores(
    settings: Mapping[str, Any],
    scores: Mapping[int, Any],
    routers: Routers,
    evidence: Evidence,
    *,
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that drops the experts, or the channels, with the lowest scores. The allocation in
    `settings` decides how many each layer loses. Dropped experts are replaced as in
    `replace_dropped`.

    `settings`: fields of AllocationConfig and the ratio. `scores`: layer -> (E,) scores of experts,
    or (E, I) scores of channels. `evidence`: step -> layer -> name -> array, for each step that
    `allocation.required_evidence(settings)` names.
    """
    granularity = allocation.granularity_of(scores)
    # layer -> number of experts to drop, or numbers (E,) of channels to retain
    amounts = allocation.allocate(settings, routers, scores, evidence)
    if granularity == "channel":
        zero_expert = allocation.zero_expert(settings)
        return make_channel_plan(
            scores, amounts, routers, zero_expert=zero_expert, provenance=provenance
        )
    plan = make_plan(scores, amounts, routers, provenance=provenance)
    return replace_dropped(plan, settings, scores, evidence, routers)


def make_plan(
    scores: Mapping[int, ArrayLike],
    n_dropped: Mapping[int, int],
    routers: Routers,
    *,
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that drops, in each layer, the `n_dropped[layer]` experts of lowest score.

    `scores`: layer -> (E,). Of experts with equal scores, the lower id is dropped first. Experts
    that `routers` protects are dropped last. A layer with a group-limited router (`n_group` > 1)
    loses the same number of experts in each group. UserError for scores that are not finite, and
    for plans that `Plan.check` rejects.
    """
    layers = {}
    for number in sorted(scores):
        values = _competing_scores(number, scores[number], routers[number])
        retained = _retained_ids(values, n_dropped[number], routers[number]["n_group"])
        layers[number] = LayerPlan(len(values), retained)
    plan = Plan(layers, dict(provenance))
    plan.check(routers)
    return plan


def make_channel_plan(
    scores: Mapping[int, NDArray[numpy.float64]],
    n_retained: Mapping[int, NDArray[numpy.int64]],
    routers: Routers,
    *,
    zero_expert: str = "keep_null",
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that retains, of each expert, the `n_retained[layer][expert]` channels of highest
    score.

    `scores`: layer -> (E, I). Of channels with equal scores, the lower number is dropped first.
    `zero_expert`: "keep_null" if an expert without channels stays as a null expert, "drop" if it is
    dropped with its router row. UserError if all channels would be dropped; other errors are those
    of `make_plan`.
    """
    layers = {}
    total = 0
    for number in sorted(scores):
        # rank of each channel in its expert; 0 is the lowest score
        ranks = finite_scores(number, scores[number]).argsort(axis=1, kind="stable").argsort(axis=1)
        mask = ranks >= (ranks.shape[1] - n_retained[number])[:, None]
        total += mask.sum()
        # whether the router row of each expert is retained
        has_row = mask.any(1) | (zero_expert == "keep_null")
        layers[number] = LayerPlan(len(mask), tuple(numpy.flatnonzero(has_row).tolist()), mask)
    if not total:
        raise UserError(
            "allocation: retains no channel of any expert, expected at least one: choose a "
            "smaller ratio"
        )
    plan = Plan(layers, dict(provenance))
    plan.check(routers)
    return plan


def _retained_ids(scores: NDArray[numpy.float64], n_dropped: int, n_group: int) -> tuple[int, ...]:
    """Ids of the retained experts of a layer, ascending. Each group of experts with consecutive ids
    loses its `n_dropped // n_group` experts of lowest `scores` (E,)."""
    ids = numpy.arange(len(scores)).reshape(n_group, -1)
    order = scores.reshape(n_group, -1).argsort(axis=1, kind="stable")
    retained = numpy.take_along_axis(ids, order, axis=1)[:, n_dropped // n_group :]
    return tuple(numpy.sort(retained, axis=None).tolist())


def replace_dropped(
    plan: Plan,
    settings: Mapping[str, Any],
    scores: Mapping[int, ArrayLike],
    evidence: Evidence,
    routers: Routers,
) -> Plan:
    """A copy of `plan`, a plan of whole experts, that replaces dropped experts as
    settings["replacement"] says. "mean_output": by constants. A name in `grouping.GROUPINGS`: by
    merging. "none": `plan` itself. Other arguments are as in `plan_from_scores`."""
    name = settings.get("replacement", "none")
    if name == "none":
        return plan
    method = grouping.GROUPINGS.get(name)  # None for mean_output, which merges nothing
    # layer -> name -> sum over tokens
    sums = merge_passes(evidence[step] for step in grouping.required_passes(name))
    replaced = {}
    for number, layer in plan.layers.items():
        width = int(routers[number]["width"])
        protected = routers[number].get("protected", ())
        if method is None:
            replaced[number] = replace_by_constants(
                layer, finite_scores(number, mean_output(sums[number])), width
            )
            continue
        values = numpy.asarray(scores[number], dtype=float)
        groups = grouping.groups(settings, sums[number], values, layer.retained, protected)
        weights = grouping.member_weights(name, groups, sums[number], values, layer.retained)
        replaced[number] = merge_experts(weights, width, rows=method.rows)
    # if the method has an `align`, channels of merged experts still have to be matched
    return Plan(replaced, plan.provenance, aligned=method is None or method.align is None)


def replace_by_constants(
    layer: LayerPlan, outputs: NDArray[numpy.float64], width: int
) -> LayerPlan:
    """`layer`, a plan of whole experts, with dropped experts replaced by constants. A token that is
    routed to a replaced expert j with gate g_j gets g_j c_j. `outputs` (E, H): the constant c_j of
    each expert j; in MoNE (arXiv 2507.00390), the mean output of j. `width`: number of channels of
    an expert."""
    channels: Mask = numpy.zeros((layer.n_experts, width), dtype=numpy.bool_)
    channels[list(layer.retained)] = True
    constants = None
    if len(layer.retained) < layer.n_experts:
        constants = outputs[~channels.any(1)].astype(numpy.float32)  # of the dropped experts
    return LayerPlan(layer.n_experts, tuple(range(layer.n_experts)), channels, constants)


def merge_experts(
    groups: Mapping[int, Mapping[int, float]],
    width: int,
    *,
    rows: Literal["all", "retained"] = "all",
) -> LayerPlan:
    """The plan of a layer that merges experts.

    `groups`: owner -> {expert: weight}. Every expert is in one group; an expert that stays
    unchanged is the only member of its group. `width`: number of channels of an expert. `rows`:
    "all" if the router retains all rows, "retained" if only the rows of owners.
    """
    n_experts = sum(map(len, groups.values()))
    channels: Mask = numpy.zeros((n_experts, width), dtype=numpy.bool_)
    channels[list(groups)] = True  # only owners keep their channels
    merged = {owner: dict(group) for owner, group in groups.items() if len(group) > 1}
    retained = tuple(range(n_experts)) if rows == "all" else tuple(sorted(groups))
    return LayerPlan(n_experts, retained, channels, merged=merged)


def count_ties(plan: Plan, scores: Mapping[int, ArrayLike], routers: Routers) -> dict[int, int]:
    """Layer -> number of experts (or channels) with a tied score. A score is tied if a retained
    expert and a dropped expert both have it. Experts are compared within each group of the router,
    channels within the layer. Layers without ties are left out."""
    counts = {}
    for number, layer in plan.layers.items():
        values = _competing_scores(number, scores[number], routers[number])
        n_group = routers[number]["n_group"] if values.ndim == 1 else 1
        count = 0
        for group_scores, retained in zip(
            values.reshape(n_group, -1),
            _is_retained(layer, values).reshape(n_group, -1),
            strict=True,
        ):
            tied_scores = numpy.intersect1d(group_scores[retained], group_scores[~retained])
            count += int(numpy.isin(group_scores, tied_scores).sum())
        if count:
            counts[number] = count
    return counts


def _is_retained(layer: LayerPlan, scores: NDArray[numpy.float64]) -> Mask:
    """Mask of the retained experts (E,) or channels (E, I), in the shape of `scores`. Experts that
    are replaced by constants or merged into others count as not retained."""
    if layer.channels is None:
        return numpy.isin(numpy.arange(layer.n_experts), layer.retained)
    # replaced experts have no channels
    return layer.channels if scores.ndim == 2 else layer.channels.sum(axis=1) > 0


def _competing_scores(
    layer: int, scores: ArrayLike, router: Mapping[str, Any]
) -> NDArray[numpy.float64]:
    """The scores of a layer, (E,) or (E, I), with infinity for protected experts."""
    values = finite_scores(layer, scores).copy()
    values[list(router.get("protected", ()))] = numpy.inf
    return values


def finite_scores(layer: int, scores: ArrayLike) -> NDArray[numpy.float64]:
    """`scores`, (E,) or (E, I), in fp64. UserError for a score that is not finite."""
    values = numpy.asarray(scores, dtype=numpy.float64)
    if indices := numpy.argwhere(~numpy.isfinite(values)).tolist():
        first = indices[0]
        ids = zip(("expert", "channel"), first, strict=False)
        position = ", ".join(f"{name} {index}" for name, index in ids)
        raise UserError(
            f"scores: layer {layer}, {position} is {values[tuple(first)]}: expected a finite number"
        )
    return values
