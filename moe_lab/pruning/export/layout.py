"""The tensors of an exported checkpoint, as byte ranges and matrices of the original files. No
torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry
from moe_lab.models.families import (
    DISK_ROUTER_WEIGHTS,
    DISK_ROUTING_VECTORS,
    BlockTensor,
    Family,
    prediction_prefixes_with_experts,
)
from moe_lab.pruning import Form, LayerForm
from moe_lab.pruning.export.chunks import (
    UNSIGNED,
    Chunk,
    Constant,
    ExportedTensor,
    Matrix,
    Projection,
    Span,
)
from moe_lab.pruning.layer_plan import StoredExpert
from moe_lab.pruning.plan import Plan

AFTER_SOFTMAX = "moe_statics."
"""Prefix of biases that are added after the softmax. Such biases cannot bar dropped experts, which
would still take part in the softmax and make the other probabilities smaller."""
BARRING_BIAS = {"F64": "000000000088c3c0", "F32": "00401cc6", "F16": "e2f0", "BF16": "1cc6"}
"""-10000 as little-endian bytes of each type: with this bias, no score (0 to 1) or logit of a
retained expert is lower."""
NO_BIAS = (
    "no bias per expert that could keep tokens from dropped experts without changing the gates of "
    "others, which a checkpoint of the original shape needs: use export=natural"
)


class Block:
    """One MoE block of the original checkpoint, and its tensors in the export. In the original,
    each expert has tensors of its own, or a tensor is a stack of all experts."""

    def __init__(
        self, tensors: Mapping[str, tuple[Entry, BlockTensor]], form: LayerForm, n_experts: int
    ) -> None:
        """`tensors`: name of each tensor of the block -> (where it is on disk, what it is in the
        block). `n_experts`: number of experts before pruning."""
        self.tensors = tensors
        self.form = form
        self.n_experts = n_experts
        self.prefix = next(block_tensor.block for _, block_tensor in tensors.values())
        """Prefix of the names of all tensors of the block, ending in a dot."""
        self.expert_tensors = {
            name: (entry, block_tensor)
            for name, (entry, block_tensor) in tensors.items()
            if block_tensor.kind in ("expert", "stack")
        }
        self.matrices: dict[tuple[str, int], Matrix] = {}
        """(role, expert) -> projection in the original's files. A role is gate, up or down."""

    def read_matrices(self, family: Family, width: int | None) -> None:
        """Fill `matrices` with the projections of all experts, each of `width` channels. `width` is
        None for a plan of whole experts."""
        if width is None or not self.form.has_computed_experts:
            return
        if family.channel_obstacle:
            raise UserError(
                f"plan: channels of {self.prefix}experts cannot be removed, because its experts "
                f"{family.channel_obstacle}: use a criterion of whole experts"
            )
        for name, (entry, block_tensor) in self.expert_tensors.items():
            for role, expert, matrix in _matrices(name, entry, block_tensor, self.n_experts, width):
                self.matrices[role, expert] = matrix

    def exported_tensor(self, name: str) -> ExportedTensor | None:
        """The tensor of the export that is made from the tensor `name` of the original. None if the
        export has no such tensor."""
        entry, block_tensor = self.tensors[name]
        experts = self.form.experts
        if block_tensor.kind == "unknown":
            raise UserError(
                f"{name} {entry.shape} belongs to a MoE block, but moe_lab does not know how to "
                "prune it"
            )
        # the first axis of router weights, and the last axis of a vector, is the axis of experts
        if block_tensor.kind == "router":
            return _rows(name, entry, 0, experts, self.n_experts)
        if block_tensor.kind == "vector":
            return _bar_dropped(
                _rows(name, entry, len(entry.shape) - 1, experts, self.n_experts), entry, self.form
            )
        if block_tensor.kind == "shared":
            return unchanged(name, entry)
        # the experts are packed, or the expert of this tensor is not stored
        if self.form.widths is not None or (
            block_tensor.expert is not None and block_tensor.expert not in experts
        ):
            return None
        shape = entry.shape
        if block_tensor.expert is None:  # a stack
            shape = _rows(name, entry, 0, experts, self.n_experts).shape
        else:  # stored experts are numbered 0, 1, 2, ... in the export
            old = f"{self.prefix}experts.{block_tensor.expert}."
            new = f"{self.prefix}experts.{experts.index(block_tensor.expert)}."
            name = name.replace(old, new, 1)
        chunks = tuple(self._chunks(entry, block_tensor))
        return ExportedTensor(name, entry.dtype, self._resized_shape(shape, block_tensor), chunks)

    def _resized_shape(self, shape: tuple[int, ...], block_tensor: BlockTensor) -> tuple[int, ...]:
        """The shape of a tensor of experts in the export: `shape`, with the new number of
        channels."""
        if (
            self.form.width is None
            or block_tensor.axes is None
            or block_tensor.axes.channels is None
        ):
            return shape
        resized = list(shape)
        # a tensor of two roles, gate and up, has the channels of both roles on this axis
        resized[block_tensor.axes.channels] = self.form.width * len(block_tensor.axes.roles)
        return tuple(resized)

    def _chunks(self, entry: Entry, block_tensor: BlockTensor) -> Iterator[Chunk]:
        """The chunks of an exported tensor of experts."""
        is_stack = block_tensor.kind == "stack"
        size = entry.size // self.n_experts if is_stack else entry.size  # bytes of one expert
        for expert, stored in zip(self.form.experts, self.form.stored, strict=True):
            if is_stack or block_tensor.expert == expert:
                if not stored.members:
                    yield Constant(b"\0", size)
                elif stored.copied is not None:
                    start = entry.start + expert * size if is_stack else entry.start
                    yield Span(entry.shard, start, size)
                elif block_tensor.axes is not None:  # `read_matrices` ensures it
                    yield from (
                        self._projection(stored, role, entry.dtype)
                        for role in block_tensor.axes.roles
                    )

    def packed(self) -> Iterator[ExportedTensor]:
        """The packed tensors of the layer. They hold one expert after the other, with channels as
        rows; expert e has I_e channels. The shape of `gate_up_packed` is (sum of 2 I_e, H), that of
        `down_packed` is (sum of I_e, H). If the layer's N null experts put out constants, there is
        also a tensor `constants` (N, H)."""
        experts = self.form.stored
        total = sum(self.form.widths or ())
        dtype = _common_type({matrix.dtype for matrix in self.matrices.values()})
        gate_up = tuple(
            self._projection(expert, role, dtype) for expert in experts for role in ("gate", "up")
        )
        down = tuple(
            self._projection(expert, "down", dtype, packs_channels_as_rows=True)
            for expert in experts
        )
        hidden = down[0].matrix.rows  # H: in the original's files, down is (H, I)
        yield ExportedTensor(
            f"{self.prefix}experts.gate_up_packed", dtype, (2 * total, hidden), gate_up
        )
        yield ExportedTensor(f"{self.prefix}experts.down_packed", dtype, (total, hidden), down)
        if (values := self.form.constants) is not None:
            content = Constant(values.astype("<f4").tobytes(), values.nbytes)
            yield ExportedTensor(f"{self.prefix}experts.constants", "F32", values.shape, (content,))

    def _projection(
        self, stored: StoredExpert, role: str, dtype: str, *, packs_channels_as_rows: bool = False
    ) -> Projection:
        """The projection `role` (gate, up or down) of the expert `stored`.
        `packs_channels_as_rows`: whether channels are rows in the export; False: as in the
        original."""
        matrices = {member.expert: self.matrices[role, member.expert] for member in stored.members}
        return Projection(
            stored,
            matrices,
            dtype,
            channels_are_columns=role == "down",
            packs_channels_as_rows=packs_channels_as_rows,
        )

    def check_complete(self, folder: Path) -> None:
        """Raise UserError unless the block has one router and all experts, each with the same
        tensors. `folder`: the original checkpoint, for messages."""
        block_tensors = [block_tensor for _, block_tensor in self.tensors.values()]
        kinds = Counter(block_tensor.kind for block_tensor in block_tensors)
        number = block_tensors[0].layer
        if kinds["router"] != 1:
            names = ", ".join(DISK_ROUTER_WEIGHTS)
            raise UserError(
                f"{folder}: layer {number} has {kinds['router']} router weights, expected 1 "
                f"({names})"
            )
        if self.form.dropped and not can_bar(self.tensors):
            raise UserError(
                f"export=masked: the plan drops experts of layer {number}, but its router has "
                f"{NO_BIAS}"
            )
        # ids of the experts with tensors of their own: must be all, or none if there are stacks
        experts = {block_tensor.expert for block_tensor in block_tensors} - {None}
        if experts != set(range(self.n_experts)) and (experts or not kinds["stack"]):
            raise UserError(
                f"plan is for another model: its layer {number} has {self.n_experts} experts, "
                f"{folder} has {len(experts)}"
            )
        projections = Counter(
            block_tensor.expert for block_tensor in block_tensors if block_tensor.axes is not None
        )
        if len(set(projections.values())) > 1:
            raise UserError(
                f"{folder}: the experts of layer {number} do not all have the same tensors"
            )


def exported_tensors(
    checkpoint: Checkpoint, family: Family, plan: Plan, form: Form
) -> dict[str, list[ExportedTensor]]:
    """Name of a file of the export -> its tensors, in the order in which they are written: first
    packed tensors of experts, then all other tensors in the order of the original's bytes.

    UserError when the checkpoint does not fit the plan, or `form` cannot be written."""
    block_tensors = family.block_tensors(checkpoint.tensors)
    left_out_prefixes = prediction_prefixes_with_experts(checkpoint.tensors)
    tensors: dict[int, dict[str, tuple[Entry, BlockTensor]]] = {}
    for name, block_tensor in block_tensors.items():
        tensors.setdefault(block_tensor.layer, {})[name] = checkpoint.tensors[name], block_tensor
    if sorted(tensors) != sorted(plan.layers):
        raise UserError(
            f"plan is for another model: it has layers {sorted(plan.layers)}, and "
            f"{checkpoint.folder} has experts in layers {sorted(tensors)}"
        )
    blocks = {}
    for number, layer in plan.layers.items():
        block = blocks[number] = Block(tensors[number], form[number], layer.n_experts)
        block.read_matrices(family, layer.width)
    by_shard: dict[str, list[ExportedTensor]] = {shard: [] for shard in checkpoint.shards}
    for name, entry in checkpoint.tensors.items():
        if name.startswith(left_out_prefixes):
            continue
        tensor: ExportedTensor | None = unchanged(name, entry)
        if name in block_tensors:
            tensor = blocks[block_tensors[name].layer].exported_tensor(name)
        if tensor is not None:
            by_shard[entry.shard].append(tensor)
    for block in blocks.values():
        block.check_complete(checkpoint.folder)
        if block.form.widths is not None:
            shard = [entry.shard for entry, _ in block.expert_tensors.values()][-1]
            # at the start of the file: after tensors of some sizes, they would not be aligned
            by_shard[shard][:0] = block.packed()
    return by_shard


def _matrices(
    name: str, entry: Entry, block_tensor: BlockTensor, n_experts: int, width: int
) -> Iterator[tuple[str, int, Matrix]]:
    """(role, expert, matrix) for each projection in the tensor `name`. A role is gate, up or down.
    `width`: number of channels of each expert."""
    if block_tensor.axes is None or block_tensor.axes.is_bias or entry.dtype not in UNSIGNED:
        raise UserError(
            f"{name}, of type {entry.dtype}: channels can be removed from gate, up and down "
            f"projections of types {', '.join(sorted(UNSIGNED))} only: use a criterion of whole "
            "experts"
        )
    roles = block_tensor.axes.roles
    # down is (H, I), gate or up alone is (I, H), gate and up in one tensor are (2 I, H)
    channel_axis = -1 if block_tensor.axes.channels == -1 else -2
    leading_shape = (n_experts,) if block_tensor.kind == "stack" else ()
    if entry.shape[:-2] != leading_shape or entry.shape[channel_axis] != width * len(roles):
        raise UserError(
            f"plan is for another model: it is about {n_experts} experts of {width} channels, and "
            f"{name} has shape {entry.shape}"
        )
    rows = entry.shape[-2] // len(roles)
    columns = entry.shape[-1]
    experts = range(n_experts) if block_tensor.expert is None else (block_tensor.expert,)
    size = entry.size // len(experts) // len(roles)  # bytes of one projection
    for expert_position, expert in enumerate(experts):
        for role_position, role in enumerate(roles):
            start = entry.start + (expert_position * len(roles) + role_position) * size
            yield role, expert, Matrix(entry.shard, start, rows, columns, entry.dtype)


def _common_type(types: set[str]) -> str:
    """The narrowest type that holds all numbers of `types` exactly."""
    if len(types) == 1:
        return next(iter(types))
    return "F64" if "F64" in types else "F32"


def expert_type(checkpoint: Checkpoint) -> str:
    """The type of the weights of routed experts."""
    # any family will do: the kinds of tensors do not depend on it
    for name, block_tensor in Family().block_tensors(checkpoint.tensors).items():
        if block_tensor.kind in ("expert", "stack"):
            return checkpoint.tensors[name].dtype
    raise UserError(f"{checkpoint.folder} has no routed experts that moe_lab knows")


def can_bar(names: Iterable[str]) -> bool:
    """Whether the router has a bias per expert that can be set so low that the router never chooses
    a dropped expert. `names`: names of all tensors of a MoE block or a checkpoint."""
    vectors = tuple(f".{name}" for name in DISK_ROUTING_VECTORS)
    return any(name.endswith(vectors) and AFTER_SOFTMAX not in name for name in names)


def unchanged(name: str, entry: Entry) -> ExportedTensor:
    """A tensor that is copied unchanged."""
    return ExportedTensor(
        name, entry.dtype, entry.shape, (Span(entry.shard, entry.start, entry.size),)
    )


def _rows(
    name: str, entry: Entry, axis: int, experts: tuple[int, ...], n_experts: int
) -> ExportedTensor:
    """The tensor `name` with only the entries of `experts` along `axis`, in this order."""
    outer = entry.shape[:axis]
    size = entry.shape[axis] if entry.shape else 0
    if size != n_experts or any(side != 1 for side in outer) or entry.size % n_experts:
        raise UserError(
            f"plan is for another model: it is about layers of {n_experts} experts, and {name} has "
            f"shape {entry.shape}"
        )
    step = entry.size // n_experts  # bytes of one expert
    spans = tuple(Span(entry.shard, entry.start + expert * step, step) for expert in experts)
    return ExportedTensor(
        name, entry.dtype, (*outer, len(experts), *entry.shape[axis + 1 :]), spans
    )


def _bar_dropped(vector: ExportedTensor, entry: Entry, layer: LayerForm) -> ExportedTensor:
    """A copy of the routing vector `vector` in which the dropped experts of `layer` have the bias
    BARRING_BIAS. `entry`: the vector in the original."""
    if not layer.dropped:
        return vector
    if entry.dtype not in BARRING_BIAS:
        raise UserError(
            f"{vector.name} is of type {entry.dtype}: expected one of {', '.join(BARRING_BIAS)} to "
            "mask experts"
        )
    bias = bytes.fromhex(BARRING_BIAS[entry.dtype])
    chunks = [
        Constant(bias, chunk.size) if expert in layer.dropped else chunk
        for expert, chunk in zip(layer.experts, vector.chunks, strict=True)
    ]
    return ExportedTensor(vector.name, vector.dtype, vector.shape, tuple(chunks))
