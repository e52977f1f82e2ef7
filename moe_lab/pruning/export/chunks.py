"""Chunks that exported tensors consist of: byte ranges of the original, constants, changed
projections. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from moe_lab.models.checkpoint import Entry
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
BUFFER = 8 << 20
"""Bytes of the original that are in memory while they are copied."""


@dataclass(frozen=True)
class Span:
    """`size` bytes of the file `shard` from byte `start`, copied unchanged."""

    shard: str
    start: int
    size: int

    def read(self, folder: Path) -> Iterator[bytes]:
        """The bytes, in blocks. `folder`: the folder of the original."""
        with (folder / self.shard).open("rb") as file:
            file.seek(self.start)
            for position in range(0, self.size, BUFFER):
                yield file.read(min(BUFFER, self.size - position))


@dataclass(frozen=True)
class Constant:
    """Numbers that are not in the original: the bytes `pattern`, repeated until there are `size`
    bytes."""

    pattern: bytes
    size: int

    def read(self, folder: Path) -> Iterator[bytes]:
        """The repeated pattern, in one block."""
        yield self.pattern * (self.size // len(self.pattern))


def read_bits(matrix: Entry, folder: Path) -> NDArray[Any]:
    """The numbers of a `matrix` in `folder`, in its shape: the bits of each, as an unsigned integer
    of the same size."""
    bits = numpy.fromfile(
        folder / matrix.shard, UNSIGNED[matrix.dtype], prod(matrix.shape), offset=matrix.start
    )
    return bits.reshape(matrix.shape)


@dataclass(frozen=True)
class Projection:
    """One projection (gate, up or down) of one expert in the export."""

    stored: StoredExpert
    matrices: Mapping[int, Entry]
    """Id of a member -> its projection in the original; all have the same shape and type."""
    dtype: str
    """The type of the projection in the export."""
    channels_are_columns: bool
    """Whether channels are columns in the original, as in a down projection."""
    packs_channels_as_rows: bool
    """Whether channels are rows in the export in any case, as in packed experts."""

    @property
    def matrix(self) -> Entry:
        """The matrix of the first member."""
        return self.matrices[self.stored.members[0].expert]

    @property
    def size(self) -> int:
        """Bytes of the projection in the export."""
        width, hidden = self.matrix.shape
        if self.channels_are_columns:
            width, hidden = hidden, width
        channels = self.stored.members[0].channels  # all members have equally many
        if channels is not None:
            width = len(channels)
        return width * hidden * int(numpy.dtype(UNSIGNED[self.dtype]).itemsize)

    def read(self, folder: Path) -> Iterator[memoryview]:
        """Yields the bytes of the projection in the export, row-major, in one block. `folder`: the
        folder of the original."""
        converts = self.stored.is_sum or self.matrix.dtype != self.dtype

        def read_member(expert: int) -> NDArray[Any]:
            """(I, H): the projection of a member, with channels as rows."""
            matrix = self.matrices[expert]
            values = read_bits(matrix, folder)
            if converts:
                values = numbers_of(values, matrix.dtype)
            return values.T if self.channels_are_columns else values

        if self.size:
            result = self.stored.projection(read_member)
            if converts:
                result = bits_in(self.dtype, result)
            # in `result`, channels are rows
            yield numpy.ascontiguousarray(
                result.T
                if self.channels_are_columns and not self.packs_channels_as_rows
                else result
            ).data


def numbers_of(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The numbers of type `dtype` that have these `bits`, as fp64 for F64, otherwise as fp32."""
    if dtype == "BF16":  # bf16 is the upper half of fp32
        return (bits.astype(numpy.uint32) << 16).view(numpy.float32)
    values = numpy.ascontiguousarray(bits).view(FLOATS[dtype])
    numbers: NDArray[Any] = values.astype(numpy.promote_types(values.dtype, numpy.float32))
    return numbers


def bits_in(dtype: str, values: NDArray[Any]) -> NDArray[Any]:
    """The bits of `values` in the type `dtype`, rounded to nearest, ties to even."""
    if dtype != "BF16":
        return numpy.ascontiguousarray(values, FLOATS[dtype]).view(UNSIGNED[dtype])
    fp32_bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
    # bf16 is the upper half of fp32. Adding 0x7FFF carries 1 into the upper half if the lower half
    # is above 0x8000. If it is exactly 0x8000, a tie, the carry also needs the lowest bit of the
    # upper half, which is added too.
    bits: NDArray[Any] = ((fp32_bits + 0x7FFF + (fp32_bits >> 16 & 1)) >> 16).astype(numpy.uint16)
    return bits


class Chunk(Protocol):
    """A part of the bytes of an exported tensor."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def read(self, folder: Path) -> Iterator[bytes | memoryview]:
        """The bytes, in blocks. `folder`: the folder of the original."""


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of the exported checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(chunk.size for chunk in self.chunks)


def copied_tensor(name: str, entry: Entry) -> ExportedTensor:
    """The tensor `name` as it is in the original, where `entry` says."""
    content = Span(entry.shard, entry.start, entry.size)
    return ExportedTensor(name, entry.dtype, entry.shape, (content,))
