"""Which bytes of a checkpoint a pruned one is made of. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry
from moe_lab.models.families import (
    DISK_FUSED_EXPERTS,
    DISK_ROUTER_WEIGHTS,
    DISK_ROUTING_VECTORS,
    DISK_SHARED,
    EXTRA_PREDICTION_BLOCKS,
)
from moe_lab.pruning.plan import Plan

BLOCK = r"(?P<block>(?P<root>(?:\w+\.)*?layers\.(?P<layer>\d+)\.)(?:\w+\.)*?)"
EXPERT = re.compile(BLOCK + r"experts\.(?P<expert>\d+)\.(?P<rest>.+)")
FUSED = re.compile(BLOCK + "(?:" + "|".join(map(re.escape, DISK_FUSED_EXPERTS)) + ")")


@dataclass(frozen=True)
class Piece:
    """One tensor of the pruned checkpoint, as byte ranges (start, size) of a file of the original one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(size for _, size in self.ranges)


@dataclass(frozen=True)
class Block:
    """A MoE block on disk: `prefix` begins the names of its tensors, `root` those of its whole decoder layer."""

    prefix: str
    root: str
    layer: int


def pieces(checkpoint: Checkpoint, plan: Plan, hidden_layers: int) -> dict[str, list[Piece]]:
    """The tensors of the pruned checkpoint by file, in the order of their bytes.

    Layers for extra predicted tokens (numbered from `hidden_layers` on, or named so) are left out if they have
    experts: no plan is about them. UserError when the blocks on disk are not those of the plan, when experts or a
    router are missing, or when a MoE block holds a tensor that moe_lab does not know.
    """
    blocks, extra = _blocks(checkpoint, hidden_layers)
    _check_layers(checkpoint, blocks, plan)
    found: dict[str, list[Piece]] = {shard: [] for shard in checkpoint.shards}
    seen: Counter[tuple[int, object]] = Counter()
    for name, entry in checkpoint.tensors.items():
        if name.startswith(extra):
            continue
        block = next((blocks[prefix] for prefix in _prefixes(name) if prefix in blocks), None)
        piece = _piece(name, entry, block, plan, seen) if block else _whole(name, entry)
        if piece is not None:
            found[entry.shard].append(piece)
    _check_complete(checkpoint, plan, seen)
    return found


def _blocks(checkpoint: Checkpoint, hidden_layers: int) -> tuple[dict[str, Block], tuple[str, ...]]:
    """MoE blocks by prefix, and the beginnings of names that belong to extra prediction layers with experts."""
    blocks: dict[str, Block] = {}
    extra: set[str] = set()
    for name in checkpoint.tensors:
        match = EXPERT.fullmatch(name) or FUSED.fullmatch(name)
        if match is None or match["block"].endswith(DISK_SHARED):
            continue
        if start := next((start for start in EXTRA_PREDICTION_BLOCKS if name.startswith(start)), None):
            extra.add(start)
        elif int(match["layer"]) >= hidden_layers:
            extra.add(match["root"])
        else:
            blocks[match["block"]] = Block(match["block"], match["root"], int(match["layer"]))
    return blocks, tuple(extra)


def _prefixes(name: str) -> list[str]:
    """All beginnings of a dotted name that end in a dot, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:end]) + "." for end in range(len(parts) - 1, 0, -1)]


def _piece(name: str, entry: Entry, block: Block, plan: Plan, seen: Counter[tuple[int, object]]) -> Piece | None:
    """What becomes of one tensor of a MoE block; None for a dropped expert's. Notes what was seen in `seen`."""
    rest = name.removeprefix(block.prefix)
    kept, count = plan.experts[block.layer], plan.n_experts[block.layer]
    if match := EXPERT.fullmatch(name):
        expert = int(match["expert"])
        seen[block.layer, expert] += 1
        if expert not in kept:
            return None
        return _whole(f"{block.prefix}experts.{kept.index(expert)}.{match['rest']}", entry)
    if rest in DISK_FUSED_EXPERTS:
        seen[block.layer, "fused"] += 1
        return _rows(name, entry, 0, kept, count)
    if rest in DISK_ROUTER_WEIGHTS:
        seen[block.layer, "router"] += 1
        return _rows(name, entry, 0, kept, count)
    if rest in DISK_ROUTING_VECTORS:
        return _rows(name, entry, len(entry.shape) - 1, kept, count)
    if rest.startswith(DISK_SHARED):
        return _whole(name, entry)
    raise UserError(f"{name} {entry.shape} belongs to a MoE block, but moe_lab does not know how to prune it")


def _whole(name: str, entry: Entry) -> Piece:
    return Piece(name, entry.dtype, entry.shape, ((entry.start, entry.size),))


def _rows(name: str, entry: Entry, axis: int, kept: tuple[int, ...], count: int) -> Piece:
    """The kept rows of a tensor whose axes before `axis` have size one, neighbours as one range."""
    outer, size = entry.shape[:axis], entry.shape[axis] if entry.shape else 0
    if size != count or any(side != 1 for side in outer) or entry.size % count:
        raise UserError(f"{name} has shape {entry.shape}: expected an axis of {count} experts")
    step = entry.size // count
    ranges: list[tuple[int, int]] = []
    for expert in kept:
        start = entry.start + expert * step
        if ranges and sum(ranges[-1]) == start:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + step)
        else:
            ranges.append((start, step))
    return Piece(name, entry.dtype, (*outer, len(kept), *entry.shape[axis + 1 :]), tuple(ranges))


def _check_layers(checkpoint: Checkpoint, blocks: Mapping[str, Block], plan: Plan) -> None:
    layers = sorted(block.layer for block in blocks.values())
    if len(set(layers)) != len(layers):
        raise UserError(f"{checkpoint.folder}: a decoder layer has several MoE blocks ({', '.join(sorted(blocks))})")
    if layers != sorted(plan.experts):
        raise UserError(
            f"plan is for another model: it is about layers {sorted(plan.experts)}, and {checkpoint.folder} has "
            f"experts in layers {layers}"
        )


def _check_complete(checkpoint: Checkpoint, plan: Plan, seen: Counter[tuple[int, object]]) -> None:
    for layer, count in plan.n_experts.items():
        if seen[layer, "router"] != 1:
            raise UserError(
                f"{checkpoint.folder}: layer {layer} has {seen[layer, 'router']} router weights, expected 1 "
                f"({', '.join(DISK_ROUTER_WEIGHTS)})"
            )
        numbered = [expert for at, expert in seen if at == layer and isinstance(expert, int)]
        if seen[layer, "fused"] and not numbered:
            continue
        if sorted(numbered) != list(range(count)):
            raise UserError(
                f"plan is for another model: its layer {layer} has {count} experts, {checkpoint.folder} has "
                f"{len(numbered)}"
            )
        if len({seen[layer, expert] for expert in numbered}) > 1:
            raise UserError(f"{checkpoint.folder}: the experts of layer {layer} do not all have the same tensors")
