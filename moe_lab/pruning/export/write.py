"""Write the weight files of an exported checkpoint, each to a temporary file that is then renamed. No torch."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint
from moe_lab.pruning.export.parts import Chunk, Piece, Span

ALIGNMENT = 64
"""Bytes. Matrix products of mapped files can differ in the last bit if weights start in the middle of a cache line."""
BUFFER = 8 << 20
"""Bytes in memory while copying, where the kernel cannot copy between files."""
NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
UNFINISHED = ".unfinished"
"""Suffix of a file that is being written."""


def write_weights(checkpoint: Checkpoint, content: Mapping[str, Sequence[Piece]], folder: Path) -> None:
    """Write the tensors of `content` (file -> tensors in order) as safetensors into `folder`.

    Files that exist already under their final names are complete and are kept. Spans are copied by the kernel where it
    can; others are computed one at a time. Raises UserError when a file of `checkpoint` becomes shorter.
    """
    for shard, tensors in content.items():
        if tensors and not (folder / shard).exists():
            unfinished = folder / f"{shard}{UNFINISHED}"
            with unfinished.open("wb") as target:
                target.write(_header(tensors, checkpoint.metadata[shard]))
                for part in _merged(tensors):
                    if isinstance(part, Span):
                        with (checkpoint.folder / part.shard).open("rb") as source:
                            _copy(source, target, part.start, part.size)
                    else:
                        target.writelines(part.read(checkpoint.folder))  # keeps no block while the next is made
                target.flush()
                os.fsync(target.fileno())  # so that a crash after the rename cannot lose data
            unfinished.rename(folder / shard)


def _header(tensors: Sequence[Piece], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for piece in tensors:
        end = position + piece.size
        fields[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _merged(tensors: Sequence[Piece]) -> Iterator[Chunk]:
    """All chunks of a file in order, with adjacent byte ranges merged."""
    last: Span | None = None
    for part in (part for piece in tensors for part in piece.chunks):
        if last and isinstance(part, Span) and (part.shard, part.start) == (last.shard, last.start + last.size):
            last = Span(last.shard, last.start, last.size + part.size)
            continue
        if last:
            yield last
        last = part if isinstance(part, Span) else None
        if last is None:
            yield part
    if last:
        yield last


def _copy(source: BinaryIO, target: BinaryIO, start: int, size: int) -> None:
    """Append `size` bytes from `start` to `target`: by the kernel where it can, else through a buffer."""
    target.flush()
    end = start + size
    while start < end and hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(source.fileno(), target.fileno(), min(end - start, 1 << 30), start)
        except OSError as error:
            if error.errno not in NO_KERNEL_COPY:
                raise
            break
        if copied == 0:
            break
        start += copied
    source.seek(start)
    target.seek(0, os.SEEK_END)
    while start < end:
        part = source.read(min(end - start, BUFFER))
        if not part:
            raise UserError(f"{source.name} became shorter while it was copied: {end - start} bytes are missing")
        target.write(part)
        start += len(part)
    target.flush()
