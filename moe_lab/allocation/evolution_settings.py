"""How a search goes about it: sizes, mutation, beginnings. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from moe_lab.allocation.evolution_patterns import PATTERNS
from moe_lab.errors import UserError, unknown


@dataclass(frozen=True)
class Settings:
    """Parameters of the search; the values are those published for OLMoE (see `evolution` for the other models)."""

    population: int = 32
    """P: schedules of the first generation; later ones have the elites and P - m children."""
    elites: int = 4
    """m: the best schedules so far, which live on and are the parents."""
    generations: int = 50
    """T: populations that are evaluated, the first one included."""
    max_transfer: int = 4
    """Delta_max: the most experts one transfer moves from layer to layer."""
    max_transfers: int = 3
    """tau_max: the most transfers that make a child."""
    granularity: int = 2
    """G: layers keep multiples of it, and transfers move multiples of it; 1 for any number."""
    seed: int = 42
    """Of numpy's PCG64, the only source of randomness."""
    patterns: tuple[str, ...] = PATTERNS
    """What the first population begins with, one each (the rest is uniform over what is feasible)."""
    proposals: int = 1
    """Children proposed for each one evaluated; with more than 1 they are screened."""

    def check(self) -> None:
        """UserError for a value that cannot work."""
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
