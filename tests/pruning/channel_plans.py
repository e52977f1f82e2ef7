"""Random plans about channels, for tests."""

from __future__ import annotations

import numpy
import torch

from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan


def channel_plan(model: torch.nn.Module, *, seed: int = 0, width: int | None = None, drop: float = 0.2) -> Plan:
    """A plan that drops some experts (another number in each layer, if the router lets it) and keeps `width` random
    channels of each other one; without `width` any number, 0 and all of them included."""
    random = numpy.random.default_rng(seed)
    experts, channels, counts = {}, {}, {}
    for layer in moe_layers(model):
        counts[layer.index] = layer.n_experts
        kept = _survivors(random, layer.n_experts, layer.n_group, layer.top_k, drop)
        experts[layer.index] = tuple(kept)
        mask = numpy.zeros((layer.n_experts, layer.width), bool)
        edges = [0, layer.width]
        for expert in kept:
            number = width if width is not None else edges.pop() if edges else int(random.integers(layer.width + 1))
            mask[expert, random.permutation(layer.width)[:number]] = True
        channels[layer.index] = mask
    return Plan(experts, counts, {"seed": seed}, channels)


def _survivors(random: numpy.random.Generator, count: int, groups: int, top_k: int, drop: float) -> list[int]:
    size = count // groups
    fewest = max(2, -(-top_k // groups)) if groups > 1 else top_k
    keep = int(random.integers(max(fewest, round(size * (1 - 2 * drop))), size + 1)) if drop else size
    return [
        group * size + int(place)
        for group in range(groups)
        for place in sorted(random.permutation(size)[:keep].tolist())
    ]
