"""Tensors of a checkpoint, one after the other, on the device where something is computed with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of plain numbers, as safetensors calls them."""


def read_tensors(checkpoint: Checkpoint, shard: str, names: list[str], device: str) -> Iterator[torch.Tensor]:
    """The tensors `names` of the file `shard`, in that order, on `device`; only one needs to be in memory.

    On the CPU they are mapped. For other devices they are read into pinned memory and copied from there, so that the
    disk reads the next one while the device copies and computes. UserError for a file that cannot be read, and for
    weights that are not plain numbers.
    """
    entries = [(name, checkpoint.tensors[name]) for name in names]
    if quantised := [(name, entry.dtype) for name, entry in entries if entry.dtype not in PLAIN]:
        name, dtype = quantised[0]
        raise UserError(f"{name} is stored as {dtype}, expected plain weights: load and save it dequantised")
    path = checkpoint.folder / shard
    try:
        if torch.device(device).type == "cpu":
            with safe_open(path, framework="pt") as mapped:
                for name, _ in entries:
                    yield mapped.get_tensor(name)
        else:
            staging = Staging(device)
            with path.open("rb", buffering=0) as file:
                for _, entry in entries:
                    yield staging.read(file, entry)
    except (OSError, SafetensorError) as error:
        raise UserError(f"shard {path} cannot be read: {error}") from error


class Staging:
    """Two buffers in main memory, by turns: one is filled from the disk while the other is copied to the device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.pinned = self.device.type == "cuda"
        self.buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self.copied: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0

    def read(self, file: BinaryIO, entry: Entry) -> torch.Tensor:
        """The tensor `entry` of an unbuffered file, on the device. UserError when the file ends before."""
        buffer = self._buffer(entry.size)
        view, filled = buffer.numpy().data, 0
        file.seek(entry.start)
        while filled < entry.size:
            count = file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise UserError(f"{file.name} became shorter while it was read: {entry.size - filled} bytes lack")
            filled += count
        stored = buffer.view(PLAIN[entry.dtype]).view(entry.shape)
        tensor = stored.to(self.device, non_blocking=self.pinned, copy=True)
        if self.pinned:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.copied[self.turn] = event
        return tensor

    def _buffer(self, size: int) -> torch.Tensor:
        """The buffer whose turn it is, of `size` bytes, no longer in use."""
        self.turn = 1 - self.turn
        event = self.copied[self.turn]
        if event is not None:
            event.synchronize()
        if len(self.buffers[self.turn]) < size:
            self.buffers[self.turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        return self.buffers[self.turn][:size]
