"""What the bytes of an exported tensor are made of: bytes of the original, constants, chosen channels. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from moe_lab.errors import UserError

UNSIGNED: dict[str, Any] = {"F64": numpy.uint64, "F32": numpy.uint32, "F16": numpy.uint16, "BF16": numpy.uint16}
"""Types whose numbers can be moved one by one -> an integer of their size. Others share scales between numbers."""


@dataclass(frozen=True)
class Span:
    """`size` bytes of the file `shard` from byte `start`, as they are."""

    shard: str
    start: int
    size: int
    zeros = 0


@dataclass(frozen=True)
class Constant:
    """One number, `pattern`, over and over, `size` bytes in all."""

    pattern: bytes
    size: int

    @property
    def zeros(self) -> int:
        """Bytes that only fill the shape."""
        return 0 if any(self.pattern) else self.size

    def read(self) -> bytes:
        """The bytes."""
        return self.pattern * (self.size // len(self.pattern))


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix inside a file."""

    shard: str
    start: int
    rows: int
    columns: int
    dtype: str


@dataclass(frozen=True)
class Cut:
    """The channels `kept` (I,) of a matrix whose channels are its rows or, with `down`, its columns.

    The result has `width` channels, the rest of them zero: the kept ones come first, or, with `in_place`, stay where
    they were. With `transposed` the channels of a down projection become rows.
    """

    matrix: Matrix
    kept: NDArray[numpy.bool_]
    width: int
    down: bool
    in_place: bool = False
    transposed: bool = False

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return self.width * self._bytes_of_channel

    @property
    def zeros(self) -> int:
        """Bytes that only fill the shape."""
        return (self.width - int(self.kept.sum())) * self._bytes_of_channel

    @property
    def _bytes_of_channel(self) -> int:
        other = self.matrix.rows if self.down else self.matrix.columns
        return other * int(numpy.dtype(UNSIGNED[self.matrix.dtype]).itemsize)

    def read(self, folder: Path) -> bytes:
        """The bytes of the result. The matrix is read whole and in one go, which is faster than row by row."""
        matrix = self.matrix
        path, count = folder / matrix.shard, matrix.rows * matrix.columns
        numbers = numpy.fromfile(path, UNSIGNED[matrix.dtype], count, offset=matrix.start)
        if numbers.size < count:
            raise UserError(f"{path} became shorter while it was copied: {count - numbers.size} numbers are missing")
        source = numbers.reshape(matrix.rows, matrix.columns)
        channels = numpy.flatnonzero(self.kept)
        places: Any = channels if self.in_place else slice(len(channels))
        axis = 1 if self.down else 0
        chosen = source.take(channels, axis)
        if len(channels) < self.width:
            filled = numpy.zeros((matrix.rows, self.width) if self.down else (self.width, matrix.columns), source.dtype)
            filled[(slice(None), places) if self.down else places] = chosen
            chosen = filled
        return (chosen.T if self.transposed else chosen).tobytes()


Part: TypeAlias = Span | Constant | Cut


@dataclass(frozen=True)
class Piece:
    """One tensor of the exported checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(part.size for part in self.parts)

    @property
    def zeros(self) -> int:
        """Bytes of it that only fill the shape."""
        return sum(part.zeros for part in self.parts)
