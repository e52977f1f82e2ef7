"""Routed experts as linear maps of their own while they are fine-tuned: adapters know linear maps, not stacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moe_lab.models.experts import sort_by_expert
from moe_lab.models.transformers_private import activation
from moe_lab.pruning.ragged import RaggedExperts

Projection = tuple[str, torch.Tensor, torch.Tensor | None]
"""Name (gate, up or down), weight (out, in), bias (out,) or None: views of the tensors of an experts module."""


def projections(experts: nn.Module, expert: int) -> Iterator[Projection]:
    """The linear maps of one expert, as views of the memory of its stacked or ragged module: what is written to them
    is written to the module. Nothing for an expert without channels.
    """
    if isinstance(experts, RaggedExperts):
        gate_up, down = experts.weights(expert)
        if len(down):
            yield from _halves(gate_up, None, interleaved=False)
            yield "down", down.T, None
        return
    if experts.has_gate:
        weight, bias = _projection(experts, "gate_up_proj", expert)
        yield from _halves(weight, bias, interleaved=not experts.is_concatenated)
    else:
        yield "up", *_projection(experts, "up_proj", expert)
    yield "down", *_projection(experts, "down_proj", expert)


def _projection(experts: Any, name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return (weight.T if experts.is_transposed else weight), bias


def _halves(weight: torch.Tensor, bias: torch.Tensor | None, *, interleaved: bool) -> Iterator[Projection]:
    """Gate and up projection out of one tensor: one below the other, or row by row in turn."""
    half = len(weight) // 2
    rows = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    for name, part in zip(("gate", "up"), rows, strict=True):
        yield name, weight[part], None if bias is None else bias[part]


class UnfusedExperts(nn.Module):
    """Takes the place of the experts module of a layer: the same function, each projection an nn.Linear on the very
    memory of the original, so that an adapter can be put on it. `maps[e]` holds those of expert e by name."""

    def __init__(self, experts: Any, count: int) -> None:
        """`count` experts of `experts`, which is kept, out of sight of parameters and modules, for its activation."""
        super().__init__()
        self.__dict__["original"] = experts
        self.maps = nn.ModuleList(
            nn.ModuleDict({name: linear_on(weight, bias) for name, weight, bias in projections(experts, expert)})
            for expert in range(count)
        )

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Gated sum (T, H) of the outputs of experts `top_k_index` (T, K) with gates `top_k_weights` (T, K)."""
        mixed = torch.zeros_like(hidden_states)
        rows = sort_by_expert(top_k_index, len(self.maps))
        for expert, part in rows.parts():
            if len(self.maps[expert]):  # type: ignore[arg-type]
                token = rows.token[part]
                gates = top_k_weights[token, rows.column[part], None]
                output = self._expert(expert, hidden_states[token])
                mixed = mixed.index_add(0, token, (output * gates).to(mixed.dtype))
        return mixed

    def _expert(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output (n, H) of one expert for its rows (n, H) of the hidden states, before the gate."""
        maps: Any = self.maps[expert]
        experts: Any = self.__dict__["original"]
        if not experts.has_gate:
            phi = experts.act_fn(maps["up"](hidden))
        else:
            halves = maps["gate"](hidden), maps["up"](hidden)
            joined = torch.cat(halves, -1) if experts.is_concatenated else torch.stack(halves, -1).flatten(-2)
            phi = experts.activate(joined) if isinstance(experts, RaggedExperts) else activation(experts)(joined)
        output: torch.Tensor = maps["down"](phi)
        norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
        return output if norm is None else norm(output)


class EffectiveWeight(nn.Module):
    """A parametrisation that gives a router, whatever its formula, the weight its adapted linear map stands for."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.map = linear_on(weight, None)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """(E, H): what `map` makes of the unit vectors; `weight`, on whose memory it lies, is not read again."""
        effective: torch.Tensor = self.map(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))
        return effective.T


def linear_on(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A frozen linear map on the memory of `weight` (out, in) and `bias`."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made
