"""Settings of allocation=evolutionary: how schedules evolve, and the fitness of a candidate. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moe_lab.allocation.decide import routed_ratio
from moe_lab.allocation.problem import budget, limits, or_nearest
from moe_lab.errors import UserError, unknown
from moe_lab.search.schedules import PATTERNS, Problem


@dataclass(frozen=True)
class EvolutionSettings:
    """Parameters of the search. Defaults are those published for OLMoE; see evolution.py for other models."""

    population: int = 32
    """P: schedules of the first generation; later ones have the elites and P - m children."""
    elites: int = 4
    """m: the best schedules so far, which stay in the population and are the parents."""
    generations: int = 50
    """T: populations that are evaluated, the first one included."""
    max_transfer: int = 4
    """Delta_max: the most experts one transfer moves from layer to layer."""
    max_transfers: int = 3
    """tau_max: the most transfers between a parent and its child."""
    granularity: int = 2
    """G: layers keep multiples of it, and transfers move multiples of it; 1 for any number."""
    seed: int = 42
    """Seed of numpy's PCG64, the only source of randomness."""
    patterns: tuple[str, ...] = PATTERNS
    """The first schedules of the first population, one each; the others are drawn uniformly from all feasible ones."""
    proposals: int = 1
    """Children made for each one that is evaluated on all rows; with more than 1, halving chooses the best."""

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "seed" else 1
            if field.name != "patterns" and (type(value) is not int or value < least):
                raise UserError(
                    f"allocation.parameters.{field.name}={value}: expected a whole number of at least {least}"
                )
        if self.elites >= self.population:
            raise UserError(
                f"allocation.parameters.elites={self.elites}: expected fewer than the population of "
                f"{self.population}, at most {self.population - 1}"
            )
        if not isinstance(self.patterns, (tuple, list)):
            raise UserError(f"allocation.parameters.patterns={self.patterns}: expected a list of names")
        for name in self.patterns:
            if name not in PATTERNS:
                raise unknown("allocation.parameters.patterns", name, PATTERNS)


FITNESS = ("esap", "sap", "kl", "kl_reversed", "nll", "spec_dec")
AVERAGINGS = ("macro", "micro")
UNSHIFTED = ("esap", "sap", "kl", "kl_reversed")
"""Fitness functions that EvoESAP's code computes at the answer tokens, not at the positions that predict them."""


@dataclass(frozen=True)
class FitnessSettings:
    """Parameters of `allocation=evolutionary` that define the fitness of a candidate and how it is computed."""

    fitness: str = "esap"
    """esap, sap, kl (of the model from the candidate), kl_reversed, nll or spec_dec; all of them higher is better."""
    averaging: str = "macro"
    """macro: the mean over rows of the mean over their answer tokens, as in the paper; micro: over all tokens."""
    shift: bool = True
    """Compute the fitness where answer tokens are predicted; False: at the answer tokens, as EvoESAP's code does."""
    header: bool = False
    """Count what the chat template writes around an answer as part of it, as EvoESAP's code does."""
    max_new_tokens: int = 128
    """Tokens that spec_dec generates for each row."""
    memory_budget: int = 2**31
    """Bytes for the unpruned model's log-probabilities. If they need more, every generation computes them again."""

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        for name, choices in (("fitness", FITNESS), ("averaging", AVERAGINGS)):
            if getattr(self, name) not in choices:
                raise unknown(f"allocation.parameters.{name}", getattr(self, name), choices)
        for name, least in (("max_new_tokens", 1), ("memory_budget", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"allocation.parameters.{name}={value}: expected a whole number of at least {least}")
        for name in ("shift", "header"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"allocation.parameters.{name}={getattr(self, name)}: expected true or false")
        if not self.shift and self.fitness not in UNSHIFTED:
            raise UserError(
                f"allocation.parameters.shift=false has no meaning for fitness={self.fitness}: expected one of "
                f"{', '.join(UNSHIFTED)}"
            )


@dataclass(frozen=True)
class SearchSettings:
    """All settings of a search."""

    problem: Problem
    evolution: EvolutionSettings
    fitness: FitnessSettings


def search_settings(settings: Mapping[str, Any], facts: Mapping[str, Any], seed: int) -> SearchSettings:
    """All settings of a search, from `settings`: fields of AllocationConfig and the ratio.

    `facts` are those of the model; keys of its layers are numbers or their JSON text. `seed` is that of the cell, which
    a parameter `seed` overrides. Raises UserError for an unknown parameter, a value that cannot work, and a ratio that
    no schedule has.
    """
    evolution, fitness = parse(settings["parameters"], seed)
    layers = {int(layer): about for layer, about in facts["layers"].items()}
    return SearchSettings(_problem(settings, facts, layers), evolution, fitness)


def parse(parameters: Mapping[str, Any], seed: int = 0) -> tuple[EvolutionSettings, FitnessSettings]:
    """The parameters of allocation=evolutionary as settings; `seed` is used if they name none.

    Raises UserError for an unknown parameter, and for a value that cannot work.
    """
    for name in parameters:
        if name not in PARAMETERS:
            raise unknown("allocation.parameters", name, PARAMETERS)
    named = {"seed": seed, **parameters}
    if isinstance(named.get("patterns"), list):
        named["patterns"] = tuple(named["patterns"])
    evolution = EvolutionSettings(**_of(EvolutionSettings, named))
    fitness = FitnessSettings(**_of(FitnessSettings, named))
    fitness.check()
    evolution.check()
    if fitness.fitness == "spec_dec" and evolution.proposals > 1:
        raise UserError(
            f"allocation.parameters.proposals={evolution.proposals} does not go with fitness=spec_dec: expected 1"
        )
    return evolution, fitness


def _of(kind: type, named: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: named[field.name] for field in fields(kind) if field.name in named}


PARAMETERS = tuple(sorted(field.name for kind in (EvolutionSettings, FitnessSettings) for field in fields(kind)))
"""Names of all parameters in `allocation.parameters` of allocation=evolutionary."""


def _problem(settings: Mapping[str, Any], facts: Mapping[str, Any], layers: Mapping[int, Mapping[str, Any]]) -> Problem:
    """The problem to search. Raises UserError when the routers cannot work with the ratio."""
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
