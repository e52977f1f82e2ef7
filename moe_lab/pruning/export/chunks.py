"""Chunks that exported tensors consist of: byte ranges of the original, constants, changed
projections. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from moe_lab.pruning.layer_plan import StoredExpert

UNSIGNED: dict[str, Any] = {
    "F64": numpy.uint64,
    "F32": numpy.uint32,
    "F16": numpy.uint16,
    "BF16": numpy.uint16,
}
"""Type whose numbers can be copied one by one -> an integer type of the same size. In all other
types, numbers share scales."""
FLOATS: dict[str, Any] = {"F64": numpy.float64, "F32": numpy.float32, "F16": numpy.float16}
"""The types of `UNSIGNED` that numpy can compute with -> numpy's type."""
BLOCK = 1 << 18
"""Bytes of a `Constant` that are in memory at a time."""


@dataclass(frozen=True)
class Span:
    """`size` bytes of the file `shard` from byte `start`, copied unchanged."""

    shard: str
    start: int
    size: int
    zeros = 0
    """Bytes of zeros that only fill the shape."""


@dataclass(frozen=True)
class Constant:
    """Numbers that are not in the original, given by their bytes `pattern`, repeated until there
    are `size` bytes."""

    pattern: bytes
    size: int

    @property
    def zeros(self) -> int:
        """Bytes of zeros that only fill the shape."""
        return 0 if any(self.pattern) else self.size

    def read(self, folder: Path) -> Iterator[bytes]:
        """The bytes of the repeated pattern, in blocks of about BLOCK bytes; no file is read."""
        repeats = self.size // len(self.pattern)
        per_block = max(BLOCK // len(self.pattern), 1)
        for start in range(0, repeats, per_block):
            yield self.pattern * min(per_block, repeats - start)


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix inside a file."""

    shard: str
    start: int
    rows: int
    columns: int
    dtype: str

    def read(self, folder: Path) -> NDArray[Any]:
        """The bits of the matrix (rows, columns), as unsigned integers of the width of its type."""
        bits = numpy.fromfile(
            folder / self.shard, UNSIGNED[self.dtype], self.rows * self.columns, offset=self.start
        )
        return bits.reshape(self.rows, self.columns)


@dataclass(frozen=True)
class Projection:
    """One projection of a stored expert, whose members' projections are read one after the
    other."""

    stored: StoredExpert
    matrices: Mapping[int, Matrix]
    """Member -> its projection in the file; all of one shape."""
    dtype: str
    """The type of the result."""
    down: bool
    """Whether channels are the columns in the file, as in a down projection."""
    as_rows: bool
    """Whether channels become rows in any case, as in packed experts."""

    @property
    def matrix(self) -> Matrix:
        """The matrix of the first member; the matrices of all members have this shape and type."""
        return self.matrices[self.stored.members[0].expert]

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return self._width * self._bytes_of_channel

    @property
    def zeros(self) -> int:
        """Bytes of zeros that only fill the shape."""
        return self.stored.padding * self._bytes_of_channel

    @property
    def _width(self) -> int:
        """Number of channels of the result: as many as in the file, unless channels are dropped or
        channels of zeros are added."""
        in_file = self.matrix.columns if self.down else self.matrix.rows
        channels = self.stored.members[0].channels
        return in_file if channels is None else len(channels)

    @property
    def _bytes_of_channel(self) -> int:
        """Bytes of a channel of the result: H numbers."""
        hidden = self.matrix.rows if self.down else self.matrix.columns
        return hidden * int(numpy.dtype(UNSIGNED[self.dtype]).itemsize)

    def read(self, folder: Path) -> Iterator[memoryview]:
        """The bytes of the result, row-major, in one block; nothing for a result without channels.
        The bits in the file are converted to numbers only for sums of members, and if their type is
        not that of the result."""
        is_sum = self.stored.members[0].weight is not None
        converts = is_sum or self.matrix.dtype != self.dtype

        def channels_first(expert: int) -> NDArray[Any]:
            """The projection of an expert, with channels as rows: numbers if `converts`, otherwise
            bits."""
            matrix = self.matrices[expert]
            values = matrix.read(folder)
            if converts:
                values = _numbers(values, matrix.dtype)
            return values.T if self.down else values

        if self._width:
            # nothing is left to widen or to round: `channels_first` gives numbers, `_bits` rounds
            result = self.stored.projection(
                channels_first, lambda numbers: numbers, lambda total, _: total
            )
            if converts:
                result = _bits(result, self.dtype)
            yield numpy.ascontiguousarray(
                result.T if self.down and not self.as_rows else result
            ).data


def _numbers(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The numbers that `bits` are in the type `dtype`: as fp64 for F64, otherwise as fp32."""
    if dtype == "BF16":  # the upper half of fp32
        return (bits.astype(numpy.uint32) << 16).view(numpy.float32)
    values = numpy.ascontiguousarray(bits).view(FLOATS[dtype])
    numbers: NDArray[Any] = values.astype(numpy.promote_types(values.dtype, numpy.float32))
    return numbers


def _bits(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The bits of `values` in the type `dtype`, rounded to nearest, ties to even."""
    if dtype != "BF16":
        return numpy.ascontiguousarray(values, FLOATS[dtype]).view(UNSIGNED[dtype])
    fp32_bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
    # adds half of the lowest of the upper 16 bits, less one unit if that bit is 0: ties to even
    bits: NDArray[Any] = ((fp32_bits + 0x7FFF + (fp32_bits >> 16 & 1)) >> 16).astype(numpy.uint16)
    return bits


Chunk: TypeAlias = Span | Constant | Projection


@dataclass(frozen=True)
class Piece:
    """One tensor of the exported checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def zeros(self) -> int:
        """Number of bytes that are zeros in place of dropped experts or channels."""
        return sum(chunk.zeros for chunk in self.chunks)
