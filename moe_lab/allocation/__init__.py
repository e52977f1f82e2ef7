"""How many experts each layer loses. A new allocation is one function and one line here. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_lab.allocation.uniform import uniform
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError, unknown

ALLOCATIONS: dict[str, Callable[..., dict[int, int]]] = {"uniform": uniform}
"""Name -> function that takes layer -> expert count and the ratio, limits of the routers by keyword, its own
parameters by keyword, and gives layer -> experts to remove."""

LIMITS = ("top_k", "n_group", "topk_group")
"""What a router sets, by name of the fact about a layer and of the parameter of an allocation."""


def get(name: str) -> Callable[..., dict[int, int]]:
    """The allocation of that name; UserError with the nearest known one."""
    if name not in ALLOCATIONS:
        raise unknown("allocation", name, ALLOCATIONS)
    return ALLOCATIONS[name]


def check(settings: AllocationConfig) -> None:
    """UserError for an unknown name, an impossible granularity or a parameter that the allocation does not take."""
    own = set(inspect.signature(get(settings.name)).parameters) - {"n_experts", "ratio", "multiple_of", *LIMITS}
    if strange := sorted(set(settings.parameters) - own):
        raise unknown("allocation.parameters", strange[0], own)
    if settings.multiple_of < 1:
        raise UserError(f"allocation.multiple_of={settings.multiple_of}: expected 1 or more")


def allocate(
    settings: Mapping[str, Any], layers: Mapping[int, Mapping[str, Any]], scores: Mapping[int, Sequence[float]]
) -> dict[int, int]:
    """Layer -> how many experts to remove.

    `settings`: fields of AllocationConfig and the ratio. `layers`: layer -> facts (n_experts, top_k, n_group,
    topk_group). `scores`: layer -> a score per expert. UserError for scores of another model and for what the
    allocation refuses.
    """
    n_experts = {layer: int(facts["n_experts"]) for layer, facts in layers.items()}
    scored = {layer: len(row) for layer, row in scores.items()}
    if scored != n_experts:
        raise UserError(f"scores are of another model: experts per layer {scored}, expected {n_experts}")
    return get(settings["name"])(
        n_experts,
        settings["ratio"],
        multiple_of=settings["multiple_of"],
        **{limit: {layer: facts[limit] for layer, facts in layers.items()} for limit in LIMITS},
        **settings["parameters"],
    )
