"""How an experts module of the registry computes one expert, and how routed tokens are sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear


@dataclass(frozen=True)
class Rows:
    """The T x K routed (token, expert) pairs of one call, sorted by expert; within an expert by k, then by token.

    That is the order in which the eager forward of transformers meets them, so equal bits come out of equal matrix
    products.
    """

    token: torch.Tensor
    """(S,) row of the hidden states."""
    column: torch.Tensor
    """(S,) position k among the token's experts."""
    expert: torch.Tensor
    """(S,) expert id, ascending."""
    ends: list[int]
    """Per expert, where its rows end; they start where those of the expert before end."""

    def parts(self) -> Iterator[tuple[int, slice]]:
        """(expert, slice of its rows) for every expert that has rows."""
        return parts(self.ends)


def parts(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, slice) for every expert whose rows are not empty."""
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            yield expert, slice(start, end)
        start = end


def sort_by_expert(index: torch.Tensor, n_experts: int) -> Rows:
    """Sort the pairs of `index` (T, K) by expert id."""
    expert, order = torch.sort(index.t().reshape(-1), stable=True)
    return Rows(
        token=order % index.shape[0],
        column=order // index.shape[0],
        expert=expert,
        ends=torch.bincount(expert, minlength=n_experts).cumsum(0).tolist(),
    )


def intermediate(module: torch.nn.Module, hidden: torch.Tensor, expert: int) -> torch.Tensor:
    """phi (n, I): what enters down_proj of `expert`, for its rows of the hidden states (n, H)."""
    activate: Any = module._apply_gate if module.has_gate else module.act_fn
    phi: torch.Tensor = activate(_project(module, hidden, "gate_up_proj" if module.has_gate else "up_proj", expert))
    return phi


def output(module: torch.nn.Module, phi: torch.Tensor, expert: int) -> torch.Tensor:
    """f (n, H): the output of `expert` before the gate."""
    f = _project(module, phi, "down_proj", expert)
    norm: Any = module.post_expert_norm if module.has_post_expert_norm else None
    return f if norm is None else norm(f)


def _project(module: torch.nn.Module, rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    projected = rows @ weight if module.is_transposed else linear(rows, weight)
    return projected + getattr(module, f"{name}_bias")[expert] if module.has_bias else projected
