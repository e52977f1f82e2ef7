"""Write a pruned checkpoint from the files of the original one, by copying byte ranges. No torch, no tensor in memory.

Dropping whole experts only ever removes entries along the axis of the experts, and those lie next to each other in a
file: an expert's own tensors are copied or left out; of tensors that hold all experts the kept entries are copied.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import INDEX, Checkpoint, open_checkpoint, read_json
from moe_lab.models.families import (
    ALSO_COUNTS,
    COUNT_FIELDS,
    EXTRA_PREDICTION_LAYERS,
    TOP_K_FIELDS,
    UNGROUPED_METHODS,
)
from moe_lab.pruning.card import model_card
from moe_lab.pruning.layout import Piece, pieces
from moe_lab.pruning.plan import Plan

BUFFER = 8 << 20
"""Bytes in memory while copying, where the kernel cannot copy by itself."""
NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
CARD = "README.md"
NOT_COPIED = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
"""Suffixes of weight files; those of the pruned model are written instead."""


def export(source: str | os.PathLike[str], plan: Plan, out: str | os.PathLike[str]) -> Path:
    """Write the checkpoint in folder `source`, pruned by `plan`, into the new folder `out`; returns it.

    The result has the layout, the shards and the config.json of the original (only its expert counts are edited), its
    tokenizer and other files, plan.json and a model card with the plan's provenance; stock transformers loads it, and
    it equals `prune` bit for bit. `out` appears at the end, whole. UserError when the plan does not fit, keeps
    different numbers in different layers, or when the checkpoint is damaged, has an unknown tensor in a MoE block, or
    the disk is too full.
    """
    folder, target = Path(source), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"export: {target} exists already: expected a folder that does not exist or is empty")
    config = read_json(folder / "config.json")
    _check_routing(config, plan)
    edited = _edited(config, plan)
    checkpoint = open_checkpoint(folder)
    content = pieces(checkpoint, plan, int(_text(config).get("num_hidden_layers", 1 << 30)))
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_room(folder, target.parent, content)
    partial = target.with_name(f".{target.name}.{uuid4().hex[:8]}")
    partial.mkdir()
    try:
        _write_weights(checkpoint, content, partial)
        _write_others(folder, edited, plan, partial)
        partial.replace(target)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError(f"export: no room left on the disk of {target.parent}, nothing was written") from None
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_weights(checkpoint: Checkpoint, content: Mapping[str, Sequence[Piece]], folder: Path) -> None:
    index: dict[str, str] = {}
    for shard, tensors in content.items():
        if tensors:
            with (checkpoint.folder / shard).open("rb") as source, (folder / shard).open("wb") as target:
                target.write(_header(tensors, checkpoint.metadata[shard]))
                target.flush()
                for start, size in _merged(tensors):
                    _copy(source, target, start, size)
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
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _merged(tensors: Sequence[Piece]) -> list[tuple[int, int]]:
    """All byte ranges of a file in order, neighbours as one."""
    merged: list[tuple[int, int]] = []
    for start, size in (span for piece in tensors for span in piece.ranges):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged


def _copy(source: BinaryIO, target: BinaryIO, start: int, size: int) -> None:
    """Append `size` bytes from `start` to `target`: inside the kernel where it can, through a buffer elsewhere."""
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


def _write_others(folder: Path, config: dict[str, Any], plan: Plan, target: Path) -> None:
    """config.json, plan.json, the card, and whatever else lies beside the weights, such as the tokenizer."""
    for file in sorted(_others(folder)):
        shutil.copyfile(file, target / file.name)
    _write_json(target / "config.json", config)
    plan.save(target / "plan.json")
    card = folder / CARD
    original = card.read_text(encoding="utf-8") if card.is_file() else None
    name = str(plan.provenance.get("model", folder.resolve().name))
    (target / CARD).write_text(model_card(plan, name, original), encoding="utf-8")


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


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json about the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _check_routing(config: dict[str, Any], plan: Plan) -> None:
    """The plan against the router that config.json describes."""
    text = _text(config)
    top_k = max((number for field in TOP_K_FIELDS for number in _numbers(text.get(field, 1))), default=1)
    n_group = text.get("n_group") or 1
    if text.get("topk_method") in UNGROUPED_METHODS:
        n_group = 1
    plan.check(top_k, n_group, text.get("topk_group"))


def _edited(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json with the new expert count in every field that holds the old one, and nothing else changed."""
    kept = plan.uniform_count()
    edited: dict[str, Any] = json.loads(json.dumps(config))
    text = _text(edited)
    fields = [field for field in COUNT_FIELDS if field in text]
    if not fields:
        raise UserError(f"config.json has no expert count: expected one of {', '.join(COUNT_FIELDS)}")
    for field in fields:
        if set(_numbers(text[field])) != set(plan.n_experts.values()):
            counts = " or ".join(map(str, sorted(set(plan.n_experts.values()))))
            raise UserError(
                f"plan is for another model: it is about layers of {counts} experts, config.json says "
                f"{field}={text[field]}"
            )
        text[field] = [kept] * len(text[field]) if isinstance(text[field], list) else kept
    text.update(dict.fromkeys(ALSO_COUNTS.get(text.get("model_type", ""), ()), kept))
    text.update({field: 0 for field in EXTRA_PREDICTION_LAYERS if text.get(field)})
    return edited


def _numbers(value: int | list[int]) -> list[int]:
    """The numbers of a field that may be given once or per layer."""
    return value if isinstance(value, list) else [value]


def _check_room(folder: Path, parent: Path, content: Mapping[str, Sequence[Piece]]) -> None:
    needed = sum(piece.size for tensors in content.values() for piece in tensors)
    needed += sum(file.stat().st_size for file in _others(folder))
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(f"export: {needed / 1e9:.2f} GB are needed in {parent}, {free / 1e9:.2f} GB are free")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
