"""Registry of allocations, and checks of their settings. A new one is a function and a line here. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, TypeAlias

from moe_lab import criteria
from moe_lab.allocation import align, coverage, grouping, listed, protection, shapes, uniform
from moe_lab.allocation.parameters import check_value, keywords
from moe_lab.config import AllocationConfig
from moe_lab.config.base import counting_fields, identity
from moe_lab.criteria.registry import source_of
from moe_lab.errors import UserError, unknown
from moe_lab.paths import check_name

Granularity: TypeAlias = Literal["expert", "channel"]
Step: TypeAlias = Literal["plan", "search", "reconstruction", "sequential"]
Function: TypeAlias = Callable[..., dict[int, Any]]
"""A problem (problem.py) and parameters by keyword -> layer -> experts to remove, or channels each expert keeps."""


@dataclass(frozen=True)
class Allocation:
    """A named rule for how much each layer, or each expert, loses."""

    name: str
    reference: str
    """The paper that introduced it."""
    functions: Mapping[Granularity, Function | None]
    """Granularity -> function that decides; None if a step other than the plan step decides."""
    needs: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda parameters: ()
    """Parameters -> evidence besides the scores: "statistics", "gradients", "ablation", "scaling"."""
    step: Step = "plan"
    """Which step makes the plan: the plan step from numbers alone, or one that runs the model."""
    parameters: tuple[str, ...] | None = ()
    """Parameters that another step reads; those of a function are its keywords. None: that step checks them."""
    uneven: tuple[Granularity, ...] = ()
    """What it keeps different numbers of, by design: experts in different layers, or channels in different experts."""
    zero_expert: str = "keep_null"
    """Default treatment of an expert without channels, as in `zero_expert()`."""

    @property
    def source(self) -> str:
        """Digest of the modules that define it, which identifies its plans; "" for those of moe_lab."""
        return source_of(*(function for function in self.functions.values() if function))

    @property
    def granularities(self) -> tuple[Granularity, ...]:
        """What it allocates: whole experts, channels, or either."""
        return tuple(self.functions)


HEAPR, EVOESAP, SLIMMING = "HEAPr", "EvoESAP", "MoE-Slimming"
BOTH: tuple[Granularity, ...] = ("expert", "channel")

ALLOCATIONS: dict[str, Allocation] = {
    allocation.name: allocation
    for allocation in (
        Allocation("uniform", "all papers", {"expert": uniform.experts, "channel": uniform.channels}),
        Allocation(
            "global",
            f"{EVOESAP}; {HEAPR}",
            {"expert": shapes.global_experts, "channel": shapes.global_channels},
            uneven=BOTH,
        ),
        Allocation("layerwise", HEAPR, {"channel": shapes.layerwise}, uneven=("channel",)),
        Allocation("u_shaped", SLIMMING, {"expert": shapes.u_shaped, "channel": shapes.u_shaped}, uneven=BOTH),
        Allocation(
            "loss_based",
            SLIMMING,
            {"expert": shapes.loss_based, "channel": shapes.loss_based},
            shapes.loss_needs,
            uneven=BOTH,
        ),
        Allocation(
            "coverage",
            SLIMMING,
            {"channel": coverage.coverage},
            coverage.needs,
            uneven=("channel",),
            zero_expert="drop",
        ),
        Allocation("list", "a file of yours", {"expert": listed.experts, "channel": listed.channels}),
        Allocation("evolutionary", EVOESAP, {"expert": None}, step="search", parameters=None, uneven=("expert",)),
        Allocation("reconstruction", "NAEE", {"expert": None}, step="reconstruction", parameters=("limit",)),
        Allocation("sequential", "CAMERA", {"expert": None, "channel": None}, step="sequential", uneven=("channel",)),
    )
}


def register(allocation: Allocation) -> None:
    """Add an allocation to the registry. UserError when its name is taken."""
    check_name("allocation", allocation.name, ("none",))
    if allocation.name in ALLOCATIONS:
        raise UserError(f"allocation {allocation.name} is there already: expected a new name")
    ALLOCATIONS[allocation.name] = allocation


def get(name: str) -> Allocation:
    """The allocation of that name; UserError, naming the nearest known one, when there is none."""
    if name not in ALLOCATIONS:
        raise unknown("allocation", name, ALLOCATIONS)
    return ALLOCATIONS[name]


@identity.register
def _(settings: AllocationConfig) -> Any:
    """Its fields, with the content of the files that they name, and the source of a plugin."""
    document = {**counting_fields(settings), **protection.identity(vars(settings)), "source": get(settings.name).source}
    if settings.path is not None:
        content = json.dumps(listed.read(settings.path), sort_keys=True)
        document["path"] = sha256(content.encode()).hexdigest()
    return document


ZeroExpert = Literal["keep_null", "drop"]


def check(settings: AllocationConfig, granularity: Granularity = "expert") -> None:
    """Raise UserError unless the allocation exists, allocates what the criterion scores ("expert" or "channel"), and
    every field and parameter belongs to it and has a valid value."""
    allocation = get(settings.name)
    _check_granularity(allocation, granularity)
    _check_fields(settings, granularity)
    accepted = _accepted(allocation, granularity) | grouping.parameters(settings.replacement)
    for name, value in settings.parameters.items() if allocation.parameters is not None else ():
        if name not in accepted:
            raise unknown("allocation.parameters", name, accepted)
        check_value(name, value, accepted[name])
    align.parse(settings.parameters.get("align"))
    protection.check(vars(settings), granularity)
    if settings.name == "list":
        listed.check(settings.path, granularity)


def check_by(settings: AllocationConfig) -> None:
    """Raise UserError unless allocation.by is null or names a criterion of experts that needs no parameters."""
    if settings.by is None:
        return
    criteria.check(settings.by, {})
    if criteria.get(settings.by).granularity != "expert":
        raise UserError(f"allocation.by={settings.by} scores channels, expected a criterion that scores experts")


def needs(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the evidence that these settings need besides the scores: "by", and the steps that measure the rest."""
    by = ("by",) if settings.get("by") else ()
    steps = (
        *grouping.needs(settings.get("replacement", "none")),
        *get(settings["name"]).needs(settings["parameters"]),
        *protection.needs(settings),
    )
    return by + tuple(dict.fromkeys(steps))


def zero_expert(settings: Mapping[str, Any]) -> str:
    """Treatment of an expert without channels: keep_null (still routed to, outputs 0) or drop (with its router row)."""
    return str(settings["parameters"].get("zero_expert", get(settings["name"]).zero_expert))


def _check_granularity(allocation: Allocation, granularity: Granularity) -> None:
    if granularity not in allocation.granularities:
        fitting = sorted(name for name, other in ALLOCATIONS.items() if granularity in other.granularities)
        raise UserError(
            f"allocation={allocation.name} allocates {allocation.granularities[0]}s, but the criterion scores "
            f"{granularity}s: choose a criterion that scores {allocation.granularities[0]}s, or one of the allocations "
            f"of {granularity}s ({', '.join(fitting)})"
        )


def _check_fields(settings: AllocationConfig, granularity: Granularity) -> None:
    if settings.multiple_of > 1 and granularity == "channel":
        raise UserError(
            f"allocation.multiple_of={settings.multiple_of} counts experts, but the criterion scores channels: "
            "expected 1; allocation.parameters.align rounds channels"
        )
    _check_replacement(settings, granularity)
    if settings.by is not None and granularity == "channel":
        raise UserError(f"allocation.by={settings.by} compares experts, expected null with a criterion for channels")


def _check_replacement(settings: AllocationConfig, granularity: Granularity) -> None:
    replacement, allocation = settings.replacement, get(settings.name)
    if replacement != "none" and settings.path is not None and listed.is_plan(listed.read(settings.path)):
        raise UserError(
            f"allocation.replacement={replacement}: the plan allocation.path={settings.path} says itself what experts "
            "are replaced by, expected none"
        )
    grouping.needs(replacement)
    if replacement != "none" and granularity == "channel":
        raise UserError(
            f"allocation.replacement={replacement} replaces whole experts, but the criterion scores channels: expected "
            "none, or a criterion of experts"
        )
    if replacement != "none" and allocation.step != "plan":
        fitting = sorted(
            name for name, other in ALLOCATIONS.items() if other.step == "plan" and other.functions.get("expert")
        )
        raise UserError(
            f"allocation.replacement={replacement} replaces what scores and an allocation drop, and "
            f"allocation={settings.name} runs the model without it to decide: expected none, or one of the allocations "
            f"{', '.join(fitting)}"
        )


def _accepted(allocation: Allocation, granularity: Granularity) -> dict[str, Any]:
    """Accepted parameter -> its type, or Any if it is checked elsewhere."""
    function = allocation.functions[granularity]
    accepted: dict[str, Any] = dict.fromkeys(allocation.parameters or (), Any)
    if function is not None:
        accepted |= keywords(function)
    if granularity == "channel":
        accepted |= {"zero_expert": ZeroExpert, "align": Any}
    return accepted
