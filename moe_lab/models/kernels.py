"""Triton kernels for sums over routed rows, whose terms are never stored.

One program adds each sum, in the order of the rows: the same bits each time. Numbers in half
precision are converted while they are read.
"""
# Triton takes annotations of kernels for types of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 128
"""Rows and columns that a program reads at once."""
SIDE = 64
"""Rows and columns of a sum of outer products that a program computes."""


@triton.jit
def _sums_by_expert(
    values,
    factors,
    ignored,
    ends,
    sums,
    maxima,
    n_rows,
    width,
    POWER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(0)
    number = tl.program_id(1)  # of the factor
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    is_double: tl.constexpr = values.dtype.element_ty == tl.float64
    dtype: tl.constexpr = tl.float64 if is_double else tl.float32
    total = tl.zeros((COLUMNS,), tl.float64)
    largest = tl.zeros((COLUMNS,), dtype)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_read = row < end
        if ignored is not None:
            is_read = is_read & (tl.load(ignored + row, mask=is_read, other=1) == 0)
        address = values + row[:, None] * width + column
        term = tl.load(address, mask=is_read[:, None] & is_column, other=0).to(dtype)
        if POWER == 2:
            term = term * term
        if factors is not None:
            factor = tl.load(factors + number * n_rows + row, mask=is_read, other=0)
            term = term * factor.to(dtype)[:, None]
        total += tl.sum(term, 0)
        largest = tl.maximum(largest, tl.max(term, 0))
    # tl.max drops NaN, and sums do not
    largest = tl.where(total == total, largest, total.to(dtype))
    offset = (number * tl.num_programs(0) + expert) * width + column
    tl.store(sums + offset, total, mask=is_column)
    tl.store(maxima + offset, largest, mask=is_column)


@triton.jit
def _outer_products(left, right, ends, sums, height, width, ROWS: tl.constexpr, SIDE: tl.constexpr):
    expert = tl.program_id(0)
    line = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((SIDE, SIDE), tl.float64)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        # (SIDE, ROWS) and (ROWS, SIDE)
        is_left = (line < height)[:, None] & (row < end)
        is_right = (row < end)[:, None] & (column < width)
        x = tl.load(left + row * height + line[:, None], mask=is_left, other=0)
        y = tl.load(right + row[:, None] * width + column, mask=is_right, other=0)
        total += tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    offset = (expert.to(tl.int64) * height + line[:, None]) * width + column
    tl.store(sums + offset, total, mask=(line < height)[:, None] & (column < width))


@triton.jit
def _inner_products(
    left, right, right_rows, products, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    right_row = row
    if right_rows is not None:
        right_row = tl.load(right_rows + row, mask=row < n_rows, other=0)
    is_double: tl.constexpr = left.dtype.element_ty == tl.float64
    dtype: tl.constexpr = tl.float64 if is_double else tl.float32
    total = tl.zeros((ROWS, COLUMNS), dtype)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None]
        is_read = (row < n_rows)[:, None] & (column < width)
        left_values = tl.load(left + row[:, None] * width + column, mask=is_read, other=0)
        right_values = tl.load(right + right_row[:, None] * width + column, mask=is_read, other=0)
        total += left_values.to(dtype) * right_values.to(dtype)
    tl.store(products + row, tl.sum(total, 1), mask=row < n_rows)


@triton.jit
def _shifts(stream_square, product, added_square, shifts, n_rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n_rows
    xx = tl.load(stream_square + row, mask=is_row, other=0)
    xa = tl.load(product + row, mask=is_row, other=0)
    aa = tl.load(added_square + row, mask=is_row, other=0)
    squares = xx * tl.maximum(xx + 2 * xa + aa, 0)
    is_defined = squares > 0
    divisor = tl.where(is_defined, squares, 1)
    cosine = (xx + xa) / tl.sqrt(divisor)
    sine_square = tl.maximum(xx * aa - xa * xa, 0) / divisor
    shift = tl.where(cosine > 0, sine_square / (1 + tl.abs(cosine)), 1 - cosine)
    tl.store(shifts + row, tl.where(is_defined, shift, 1), mask=is_row)


def term_sums(
    values: torch.Tensor,
    factors: torch.Tensor | None,
    ignored: torch.Tensor | None,
    rows: Any,
    power: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `moe_lab.models.rows.term_sums`, in fp64. `factors`: None for 1. Terms are computed in
    fp32, of `values` in fp64 in fp64."""
    values = values.contiguous()
    factors = None if factors is None else factors.contiguous()
    n_rows, width = values.shape
    shape = (1 if factors is None else len(factors), len(rows.ends), width)
    sums = torch.empty(shape, dtype=torch.float64, device=values.device)
    maxima = torch.empty_like(sums)
    grid = (shape[1], shape[0], triton.cdiv(width, COLUMNS))
    _sums_by_expert[grid](
        values, factors, ignored, rows.ends, sums, maxima, n_rows, width, power, ROWS, COLUMNS
    )
    return sums, maxima


def reduce_by_expert(
    values: torch.Tensor, ignored: torch.Tensor | None, rows: Any, how: str
) -> torch.Tensor:
    """As `moe_lab.models.rows.reduce_by_expert`, in fp64."""
    flat = values.reshape(len(values), -1)
    sums, maxima = term_sums(flat, None, ignored, rows, power=1)
    return (sums if how == "sum" else maxima).view(-1, *values.shape[1:])


def outer_products(left: torch.Tensor, right: torch.Tensor, rows: Any) -> torch.Tensor:
    """As `moe_lab.models.rows.outer_products`, in fp64. The products of `ROWS` rows are added in
    fp32."""
    shape = (len(rows.ends), left.shape[1], right.shape[1])
    sums = torch.empty(shape, dtype=torch.float64, device=left.device)
    grid = (shape[0], triton.cdiv(shape[1], SIDE), triton.cdiv(shape[2], SIDE))
    _outer_products[grid](
        left.contiguous(), right.contiguous(), rows.ends, sums, *shape[1:], ROWS, SIDE
    )
    return sums


def inner_products(
    left: torch.Tensor, right: torch.Tensor, right_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """As `moe_lab.models.rows.inner_products`."""
    left = left.contiguous()
    n_rows, width = left.shape
    products = torch.empty(n_rows, dtype=torch.float64, device=left.device)
    _inner_products[(triton.cdiv(n_rows, ROWS),)](
        left, right.contiguous(), right_rows, products, n_rows, width, ROWS, COLUMNS
    )
    return products


def shifts(xx: torch.Tensor, xa: torch.Tensor, aa: torch.Tensor) -> torch.Tensor:
    """As `moe_lab.statistics.forward.shifts`."""
    result = torch.empty_like(xx)
    _shifts[(triton.cdiv(len(xx), ROWS),)](xx, xa, aa, result, len(xx), ROWS)
    return result
