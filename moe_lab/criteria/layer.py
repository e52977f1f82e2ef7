"""What a criterion sees of one MoE layer: its statistics, the chosen gate, and a source of random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from moe_lab.errors import UserError

Array = NDArray[numpy.float64]
_SOFTMAX = "; this needs a router that is a softmax over all experts: choose gate=model or renormalized"
LACKING = {
    "sums_full_softmax": _SOFTMAX,
    "sums_double_softmax": _SOFTMAX,
    "shift_weighted": "; this needs MoE blocks that read a norm of the residual stream",
}
"""Statistic that some models do not have -> why."""


@dataclass(frozen=True)
class Layer:
    """One layer of `n_experts` (E) experts with `width` (I) channels each, as `criterion` sees it.

    Arrays are fp64; names and shapes are those of statistics/sums.py.
    """

    criterion: str
    """Name of the criterion, for messages."""
    index: int
    n_experts: int
    width: int
    """0 when a criterion of experts is not told."""
    arrays: Mapping[str, Any]
    gate: str
    random: numpy.random.Generator
    """Shared by the layers of one scoring, which are visited in layer order."""

    @property
    def tokens(self) -> Array:
        """N_j, tokens routed to expert j (E,)."""
        return self["tokens"]

    def sum(self, alpha: int, beta: int) -> Array:
        """sum_t g^alpha ||f||^beta over the tokens routed to each expert (E,), with the chosen gate."""
        gate = self.gate if alpha else "model"  # g^0 = 1, whatever the gate
        return self[f"sums_{gate}"][:, alpha, beta]

    def mean(self, alpha: int, beta: int) -> Array:
        """`sum(alpha, beta)` / N_j (E,); 0 for an expert that saw no token."""
        return self.sum(alpha, beta) / numpy.maximum(self.tokens, 1)

    def __getitem__(self, name: str) -> Array:
        """The statistic called `name`. UserError when this layer has none."""
        if name not in self.arrays:
            there = ", ".join(sorted(self.arrays)) or "nothing"
            lacking = f"layer {self.index} has no {name} for criterion={self.criterion}: it has {there}"
            raise UserError(lacking + LACKING.get(name, ""))
        return numpy.asarray(self.arrays[name], dtype=numpy.float64)
