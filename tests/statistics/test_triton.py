"""Triton's kernels, run as Python: sums that are not those of a pass over a tiny model, and the
bytes that they load and store."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from benchmarks.launches import TRAFFIC
from moe_lab.models import kernels
from moe_lab.models.rows import inner_products
from moe_lab.statistics.forward import shifts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_lab.models import kernels

SIZES = dict.fromkeys(["n_rows", "height", "width"], "i32")
TYPES = dict.fromkeys(["sums", "maxima", "products", "shifts", "factors"], "*fp64")
TYPES |= dict.fromkeys(["stream_square", "product", "added_square"], "*fp64")
TYPES |= dict.fromkeys(["ends", "right_rows"], "*i64")
TYPES |= {"ignored": "*i1"} | SIZES
CONSTANTS = {"POWER": 2, "ROWS": 16, "COLUMNS": 128, "SIDE": 64}
OPTIONAL = {"factors": None, "ignored": None, "right_rows": None}

for kernel in [value for value in vars(kernels).values() if isinstance(value, triton.JITFunction)]:
    # arguments that are None, and integers that are 1, are constants for the compiler
    for dtype, more in (("*bf16", {}), ("*fp32", OPTIONAL), ("*fp64", dict.fromkeys(SIZES, 1))):
        given = {**CONSTANTS, **more}
        constants = {(i,): given[a] for i, a in enumerate(kernel.arg_names) if a in given}
        types = {a: TYPES.get(a, dtype) for a in kernel.arg_names}
        types |= {a: "constexpr" for a in given if a in types}
        source = ASTSource(kernel, types, constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""
"""Compiles each kernel for a GPU, which is not needed for it."""


class Traffic:
    """Bytes that kernels load and store, and those that the formulas of benchmarks.launches give,
    by the name of the kernel."""

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}
        self.formula: dict[str, int] = {}
        self.name = ""

    def run(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool) -> None:
        self.name = kernel.fn.__name__
        self.formula[self.name] = TRAFFIC[self.name](*arguments)
        self.moved[self.name] = 0
        RUN(kernel, *arguments, grid=grid, warmup=warmup)

    def load(self, builder: Any, pointers: Any, mask: Any, *arguments: Any) -> Any:
        values = LOAD(builder, pointers, mask, *arguments)
        self._count(mask, values)
        return values

    def store(self, builder: Any, pointers: Any, values: Any, mask: Any, *arguments: Any) -> Any:
        self._count(mask, values)
        return STORE(builder, pointers, values, mask, *arguments)

    def _count(self, mask: Any, values: Any) -> None:
        self.moved[self.name] += int(numpy.sum(mask.data)) * values.data.itemsize


RUN = InterpretedFunction.run
LOAD = InterpreterBuilder.create_masked_load
STORE = InterpreterBuilder.create_masked_store


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    counted = Traffic()
    with (
        patch.object(InterpretedFunction, "run", lambda *a, **k: counted.run(*a, **k)),
        patch.object(InterpreterBuilder, "create_masked_load", lambda *a: counted.load(*a)),
        patch.object(InterpreterBuilder, "create_masked_store", lambda *a: counted.store(*a)),
    ):
        yield counted


@pytest.mark.parametrize(
    ("tokens", "experts", "width"), [(40, 4, 24), (70, 9, 300)], ids=["small", "wide"]
)
def test_bytes_are_those_of_the_formulas(
    tokens: int, experts: int, width: int, traffic: Traffic
) -> None:
    values = torch.rand(tokens, width)
    ends = torch.arange(1, experts + 1) * tokens // experts
    kernels.term_sums(values, torch.rand(2, tokens), None, SimpleNamespace(ends=ends), 2)
    kernels.outer_products(torch.rand(tokens, experts), values, SimpleNamespace(ends=ends))
    kernels.inner_products(values, values, torch.arange(tokens))
    kernels.shifts(*torch.rand(3, tokens, dtype=torch.float64))
    assert traffic.moved == traffic.formula
    assert traffic.moved.keys() == TRAFFIC.keys()


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_ignored_rows_are_not_read() -> None:
    values = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf], [3.0, -4.0]])
    ignored = torch.tensor([False, True, False])
    rows = SimpleNamespace(ends=torch.tensor([0, 3]))
    sums, maxima = kernels.term_sums(values, None, ignored, rows, 2)
    assert sums.tolist() == [[[0, 0], [10, 20]]]
    assert maxima.tolist() == [[[0, 0], [9, 16]]]


def test_maximum_of_nan_is_nan() -> None:
    values = torch.tensor([[torch.nan, 1.0], [2.0, torch.inf], [3.0, 4.0]])
    rows = SimpleNamespace(ends=torch.tensor([2, 3]))
    maxima = kernels.reduce_by_expert(values, None, rows, "max")
    torch.testing.assert_close(
        maxima, torch.tensor([[torch.nan, torch.inf], [3, 4]]).double(), equal_nan=True
    )


def test_sums_of_doubles_are_computed_in_fp64() -> None:
    values = torch.tensor([[1.0], [1e-12]], dtype=torch.float64)
    rows = SimpleNamespace(ends=torch.tensor([2]))
    sums, _ = kernels.term_sums(values, None, None, rows, 1)
    assert sums.item() == 1 + 1e-12


def test_shifts_are_those_without_triton() -> None:
    stream = torch.randn(50, 200)
    stream[0] = 0
    added = 0.1 * torch.randn(50, 200)
    added[1] = -stream[1]
    added[2] = -2 * stream[2]
    pairs = ((stream, stream), (stream, added), (added, added))
    products = [inner_products(*pair) for pair in pairs]
    torch.testing.assert_close(kernels.shifts(*products), shifts(*products))
    for pair, product in zip(pairs, products, strict=True):
        torch.testing.assert_close(kernels.inner_products(*pair), product, rtol=1e-6, atol=1e-6)
