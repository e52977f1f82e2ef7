"""Settings of allocation=evolutionary: how schedules evolve, and the fitness of a candidate. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, model_validator
from pydantic.dataclasses import dataclass

from moe_lab.allocation import routed_ratio
from moe_lab.allocation.problem import budget, limits, or_nearest
from moe_lab.config.base import SETTINGS, Count, Positive, valid
from moe_lab.errors import unknown
from moe_lab.search.schedules import PATTERNS, Problem

UNSHIFTED = ("esap", "sap", "kl", "kl_reversed")
"""Fitness functions that EvoESAP's code computes at the answer tokens, not at the positions that predict them."""


def _pattern(name: str) -> str:
    if name not in PATTERNS:
        raise unknown("pattern", name, PATTERNS)
    return name


@dataclass(config=SETTINGS, frozen=True)
class EvolutionSettings:
    """Parameters of the search. Defaults are those published for OLMoE; see evolution.py for other models."""

    population: Positive = 32
    """P: schedules of the first generation; later ones have the elites and P - m children."""
    elites: Positive = 4
    """m: the best schedules so far, which stay in the population and are the parents."""
    generations: Positive = 50
    """T: populations that are evaluated, the first one included."""
    max_transfer: Positive = 4
    """Delta_max: the most experts one transfer moves from layer to layer."""
    max_transfers: Positive = 3
    """tau_max: the most transfers between a parent and its child."""
    granularity: Positive = 2
    """G: layers keep multiples of it, and transfers move multiples of it; 1 for any number."""
    seed: Count = 42
    """Seed of numpy's PCG64, the only source of randomness."""
    patterns: list[Annotated[str, AfterValidator(_pattern)]] = field(default_factory=lambda: list(PATTERNS))
    """The first schedules of the first population, one each; the others are drawn uniformly from all feasible ones."""

    @model_validator(mode="after")
    def _fewer_elites(self) -> Self:
        if self.elites >= self.population:
            raise ValueError(
                f"elites={self.elites}: expected fewer than the population of {self.population}, at most "
                f"{self.population - 1}"
            )
        return self


@dataclass(config=SETTINGS, frozen=True)
class FitnessSettings:
    """Parameters of the fitness of a candidate."""

    fitness: Literal["esap", "sap", "kl", "kl_reversed", "nll", "spec_dec"] = "esap"
    """esap, sap, kl (of the model from the candidate), kl_reversed, nll or spec_dec; all of them higher is better."""
    averaging: Literal["macro", "micro"] = "macro"
    """macro: the mean over rows of the mean over their answer tokens, as in the paper; micro: over all tokens."""
    shift: bool = True
    """Compute the fitness where answer tokens are predicted; False: at the answer tokens, as EvoESAP's code does."""
    header: bool = False
    """Count what the chat template writes around an answer as part of it, as EvoESAP's code does."""
    max_new_tokens: Positive = 128
    """Tokens that spec_dec generates for each row."""
    memory_budget: Count = 2**31
    """Bytes for the unpruned model's log-probabilities. If they need more, every generation computes them again."""

    @model_validator(mode="after")
    def _has_shift(self) -> Self:
        if not self.shift and self.fitness not in UNSHIFTED:
            raise ValueError(
                f"shift=false has no meaning for fitness={self.fitness}: expected one of {', '.join(UNSHIFTED)}"
            )
        return self


@dataclass(config=SETTINGS, frozen=True)
class SearchSettings(EvolutionSettings, FitnessSettings):
    """All of allocation.parameters with allocation=evolutionary."""


def parse(parameters: Mapping[str, Any], seed: int = 0) -> SearchSettings:
    """The parameters of allocation=evolutionary; `seed` is used if they name none. UserError for wrong ones."""
    return valid(SearchSettings, {"seed": seed, **parameters}, "allocation.parameters")


def problem_of(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> Problem:
    """The problem to search, from fields of AllocationConfig and the ratio, and the facts of the model. UserError when
    the routers cannot work with the ratio."""
    layers = {int(layer): about for layer, about in facts["layers"].items()}
    allowed = limits(layers, settings["multiple_of"])
    order, model = sorted(allowed), {**facts, "layers": layers}

    def decide(ratio: float) -> int:
        return budget(allowed, routed_ratio(ratio, settings.get("ratio_basis", "routed"), model))

    return Problem(
        n_experts=tuple(allowed[layer].count for layer in order),
        fewest=tuple(allowed[layer].fewest for layer in order),
        steps=tuple(allowed[layer].step for layer in order),
        budget=or_nearest(decide, settings["ratio"]),
    )
