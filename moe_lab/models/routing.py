"""How few experts a router still works with. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TypeAlias

PerLayer: TypeAlias = int | Mapping[int, int]
"""One number for all layers, or layer -> number."""


def at(value: PerLayer, layer: int) -> int:
    """The number of one layer."""
    return value if isinstance(value, int) else value[layer]


def fewest_experts(top_k: int, n_group: int = 1, topk_group: int | None = None) -> int:
    """The smallest number of experts a layer can keep.

    A router needs `top_k` experts to choose from. A group-limited one keeps the same number in each of its `n_group`
    groups; the `topk_group` groups a token reaches (None: all) must hold `top_k` experts together, and groups are
    ranked by their two best experts.
    """
    if n_group == 1:
        return top_k
    return n_group * max(2, ceil(top_k / (topk_group or n_group)))
