"""The tensors of an exported checkpoint, and the parts of the original that each is made of. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError, need, user_errors
from moe_lab.models.checkpoint import Checkpoint, Entry, open_checkpoint
from moe_lab.models.config_json import check_plain_weights, check_trained_top_k, quantization
from moe_lab.models.families import (
    DISK_FUSED_EXPERTS,
    DISK_ROUTER_WEIGHTS,
    DISK_ROUTING_VECTORS,
    DISK_SHARED,
    EXTRA_PREDICTION_BLOCKS,
    prediction_layers,
)
from moe_lab.paths import local
from moe_lab.pruning.export.form import Form, LayerForm
from moe_lab.pruning.export.quantised import check_quantised
from moe_lab.pruning.export.tensors import Channels, Constant, Part, Piece, Span
from moe_lab.pruning.plan import Plan

BLOCK = r"(?P<block>(?P<root>(?:\w+\.)*?layers\.(?P<layer>\d+)\.)(?:\w+\.)*?)"
EXPERT = re.compile(BLOCK + r"experts\.(?P<expert>\d+)\.(?P<rest>.+)")
FUSED = re.compile(BLOCK + "(?:" + "|".join(map(re.escape, DISK_FUSED_EXPERTS)) + ")")
AFTER_SOFTMAX = "moe_statics."
"""Prefix of biases that are added after the softmax. They cannot bar dropped experts: these would still take part in
the softmax and make the other probabilities smaller."""
NEVER = {"F64": "000000000088c3c0", "F32": "00401cc6", "F16": "e2f0", "BF16": "1cc6"}
"""-10000 as little-endian bytes of each type: with this bias, no score (0 to 1) or logit of a kept expert is lower."""
NO_BIAS = (
    "no bias per expert that could keep tokens from dropped ones without changing the gates of others, which a "
    "checkpoint of the original shape needs: use export=natural"
)


@dataclass(frozen=True)
class Block:
    """A MoE block on disk: names of its tensors start with `prefix`, those of its decoder layer with `root`."""

    prefix: str
    root: str
    layer: int


def pieces(
    checkpoint: Checkpoint, plan: Plan, form: Form, apart: Set[tuple[int, int]] = frozenset()
) -> dict[str, list[Piece]]:
    """The tensors of the exported checkpoint by file, in the order of the original's bytes, packed experts first.

    Layers that predict several tokens are left out if they have experts, because no plan covers them. `apart`: (layer,
    expert) of experts that may have other tensors than the others of their layer, because they are quantised in another
    way. Raises UserError when the blocks on disk are not those of the plan, when experts or a router are missing, when
    a MoE block holds a tensor that moe_lab does not know, or when the form cannot be written.
    """
    blocks, extra = moe_blocks(checkpoint)
    _check_layers(checkpoint, blocks, plan)
    by_shard: dict[str, list[Piece]] = {shard: [] for shard in checkpoint.shards}
    seen: Counter[tuple[int, object]] = Counter()
    channels = _channels(checkpoint, blocks, form, extra)
    for name, entry in checkpoint.tensors.items():
        if name.startswith(extra):
            continue
        block = next((blocks[prefix] for prefix in _prefixes(name) if prefix in blocks), None)
        if block is None:
            by_shard[entry.shard].append(whole(name, entry))
            continue
        layer = form.layers[block.layer]
        if layer.ragged and _note_experts(name, block, seen):
            continue
        piece = _piece(name, entry, block, plan, layer, channels.get(block.prefix), seen)
        if piece is not None:
            by_shard[entry.shard].append(piece)
    _check_complete(checkpoint, plan, form, seen, apart)
    for of_layer in channels.values():
        if of_layer.layer.ragged:  # at the start of the file, which is aligned whatever the sizes of its other tensors
            by_shard[of_layer.shard][:0] = of_layer.packed()
    return by_shard


def _channels(
    checkpoint: Checkpoint, blocks: Mapping[str, Block], form: Form, extra: tuple[str, ...]
) -> dict[str, Channels]:
    """Prefix of a block whose experts are not written as they are -> the matrices of all its experts."""
    channels: dict[str, Channels] = {}
    for name, entry in checkpoint.tensors.items():
        match = EXPERT.fullmatch(name) or FUSED.fullmatch(name)
        if match is None or match["block"] not in blocks or name.startswith(extra):
            continue
        prefix = match["block"]
        layer = form.layers[blocks[prefix].layer]
        if layer.channels is not None:
            channels.setdefault(prefix, Channels(prefix, layer)).add(name, entry)
    return channels


def expert_type(checkpoint: Checkpoint) -> str:
    """The type of the weights of routed experts. Raises UserError when the checkpoint has none."""
    for name, entry in checkpoint.tensors.items():
        if EXPERT.fullmatch(name) or FUSED.fullmatch(name):
            return entry.dtype
    raise UserError(f"{checkpoint.folder} has no routed experts that moe_lab knows")


def wrong(
    export: ExportConfig, model: ModelConfig, recovery: RecoveryConfig, granularity: str | None, *, verify: bool
) -> Iterator[str]:
    """A sentence for each reason why plans of `granularity` for the model cannot be exported with these settings.

    What needs the model's files is checked only if they are on this machine.
    """
    shape = export.shape
    if recovery.name != "none" and verify:
        yield (
            f"verify=true compares an export with the masked model, which recovery={recovery.name} changes: expected "
            "verify=false with a recovery"
        )
    yield from _wrong_format(export)
    if shape is None:
        return
    yield from user_errors(check_trained_top_k, model, f"export={shape}")
    yield from _wrong_of_quantised(export, model, verify)
    if export.format == "compressed_tensors":
        yield from _wrong_compression(model, recovery, verify)
    if recovery.name != "none" and shape != "natural":
        yield (
            f"export={shape} has a shape other than that of the model that recovery={recovery.name} changes: expected "
            "export=natural with a recovery"
        )
    if shape == "masked" and granularity == "expert":
        yield from user_errors(check_masked, model)


def _wrong_of_quantised(export: ExportConfig, model: ModelConfig, verify: bool) -> Iterator[str]:
    method = quantization(model)
    if method is None:
        return
    yield from user_errors(check_quantised, method, export.shape)
    needing = []
    if verify:
        needing.append("verify=true")
    if export.format != ExportConfig.format:
        needing.append(f"export.format={export.format}")
    for setting in needing:
        yield from user_errors(check_plain_weights, model, setting)


def _wrong_format(export: ExportConfig) -> Iterator[str]:
    """A sentence if the package that stores tensors in the format is missing."""
    if export.format == "compressed_tensors":
        yield from user_errors(need, "compressed-tensors", "compression", f"export.format={export.format}")


def _wrong_compression(model: ModelConfig, recovery: RecoveryConfig, verify: bool) -> Iterator[str]:
    """A sentence for each reason why the model cannot be exported in the format of compressed-tensors."""
    name = "export.format=compressed_tensors"
    if recovery.bits == 4:
        yield f"{name} quantises weights, and recovery={recovery.name} has done so: expected recovery.bits=16"
    if verify:
        yield f"verify=true compares with the masked model, and {name} rounds its weights: expected verify=false"
    folder = local(model.path)
    if (folder / "config.json").is_file():
        yield from user_errors(check_stored_apart, open_checkpoint(folder).tensors, folder)


def check_stored_apart(names: Iterable[str], where: Path) -> None:
    """Raise UserError unless the tensors `names` have each expert's matrices apart, as compressed-tensors needs."""
    if not any(map(EXPERT.fullmatch, names)):
        raise UserError(
            f"export.format=compressed_tensors stores each expert's matrices apart, and {where} has those of a layer "
            "in one tensor: expected export.format=safetensors"
        )


def check_masked(model: ModelConfig) -> None:
    """Raise UserError unless the tensor names show a routing vector that can bar dropped experts.

    A model that is not on this machine is not checked.
    """
    folder = local(model.path)
    if (folder / "config.json").is_file() and not can_bar(open_checkpoint(folder).tensors):
        raise UserError(f"export=masked: routers in {folder} have {NO_BIAS}")


def can_bar(names: Iterable[str]) -> bool:
    """Whether tensors of these names include a routing vector in which a dropped expert can be barred."""
    vectors = tuple(f".{name}" for name in DISK_ROUTING_VECTORS)
    return any(name.endswith(vectors) and AFTER_SOFTMAX not in name for name in names)


def moe_blocks(checkpoint: Checkpoint) -> tuple[dict[str, Block], tuple[str, ...]]:
    """MoE blocks by prefix, and the prefixes of layers that predict several tokens, if any of these has experts."""
    named = {start for start in EXTRA_PREDICTION_BLOCKS for name in checkpoint.tensors if name.startswith(start)}
    numbered = prediction_layers(name for name in checkpoint.tensors if not name.startswith(EXTRA_PREDICTION_BLOCKS))
    predicting = (*named, *numbered)
    blocks: dict[str, Block] = {}
    extra: tuple[str, ...] = ()
    for name in checkpoint.tensors:
        match = EXPERT.fullmatch(name) or FUSED.fullmatch(name)
        if match is None or match["block"].endswith(DISK_SHARED):
            continue
        if name.startswith(predicting):
            extra = predicting
        else:
            blocks[match["block"]] = Block(match["block"], match["root"], int(match["layer"]))
    return blocks, extra


def _prefixes(name: str) -> list[str]:
    """All prefixes of a dotted name that end in a dot, longest first."""
    parts = name.split(".")
    return [".".join(parts[:end]) + "." for end in range(len(parts) - 1, 0, -1)]


def _note_experts(name: str, block: Block, seen: Counter[tuple[int, object]]) -> bool:
    """Whether a tensor of a MoE block holds expert weights; if so, it is counted in `seen`."""
    if match := EXPERT.fullmatch(name):
        seen[block.layer, int(match["expert"])] += 1
    elif name.removeprefix(block.prefix) in DISK_FUSED_EXPERTS:
        seen[block.layer, "fused"] += 1
    else:
        return False
    return True


def _piece(
    name: str,
    entry: Entry,
    block: Block,
    plan: Plan,
    layer: LayerForm,
    channels: Channels | None,
    seen: Counter[tuple[int, object]],
) -> Piece | None:
    """The exported form of a tensor of a MoE block; None for that of a dropped expert. Counts the tensor in `seen`.

    `channels`: the matrices of the layer's experts where these are not written as they are.
    """
    rest = name.removeprefix(block.prefix)
    count = plan.n_experts[block.layer]
    if _note_experts(name, block, seen):
        match = EXPERT.fullmatch(name)
        return _expert(match, entry, layer, channels) if match else _fused(name, entry, layer, channels, count)
    if rest in DISK_ROUTER_WEIGHTS:
        seen[block.layer, "router"] += 1
        return _rows(name, entry, 0, layer.experts, count)
    if rest in DISK_ROUTING_VECTORS:
        seen[block.layer, "vector"] += not rest.removeprefix("gate.").startswith(AFTER_SOFTMAX)
        return _barred(_rows(name, entry, len(entry.shape) - 1, layer.experts, count), entry, layer)
    if rest.startswith(DISK_SHARED):
        return whole(name, entry)
    raise UserError(f"{name} {entry.shape} belongs to a MoE block, but moe_lab does not know how to prune it")


def _expert(match: re.Match[str], entry: Entry, layer: LayerForm, channels: Channels | None) -> Piece | None:
    """The exported form of a tensor of one expert, under its new number; None if the expert is not written."""
    expert, rest = int(match["expert"]), match["rest"]
    if expert not in layer.experts:
        return None
    name = f"{match['block']}experts.{layer.experts.index(expert)}.{rest}"
    if expert in layer.dropped:
        return Piece(name, entry.dtype, entry.shape, (Constant(b"\0", entry.size),))
    return whole(name, entry) if channels is None else channels.cut(name, match[0], entry)


def _fused(name: str, entry: Entry, layer: LayerForm, channels: Channels | None, count: int) -> Piece:
    """The exported form of a tensor that holds all experts of a layer."""
    if channels is not None:
        return channels.cut(name, name, entry)
    piece = _rows(name, entry, 0, layer.experts, count)
    if not layer.dropped:
        return piece
    step = entry.size // count
    parts: list[Part] = []
    for expert in layer.experts:
        if expert in layer.dropped:
            parts.append(Constant(b"\0", step))
        else:
            parts.append(Span(entry.shard, entry.start + expert * step, step))
    return Piece(name, entry.dtype, piece.shape, tuple(parts))


def whole(name: str, entry: Entry) -> Piece:
    """A tensor that is copied unchanged."""
    return Piece(name, entry.dtype, entry.shape, (Span(entry.shard, entry.start, entry.size),))


def _rows(name: str, entry: Entry, axis: int, kept: tuple[int, ...], count: int) -> Piece:
    """The kept rows of a tensor whose axes before `axis` have size one."""
    outer, size = entry.shape[:axis], entry.shape[axis] if entry.shape else 0
    if size != count or any(side != 1 for side in outer) or entry.size % count:
        raise UserError(f"{name} has shape {entry.shape}: expected an axis of {count} experts")
    step = entry.size // count
    spans = tuple(Span(entry.shard, entry.start + expert * step, step) for expert in kept)
    return Piece(name, entry.dtype, (*outer, len(kept), *entry.shape[axis + 1 :]), spans)


def _barred(piece: Piece, entry: Entry, layer: LayerForm) -> Piece:
    """A routing vector in which dropped experts have a bias so low that they are never chosen."""
    if not layer.dropped:
        return piece
    if entry.dtype not in NEVER:
        raise UserError(f"{piece.name} is of type {entry.dtype}: expected one of {', '.join(NEVER)} to mask experts")
    never = bytes.fromhex(NEVER[entry.dtype])
    parts = [
        Constant(never, part.size) if expert in layer.dropped else part
        for expert, part in zip(layer.experts, piece.parts, strict=True)
    ]
    return Piece(piece.name, piece.dtype, piece.shape, tuple(parts))


def _check_layers(checkpoint: Checkpoint, blocks: Mapping[str, Block], plan: Plan) -> None:
    layers = sorted(block.layer for block in blocks.values())
    if len(set(layers)) != len(layers):
        raise UserError(f"{checkpoint.folder}: a decoder layer has several MoE blocks ({', '.join(sorted(blocks))})")
    if layers != sorted(plan.experts):
        raise UserError(
            f"plan is for another model: it is about layers {sorted(plan.experts)}, and {checkpoint.folder} has "
            f"experts in layers {layers}"
        )


def _check_complete(
    checkpoint: Checkpoint, plan: Plan, form: Form, seen: Counter[tuple[int, object]], apart: Set[tuple[int, int]]
) -> None:
    for layer, count in plan.n_experts.items():
        if seen[layer, "router"] != 1:
            raise UserError(
                f"{checkpoint.folder}: layer {layer} has {seen[layer, 'router']} router weights, expected 1 "
                f"({', '.join(DISK_ROUTER_WEIGHTS)})"
            )
        if form.layers[layer].dropped and not seen[layer, "vector"]:
            raise UserError(f"export=masked: the plan drops experts of layer {layer}, but its router has {NO_BIAS}")
        numbered = [expert for at, expert in seen if at == layer and isinstance(expert, int)]
        if seen[layer, "fused"] and not numbered:
            continue
        if sorted(numbered) != list(range(count)):
            raise UserError(
                f"plan is for another model: its layer {layer} has {count} experts, {checkpoint.folder} has "
                f"{len(numbered)}"
            )
        if len({seen[layer, expert] for expert in numbered if (layer, expert) not in apart}) > 1:
            raise UserError(f"{checkpoint.folder}: the experts of layer {layer} do not all have the same tensors")
