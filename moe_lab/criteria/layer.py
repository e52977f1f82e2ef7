"""What a criterion sees of one MoE layer: its statistics, the chosen gate, and a source of random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import torch

from moe_lab.errors import UserError


@dataclass(frozen=True)
class Layer:
    """One layer of E experts. Tensors are fp64 and have one row per expert; names are those of statistics/sums.py."""

    index: int
    tensors: Mapping[str, torch.Tensor]
    gate: str
    random: numpy.random.Generator
    """Shared by the layers of one scoring, which are visited in layer order."""

    @property
    def n_experts(self) -> int:
        """E, read from any statistic that has a row per expert."""
        return next(tensor.shape[0] for tensor in self.tensors.values() if tensor.dim())

    @property
    def tokens(self) -> torch.Tensor:
        """N_j, tokens routed to expert j (E,)."""
        return self["tokens"]

    def sum(self, alpha: int, beta: int) -> torch.Tensor:
        """sum_t g^alpha ||f||^beta over the tokens routed to each expert (E,), with the chosen gate."""
        gate = self.gate if alpha else "model"  # g^0 = 1, whatever the gate
        return self[f"sums_{gate}"][:, alpha, beta]

    def per_token(self, total: torch.Tensor) -> torch.Tensor:
        """`total` (E,) divided by N_j; 0 for an expert that saw no token."""
        return torch.where(self.tokens > 0, total / self.tokens.clamp(min=1), torch.zeros_like(total))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The statistic called `name`, as fp64. UserError when this layer has none."""
        if name not in self.tensors:
            raise UserError(f"layer {self.index} has no {name}: {_reason(name)} (it has: {', '.join(sorted(self.tensors))})")
        return self.tensors[name].double()


def _reason(name: str) -> str:
    if name == "sums_double_softmax":
        return "gate=double_softmax needs a router that is a softmax over all experts, choose gate=model or renormalized"
    return "the statistics given are not those the criterion needs"
