"""What a search takes beyond the search of schedules itself: which fitness, over what, at which cost. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moe_lab.errors import UserError, unknown

FITNESS = ("esap", "sap", "kl", "kl_reversed", "nll", "spec_dec")
AVERAGES = ("macro", "micro")
FILTERS = ("none", "reconstruction", "halving")
UNSHIFTED = ("esap", "sap", "kl", "kl_reversed")
"""What the released code computes at the answer tokens themselves instead of at the positions that predict them."""


@dataclass(frozen=True)
class FitnessSettings:
    """Parameters of `allocation=evolutionary` that say what a candidate is worth and how that is found out."""

    fitness: str = "esap"
    """esap, sap, kl (of the model from the candidate), kl_reversed, nll or spec_dec; all of them higher is better."""
    average: str = "macro"
    """macro: the mean over rows of the mean over their answer tokens, as in the paper; micro: over all tokens."""
    shift: bool = True
    """Judge the positions that predict answer tokens; False judges the answer tokens' own, as the released code."""
    header: bool = False
    """Count what the chat template writes around an answer as answer, as the released code."""
    max_new_tokens: int = 128
    """Tokens that spec_dec generates for each row."""
    memory_budget: int = 2**31
    """Bytes for the model's own log-probabilities; what needs more is computed again for every generation."""
    filter: str = "none"
    """How proposals are ranked before the best are evaluated: none, reconstruction or halving."""
    filter_tokens: int = 4096
    """Tokens that filter=reconstruction reads."""

    def check(self) -> None:
        """UserError for a value that cannot work."""
        for name, known in (("fitness", FITNESS), ("average", AVERAGES), ("filter", FILTERS)):
            if getattr(self, name) not in known:
                raise unknown(f"allocation.parameters.{name}", getattr(self, name), known)
        for name, least in (("max_new_tokens", 1), ("memory_budget", 0), ("filter_tokens", 1)):
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
        if self.fitness == "spec_dec" and self.filter == "halving":
            raise UserError(
                "allocation.parameters.filter=halving does not go with fitness=spec_dec: use reconstruction"
            )


NAMES = tuple(field.name for field in fields(FitnessSettings))


def fitness_settings(parameters: Mapping[str, Any]) -> FitnessSettings:
    """Those of `parameters` that are about fitness, checked; names of other parts are left alone."""
    found = FitnessSettings(**{name: parameters[name] for name in NAMES if name in parameters})
    found.check()
    return found
