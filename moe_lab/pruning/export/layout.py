"""The tensors of an exported checkpoint, as byte ranges and matrices of the original files. No
torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry
from moe_lab.models.families import DISK_SHARED, NOVICE_TENSOR, ExpertTensor, Family
from moe_lab.pruning import FORMS, Form, LayerForm
from moe_lab.pruning.export.chunks import (
    UNSIGNED,
    Chunk,
    Constant,
    ExportedTensor,
    Projection,
    Span,
    bits_in,
    copied_tensor,
    numbers_of,
    read_bits,
)
from moe_lab.pruning.layer_plan import Constants, StoredExpert
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import make_plan

AFTER_SOFTMAX = "moe_statics."
"""Prefix of biases that are added after the softmax. Such biases cannot bar dropped experts, which
would still take part in the softmax and make the other probabilities smaller."""
BARRING_BIAS = numpy.array(-10000.0)
"""With this bias, no score (0 to 1) or logit of a retained expert is lower."""


@dataclass(eq=False)
class Block:
    """One MoE block of the original checkpoint, and its tensors in the export. In the original,
    each expert has tensors of its own, or a tensor is a stack of all experts."""

    tensors: Mapping[str, tuple[Entry, ExpertTensor]]
    """Name of each tensor of the block's experts -> (where it is on disk, what it holds)."""
    form: LayerForm
    n_experts: int
    """Number of experts before pruning."""
    routing: Sequence[str]
    """Names of the router's tensors."""
    width: int = 0
    """Number of channels of an expert before pruning, for a plan of channels."""

    @property
    def prefix(self) -> str:
        """Prefix of the names of all tensors of the block, ending in a dot."""
        return next(expert_tensor.block for _, expert_tensor in self.tensors.values())

    @cached_property
    def matrices(self) -> dict[tuple[str, int], Entry]:
        """(role, expert) -> projection in the original's files. A role is gate, up or down.
        UserError if channels of a tensor cannot be removed."""
        matrices = {}
        for name, (entry, expert_tensor) in self.tensors.items():
            axes = expert_tensor.axes
            if axes is None or axes.is_bias or entry.dtype not in UNSIGNED:
                raise UserError(
                    f"{name}, of type {entry.dtype}: channels can be removed from gate, up and "
                    f"down projections of types {', '.join(sorted(UNSIGNED))} only: use a "
                    "criterion of whole experts"
                )
            expert = expert_tensor.expert
            experts = range(self.n_experts) if expert is None else (expert,)
            # down is (H, I), gate or up alone is (I, H), gate and up in one tensor are (2 I, H)
            channels = entry.shape[-1 if axes.channels == -1 else -2]
            leading_shape = (self.n_experts,) if expert is None else ()
            if (entry.shape[:-2], channels) != (leading_shape, self.width * len(axes.roles)):
                raise UserError(
                    f"plan is for another model: it is about {self.n_experts} experts of "
                    f"{self.width} channels, and {name} has shape {entry.shape}"
                )
            shape = (entry.shape[-2] // len(axes.roles), entry.shape[-1])
            size = entry.size // len(experts) // len(axes.roles)  # bytes of one projection
            for position, (number, role) in enumerate(product(experts, axes.roles)):
                start = entry.start + position * size
                matrices[role, number] = replace(entry, shape=shape, start=start, size=size)
        return matrices

    def exported_routing(self, name: str, entry: Entry) -> ExportedTensor:
        """The tensor of the export that is made from the router's tensor `name` of the original: a
        matrix (E, H), or a vector (E,) or (1, E)."""
        is_vector = prod(entry.shape) == max(entry.shape, default=0)
        shape = self._shape(name, entry, len(entry.shape) - 1 if is_vector else 0)
        size = entry.size // self.n_experts  # bytes of one expert
        chunks: list[Chunk] = []
        for expert, stored in zip(self.form.experts, self.form.stored, strict=True):
            if is_vector and not stored.members:
                chunks.append(Constant(bits_in(entry.dtype, BARRING_BIAS).tobytes(), size))
            else:
                chunks.append(Span(entry.shard, entry.start + expert * size, size))
        return ExportedTensor(name, entry.dtype, tuple(shape), tuple(chunks))

    def exported_tensor(self, name: str) -> ExportedTensor | None:
        """The tensor of the export that is made from the experts' tensor `name` of the original.
        None if the export has no such tensor."""
        entry, expert_tensor = self.tensors[name]
        axes = expert_tensor.axes
        expert = expert_tensor.expert  # None: the tensor is a stack
        stored = dict(zip(self.form.experts, self.form.stored, strict=True))
        # the experts are packed, or the expert of this tensor is stored as a constant
        if self.form.widths is not None or expert in self.form.novices:
            return None
        shape = list(entry.shape)
        if expert is None:
            shape = self._shape(name, entry, 0)
        elif expert in stored:  # stored experts are numbered 0, 1, 2, ... in the export
            old = f"{self.prefix}experts.{expert}."
            new = f"{self.prefix}experts.{self.form.experts.index(expert)}."
            name = name.replace(old, new, 1)
            stored = {expert: stored[expert]}
        else:
            return None
        if self.form.width is not None and axes is not None and axes.channels is not None:
            # a tensor of two roles, gate and up, has the channels of both roles on this axis
            shape[axes.channels] = self.form.width * len(axes.roles)
        chunks = tuple(self._chunks(entry, expert_tensor, stored))
        return ExportedTensor(name, entry.dtype, tuple(shape), chunks)

    def _shape(self, name: str, entry: Entry, axis: int) -> list[int]:
        """The shape of the tensor `name` in the export, with the stored experts along `axis`.
        UserError unless this is the axis of experts in the original."""
        shape = list(entry.shape)
        if shape[axis : axis + 1] != [self.n_experts]:
            raise UserError(
                f"plan is for another model: it is about layers of {self.n_experts} experts, and "
                f"{name} has shape {entry.shape}"
            )
        shape[axis] = len(self.form.experts)
        return shape

    def _chunks(
        self, entry: Entry, expert_tensor: ExpertTensor, stored: Mapping[int, StoredExpert]
    ) -> Iterator[Chunk]:
        """The chunks of an exported tensor of experts. `stored`: id -> what is stored of it."""
        is_stack = expert_tensor.expert is None
        size = entry.size // self.n_experts if is_stack else entry.size  # bytes of one expert
        for expert, stored_expert in stored.items():
            if not stored_expert.members:
                yield Constant(b"\0", size)
            elif stored_expert.copied is not None:
                start = entry.start + expert * size if is_stack else entry.start
                yield Span(entry.shard, start, size)
            else:
                assert expert_tensor.axes is not None  # other tensors are refused by `matrices`
                for role in expert_tensor.axes.roles:
                    yield self._projection(stored_expert, role, entry.dtype)

    def novices(self) -> Iterator[ExportedTensor]:
        """The constant (H,) of each expert that is stored as a constant alone, as vLLM names it."""
        for expert, output in self.form.novices.items():
            yield _constants(f"{self.prefix}experts.{expert}{NOVICE_TENSOR}", output)

    def packed(self) -> Iterator[ExportedTensor]:
        """The packed tensors of the layer, if its experts are packed. They hold one expert after
        the other, with channels as rows; expert e has I_e channels. The shape of `gate_up_packed`
        is (sum of 2 I_e, H), that of `down_packed` is (sum of I_e, H). If the layer's N null
        experts put out constants, there is also a tensor `constants` (N, H)."""
        if self.form.widths is None:
            return
        experts = self.form.stored
        total = sum(self.form.widths)
        dtype = _common_type({matrix.dtype for matrix in self.matrices.values()})
        gate_up = tuple(
            self._projection(expert, role, dtype) for expert in experts for role in ("gate", "up")
        )
        down = tuple(
            self._projection(expert, "down", dtype, packs_channels_as_rows=True)
            for expert in experts
        )
        hidden = down[0].matrix.shape[0]  # H: in the original's files, down is (H, I)
        yield ExportedTensor(
            f"{self.prefix}experts.gate_up_packed", dtype, (2 * total, hidden), gate_up
        )
        yield ExportedTensor(f"{self.prefix}experts.down_packed", dtype, (total, hidden), down)
        if self.form.constants is not None:
            yield _constants(f"{self.prefix}experts.constants", self.form.constants)

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
        """Raise UserError unless the block has all experts, and its router can keep tokens from
        dropped experts. `folder`: the original checkpoint, for messages."""
        expert_tensors = [expert_tensor for _, expert_tensor in self.tensors.values()]
        number = expert_tensors[0].layer
        if self.form.has_zeros and not can_bar(self.routing):
            raise UserError(
                f"export=masked: the plan drops experts of layer {number}, but its router has no "
                "bias per expert that could keep tokens from dropped experts without changing the "
                "gates of others, which a checkpoint of the original shape needs: expected "
                "export=natural"
            )
        # ids of the experts with tensors of their own: must be all, or none if there are stacks
        experts = {expert_tensor.expert for expert_tensor in expert_tensors} - {None}
        if self.form.novices and not experts:
            raise UserError(
                f"export=masked: {self.prefix}experts are stored in one tensor, and vLLM reads "
                "constants only beside experts with tensors of their own: expected export=natural"
            )
        if experts and experts != set(range(self.n_experts)):
            raise UserError(
                f"plan is for another model: its layer {number} has {self.n_experts} experts, "
                f"{folder} has {len(experts)}"
            )


def predicting_blocks(
    checkpoint: Checkpoint, family: Family, form: Form, facts: Mapping[str, Any]
) -> list[Block]:
    """The pruned MoE blocks of layers that predict further tokens. No pass of the model runs these
    layers, so the experts with the largest sums of absolute router weights are retained. `facts`:
    those of a layer before pruning. [] if these layers stay whole: if the export retains all
    experts, or layers differ in their number.

    UserError for a router whose weights are quantised."""
    count, *other_counts = {len(layer.experts) for layer in form.values()}
    if other_counts or count == facts["n_experts"]:
        return []
    predicting = family.prediction_experts(checkpoint.tensors)
    n_dropped = facts["n_experts"] - count
    blocks = []
    for prefix in sorted({tensor.block for tensor in predicting.values()}):
        routing = {
            name: entry
            for name, entry in checkpoint.tensors.items()
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith(DISK_SHARED)
        }
        experts = {
            name: (routing.pop(name), predicting[name]) for name in predicting if name in routing
        }
        weight = max(routing.values(), key=lambda entry: entry.size)
        if weight.dtype not in UNSIGNED:
            raise UserError(
                f"export: {prefix} predicts further tokens, and its router is stored as "
                f"{weight.dtype}: expected export=masked, or allocation=global"
            )
        norms = abs(numbers_of(read_bits(weight, checkpoint.folder), weight.dtype)).sum(1)
        plan = make_plan({0: norms}, {0: n_dropped}, {0: facts}, provenance={})
        layer = FORMS["natural"](plan.layers[0])
        blocks.append(Block(experts, layer, facts["n_experts"], list(routing)))
    return blocks


def exported_tensors(
    checkpoint: Checkpoint,
    family: Family,
    routing: Mapping[str, int],
    plan: Plan,
    form: Form,
    predicting: Iterable[Block],
) -> dict[str, list[ExportedTensor]]:
    """Name of a file of the export -> its tensors, in the order in which they are written: first
    packed tensors of experts, then all other tensors in the order of the original's bytes.
    `routing`: as from `stored_routing`. `predicting`: as from `predicting_blocks`.

    UserError when the checkpoint does not fit the plan, or `form` cannot be written."""
    blocks = [*_blocks(checkpoint, family, routing, plan, form), *predicting]
    by_shard: dict[str, list[ExportedTensor]] = {shard: [] for shard in checkpoint.shards}
    block_of = {name: block for block in blocks for name in (*block.tensors, *block.routing)}
    for name, entry in checkpoint.tensors.items():
        tensor: ExportedTensor | None
        if name not in block_of:
            tensor = copied_tensor(name, entry)
        elif name in block_of[name].tensors:
            tensor = block_of[name].exported_tensor(name)
        else:
            tensor = block_of[name].exported_routing(name, entry)
        if tensor is not None:
            by_shard[entry.shard].append(tensor)
    for block in blocks:
        block.check_complete(checkpoint.folder)
        shard = [entry.shard for entry, _ in block.tensors.values()][-1]
        # at the start of the file: after tensors of some sizes, they would not be aligned
        by_shard[shard][:0] = [*block.packed(), *block.novices()]
    return by_shard


def _blocks(
    checkpoint: Checkpoint, family: Family, routing: Mapping[str, int], plan: Plan, form: Form
) -> Iterator[Block]:
    """The MoE block of each layer. UserError for a layer without experts in the checkpoint."""
    tensors: dict[int, dict[str, tuple[Entry, ExpertTensor]]] = {}
    for name, expert_tensor in family.expert_tensors(checkpoint.tensors).items():
        tensors.setdefault(expert_tensor.layer, {})[name] = checkpoint.tensors[name], expert_tensor
    for number, layer in plan.layers.items():
        if number not in tensors:
            raise UserError(f"{checkpoint.folder} has no experts of layer {number} that are known")
        names = [name for name, routed_layer in routing.items() if routed_layer == number]
        yield Block(tensors[number], form[number], layer.n_experts, names, layer.width or 0)


def _common_type(types: set[str]) -> str:
    """The narrowest type that holds all numbers of `types` exactly."""
    if len(types) == 1:
        return next(iter(types))
    return "F64" if "F64" in types else "F32"


def can_bar(names: Iterable[str]) -> bool:
    """Whether the router has a bias per expert that can be set so low that the router never chooses
    a dropped expert. `names`: names of all tensors of a router."""
    return any(name.endswith("bias") and AFTER_SOFTMAX not in name for name in names)


def _constants(name: str, values: Constants) -> ExportedTensor:
    """A tensor of constant outputs, in fp32."""
    content = Constant(values.astype("<f4").tobytes(), values.nbytes)
    return ExportedTensor(name, "F32", values.shape, (content,))
