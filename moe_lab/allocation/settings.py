"""Whether the settings of an allocation make sense, before there is anything to allocate."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moe_lab.allocation import align, listed
from moe_lab.allocation.registry import ALLOCATIONS, Allocation, Function, Granularity, get
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError, unknown

BASES = ("routed", "model")
ZeroExpert = Literal["keep_null", "drop"]
ONLY_FOR = {"by": "global", "search": "evolutionary", "path": "list"}
"""Field -> the one allocation that reads it."""


def check(settings: AllocationConfig, granularity: Granularity = "expert") -> None:
    """UserError unless the allocation exists, allocates what the criterion scores ("expert" or "channel"), and every
    field and parameter is its own and has a possible value."""
    allocation = get(settings.name)
    _check_granularity(allocation, granularity)
    _check_fields(settings, granularity)
    accepted = _accepted(allocation, granularity)
    for name, value in settings.parameters.items():
        if name not in accepted:
            raise unknown("allocation.parameters", name, accepted)
        _check_value(name, value, accepted[name])
    align.parse(settings.parameters.get("align"))
    if settings.name == "list":
        listed.check(settings.path, granularity)


def needs(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Evidence that these settings read besides the scores: "by", and what passes over a text leave, by their step."""
    by = ("by",) if settings.get("by") else ()
    return by + get(settings["name"]).needs(settings["parameters"])


def zero_expert(settings: Mapping[str, Any]) -> str:
    """What becomes of an expert without channels: keep_null (routed to, gives 0) or drop (with its router row)."""
    return str(settings["parameters"].get("zero_expert", get(settings["name"]).zero_expert))


def own(function: Function, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are keywords of `function`."""
    return {name: value for name, value in parameters.items() if name in _keywords(function)}


def _check_granularity(allocation: Allocation, granularity: Granularity) -> None:
    if granularity not in allocation.granularities:
        fitting = sorted(name for name, other in ALLOCATIONS.items() if granularity in other.granularities)
        raise UserError(
            f"allocation={allocation.name} allocates {allocation.granularities[0]}s, but the criterion scores "
            f"{granularity}s: choose a criterion that scores {allocation.granularities[0]}s, or one of the allocations "
            f"of {granularity}s ({', '.join(fitting)})"
        )


def _check_fields(settings: AllocationConfig, granularity: Granularity) -> None:
    if settings.multiple_of < 1:
        raise UserError(f"allocation.multiple_of={settings.multiple_of}: expected 1 or more")
    if settings.multiple_of > 1 and granularity == "channel":
        raise UserError(
            f"allocation.multiple_of={settings.multiple_of} counts experts, but the criterion scores channels: "
            "expected 1; allocation.parameters.align rounds channels"
        )
    if settings.ratio_basis not in BASES:
        raise unknown("allocation.ratio_basis", settings.ratio_basis, BASES)
    for field, name in ONLY_FOR.items():
        if getattr(settings, field) is not None and settings.name != name:
            raise UserError(
                f"allocation.{field}={getattr(settings, field)} is only for allocation={name}, expected null with "
                f"allocation={settings.name}"
            )
    if settings.by is not None and granularity == "channel":
        raise UserError(f"allocation.by={settings.by} compares experts, expected null with a criterion for channels")
    if settings.name == "evolutionary" and settings.search is None:
        raise UserError("allocation=evolutionary needs allocation.search: the name of a text with answers")


def _accepted(allocation: Allocation, granularity: Granularity) -> dict[str, Any]:
    """Parameter -> type, or Any where another step checks."""
    function = allocation.functions[granularity]
    accepted: dict[str, Any] = dict.fromkeys(allocation.parameters, Any)
    if function is not None:
        accepted |= _keywords(function)
    if granularity == "channel":
        accepted |= {"zero_expert": ZeroExpert, "align": Any}
    return accepted


def _keywords(function: Function) -> dict[str, Any]:
    """Keyword -> type of `function`."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {one.name: hints[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY}


def _check_value(name: str, value: Any, expected: Any) -> None:
    if get_origin(expected) is Literal:
        if value not in get_args(expected):
            raise unknown(f"allocation.parameters.{name}", str(value), get_args(expected))
    elif expected is float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UserError(f"allocation.parameters.{name}={value}: expected a number")
