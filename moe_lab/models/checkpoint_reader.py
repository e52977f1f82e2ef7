"""Read tensors of a checkpoint ahead of their use, so that the disk works while the processors compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry

BLOCK = 8 << 20
"""Bytes of one read."""

Ranges = Sequence[tuple[Path, int, int]]
"""(file, first byte, how many)."""
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of plain numbers, as safetensors calls them."""


class ReadAhead:
    """Reads ranges of files into the system's cache, in a thread of its own, in the order of the requests.

    Advice to the system (posix_fadvise) would do for a few MB: of each range it follows no more than the disk's
    read-ahead.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._pending: dict[int, Future[None]] = {}

    def start(self, number: int, ranges: Ranges) -> None:
        """Start reading `ranges` under the key `number`; does nothing while that key is being read."""
        if number not in self._pending:
            self._pending[number] = self._thread.submit(_read, _joined(ranges))

    def wait(self, number: int) -> None:
        """Wait until `number` is read. Errors are ignored: whoever uses the bytes meets them again."""
        wait([self._pending.pop(number)])


def _joined(ranges: Ranges) -> list[tuple[Path, int, int]]:
    """The same bytes in order, ranges that touch as one."""
    joined: list[tuple[Path, int, int]] = []
    for file, start, size in sorted(ranges):
        if joined and joined[-1][0] == file and joined[-1][1] + joined[-1][2] == start:
            joined[-1] = (file, joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((file, start, size))
    return joined


def _read(ranges: Ranges) -> None:
    buffer = memoryview(bytearray(BLOCK))
    for path, start, size in ranges:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while size and (count := file.readinto(buffer[:size])):
                size -= count


def read_tensors(
    checkpoint: Checkpoint, shard: str, names: Sequence[str], device: str = "cpu"
) -> Iterator[torch.Tensor]:
    """The tensors `names` of the file `shard`, in that order, on `device`; each is there until the next is asked for.

    On the CPU they are mapped. UserError for a file that cannot be read, and for weights that are not plain numbers.
    """
    entries = [checkpoint.tensors[name] for name in names]
    for name, entry in zip(names, entries, strict=True):
        if entry.dtype not in PLAIN:
            raise UserError(f"{name} is stored as {entry.dtype}, expected plain weights: load and save it dequantised")
    path = checkpoint.folder / shard
    try:
        if torch.device(device).type == "cpu":
            with safe_open(path, framework="pt") as mapped:
                yield from map(mapped.get_tensor, names)
        else:
            yield from through_buffers(path, entries, torch.device(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"shard {path} cannot be read: {error}") from error


def through_buffers(path: Path, entries: Sequence[Entry], device: torch.device) -> Iterator[torch.Tensor]:
    """The tensors `entries` of a file on `device`; each is there until the next is asked for.

    While one is copied and computed with, a thread reads the next one from the disk, into pinned memory if the device
    is CUDA. Two are in memory at most.
    """
    buffers = (_Buffer(device), _Buffer(device))
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(buffers[0].fill, file, entry) for entry in entries[:1]]
        for number in range(len(entries)):
            ahead.pop().result()
            for entry in entries[number + 1 : number + 2]:  # into the buffer of the one before, which is not needed
                ahead.append(thread.submit(buffers[(number + 1) % 2].fill, file, entry))
            yield buffers[number % 2].tensor()


class _Buffer:
    """Memory that holds one tensor of a file after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.stored = self.memory
        self.copied: torch.cuda.Event | None = None
        """When the device has its copy of what is stored."""

    def fill(self, file: BinaryIO, entry: Entry) -> None:
        """Read the tensor `entry` of an unbuffered file. UserError when the file ends before."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.memory) < entry.size:
            self.memory = torch.empty(entry.size, dtype=torch.uint8, pin_memory=self.pinned)
        view, filled = self.memory[: entry.size].numpy().data, 0
        file.seek(entry.start)
        while filled < entry.size:
            count = file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise UserError(f"{file.name} became shorter while it was read: {entry.size - filled} bytes lack")
            filled += count
        self.stored = self.memory[: entry.size].view(PLAIN[entry.dtype]).view(entry.shape)

    def tensor(self) -> torch.Tensor:
        """The tensor read last, on the device; on the CPU it is the buffer itself."""
        copy = self.stored.to(self.device, non_blocking=self.pinned)
        if self.pinned:
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(self.device))
        return copy
