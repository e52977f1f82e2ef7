"""Copy an exported checkpoint with some tensors changed, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from moe_lab.models.checkpoint import (
    INDEX,
    Checkpoint,
    Entry,
    open_checkpoint,
    read_header,
    read_json,
)
from moe_lab.pruning.export.card import add_section
from moe_lab.pruning.export.write import (
    ALIGNMENT,
    copy_others,
    header_bytes,
    new_file,
    new_folder,
    write_index,
    write_json,
)

HEADER_ENTRY = 2048
"""Bytes of a header that are reserved for each tensor that is read; NF4 writes six tensors for
one."""
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Changes:
    """Changes to an exported checkpoint."""

    tensors: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
    """(name, tensor) of the checkpoint -> the tensors that are written in its place, by name."""
    summary: str
    """A sentence for the model card that says what was changed."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are set in config.json."""


def rewrite(folder: Path, changes: Changes, out: Path) -> Path:
    """Write the exported checkpoint in `folder`, with `changes`, to the new folder `out`; returns
    `out`. `out` only appears when it is complete."""
    checkpoint = open_checkpoint(folder)
    with new_folder(out) as work:
        entries: dict[str, Entry] = {}
        for shard in checkpoint.shards:
            _write_shard(checkpoint, shard, changes, work)
            entries |= read_header(work, shard)[1]
        copy_others(folder, work)
        total = sum(entry.size for entry in entries.values())
        write_json(work / "config.json", {**read_json(folder / "config.json"), **changes.config})
        if (folder / INDEX).exists():
            write_index(work, {name: entry.shard for name, entry in entries.items()}, total)
        text = f"{changes.summary} The weights of this folder take {total:,} bytes."
        add_section(work, "Changes after pruning", text)
    return out


def _write_shard(checkpoint: Checkpoint, shard: str, changes: Changes, folder: Path) -> None:
    """Write one shard with `changes` into `folder`. Bytes for the header are reserved at the start
    of the file, because the header is complete only when the last tensor is written. Tensors whose
    size is no multiple of `ALIGNMENT` are written last, so that all other tensors are aligned."""
    names = [name for name, entry in checkpoint.tensors.items() if entry.shard == shard]
    metadata = checkpoint.metadata[shard]
    # HEADER_ENTRY bytes for each tensor, and as many for all else in the header
    reserved = len(json.dumps(metadata)) + HEADER_ENTRY * (len(names) + 1)
    data_start = reserved + -reserved % ALIGNMENT  # rounded up
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    unaligned: dict[str, torch.Tensor] = {}
    with (
        safe_open(checkpoint.folder / shard, framework="pt") as source,
        new_file(folder / shard) as target,
    ):
        target.seek(data_start)
        for name in names:
            for new_name, tensor in changes.tensors(name, source.get_tensor(name)).items():
                if tensor.nbytes % ALIGNMENT:
                    unaligned[new_name] = tensor
                else:
                    header[new_name] = _append(tensor, target, data_start)
        for new_name, tensor in unaligned.items():
            header[new_name] = _append(tensor, target, data_start)
        beginning = header_bytes(header, data_start)
        if len(beginning) > data_start:
            raise ValueError(
                f"the header of {shard} takes {len(beginning)} bytes, {data_start} are reserved"
            )
        target.seek(0)
        target.write(beginning)


def _append(tensor: torch.Tensor, target: BinaryIO, data_start: int) -> dict[str, Any]:
    """Write the bytes of a tensor to `target`. Returns the tensor's entry for the header. The
    offsets in the entry count from byte `data_start` of the file."""
    begin = target.tell() - data_start
    target.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return {
        "dtype": TYPES[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [begin, begin + tensor.nbytes],
    }
