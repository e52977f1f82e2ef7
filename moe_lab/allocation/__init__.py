"""Allocations by name: how many experts each layer loses, or how many channels each expert retains.

A new allocation is a function and an entry of `ALLOCATIONS`. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property, partial
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeAlias

import numpy
from pydantic import Strict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from moe_lab import criteria
from moe_lab.allocation import coverage, grouping, list_file, shapes
from moe_lab.allocation.problem import (
    Budgets,
    Channels,
    Evidence,
    Experts,
    RatioTooLarge,
    accepted_parameters,
    budget,
    call_or_suggest_ratio,
    check_ratio,
    keyword_types,
    limits,
)
from moe_lab.config import AllocationConfig
from moe_lab.config.base import SETTINGS, Positive, identity_fields, validated
from moe_lab.criteria import Granularity
from moe_lab.criteria.channels import HEAPR, SLIMMING
from moe_lab.errors import Registry, UserError, check_known
from moe_lab.paths import check_name
from moe_lab.source_code import function_digest

Step: TypeAlias = Literal["plan", "search", "reconstruction", "sequential"]
Function: TypeAlias = Callable[..., dict[int, Any]]
"""Problem (problem.py), and parameters by keyword -> by layer, the number of experts to remove, or
the channels that each expert retains (E,)."""


@dataclass(frozen=True)
class Allocation:
    """A named rule of allocation."""

    name: str
    functions: Mapping[Granularity, Function | None]
    """Granularity that the allocation supports -> function that decides; None if a step other than
    the plan step decides."""
    needs: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda parameters: ()
    """Parameters -> the evidence needed besides the scores: "statistics", "gradients", "ablation",
    "scaling"."""
    step: Step = "plan"
    """The step that makes the plan: "plan", from numbers alone, or a step that runs the model."""
    parameters: Mapping[str, Any] | None = field(default_factory=dict)
    """Parameter that a step other than the plan step reads -> its type. Keywords of `functions` are
    parameters, too. None: the step that decides checks the parameters."""
    uneven: tuple[Granularity, ...] = ()
    """Granularities at which the retained numbers differ by design: of experts between layers, or
    of channels between experts."""
    reference: str = ""
    """The paper that introduces the allocation, with its number on arXiv if it has one."""
    zero_expert: str = "keep_null"
    """Default treatment of an expert without channels; see the function `zero_expert`."""

    @property
    def source(self) -> str:
        """Digests of the source code of `functions`, separated by spaces, if a plugin defines the
        functions; "" for an allocation of moe_lab."""
        return " ".join(
            sorted({function_digest(function) for function in self.functions.values() if function})
        )


BOTH: tuple[Granularity, ...] = ("expert", "channel")
CHANNEL: tuple[Granularity, ...] = ("channel",)


ALLOCATIONS: Registry[Allocation] = Registry(
    (allocation.name, allocation)
    for allocation in (
        Allocation(
            "uniform", {"expert": shapes.uniform_experts, "channel": shapes.uniform_channels}
        ),
        Allocation(
            "global",
            {"expert": shapes.global_experts, "channel": shapes.global_channels},
            uneven=BOTH,
        ),
        Allocation("layerwise", {"channel": shapes.layerwise}, uneven=CHANNEL, reference=HEAPR),
        Allocation("u_shaped", dict.fromkeys(BOTH, shapes.u_shaped), uneven=BOTH),
        Allocation(
            "loss_based",
            dict.fromkeys(BOTH, shapes.loss_based),
            shapes.layer_loss_steps,
            uneven=BOTH,
        ),
        Allocation(
            "coverage",
            {"channel": coverage.coverage},
            coverage.needs,
            uneven=CHANNEL,
            reference=SLIMMING,
            zero_expert="drop",
        ),
        # a plan in the file is used as it is; for channels, there is no other file
        Allocation("list", {"expert": list_file.removals, "channel": None}),
        Allocation(
            "evolutionary",
            {"expert": None},
            step="search",
            parameters=None,
            uneven=("expert",),
            reference="EvoESAP: Non-Uniform Expert Pruning for Sparse MoE",
        ),
        Allocation(
            "reconstruction",
            {"expert": None},
            step="reconstruction",
            parameters={"limit": Positive},
            reference="Not All Experts are Equal, arXiv 2402.14800",
        ),
        Allocation(
            "sequential",
            {"expert": None, "channel": None},
            step="sequential",
            uneven=CHANNEL,
            reference="CAMERA, arXiv 2508.02322",
        ),
    )
)


def register(allocation: Allocation) -> None:
    """Add an allocation to `ALLOCATIONS`."""
    check_name("allocation", allocation.name)
    if allocation.name in ALLOCATIONS:
        raise UserError(f"allocation={allocation.name} is registered already: expected a new name")
    ALLOCATIONS[allocation.name] = allocation


def get(name: str) -> Allocation:
    """The allocation called `name`. UserError when there is none."""
    check_known("allocation", name, ALLOCATIONS)
    return ALLOCATIONS[name]


class IdentifiedAllocation(AllocationConfig):
    """Settings of an allocation, identified by their fields, a digest of the file at `path`, and
    the source of a plugin's allocation."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Name of a setting -> value, for the settings that affect the plan."""
        fields = {**identity_fields(self), "source": get(self.name).source}
        if self.path is not None:
            content = json.dumps(list_file.read(self.path), sort_keys=True)
            fields["path"] = sha256(content.encode()).hexdigest()
        return fields


ZeroExpert = Literal["keep_null", "drop"]


def check(settings: AllocationConfig, granularity: Granularity = "expert") -> None:
    """Raise UserError unless `settings` are valid for a criterion that scores `granularity`."""
    allocation = get(settings.name)
    if granularity not in allocation.functions:
        unit = next(iter(allocation.functions))  # the only granularity that is supported
        names = sorted(
            name for name, other in ALLOCATIONS.items() if granularity in other.functions
        )
        raise UserError(
            f"allocation={allocation.name} allocates {unit}s, but the criterion scores "
            f"{granularity}s: choose a criterion that scores {unit}s, or one of the "
            f"allocations of {granularity}s ({', '.join(names)})"
        )
    if granularity == "channel":
        _check_channel_settings(settings)
    if settings.protect is not None:
        from moe_lab.allocation import protection

        check_known("allocation.protect", settings.protect, protection.PROTECTIONS)
    _check_replacement(settings, allocation)
    if allocation.parameters is not None:
        validated(
            _parameters(settings, allocation, granularity),
            settings.parameters,
            "allocation.parameters",
        )
    if settings.name == "list":
        # called only for its errors
        list_file.read_for_granularity(settings.path, granularity)
    if settings.by is not None:  # a second criterion, which gets no parameters
        criteria.check(settings.by, {})
        if criteria.get(settings.by).granularity != "expert":
            raise UserError(
                f"allocation.by={settings.by} scores channels, expected a criterion that scores "
                "experts"
            )


def required_evidence(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The evidence that an allocation needs besides the scores: names of steps, and "by" for the
    scores of the criterion settings["by"]. `settings`: fields of AllocationConfig."""
    other_scores = ("by",) if settings.get("by") else ()
    steps = [
        *grouping.required_passes(settings.get("replacement", "none")),
        *get(settings["name"]).needs(settings["parameters"]),
    ]
    if settings.get("protect") is not None:
        steps.append("statistics")  # super experts are recognised by output_abs_max
    return other_scores + tuple(dict.fromkeys(steps))


def check_evidence(settings: Mapping[str, Any], sums: Collection[str]) -> None:
    """Raise UserError when `sums`, names of passes, lacks a name in
    `required_evidence(settings)`."""
    if missing := [name for name in required_evidence(settings) if name not in sums]:
        raise UserError(
            f"plan: allocation={settings['name']}, replacement={settings['replacement']} and "
            f"protect={settings['protect']} read {', '.join(missing)}, which these statistics "
            "do not have: give calibrate the same replacement, and criteria that read the rest"
        )


def zero_expert(settings: Mapping[str, Any]) -> str:
    """How experts that retain no channel are treated: "keep_null" (the router can still select the
    expert, whose output is 0) or "drop" (the expert and its row of the router are removed)."""
    return str(settings["parameters"].get("zero_expert", get(settings["name"]).zero_expert))


def _check_channel_settings(settings: AllocationConfig) -> None:
    """Raise UserError if `settings` has values that only apply to whole experts."""
    for name, default in (("multiple_of", 1), ("replacement", "none"), ("by", None)):
        value = getattr(settings, name)
        if value != default:
            raise UserError(
                f"allocation.{name}={value} is for whole experts, expected a criterion that "
                "scores experts"
            )
    if settings.protect is not None and settings.name == "uniform":
        raise UserError(
            f"allocation.protect={settings.protect} retains experts with all their channels, and "
            "allocation=uniform gives all experts the same number: expected null, or an allocation "
            "such as layerwise"
        )


def _check_replacement(settings: AllocationConfig, allocation: Allocation) -> None:
    """Raise UserError if allocation.replacement is unknown or does not fit the other settings."""
    replacement = settings.replacement
    check_known("allocation.replacement", replacement, grouping.REPLACEMENTS)
    if replacement == "none":
        return
    if settings.path is not None and not list_file.is_schedule(list_file.read(settings.path)):
        raise UserError(
            f"allocation.replacement={replacement}: the plan allocation.path={settings.path} "
            "is used as it is, expected none"
        )
    if allocation.step not in ("plan", "sequential"):
        raise UserError(
            f"allocation.replacement={replacement} replaces the experts that scores drop, and "
            f"allocation={settings.name} runs the model without replacements to decide: expected "
            "none, or an allocation such as uniform or global"
        )


def _parameters(
    settings: AllocationConfig, allocation: Allocation, granularity: Granularity
) -> Any:
    """A new dataclass, by which pydantic validates allocation.parameters."""
    function = allocation.functions[granularity]
    types = {**(allocation.parameters or {}), **(keyword_types(function) if function else {})}
    types |= grouping.parameters(settings.replacement)
    if granularity == "channel":
        types |= {"zero_expert": ZeroExpert, "align": coverage.Alignment | None}
    # strict, so that "3" or true is not taken for a number
    strict = {
        name: Annotated[hint, Strict()] if hint in (int, float) else hint
        for name, hint in types.items()
    }
    plain = make_dataclass("Parameters", [(name, hint, None) for name, hint in strict.items()])
    return pydantic_dataclass(plain, config=SETTINGS)


Layers = Mapping[int, Mapping[str, Any]]
"""Layer -> facts: n_experts, top_k, n_group, topk_group, and perhaps protected (the ids of experts
that must be retained)."""


def allocate(
    settings: Mapping[str, Any],
    layers: Layers,
    scores: Mapping[int, Any],
    evidence: Evidence | None = None,
) -> dict[int, Any]:
    """For scores of experts: layer -> number of experts to remove. For scores of channels: layer ->
    number of channels that each expert retains, (E,) int64.

    `settings`: fields of AllocationConfig, and "ratio". `scores`: layer -> scores (E,), or (E, I)
    of channels. `evidence` has the keys `required_evidence(settings)`. UserError for an infeasible
    ratio, with the nearest feasible ratio.
    """
    granularity = granularity_of(scores)
    function = _function(settings, granularity)
    arrays = {layer: numpy.asarray(scores[layer], dtype=numpy.float64) for layer in layers}
    protected = {
        layer: list(facts["protected"]) for layer, facts in layers.items() if facts.get("protected")
    }
    inputs: dict[str, Any] = {
        "evidence": evidence or {},
        "path": settings.get("path"),
        "protected": protected,
    }
    if granularity == "expert":
        inputs |= {"scores": arrays, "limits": limits(layers, settings["multiple_of"])}
        return call_or_suggest_ratio(
            lambda ratio: function(Experts(ratio=ratio, **inputs)), settings["ratio"]
        )
    alignment = coverage.alignment_of(settings)
    inputs["scores"] = {layer: array.copy() for layer, array in arrays.items()}
    for layer, experts in protected.items():
        inputs["scores"][layer][experts] = numpy.inf

    def channel_budgets(ratio: float) -> Budgets:
        """Layer -> number of channels that each expert retains (E,) at `ratio`."""
        _check_channels(ratio, settings, layers)
        problem = Channels(ratio=ratio, **inputs)
        if problem.protected_channels.sum() > problem.total_retained:
            raise RatioTooLarge(
                f"retains {problem.total_retained} channels, but allocation.protect needs "
                f"{problem.protected_channels.sum()}"
            )
        budgets: Budgets = function(problem)
        # `align` adds up scores, so it gets the finite ones
        return budgets if alignment is None else coverage.align(budgets, arrays, alignment)

    return call_or_suggest_ratio(channel_budgets, settings["ratio"])


def granularity_of(scores: Mapping[int, Any]) -> Granularity:
    """The granularity of scores: "expert" for shape (E,), "channel" for shape (E, I)."""
    return "channel" if numpy.ndim(next(iter(scores.values()))) == 2 else "expert"


def check_fits(settings: Mapping[str, Any], layers: Layers, granularity: Granularity) -> None:
    """Raise UserError when the ratio, multiple_of or the block size is infeasible for a model,
    whatever the scores are."""
    if granularity == "channel":
        with_width = {layer: facts for layer, facts in layers.items() if "width" in facts}
        call_or_suggest_ratio(
            lambda ratio: _check_channels(ratio, settings, with_width), settings["ratio"]
        )
    elif settings["name"] != "list":  # the numbers of a list come from its file
        call_or_suggest_ratio(
            lambda ratio: _check_experts(ratio, settings, layers), settings["ratio"]
        )


def _check_channels(ratio: float, settings: Mapping[str, Any], layers: Layers) -> None:
    """Raise UserError when channels cannot be allocated at `ratio`, whatever their scores are."""
    check_ratio(ratio)
    if (alignment := coverage.alignment_of(settings)) is not None:
        coverage.check_fits(alignment, layers, ratio)


def _check_experts(ratio: float, settings: Mapping[str, Any], layers: Layers) -> None:
    """Raise UserError when experts cannot be allocated at `ratio`, whatever their scores are."""
    layer_limits = limits(layers, settings["multiple_of"])
    # same_share and budget are called only for their errors
    if settings["name"] in ("uniform", "reconstruction", "sequential"):
        # these allocations remove the same share of every layer
        shapes.same_share(layer_limits, ratio)
    else:
        budget(layer_limits, ratio)
    for layer, limit in layer_limits.items():
        grouping.check_groups(
            settings,
            limit.n_experts,
            limit.retained_at(ratio),
            len(layers[layer].get("protected", ())),
        )


def _function(settings: Mapping[str, Any], granularity: Granularity) -> Function:
    """The function that computes the allocation, with the parameters in `settings` bound as keyword
    arguments."""
    allocation = get(settings["name"])
    function = allocation.functions.get(granularity)
    if function is None:
        raise UserError(
            f"allocation={allocation.name} cannot decide from scores of {granularity}s alone: it "
            f"is for {' and '.join(allocation.functions)}s, decided in the {allocation.step} step"
        )
    return partial(function, **accepted_parameters(function, settings["parameters"]))
