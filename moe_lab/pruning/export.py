"""Write a pruned checkpoint from the files of the original one. No torch where all layers keep one shape.

Dropping whole experts only ever removes entries along the axis of the experts, and those lie next to each other in a
file: an expert's own tensors are copied or left out; of tensors that hold all experts the kept entries are copied.
Where experts lose channels, their tensors are read, cut and written one at a time.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import BITS, INDEX, Checkpoint, open_checkpoint, read_json
from moe_lab.models.files import fingerprint
from moe_lab.pruning.card import Cost, model_card
from moe_lab.pruning.export_config import Description, check_routing, describe_export, text_part
from moe_lab.pruning.export_form import make_form
from moe_lab.pruning.export_parts import Constant, Part, Piece, Span
from moe_lab.pruning.layout import expert_type, pieces
from moe_lab.pruning.plan import Plan

ALIGNMENT = 64
"""Bytes. Matrix products of mapped files can differ in the last bit if weights begin in the middle of a cache line."""
BUFFER = 8 << 20
"""Bytes in memory while copying, where the kernel cannot copy by itself."""
NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
CARD = "README.md"
NOT_COPIED = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
"""Suffixes of weight files; those of the pruned model are written instead."""


def export(source: str | os.PathLike[str], plan: Plan, out: str | os.PathLike[str], *, shape: str = "natural") -> Path:
    """Write the checkpoint in folder `source`, pruned by `plan`, into the new folder `out`; returns it.

    `shape` is one of `SHAPES`. natural writes what the plan keeps and nothing else: a stock checkpoint where all layers
    have one shape, per-layer configuration and a code file where they differ, packed experts under a model type of
    their own where widths differ inside a layer. It equals `prune` bit for bit. masked has the shape of the original,
    with zeros for what is dropped; padded makes each layer as wide as its widest expert, padded_stock all layers as
    wide as the widest of all, with zeros.

    The result has the shards and the config.json of the original (edited where it must be), its tokenizer and other
    files, plan.json and a model card with the plan's provenance, and what the shape costs. `out` appears at the end,
    whole. Whole experts are copied as byte ranges; where channels go, one tensor at a time is in memory. UserError when
    the plan does not fit, when the shape cannot express it, or when the checkpoint is damaged, has an unknown tensor in
    a MoE block, or the disk is too full.
    """
    folder, target = Path(source), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"export: {target} exists already: expected a folder that does not exist or is empty")
    config = read_json(folder / "config.json")
    check_routing(config, plan)
    checkpoint = open_checkpoint(folder)
    if plan.provenance.get("model_sha256"):
        plan.check_origin(fingerprint(folder), folder)
    form = make_form(plan, shape, max(1, BITS[expert_type(checkpoint)] // 8))
    description = describe_export(config, plan, form, shape)
    content = pieces(checkpoint, plan, form, int(text_part(config).get("num_hidden_layers", 1 << 30)))
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_room(folder, target.parent, content)
    partial = target.with_name(f".{target.name}.{uuid4().hex[:8]}")
    partial.mkdir()
    try:
        _write_weights(checkpoint, content, partial)
        _write_others(folder, description, plan, _cost(shape, description.kind, checkpoint, content), partial)
        partial.replace(target)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError(f"export: no room left on the disk of {target.parent}, nothing was written") from None
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _cost(shape: str, kind: str, checkpoint: Checkpoint, content: Mapping[str, Sequence[Piece]]) -> Cost:
    written = [piece for tensors in content.values() for piece in tensors]
    return Cost(
        shape=shape,
        kind=kind,
        original=sum(entry.size for entry in checkpoint.tensors.values()),
        written=sum(piece.size for piece in written),
        zeros=sum(piece.zeros for piece in written),
    )


def _write_weights(checkpoint: Checkpoint, content: Mapping[str, Sequence[Piece]], folder: Path) -> None:
    index: dict[str, str] = {}
    for shard, tensors in content.items():
        if tensors:
            with (folder / shard).open("wb") as target:
                target.write(_header(tensors, checkpoint.metadata[shard]))
                for part in _merged(tensors):
                    _write(part, checkpoint.folder, target)
            index.update({piece.name: shard for piece in tensors})
    if (checkpoint.folder / INDEX).exists():
        total = sum(piece.size for tensors in content.values() for piece in tensors)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})


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


def _merged(tensors: Sequence[Piece]) -> Iterator[Part]:
    """All parts of a file in order, neighbouring byte ranges as one."""
    last: Span | None = None
    for part in (part for piece in tensors for part in piece.parts):
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


def _write(part: Part, folder: Path, target: BinaryIO) -> None:
    """Append one part to `target`."""
    if isinstance(part, Span):
        with (folder / part.shard).open("rb") as source:
            _copy(source, target, part.start, part.size)
    elif isinstance(part, Constant):
        target.write(part.read())
    else:
        target.write(part.read(folder))


def _copy(source: BinaryIO, target: BinaryIO, start: int, size: int) -> None:
    """Append `size` bytes from `start` to `target`: inside the kernel where it can, through a buffer elsewhere."""
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


def _write_others(folder: Path, description: Description, plan: Plan, cost: Cost, target: Path) -> None:
    """config.json, plan.json, the card, code, and whatever else lies beside the weights, such as the tokenizer."""
    for file in sorted(_others(folder)):
        shutil.copyfile(file, target / file.name)
    _write_json(target / "config.json", description.config)
    for code, text in description.code.items():
        (target / code).write_text(text, encoding="utf-8")
    plan.save(target / "plan.json")
    card = folder / CARD
    original = card.read_text(encoding="utf-8") if card.is_file() else None
    name = str(plan.provenance.get("model", folder.resolve().name))
    (target / CARD).write_text(model_card(plan, name, original, cost), encoding="utf-8")


def _others(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.iterdir()
        if file.is_file()
        and file.suffix not in NOT_COPIED
        and not file.name.startswith(".")
        and not file.name.endswith(".index.json")
        and file.name not in ("config.json", "plan.json", CARD)
    ]


def _check_room(folder: Path, parent: Path, content: Mapping[str, Sequence[Piece]]) -> None:
    needed = sum(piece.size for tensors in content.values() for piece in tensors)
    needed += sum(file.stat().st_size for file in _others(folder))
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(f"export: {needed / 1e9:.2f} GB are needed in {parent}, {free / 1e9:.2f} GB are free")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
