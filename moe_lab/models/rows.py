"""The routed (token, expert) pairs of one call of a layer's experts, sorted by expert.

A model with eager experts computes them one after the other (`Rows`). A model with grouped_mm, as
moe_lab loads it on a GPU, computes all at once (`GroupedRows`): with the same number of operations
for any number of experts, and none whose result the CPU waits for. Sums over rows are Triton
kernels on CUDA, and operations of torch on other devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, wraps
from importlib.util import find_spec
from subprocess import SubprocessError
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch.nn.functional import linear, pad

from moe_lab.models.discover import MoELayer, Weights
from moe_lab.models.transformers_private import experts_implementation, grouped_mm

F = TypeVar("F", bound=Callable[..., Any])
TensorMap = Callable[[torch.Tensor], torch.Tensor]
PIECE = 64
"""Rows that a segment reduction adds one after the other."""
MATRIX_PIECE = 512
"""Rows whose outer products are added by one matrix product."""
DENSE_TOKENS = 512
"""Tokens of which the results of all experts are in memory at once, where all experts compute
them."""
TRITON_DEVICES = ("cuda",) if find_spec("triton") else ()
"""Types of devices that run Triton kernels."""


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in at least fp32, for sums and squares."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def triton_kernels(device: torch.device) -> ModuleType | None:
    """The module `kernels` for tensors on `device`; None if the device runs no Triton kernels."""
    return _compiled_kernels(device.type) if device.type in TRITON_DEVICES else None


@cache
def _compiled_kernels(device: str) -> ModuleType | None:
    """The module `kernels`, or None with a warning if a first kernel fails on `device`."""
    from moe_lab.models import kernels

    try:
        zero = torch.zeros(1, 1, device=device)
        kernels.inner_products(zero, zero)
    except (RuntimeError, OSError, SubprocessError) as error:  # such as without a C compiler
        warnings.warn(f"operations of torch take the place of Triton's: {error}", stacklevel=2)
        return None
    return kernels


def in_kernels(function: F) -> F:
    """Decorator: on a device with Triton kernels, the function of the same name in the module
    `kernels` takes the place of `function`, whose first argument is a tensor on the device."""

    @wraps(function)
    def chosen(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kernels = triton_kernels(values.device)
        if kernels is None:
            return function(values, *args, **kwargs)
        with torch.cuda.device_of(values):  # kernels run on the current GPU
            return getattr(kernels, function.__name__)(values, *args, **kwargs)

    return cast(F, chosen)


@in_kernels
def inner_products(
    left: torch.Tensor, right: torch.Tensor, right_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Inner products (S,) fp64, computed in at least fp32, of the rows of `left` (S, H) and the
    rows `right_rows` (S,) of `right` (T, H). None: all rows in their order."""
    right = right if right_rows is None else right[right_rows]
    return (at_least_fp32(left) * right).sum(-1).double()


class OneExpert(NamedTuple):
    """A part of the rows: those of one expert."""

    experts: int
    """The expert, as an index of tensors (E, ...)."""
    rows: slice
    """The part's rows among all rows of the call."""

    def weights(
        self, layer: MoELayer, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Weights:
        """The weights of the part's experts. `tensors`: as in `MoELayer.weights`."""
        return layer.weights(self.experts, tensors)

    def linear(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The products (n, out) of the `states` (n, in) of the part's rows with the `weight` (out,
        in) of its expert."""
        return linear(states, weight)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` of the part's expert, for all of its rows."""
        return values

    def sum(self, values: torch.Tensor, ignored: torch.Tensor | None = None) -> torch.Tensor:
        """The sums (...), in at least fp32, of `values` (n, ...) over the part's rows, without the
        rows `ignored` (S,) bool; None: over all."""
        return at_least_fp32(self._counted(values, ignored)).sum(0)

    def amax(self, values: torch.Tensor, ignored: torch.Tensor | None = None) -> torch.Tensor:
        """The largest (...) of `values` (n, ...) >= 0; 0 without rows. `ignored`: as in `sum`."""
        values = self._counted(values, ignored)
        return values.amax(0) if len(values) else values.new_zeros(values.shape[1:])

    def square_sums(
        self, values: torch.Tensor, factors: torch.Tensor, ignored: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sums, roots of the maxima), (F, C) each and in at least fp32, of a v^2 over the part's
        rows, for v = `values` (n, C) and each of the `factors` a (F, S) >= 0. `ignored`: as in
        `sum`."""
        squares = at_least_fp32(self._counted(values, ignored)).square()
        weights = self._counted(factors[:, self.rows].t(), ignored)
        products = squares[:, None] * weights[:, :, None].to(squares.dtype)
        return self.sum(products), self.amax(products).sqrt()

    def _counted(self, values: torch.Tensor, ignored: torch.Tensor | None) -> torch.Tensor:
        return values if ignored is None else values[~ignored[self.rows]]


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

        ends = torch.bincount(self.expert, minlength=n_experts).cumsum(0).tolist()
        bounds = enumerate(zip([0, *ends], ends, strict=False))
        self._parts = [
            OneExpert(expert, slice(start, end)) for expert, (start, end) in bounds if end > start
        ]

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the rows that are computed one after the other: the rows of each expert that
        has rows."""
        return self._parts

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (E,) of the `values` (S,) of each expert's rows."""
        return torch.bincount(self.expert, values, self.n_experts)

    def product_sums(
        self, factors: torch.Tensor, values: torch.Tensor, ignored: torch.Tensor | None
    ) -> torch.Tensor:
        """Sums (F, E, C) of the products of `factors` (F, S) and `values` (S, C) over each expert's
        rows, without the rows `ignored` (S,) bool; None: over all."""
        if ignored is not None:
            factors = factors.masked_fill(ignored, 0)
            values = values.masked_fill(ignored[:, None], 0)
        sums = factors.new_zeros(len(factors), self.n_experts, values.shape[1])
        for part in self.parts:
            sums[:, part.experts] = factors[:, part.rows] @ values[part.rows]
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
        compute: Callable[[Any, torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor:
        """Gated sum (T, H) of expert outputs, added in the order of the eager forward of
        transformers. `hidden`: (T, H). `weights`: the gates (T, K).

        `compute(part, states (n, H))` returns the outputs (n, H) of the experts of one of `parts`,
        or None if they add nothing."""
        gates = weights[self.token, self.column, None]
        output = torch.zeros_like(hidden)
        for part in self.parts:
            token = self.token[part.rows]
            f = compute(part, hidden.index_select(0, token))  # much faster than hidden[token]
            if f is not None:
                output.index_add_(0, token, (f * gates[part.rows]).to(output.dtype))
        return output

    def outputs(
        self, hidden: torch.Tensor, compute: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The outputs (T, K, H) of the experts of each token, not weighted by gates. Arguments as
        in `output`."""
        outputs = None
        for part in self.parts:
            token = self.token[part.rows]
            f = compute(part, hidden.index_select(0, token))
            if outputs is None:
                outputs = f.new_empty(len(hidden), len(self.token) // len(hidden), f.shape[1])
            outputs[token, self.column[part.rows]] = f
        assert outputs is not None, "there are tokens"
        return outputs


class GroupedRows(Rows):
    """The routed pairs of one call, sorted by expert, then by token, then by k, as in transformers'
    grouped_mm. All experts are computed at once.

    Rows of the id `n_experts` belong to no expert: their results are undefined, and they are in no
    sum. Sums are segment reductions, which add in the same order each time."""

    experts = slice(None)
    rows = slice(None)

    def __init__(self, index: torch.Tensor, n_experts: int) -> None:
        self.n_experts = n_experts
        self.top_k = index.shape[1]
        self.expert, order = torch.sort(index.reshape(-1), stable=True)
        self.token = order // self.top_k
        self.column = order % self.top_k
        numbers = torch.arange(len(order), device=order.device)
        self.positions = torch.empty_like(order).scatter_(0, order, numbers)
        """(T K,) row of each pair of a token and k."""
        experts = torch.arange(n_experts, device=order.device)
        self.ends = torch.searchsorted(self.expert, experts, right=True)
        """(E,) end of each expert's rows."""
        self.offsets = self.ends.to(torch.int32)

    @property
    def parts(self) -> Sequence[Part]:
        return [self]

    def product_sums(
        self, factors: torch.Tensor, values: torch.Tensor, ignored: torch.Tensor | None
    ) -> torch.Tensor:
        return term_sums(values, factors, ignored, self, power=1)[0]

    def assemble(
        self, parts: Sequence[tuple[Part, Mapping[str, torch.Tensor]]]
    ) -> dict[str, torch.Tensor]:
        return dict(parts[0][1])

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` (T, ...) -> (S, ...)."""
        return tokens[self.token]

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (T, ...) of the `values` (S, ...) of each token's rows."""
        of_tokens = values[self.positions].view(-1, self.top_k, *values.shape[1:])
        return of_tokens.sum(1)

    def output(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[Any, torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor:
        states: torch.Tensor = _LinearMap.apply(hidden, self.gather, self.combine)
        f = compute(self, states)
        assert f is not None, "not all experts add nothing"
        gates = weights[self.token, self.column, None]
        output: torch.Tensor = _LinearMap.apply(f * gates, self.combine, self.gather)
        return output.to(hidden.dtype)

    def weights(
        self, layer: MoELayer, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Weights:
        """The weights of all experts. `tensors`: as in `MoELayer.weights`."""
        weights = layer.weights(self.experts, tensors)
        return replace(weights, product=self.linear, spread=self.spread)

    def linear(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The products (S, out) of each of the `states` (S, in) with the `weight` (E, out, in) of
        its expert."""
        return grouped_mm(states, weight.mT, self.offsets)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (E, ...) of the experts -> (S, ...), those of each row's expert."""
        spread: torch.Tensor = _LinearMap.apply(
            values, lambda values: values[self.expert], self.sum
        )
        return spread

    def sum(self, values: torch.Tensor, ignored: torch.Tensor | None = None) -> torch.Tensor:
        """The sums (E, ...), in at least fp32, of `values` (S, ...) over each expert's rows,
        without the rows `ignored` (S,) bool; None: over all."""
        return reduce_by_expert(values, ignored, self, "sum")

    def amax(self, values: torch.Tensor, ignored: torch.Tensor | None = None) -> torch.Tensor:
        """The largest (E, ...) of `values` (S, ...) >= 0; 0 without rows. `ignored`: as in
        `sum`."""
        return reduce_by_expert(values, ignored, self, "max")

    def square_sums(
        self, values: torch.Tensor, factors: torch.Tensor, ignored: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sums, roots of the maxima), (F, E, C) each and in at least fp32, of a v^2 over each
        expert's rows, for v = `values` (S, C) and each of the `factors` a (F, S) >= 0. `ignored`:
        as in `sum`."""
        sums, maxima = term_sums(values, factors, ignored, self, power=2)
        return sums, maxima.sqrt()

    @cached_property
    def pieces(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pieces of at most PIECE rows, see `cut`."""
        return self.cut(PIECE)

    def cut(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ends (1 + P,) of pieces of at most `size` rows of one expert, ends (1 + E,) of the
        pieces of each expert), both after a 0. P depends on the number of rows only; pieces can be
        empty."""
        n_pieces = max(1, -(-len(self.expert) // size))
        cuts = size * torch.arange(1, n_pieces, device=self.ends.device)
        piece_ends = torch.cat([self.ends, cuts]).sort().values
        last_pieces = torch.searchsorted(piece_ends, self.ends, right=True)
        zero = self.ends.new_zeros(1)
        return torch.cat([zero, piece_ends]), torch.cat([zero, last_pieces])


@in_kernels
def reduce_by_expert(
    values: torch.Tensor, ignored: torch.Tensor | None, rows: GroupedRows, how: str
) -> torch.Tensor:
    """The sums, or the largest, (E, ...), in at least fp32, of `values` (S, ...) over each expert's
    rows, without the rows `ignored` (S,) bool; None: over all. 0 without rows. `how`: sum, or max
    of values >= 0."""
    values = at_least_fp32(values)
    if ignored is not None:
        values = values.masked_fill(ignored.view(-1, *[1] * (values.dim() - 1)), 0)
    # Pieces first: an expert with many rows would take long, since a column of its rows is added
    # one by one, and rounding errors would add up.
    for offsets in rows.pieces:
        # without `unsafe`, the offsets are read on the CPU
        values = torch.segment_reduce(
            values, how, offsets=offsets, axis=0, unsafe=True, initial=0.0
        )
    return values


@in_kernels
def term_sums(
    values: torch.Tensor,
    factors: torch.Tensor,
    ignored: torch.Tensor | None,
    rows: GroupedRows,
    power: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, maxima), (F, E, C) each and in at least fp32, of a v^power over each expert's rows,
    for v = `values` (S, C) and each of the `factors` a (F, S). Maxima are at least 0. `power`: 1 or
    2. `ignored`: as in `reduce_by_expert`."""
    powers = at_least_fp32(values) ** power
    products = powers[:, None] * factors.t()[:, :, None].to(powers.dtype)
    sums, maxima = (reduce_by_expert(products, ignored, rows, how) for how in ("sum", "max"))
    return sums.movedim(1, 0), maxima.movedim(1, 0)


@in_kernels
def outer_products(left: torch.Tensor, right: torch.Tensor, rows: GroupedRows) -> torch.Tensor:
    """Sums (E, N, M), in at least fp32, of the outer products of `left` (S, N) and `right` (S, M)
    over each expert's rows."""
    piece_ends, last_pieces = rows.cut(MATRIX_PIECE)
    numbers = piece_ends[:-1, None] + torch.arange(MATRIX_PIECE, device=piece_ends.device)
    numbers = numbers.masked_fill(numbers >= piece_ends[1:, None], len(left))
    # (P, MATRIX_PIECE, ...): the rows of each piece, then rows of zeros
    lefts, rights = (pad(at_least_fp32(values), (0, 0, 0, 1))[numbers] for values in (left, right))
    return torch.segment_reduce(
        lefts.mT @ rights, "sum", offsets=last_pieces, axis=0, unsafe=True, initial=0.0
    )


class _LinearMap(torch.autograd.Function):
    """A linear map of tensors, whose gradient is taken by its `adjoint`: in the same order each
    time."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, map: TensorMap, adjoint: TensorMap) -> torch.Tensor:
        ctx.adjoint = adjoint
        return map(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def is_grouped(layer: MoELayer) -> bool:
    """Whether the model computes all experts of the layer at once."""
    return experts_implementation(layer.experts) == "grouped_mm"


def dense_weights(
    layer: MoELayer, needed: Collection[int] | None = None
) -> Iterator[tuple[slice, Weights]]:
    """(slice of experts, their weights) for experts that all compute the same states (n, ...): all
    at once, or one expert after the other, of the `needed` ones; None: of all. The weights are
    (experts, ...) each, and the results (experts, n, ...)."""
    step = layer.n_experts if is_grouped(layer) else 1
    for first in range(0, layer.n_experts, step):
        if step == 1 and needed is not None and first not in needed:
            continue
        experts = slice(first, first + step)
        yield (
            experts,
            replace(
                layer.weights(experts),
                product=lambda states, weight: states @ weight.mT,
                spread=lambda bias: bias[:, None],
            ),
        )


Part: TypeAlias = OneExpert | GroupedRows
"""Rows that are computed at once."""


def sort_by_expert(layer: MoELayer, index: torch.Tensor) -> Rows:
    """The sorted pairs of `index` (T, K), the expert ids of each token."""
    return (GroupedRows if is_grouped(layer) else Rows)(index, layer.n_experts)
