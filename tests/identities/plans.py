"""Random plans of every kind, for any model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy

from moe_lab.models.config_json import fewest_experts
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.replace import merge_experts, replace_by_constants

KINDS = {
    "experts": ("even", "uneven"),
    "channels": ("ragged", "one width"),
    "replaced": ("merged", "merged rows", "constants"),
}
"""Kind of a plan -> its ways."""


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
    counts = {layer.index: layer.n_experts for layer in layers}
    kept = {
        layer.index: _kept(layer, random, share or (0.5 if way == "even" else None))
        for layer in layers
    }
    dropping = Plan(kept, counts, {"way": way, "seed": seed})
    widths = {layer.index: layer.width for layer in layers}
    if way in ("even", "uneven"):
        return dropping
    if way == "constants":
        outputs = {
            layer.index: random.normal(size=(layer.n_experts, layer.hidden)) for layer in layers
        }
        return replace_by_constants(dropping, outputs, widths)
    if way.startswith("merged"):
        groups = {layer.index: _groups(layer, kept[layer.index], random) for layer in layers}
        merged = merge_experts(
            groups, widths, rows="all" if way == "merged" else "kept", provenance={}
        )
        orders = {}
        for layer in list(merged.merged)[:2]:  # the others are added channel by channel
            drawn = [random.permutation(widths[layer]) for _ in merged.merged_away(layer)]
            orders[layer] = numpy.array(drawn, dtype=numpy.int32)
        return replace(merged, alignments=orders)
    channels = {}
    for place, layer in enumerate(layers):
        mask = numpy.zeros((layer.n_experts, layer.width), dtype=bool)
        edges = [0, layer.width]
        own = width if isinstance(width, int) else width[place]
        for expert in kept[layer.index]:
            number = (
                own
                if way == "one width"
                else edges.pop()
                if edges
                else int(random.integers(layer.width + 1))
            )
            mask[expert, random.permutation(layer.width)[:number]] = True
        channels[layer.index] = mask
    return replace(dropping, channels=channels)


def _kept(layer: MoELayer, random: numpy.random.Generator, share: float | None) -> tuple[int, ...]:
    """Experts of a layer, equally many of each group of its router: a `share` of them, or any
    number."""
    size = layer.n_experts // layer.n_group
    fewest = fewest_experts(vars(layer)) // layer.n_group
    keep = (
        max(fewest, round(size * share))
        if share
        else int(random.integers(fewest, max(size, fewest + 1)))
    )
    groups = (group * size + random.permutation(size)[:keep] for group in range(layer.n_group))
    return tuple(sorted(int(expert) for group in groups for expert in group))


def _groups(
    layer: MoELayer, kept: tuple[int, ...], random: numpy.random.Generator
) -> dict[int, dict[int, float]]:
    """Expert that stays -> share of each expert that it stands for: any of the dropped ones, beside
    itself."""
    members: dict[int, list[int]] = {owner: [owner] for owner in kept}
    for expert in sorted(set(range(layer.n_experts)) - set(kept)):
        members[int(random.choice(kept[:3]))].append(expert)
    groups: dict[int, dict[int, float]] = {}
    for owner, group in members.items():
        shares = random.dirichlet(numpy.ones(len(group))).tolist()
        groups[owner] = dict(zip(group, shares, strict=True))
    return groups
