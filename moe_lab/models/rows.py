"""The routed (token, expert) pairs of one call of a layer's experts, sorted by expert.

On the CPU experts are computed one after the other (`Rows`), on other devices all at once
(`GroupedRows`): with the same number of operations for any number of experts, and none whose result
the CPU waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from moe_lab.models.discover import MoELayer, Weights
from moe_lab.models.transformers_private import grouped_mm


class OneExpert(NamedTuple):
    """The rows of one expert."""

    experts: int
    """Index of the part's experts in tensors (E, ...)."""
    rows: slice
    """The part's rows among all rows of the call."""

    def weights(
        self, layer: MoELayer, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Weights:
        """The weights of the part's experts. `tensors`: as in `MoELayer.weights`."""
        return layer.weights(self.experts, tensors)

    def counted(self, ignored: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
        """`values` (n, ...) of the part's rows; `ignored` (S,) bool: rows that are left out, or set
        to 0. None: no row."""
        return values if ignored is None else values[~ignored[self.rows]]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of `values` (n, ...) over the rows of each expert of the part: (...) for one expert,
        else (E, ...)."""
        return values.sum(0)

    def amax(self, values: torch.Tensor) -> torch.Tensor:
        """As `sum`, the largest of `values` >= 0; 0 for an expert without rows."""
        return values.amax(0) if len(values) else values.new_zeros(values.shape[1:])


class Rows:
    """The T x K routed (token, expert) pairs of one call, sorted by expert, then by k, then by
    token. The eager forward of transformers uses the same order.

    `index` (T, K): the expert ids of each token."""

    token: torch.Tensor
    """(S,) row of the hidden states."""
    column: torch.Tensor
    """(S,) position k among the token's experts."""
    expert: torch.Tensor
    """(S,) expert id, ascending."""

    def __init__(self, index: torch.Tensor, n_experts: int) -> None:
        self.n_experts = n_experts
        # Position p of the flat transpose holds token p % T in column p // T. The stable sort keeps
        # this order within an expert.
        self.expert, order = torch.sort(index.t().reshape(-1), stable=True)
        self.token = order % index.shape[0]
        self.column = order // index.shape[0]

    def parts(self) -> Iterator[Part]:
        """The rows that are computed at once."""
        return self.one_by_one()

    def one_by_one(self) -> Iterator[OneExpert]:
        """The rows of each expert that has rows."""
        ends = torch.bincount(self.expert, minlength=self.n_experts).cumsum(0).tolist()
        start = 0
        for expert, end in enumerate(ends):
            if end > start:
                yield OneExpert(expert, slice(start, end))
            start = end

    def sum(self, terms: torch.Tensor) -> torch.Tensor:
        """Sums (E,) of the `terms` (S,) of each expert's rows."""
        return torch.bincount(self.expert, terms, self.n_experts)

    def product_sums(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Sums (E, P, Q) over each expert's rows of the products of `left` (S, P) and `right` (S,
        Q)."""
        sums = left.new_zeros(self.n_experts, left.shape[1], right.shape[1])
        for part in self.one_by_one():
            torch.mm(left[part.rows].t(), right[part.rows], out=sums[part.experts])
        return sums

    def assemble(
        self, parts: Sequence[tuple[Part, Mapping[str, torch.Tensor]]]
    ) -> dict[str, torch.Tensor]:
        """Name -> statistic (E, ...), 0 for experts without rows. `parts`: all parts, each as
        (part, name -> values for its experts)."""
        statistics = {
            name: values.new_zeros(self.n_experts, *values.shape)
            for name, values in parts[0][1].items()
        }
        for part, sums in parts:
            for name, values in sums.items():
                statistics[name][part.experts] = values
        return statistics

    def output(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[Part, torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor:
        """Gated sum (T, H) of expert outputs, added in the order of the eager forward of
        transformers. `hidden`: (T, H). `weights`: the gates (T, K).

        `compute(part, states (n, H))` returns the outputs (n, H) of the experts of a part, or None
        if they add nothing."""
        gates = weights[self.token, self.column, None]
        output = torch.zeros_like(hidden)
        for part in self.parts():
            token = self.token[part.rows]
            f = compute(part, hidden.index_select(0, token))  # much faster than hidden[token]
            if f is not None:
                output.index_add_(0, token, (f * gates[part.rows]).to(output.dtype))
        return output

    def outputs(
        self, hidden: torch.Tensor, compute: Callable[[Part, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The outputs (T, K, H) of the experts of each token, not weighted by gates. Arguments as
        in `output`."""
        parts = [
            (part, compute(part, hidden.index_select(0, self.token[part.rows])))
            for part in self.parts()
        ]
        outputs = torch.cat([f for _, f in parts])
        shape = (len(hidden), len(self.token) // len(hidden), outputs.shape[1])
        return outputs.new_empty(shape).index_put_((self.token, self.column), outputs)


class GroupedRows(Rows):
    """The routed pairs of one call, sorted by expert, then by token, then by k. All experts are one
    part: their matrix products are grouped_mm, and their sums segment reductions, which add in the
    same order each time."""

    rows = slice(None)
    experts = slice(None)

    def __init__(self, index: torch.Tensor, n_experts: int) -> None:
        self.n_experts = n_experts
        self.top_k = index.shape[1]
        self.expert, order = torch.sort(index.reshape(-1), stable=True)
        self.token = order // self.top_k
        self.column = order % self.top_k
        positions = torch.arange(len(order), device=order.device)
        self.positions = torch.empty_like(order).scatter_(0, order, positions)
        """(T K,) row of each pair of a token and k."""
        experts = torch.arange(n_experts, device=order.device)
        self.ends = torch.searchsorted(self.expert, experts, right=True)
        """(E,) end of each expert's rows."""

    def parts(self) -> Iterator[Part]:
        yield self

    def weights(
        self, layer: MoELayer, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Weights:
        weights = layer.weights(self.experts, tensors)
        return GroupedWeights(**vars(weights), rows=self)

    def counted(self, ignored: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
        if ignored is None:
            return values
        return values.masked_fill(ignored.view(-1, *[1] * (values.dim() - 1)), 0)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._reduce(values, "sum")

    def amax(self, values: torch.Tensor) -> torch.Tensor:
        return self._reduce(values, "max")

    @cached_property
    def lengths(self) -> torch.Tensor:
        """(E,) number of each expert's rows."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    def _reduce(self, values: torch.Tensor, how: str) -> torch.Tensor:
        """`values` (S, ...) -> (E, ...), 0 for experts without rows."""
        # without `unsafe`, the lengths are read on the host
        return torch.segment_reduce(
            values, how, lengths=self.lengths, axis=0, unsafe=True, initial=0.0
        )

    def product_sums(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.sum(left[:, :, None] * right[:, None])

    def assemble(
        self, parts: Sequence[tuple[Part, Mapping[str, torch.Tensor]]]
    ) -> dict[str, torch.Tensor]:
        return dict(parts[0][1])

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` (T, ...) -> (S, ...)."""
        return tokens[self.token]

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (T, ...) of the `values` (S, ...) of each token's rows."""
        rows = values[self.positions]
        return rows.view(-1, self.top_k, *rows.shape[1:]).sum(1)

    def output(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[Part, torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor:
        states: torch.Tensor = _Gather.apply(hidden, self)
        f = compute(self, states)
        if f is None:
            return torch.zeros_like(hidden)
        gates = weights[self.token, self.column, None]
        output: torch.Tensor = _Combine.apply(f * gates, self)
        return output.to(hidden.dtype)

    def outputs(
        self, hidden: torch.Tensor, compute: Callable[[Part, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        rows = compute(self, self.gather(hidden))[self.positions]
        return rows.view(-1, self.top_k, rows.shape[1])


class _Gather(torch.autograd.Function):
    """`GroupedRows.gather`, whose gradient is combined in the same order each time."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, rows: GroupedRows) -> torch.Tensor:
        ctx.rows = rows
        return rows.gather(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.combine(gradient), None


class _Combine(torch.autograd.Function):
    """`GroupedRows.combine`, and its gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: GroupedRows) -> torch.Tensor:
        ctx.rows = rows
        return rows.combine(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.gather(gradient), None


def dense_weights(layer: MoELayer, device: torch.device) -> Iterator[tuple[slice, DenseWeights]]:
    """(slice of experts, their weights) for experts that all compute the same states: one expert
    after the other on the CPU, all experts at once on another device."""
    n_experts = layer.n_experts
    step = 1 if device.type == "cpu" else n_experts
    for first in range(0, n_experts, step):
        experts = slice(first, first + step)
        yield experts, DenseWeights(**vars(layer.weights(experts)))


class DenseWeights(Weights):
    """The weights of experts that all compute the same states (n, ...), (experts, ...) each: the
    result is (experts, n, ...)."""

    def linear(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        product = states @ weight.mT
        return product if bias is None else product + bias[:, None]


@dataclass(frozen=True, kw_only=True)
class GroupedWeights(Weights):
    """The weights of all experts, (E, ...) each, for rows that are sorted by expert."""

    rows: GroupedRows

    def linear(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        product = grouped_mm(states, weight.mT, self.rows.ends.to(torch.int32))
        return product if bias is None else product + bias[self.rows.expert]


Part: TypeAlias = OneExpert | GroupedRows
"""Rows that are computed at once: those of one expert, or those of all."""


def sort_by_expert(index: torch.Tensor, n_experts: int) -> Rows:
    """The sorted pairs of `index` (T, K), the expert ids of each token."""
    return (Rows if index.device.type == "cpu" else GroupedRows)(index, n_experts)
