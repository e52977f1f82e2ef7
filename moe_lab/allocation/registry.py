"""Allocations by name. A new one is a function and a line here. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from moe_lab.allocation import coverage, listed, ranked, shapes, uniform
from moe_lab.allocation.evolution_settings import Settings
from moe_lab.criteria.registry import source_of
from moe_lab.errors import UserError, unknown
from moe_lab.paths import check_name

Granularity: TypeAlias = Literal["expert", "channel"]
Step: TypeAlias = Literal["plan", "search", "reconstruction", "sequential"]
Function: TypeAlias = Callable[..., dict[int, Any]]
"""A problem (problem.py) and parameters by keyword -> layer -> experts to remove, or channels each expert keeps."""

SEARCH_PARAMETERS = (
    *(field.name for field in fields(Settings)),
    *("fitness", "averaging", "shift", "header", "max_new_tokens", "memory_budget", "filter", "filter_tokens"),
)
"""What allocation=evolutionary can be told; the search checks the values."""


def _nothing(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Allocation:
    """A named way to say how much each layer, or each expert, loses."""

    name: str
    reference: str
    """The paper it is from."""
    functions: Mapping[Granularity, Function | None]
    """What decides, by granularity; None where another step than the plan's does."""
    needs: Callable[[Mapping[str, Any]], tuple[str, ...]] = _nothing
    """Parameters -> evidence besides the scores: "statistics", "gradients", "ablation", "scaling"."""
    step: Step = "plan"
    """Which step makes the plan: the plan step from numbers alone, or one that runs the model."""
    parameters: tuple[str, ...] = ()
    """Parameters of what another step decides; a function's are its keywords."""
    zero_expert: str = "keep_null"
    """What becomes of an expert without channels, unless said otherwise."""

    @property
    def source(self) -> str:
        """Digest of the modules it is from, which identifies its plans; "" for those of moe_lab."""
        return source_of(*(function for function in self.functions.values() if function))

    @property
    def granularities(self) -> tuple[Granularity, ...]:
        """What it allocates: whole experts, channels, or either."""
        return tuple(self.functions)


HEAPR, EVOESAP, SLIMMING = "HEAPr", "EvoESAP", "MoE-Slimming"

ALLOCATIONS: dict[str, Allocation] = {
    allocation.name: allocation
    for allocation in (
        Allocation("uniform", "all papers", {"expert": uniform.experts, "channel": uniform.channels}),
        Allocation(
            "global", f"{EVOESAP}; {HEAPR}", {"expert": ranked.global_experts, "channel": ranked.global_channels}
        ),
        Allocation("layerwise", HEAPR, {"channel": shapes.layerwise}),
        Allocation("u_shaped", SLIMMING, {"expert": shapes.u_shaped_experts, "channel": shapes.u_shaped_channels}),
        Allocation(
            "loss_based",
            SLIMMING,
            {"expert": shapes.loss_based_experts, "channel": shapes.loss_based_channels},
            shapes.loss_needs,
        ),
        Allocation("coverage", SLIMMING, {"channel": coverage.coverage}, coverage.needs, zero_expert="drop"),
        Allocation("list", "a file of yours", {"expert": listed.experts, "channel": listed.channels}),
        Allocation("evolutionary", EVOESAP, {"expert": None}, step="search", parameters=SEARCH_PARAMETERS),
        Allocation("reconstruction", "NAEE", {"expert": None}, step="reconstruction", parameters=("limit",)),
        Allocation("sequential", "CAMERA", {"expert": None, "channel": None}, step="sequential"),
    )
}


def register(allocation: Allocation) -> None:
    """Make an allocation one that can be chosen. UserError when its name is taken."""
    check_name("allocation", allocation.name, ("none",))
    if allocation.name in ALLOCATIONS:
        raise UserError(f"allocation {allocation.name} is there already: expected a new name")
    ALLOCATIONS[allocation.name] = allocation


def get(name: str) -> Allocation:
    """The allocation of that name; UserError with the nearest known one."""
    if name not in ALLOCATIONS:
        raise unknown("allocation", name, ALLOCATIONS)
    return ALLOCATIONS[name]
