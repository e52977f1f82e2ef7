"""Write the files of an exported checkpoint into a folder that appears when all of them are
complete. No torch."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import INDEX, Checkpoint, open_checkpoint
from moe_lab.models.files import BESIDE, DESCRIBING, TOKENIZER, paths_in
from moe_lab.pruning.export.card import add_section
from moe_lab.pruning.export.chunks import ExportedTensor, copied_tensor

KEEP_LIST = "reap_selection.json"
"""File with the ids of the retained experts by layer, called as in models pruned by REAP."""
PLAN_FILES = ("plan.json", "plan.npz", KEEP_LIST)
"""Files of an export that have its plan."""
ALIGNMENT = 64
"""Bytes. Matrix products of mapped files can differ in the last bit if weights start in the middle
of a cache line."""


def check_target(target: Path) -> None:
    """Raise UserError unless `target`, the folder of an export, is empty, or can be made."""
    if target.exists() and (not target.is_dir() or set(target.iterdir()) - {_work_folder(target)}):
        raise UserError(
            f"export: {target} exists already: expected a folder that does not exist or is empty"
        )
    # not Path.exists, which raises an error below a folder that may not be entered
    nearest = next(filter(os.path.exists, (target, *target.parents)))
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"export: {target} cannot be made, as {nearest} is no folder in which you may write: "
            "expected a path below such a folder"
        )


def _work_folder(target: Path) -> Path:
    """The folder in which the files of `target` are written."""
    # an empty folder may be a mounted disk, which cannot be replaced by a folder of another disk
    return (target if target.is_dir() else target.parent) / f".{target.name}.unfinished"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A context with a new empty folder. At the end, the folder is renamed to `target`, or, if
    `target` is an empty folder, its files are moved there, config.json last."""
    is_empty_folder = target.is_dir()
    work = _work_folder(target)
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    work.mkdir(parents=True)
    try:
        yield work
        if is_empty_folder:
            for file in sorted(work.iterdir(), key=lambda file: file.name == "config.json"):
                file.replace(target / file.name)
            work.rmdir()
        else:
            work.replace(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_weights(
    checkpoint: Checkpoint, content: Mapping[str, Sequence[ExportedTensor]], folder: Path
) -> int:
    """Write safetensors files into `folder`, with an index if `checkpoint`, the original, has one.
    Returns the bytes of all tensors. `content`: name of a file -> its tensors, in order."""
    for shard, tensors in content.items():
        if not tensors:
            continue
        path = folder / shard
        path.parent.mkdir(parents=True, exist_ok=True)  # may be in a folder below the index
        with path.open("wb") as target:
            target.write(_header(tensors, checkpoint.metadata[shard]))
            for tensor in tensors:
                for chunk in tensor.chunks:
                    # each block of bytes is written before the next one is read or computed
                    target.writelines(chunk.read(checkpoint.folder))
            target.flush()
            os.fsync(target.fileno())
    total = sum(tensor.size for tensors in content.values() for tensor in tensors)
    if (checkpoint.folder / INDEX).exists():
        shard_of = {tensor.name: shard for shard in content for tensor in content[shard]}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
        write_json(folder / INDEX, index)
    return total


def rewrite(folder: Path, changed: Mapping[str, ExportedTensor], changes: str, out: Path) -> Path:
    """Write the exported checkpoint in `folder` to the new folder `out`, which only appears when
    it is complete; returns `out`. `changed`: name -> tensor to write in its place. `changes`: a
    sentence for the model card that says what was changed."""
    checkpoint = open_checkpoint(folder)
    content: dict[str, list[ExportedTensor]] = {shard: [] for shard in checkpoint.shards}
    for name, entry in checkpoint.tensors.items():
        content[entry.shard].append(changed.get(name, copied_tensor(name, entry)))
    with new_folder(out) as work:
        total = write_weights(checkpoint, content, work)
        copy_others(folder, work)
        text = f"{changes} The weights of this folder take {total:,} bytes."
        add_section(work, "Changes after pruning", text)
    return out


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_others(folder: Path, target: Path) -> None:
    """Copy the files of the checkpoint in `folder` other than weights, such as its tokenizer and,
    if it is an export, its plan, to the same relative paths in `target`."""
    _copy_files(folder, target, (*DESCRIBING, *BESIDE, *PLAN_FILES))


def replace_tokenizer(target: Path, folder: Path) -> None:
    """Put the tokenizer in `folder`, with its chat templates, in place of that in `target`."""
    for name in paths_in(target, TOKENIZER):
        (target / name).unlink()
    _copy_files(folder, target, TOKENIZER)


def _copy_files(folder: Path, target: Path, patterns: Iterable[str]) -> None:
    for name in paths_in(folder, patterns):
        destination = target / name
        destination.parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, destination)


def _header(tensors: Sequence[ExportedTensor], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file: 8 bytes with the length of the header, then the header:
    JSON, and spaces, so that the data after it are aligned."""
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for tensor in tensors:
        end = position + tensor.size
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    size = 8 + len(text)
    size += -size % ALIGNMENT
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)
