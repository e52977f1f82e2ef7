"""Random plans of every kind for any model, and plans that an export refuses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from moe_lab.errors import UserError
from moe_lab.models.config_json import fewest_experts
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.pruning.export import export
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import merge_experts, replace_by_constants

KINDS = {
    "experts": ("even", "uneven"),
    "channels": ("ragged", "one width"),
    "replaced": ("merged", "merged rows", "constants"),
}
"""Kind of a plan -> the ways to make it, see `random_plan`."""


def random_plan(
    model: Any, way: str, seed: int = 0, share: float | None = None, width: int | Sequence[int] = 8
) -> Plan:
    """A plan for `model`, of one of the ways of `KINDS`.

    Each layer keeps a `share` of its experts; without one, even keeps half, or as few as the router
    allows, and all others another number in each layer, and not all of them where the router allows
    fewer. ragged: any number of channels of each expert, none and all included; one width: `width`
    of each, one number or one for each layer. merged: dropped experts are merged into others with
    random shares, and with random orders of channels; with "rows" the router only keeps the rows of
    those that stand for a group. constants: dropped experts put out random constants.
    """
    random = numpy.random.default_rng(seed)
    layers = moe_layers(model)
    share = share or (0.5 if way == "even" else None)
    whole_plans = {
        layer.index: LayerPlan(layer.n_experts, _retained(layer, random, share)) for layer in layers
    }
    if way == "constants":
        plans = {
            layer.index: replace_by_constants(
                whole_plans[layer.index],
                random.normal(size=(layer.n_experts, layer.hidden)),
                layer.width,
            )
            for layer in layers
        }
    elif way.startswith("merged"):
        rows: Any = "all" if way == "merged" else "retained"
        groups = {layer.index: _groups(whole_plans[layer.index], random) for layer in layers}
        plans = {
            layer.index: merge_experts(groups[layer.index], layer.width, rows=rows)
            for layer in layers
        }
        # the others have no alignment
        for number in [number for number, plan in plans.items() if plan.merged][:2]:
            layer_plan = plans[number]
            orders = [random.permutation(layer_plan.width) for _ in layer_plan.merged_members]
            alignment = numpy.array(orders, dtype=numpy.int32)
            plans[number] = replace(layer_plan, alignment=alignment)
    elif way in ("ragged", "one width"):
        plans = {}
        for position, layer in enumerate(layers):
            n_retained = width if isinstance(width, int) else width[position]
            narrow_plan = _narrow_plan(
                whole_plans[layer.index],
                layer.width,
                None if way == "ragged" else n_retained,
                random,
            )
            plans[layer.index] = narrow_plan
    else:
        plans = whole_plans
    return Plan(plans, {} if way.startswith("merged") else {"way": way, "seed": seed})


def whole_expert_plan(plan: Plan) -> Plan:
    """The plan that retains the same experts with all their channels, and replaces none."""
    return Plan(
        {
            number: LayerPlan(layer.n_experts, layer.retained)
            for number, layer in plan.layers.items()
        }
    )


def plan_without_alignment(plan: Plan) -> Plan:
    """The plan that merges the same experts, without an order of channels."""
    return Plan(
        {number: replace(layer, alignment=None) for number, layer in plan.layers.items()},
        plan.provenance,
    )


def check_refused(folder: Path, message: str, plan: Plan, shape: str = "natural") -> None:
    """Exporting the checkpoint in a folder is an error, and writes nothing beside it."""
    with pytest.raises(UserError, match=message):
        export(folder, plan, folder.parent / "out", shape=shape)
    assert not list(folder.parent.glob("*out*"))


def _narrow_plan(
    plan: LayerPlan, width: int, retained: int | None, random: numpy.random.Generator
) -> LayerPlan:
    """The plan with `retained` random channels of each expert; None for any number, which includes
    none and all."""
    mask = numpy.zeros((plan.n_experts, width), dtype=bool)
    edges = [0, width]
    for expert in plan.retained:
        if retained is not None:
            n_retained = retained
        elif edges:
            n_retained = edges.pop()
        else:
            n_retained = int(random.integers(width + 1))
        mask[expert, random.permutation(width)[:n_retained]] = True
    return replace(plan, channels=mask)


def _retained(
    layer: MoELayer, random: numpy.random.Generator, share: float | None
) -> tuple[int, ...]:
    """Random experts of a layer, with equal numbers from each group of its router: a `share` of
    them, or any number if `share` is None."""
    group_size = layer.n_experts // layer.n_group
    fewest = fewest_experts(vars(layer)) // layer.n_group
    n_retained = (
        max(fewest, round(group_size * share))
        if share
        else int(random.integers(fewest, max(group_size, fewest + 1)))
    )
    groups = (
        group * group_size + random.permutation(group_size)[:n_retained]
        for group in range(layer.n_group)
    )
    return tuple(sorted(int(expert) for group in groups for expert in group))


def _groups(plan: LayerPlan, random: numpy.random.Generator) -> dict[int, dict[int, float]]:
    """Retained expert -> weight of each member of its group. A group has the retained expert and
    any number of dropped ones."""
    members: dict[int, list[int]] = {owner: [owner] for owner in plan.retained}
    for expert in sorted({*range(plan.n_experts)} - {*plan.retained}):
        members[int(random.choice(plan.retained[:3]))].append(expert)
    groups: dict[int, dict[int, float]] = {}
    for owner, group in members.items():
        shares = random.dirichlet(numpy.ones(len(group))).tolist()
        groups[owner] = dict(zip(group, shares, strict=True))
    return groups
