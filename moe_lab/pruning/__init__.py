"""What is stored of a pruned MoE layer, in memory and in files alike, and of what it is made. No
torch.

A form is one of three shapes:

natural  what the plan keeps and nothing else
masked   the shape of the original; what is dropped is zero and is never chosen
padded   every layer as wide as its widest expert, narrower ones filled with zeros
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy
from numpy.typing import NDArray

from moe_lab.config.pruning import Shape
from moe_lab.errors import UserError, check_known
from moe_lab.pruning.plan import Constants, Plan

KERNEL_BYTES = 16
"""transformers' grouped matrix products need rows of weights whose length is a multiple of this
many bytes."""
SHAPES: tuple[str, ...] = get_args(Shape)
Channels = NDArray[numpy.intp]
"""(W,): for each stored channel, the channel of an expert that it is; -1 for one of zeros."""


class Member(NamedTuple):
    """What one expert gives to a stored one."""

    expert: int
    share: float | None
    """The factor of its weights; None: they are copied, bit by bit."""
    channels: Channels | None
    """Which of its channels are used; None: all, in their order."""


class Part(NamedTuple):
    """Of what all projections of one stored expert are made: a sum, by ascending id. Without
    members: zeros."""

    members: tuple[Member, ...]

    @property
    def whole(self) -> int | None:
        """The expert that is copied without a change; None if there is more to do."""
        if len(self.members) != 1:
            return None
        expert, share, channels = self.members[0]
        return expert if share is None and channels is None else None

    @property
    def zeros(self) -> int:
        """Channels of zeros that only fill the shape."""
        channels = self.members[0].channels if self.members else None
        return 0 if channels is None else int((channels < 0).sum())


def rows(
    part: Part,
    read: Callable[[int], Any],
    wide: Callable[[Any], Any],
    narrow: Callable[[Any, Any], Any],
) -> Any:
    """One projection of a stored expert (W, H), from those of its members: `read(expert)` (I, H),
    channels as rows. They are tensors of torch, or the bits in a file. `wide` makes numbers of them
    that can be added, fp32, or fp64 if they are fp64; `narrow(sum, tensor)` rounds a sum to the
    type of a tensor."""
    total: Any = 0
    for expert, share, channels in part.members:
        values = read(expert)
        if channels is not None:
            taken = values[channels.clip(0)]
            if (channels < 0).any():
                taken[channels < 0] = 0
            values = taken
        total = values if share is None else total + wide(values) * share
    return total if part.members[0].share is None else narrow(total, values)


@dataclass(frozen=True)
class LayerForm:
    """How one MoE layer is stored."""

    experts: tuple[int, ...]
    """Ids of the experts that are stored, in order."""
    parts: tuple[Part, ...]
    """Of what each of them is made."""
    dropped: frozenset[int] = frozenset()
    """Ids among `experts` that are zeros, and which the router never chooses."""
    width: int | None = None
    """Channels of all stored experts; None: as many as before, or packed."""
    widths: tuple[int, ...] | None = None
    """Channels of each of the stored experts where they are packed one after the other, each with
    its own number."""
    owners: tuple[int, ...] | None = None
    """(E',) of packed experts: the position of the one with whose weights each is computed; None:
    of its own."""
    constants: Constants | None = None
    """(N, H) of packed experts: what the N experts of width 0 put out that nothing stands for;
    None: 0."""

    @property
    def changed(self) -> bool:
        """Whether weights of experts are stored that are not copies of whole experts."""
        return any(part.members and part.whole is None for part in self.parts)


Form: TypeAlias = dict[int, LayerForm]
"""How all MoE layers are stored, by number, ascending."""


def make_form(plan: Plan, shape: str, element_size: int) -> Form:
    """How `plan` is stored in the shape `shape`, with weights of `element_size` bytes each. Raises
    UserError for an unknown shape, and for any but natural where tokens are routed to experts that
    are constants or computed with the weights of others."""
    check_known("export", shape, SHAPES)
    if (plan.constants or plan.shares_experts) and shape != "natural":
        raise no_replacements(shape)
    if not plan.channels and shape != "masked":
        return {layer: _of_width(plan, layer, None) for layer in sorted(plan.experts)}
    make = {"natural": _natural, "masked": _masked, "padded": _padded}[shape]
    return {layer: make(plan, layer, element_size) for layer in sorted(plan.experts)}


def no_replacements(shape: str) -> UserError:
    """The error for a shape that cannot say what dropped experts are replaced by."""
    return UserError(
        f"export={shape} has no place for what dropped experts are replaced by (constants, merged "
        "experts): expected "
        "export=natural"
    )


def is_stock(widths: Sequence[int], element_size: int) -> bool:
    """Whether experts of these widths fit a family's own module: all equal, not 0, and with aligned
    rows. A weight takes `element_size` bytes."""
    return len(set(widths)) == 1 and widths[0] > 0 and widths[0] * element_size % KERNEL_BYTES == 0


def _natural(plan: Plan, layer: int, element_size: int) -> LayerForm:
    kept = plan.experts[layer]
    widths = plan.widths(layer)
    if min(widths) == plan.width(layer) or is_stock(widths, element_size):
        return _of_width(plan, layer, widths[0])
    parts = tuple(
        part_of(plan, layer, expert, width) for expert, width in zip(kept, widths, strict=True)
    )
    constants = plan.constants.get(layer)
    owners = plan.computed_as(layer)
    return LayerForm(kept, parts, widths=widths, owners=owners, constants=constants)


def _masked(plan: Plan, layer: int, element_size: int) -> LayerForm:
    everything = range(plan.n_experts[layer])
    kept = plan.experts[layer]
    parts = tuple(_in_place(plan, layer, one) if one in kept else Part(()) for one in everything)
    return LayerForm(tuple(everything), parts, dropped=frozenset(everything) - frozenset(kept))


def _padded(plan: Plan, layer: int, element_size: int) -> LayerForm:
    step = max(1, KERNEL_BYTES // element_size)
    return _of_width(
        plan,
        layer,
        min(plan.channels[layer].shape[1], -(-max(1, *plan.widths(layer)) // step) * step),
    )


def _of_width(plan: Plan, layer: int, width: int | None) -> LayerForm:
    kept = plan.experts[layer]
    parts = tuple(part_of(plan, layer, expert, width) for expert in kept)
    return LayerForm(kept, parts, width=None if width == plan.width(layer) else width)


def part_of(plan: Plan, layer: int, expert: int, width: int | None = None) -> Part:
    """Of what an expert that is stored with `width` channels (None: all) is made: kept channels
    first, then zeros."""
    group: Mapping[int, float] = plan.merged.get(layer, {}).get(expert, {})
    if group:  # owners have all their channels
        orders = dict(zip(plan.merged_away(layer), plan.alignments.get(layer, ()), strict=False))
        return Part(
            tuple(
                Member(
                    member, share, orders[member].astype(numpy.intp) if member in orders else None
                )
                for member, share in sorted(group.items())
            )
        )
    mask = plan.channels.get(layer)
    if mask is None or width is None or (mask[expert].all() and width == mask.shape[1]):
        return Part((Member(expert, None, None),))
    channels = numpy.full(width, -1)
    kept = numpy.flatnonzero(mask[expert])
    channels[: len(kept)] = kept
    return Part((Member(expert, None, channels),))


def _in_place(plan: Plan, layer: int, expert: int) -> Part:
    """An expert of the original shape, with zeros where channels are dropped."""
    mask = plan.channels.get(layer)
    if mask is None or mask[expert].all():
        return part_of(plan, layer, expert)
    return Part((Member(expert, None, numpy.where(mask[expert], numpy.arange(mask.shape[1]), -1)),))
