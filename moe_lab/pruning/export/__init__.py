"""Write a pruned checkpoint from the files of the original one. No torch unless all experts get one new width.

Dropping whole experts removes entries along the expert axis, and these are contiguous in a file: tensors of a single
expert are copied or left out, and of tensors that hold all experts the kept entries are copied. Where experts lose
channels, their tensors are read, cut and written one at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from moe_lab.errors import DISK_FULL, Unavailable, UserError
from moe_lab.models.checkpoint import INDEX, Checkpoint, bits_of, open_checkpoint, read_json
from moe_lab.models.config_json import quantization_method
from moe_lab.models.families import EXTRA_PREDICTION, family_of, predicting_experts
from moe_lab.models.files import files_of, fingerprint
from moe_lab.pruning.export.card import Cost, model_card
from moe_lab.pruning.export.config import Description, check_routing, describe_export, text_part
from moe_lab.pruning.export.layout import expert_type, pieces
from moe_lab.pruning.export.parts import Piece
from moe_lab.pruning.export.quantised import check_quantised, named_experts, renumbered_files
from moe_lab.pruning.export.write import UNFINISHED, write_weights
from moe_lab.pruning.form import make_form
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.replace import check_aligned

CARD = "README.md"
ORIGIN = ".origin.json"
"""File in the folder of an unfinished export that identifies what is exported."""
NOT_COPIED = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
"""Suffixes of weight files, which are not copied: those of the pruned model are written instead."""


def export(
    source: str | os.PathLike[str],
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    shape: str = "natural",
    partial: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the checkpoint in folder `source`, pruned by `plan`, into the new folder `out`; returns that folder.

    `shape` is one of `SHAPES`. natural writes what the plan keeps and nothing else: a stock checkpoint where all layers
    have one shape, per-layer configuration and a code file where they differ, packed experts under a model type of
    their own where widths differ inside a layer. It equals `prune` bit for bit. masked has the shape of the original,
    with zeros for what is dropped; padded makes each layer as wide as its widest expert, with zeros.

    The result has the shards and the config.json of the original (edited where necessary), its tokenizer and other
    files, plan.json, and a model card with the plan's provenance and the size of the weights. `out` is complete as soon
    as it exists. Whole experts are copied as byte ranges; where channels are removed, one tensor at a time is in
    memory. An export that was killed resumes from the complete files it left in `partial`, a folder on the disk of
    `out` that nothing else uses; without one it starts again.

    Raises UserError when the plan does not fit or still has to be aligned, when the shape cannot express it, or when
    the checkpoint is damaged or has an unknown tensor in a MoE block, and Unavailable when the disk is too full.
    Nothing is left behind then.
    """
    folder, target = Path(source), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"export: {target} exists already: expected a folder that does not exist or is empty")
    config = read_json(folder / "config.json")
    check_routing(config, plan)
    check_aligned(plan)
    checkpoint = open_checkpoint(folder)
    if plan.provenance.get("model_sha256"):
        plan.check_origin(fingerprint(folder), folder)
    check_quantised(quantization_method(config), shape, channels=bool(plan.channels))
    form = make_form(plan, shape, max(1, bits_of(expert_type(checkpoint)) // 8))
    left_out = predicting_experts(checkpoint.tensors)
    predicts = any(EXTRA_PREDICTION.search(name) and not name.startswith(left_out) for name in checkpoint.tensors)
    description = describe_export(config, plan, form, predicts_several=predicts)
    quantisation = renumbered_files(folder, form.stored)
    family = family_of(text_part(config).get("model_type"))
    content = pieces(checkpoint, family, plan, form, apart=set(named_experts(config)))
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{uuid4().hex[:8]}") if partial is None else Path(partial)
    with unfinished(work, folder, {"plan": plan.digest, "shape": shape}, keep=partial is not None):
        check_room(work, _needed(folder, work, content))
        write_weights(checkpoint, content, work)
        _write_index(checkpoint, content, work)
        cost = _cost(shape, description.kind, checkpoint, content, left_out)
        _write_others(folder, description, plan, cost, work)
        for name, described in quantisation.items():
            write_json(work / name, described)
        (work / ORIGIN).unlink()
        work.replace(target)
    return target


@contextmanager
def unfinished(work: Path, source: Path, what: Mapping[str, str], *, keep: bool) -> Iterator[None]:
    """A context with the folder `work`, which still has the complete files of an earlier export of the same.

    The folder is deleted when anything fails; with `keep`, it stays when the process is told to stop. Raises
    Unavailable when the disk fills up.
    """
    origin = json.dumps({"source": fingerprint(source), **what} if keep else what)
    if not (work / ORIGIN).exists() or (work / ORIGIN).read_text() != origin:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / ORIGIN).write_text(origin)
    for begun in work.glob(f"*{UNFINISHED}"):
        begun.unlink()
    try:
        yield
    except BaseException as error:
        if not (keep and isinstance(error, (KeyboardInterrupt, SystemExit))):
            shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise Unavailable(f"export: no room left on the disk of {work.parent}, nothing was written") from None
        raise


def _cost(
    shape: str,
    kind: str,
    checkpoint: Checkpoint,
    content: Mapping[str, Sequence[Piece]],
    left_out: Sequence[str],
) -> Cost:
    written = [piece for tensors in content.values() for piece in tensors]
    return Cost(
        shape=shape,
        kind=kind,
        original=sum(entry.size for entry in checkpoint.tensors.values()),
        written=sum(piece.size for piece in written),
        zeros=sum(piece.zeros for piece in written),
        left_out=tuple(sorted(prefix.removesuffix(".") for prefix in left_out)),
    )


def _write_index(checkpoint: Checkpoint, content: Mapping[str, Sequence[Piece]], folder: Path) -> None:
    """Write the index of the shards, if the original has one."""
    if (checkpoint.folder / INDEX).exists():
        index, total = {}, 0
        for shard, tensors in content.items():
            for piece in tensors:
                index[piece.name] = shard
                total += piece.size
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})


def _write_others(folder: Path, description: Description, plan: Plan, cost: Cost, target: Path) -> None:
    """Write config.json, plan.json, model card and code; copy other files of the original, such as its tokenizer."""
    copy_files(_others(folder), folder, target)
    write_json(target / "config.json", description.config)
    for code, text in description.code.items():
        (target / code).write_text(text, encoding="utf-8")
    plan.save(target / "plan.json")
    card = folder / CARD
    original = card.read_text(encoding="utf-8") if card.is_file() else None
    (target / CARD).write_text(model_card(plan, _name(folder, plan), original, cost), encoding="utf-8")


def copy_files(files: Iterable[Path], folder: Path, target: Path) -> None:
    """Copy files of `folder` to the same places in `target`."""
    for file in files:
        place = target / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)


def _name(folder: Path, plan: Plan) -> str:
    """The name of the original model for the card.

    It is the name in the plan if the model's fingerprint was checked, else that of the folder, which in the hub's cache
    is models--OWNER--NAME/snapshots/COMMIT.
    """
    where = folder.resolve()
    if plan.provenance.get("model_sha256") and "model" in plan.provenance:
        return str(plan.provenance["model"])
    if where.parent.name == "snapshots":
        return where.parent.parent.name.removeprefix("models--").replace("--", "/")
    return where.name


def _others(folder: Path) -> list[Path]:
    return [
        file
        for file in files_of(folder)
        if file.suffix not in NOT_COPIED
        and not file.name.startswith(".")
        and not file.name.endswith(".index.json")
        and file.name not in ("config.json", "plan.json", "plan.npz", CARD)
    ]


def _needed(folder: Path, work: Path, content: Mapping[str, Sequence[Piece]]) -> int:
    """Bytes of the files that are still to be written."""
    needed = sum(file.stat().st_size for file in _others(folder))
    for shard, tensors in content.items():
        if not (work / shard).exists():
            needed += sum(piece.size for piece in tensors)
    return needed


def check_room(work: Path, needed: int) -> None:
    """Raise Unavailable unless `needed` bytes are free on the disk of `work`."""
    free = shutil.disk_usage(work).free
    if needed > free:
        raise Unavailable(f"export: {needed / 1e9:.2f} GB are needed in {work.parent}, {free / 1e9:.2f} GB are free")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
