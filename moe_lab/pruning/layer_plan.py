"""What a plan retains of one MoE layer, and the stored experts as sums of source experts. No
torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

Mask: TypeAlias = NDArray[numpy.bool_]
"""(E, I): which channels of which experts are retained."""
Constants: TypeAlias = NDArray[numpy.float32]
"""(N, H): constant outputs of a layer's N null experts, in the order of their ids."""
Alignment: TypeAlias = NDArray[numpy.int32]
"""(M, I): a permutation of the channels of each of a layer's M merged experts, in the order of
their ids."""
Channels: TypeAlias = NDArray[numpy.intp]
"""(W,): for each stored channel, the channel of the source expert; -1 for a channel of zeros."""
ARRAYS = ("constants", "alignment")
"""Fields of a layer that are in plan.npz; plan.json has their sha256."""


class Member(NamedTuple):
    """One term of the weighted sum that makes a stored expert."""

    expert: int
    weight: float | None = None
    """The factor of the expert's weights; None: the weights are copied, bit by bit."""
    channels: Channels | None = None
    """Which channels of the expert are used, with -1 for a channel of zeros; None: all channels, in
    their order."""


class StoredExpert(NamedTuple):
    """The weighted sum of `members`, which are source experts by ascending id. All weights of a
    stored expert without members are 0."""

    members: tuple[Member, ...] = ()

    @property
    def copied(self) -> int | None:
        """Id of the source expert of which the stored expert is a bit-for-bit copy, or None."""
        if len(self.members) != 1:
            return None
        expert, weight, channels = self.members[0]
        return expert if weight is None and channels is None else None

    @property
    def is_sum(self) -> bool:
        """Whether the stored expert is a weighted sum, and no copy. It must have members."""
        return self.members[0].weight is not None

    def projection(self, read: Callable[[int], Any]) -> Any:
        """One projection (gate, up or down) of the stored expert, with channels as rows: (stored
        channels, H). The stored expert must have members.

        `read(expert)` returns the projection (I, H) of a source expert: a torch tensor, or an array
        of numbers, or of their bits unless `is_sum`. A sum is computed in the type of these
        projections, which is fp32 or fp64."""
        total: Any = 0
        for expert, weight, channels in self.members:
            values = _select_rows(read(expert), channels)
            if weight is None:  # the only member
                return values
            total = total + values * weight
        return total


def _select_rows(values: Any, channels: Channels | None) -> Any:
    """The rows `channels` of `values`, with zeros for -1."""
    if channels is None:
        return values
    rows = values[channels.clip(0)]  # row 0 stands in for -1, and is overwritten
    if (channels < 0).any():
        rows[channels < 0] = 0
    return rows


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What a plan retains of one layer, and what replaces the rest. Experts can be merged in
    groups: the weighted sum of the group's weights is stored for one expert of the group, its
    owner."""

    n_experts: int
    """Number of experts before pruning."""
    retained: tuple[int, ...]
    """Ids of the experts whose router rows are retained, ascending."""
    channels: Mask | None = None
    """(E, I) bool, True for retained channels; None in a plan of whole experts. Rows of dropped
    experts are False. A retained expert whose row is False is a null expert: tokens are routed to
    it, and its output is its constant, or 0."""
    constants: Constants | None = None
    """Constant outputs of the null experts; None: 0."""
    merged: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Owner -> {expert: weight} for all members of the owner's group, including the owner. The
    owner keeps its channels; the other members have no channels. Tokens that are routed to any
    retained member are computed with the owner, and the gates add up."""
    alignment: Alignment | None = None
    """For each expert of `merged_members`, the channel that is added to each channel of its owner.
    None: channel i is added to channel i."""

    @property
    def dropped(self) -> list[int]:
        """Ids of the experts whose router rows are dropped, ascending."""
        return sorted(set(range(self.n_experts)) - set(self.retained))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """(E,): for each expert, the owner of its group. An expert that is in no group is its own
        owner."""
        owners = list(range(self.n_experts))
        for owner, group in self.merged.items():
            for member in group:
                owners[member] = owner
        return tuple(owners)

    @cached_property
    def owner_positions(self) -> tuple[int, ...] | None:
        """For each retained expert, the position of its owner among the retained experts. None if
        each retained expert is its own owner."""
        positions = tuple(self.retained.index(self.owners[expert]) for expert in self.retained)
        return None if positions == tuple(range(len(self.retained))) else positions

    @cached_property
    def merged_members(self) -> tuple[int, ...]:
        """Ids of the experts that are merged into another expert, ascending."""
        return tuple(expert for expert, owner in enumerate(self.owners) if owner != expert)

    @property
    def merged_pairs(self) -> list[tuple[int, int]]:
        """(owner, member) for each of `merged_members`."""
        return [(self.owners[member], member) for member in self.merged_members]

    @cached_property
    def null_experts(self) -> list[int]:
        """Ids of the retained experts that retain no channel and are not merged into another
        expert, ascending."""
        if self.channels is None:
            return []
        widths = self.channels.sum(1)
        return [
            expert
            for expert in self.retained
            if not widths[expert] and self.owners[expert] == expert
        ]

    @property
    def width(self) -> int | None:
        """Number of channels of each expert before pruning; None in a plan of whole experts."""
        return None if self.channels is None else self.channels.shape[1]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of retained channels of each retained expert; () in a plan of whole experts."""
        if self.channels is None:
            return ()
        return tuple(self.channels[list(self.retained)].sum(1).tolist())

    def is_unchanged(self, expert: int) -> bool:
        """Whether an expert is retained with all its channels, and no other expert is merged into
        it."""
        is_whole = self.channels is None or bool(self.channels[expert].all())
        return is_whole and expert in self.retained and expert not in self.merged

    def stored_expert(self, expert: int, width: int | None = None) -> StoredExpert:
        """The stored form of a retained expert. An expert that owns no group is stored with `width`
        channels: its retained channels, then zeros. `width` None: all its channels."""
        if expert in self.merged:
            return StoredExpert(tuple(self._members(expert)))
        if self.channels is None or width is None:
            return StoredExpert((Member(expert),))
        retained = numpy.flatnonzero(self.channels[expert])
        if len(retained) == width == self.width:
            return StoredExpert((Member(expert),))
        channels = numpy.full(width, -1)  # -1: zeros
        channels[: len(retained)] = retained
        return StoredExpert((Member(expert, channels=channels),))

    def _members(self, owner: int) -> Iterator[Member]:
        """The terms of the weighted sum that is stored for `owner`, by ascending id."""
        for expert, weight in sorted(self.merged[owner].items()):
            channels = None
            if self.alignment is not None and expert != owner:
                channels = self.alignment[self.merged_members.index(expert)].astype(numpy.intp)
            yield Member(expert, weight, channels)

    def masked_expert(self, expert: int) -> StoredExpert:
        """The stored form of an expert in its original shape, with zeros in place of its dropped
        channels."""
        if expert not in self.retained:
            return StoredExpert()
        if self.channels is None or self.channels[expert].all():
            return self.stored_expert(expert)
        channels = numpy.where(self.channels[expert], numpy.arange(self.channels.shape[1]), -1)
        return StoredExpert((Member(expert, channels=channels),))

    def as_json(self) -> dict[str, Any]:
        """The layer in plan.json, with these fields:

        experts        number of experts before pruning
        retained       ids of the retained experts
        width          number of channels of each expert before pruning
        channels       row of the mask of each retained expert: packed bits, in hex
        merged         owner -> member -> weight
        array's name   sha256 of the array, for each array in `arrays`
        """
        document: dict[str, Any] = {"experts": self.n_experts, "retained": list(self.retained)}
        if self.channels is not None:
            packed = numpy.packbits(self.channels[list(self.retained)], axis=1, bitorder="little")
            document |= {"width": self.width, "channels": [row.tobytes().hex() for row in packed]}
        if self.merged:
            groups = {}
            for owner, group in self.merged.items():
                groups[str(owner)] = {str(expert): weight for expert, weight in group.items()}
            document["merged"] = groups
        return document | {name: _sha256(array) for name, array in self.arrays().items()}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Name -> array, for each field in `ARRAYS` that is not None."""
        return {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
    ) -> LayerPlan:
        """The layer whose fields in plan.json are `document`, and whose arrays in plan.npz are
        `arrays`. ValueError, TypeError or LookupError if `document` is damaged."""
        merged = {}
        for owner, group in document.get("merged", {}).items():
            merged[int(owner)] = {int(expert): weight for expert, weight in group.items()}
        channels = _unpack_mask(document) if "channels" in document else None
        return cls(
            n_experts=document["experts"],
            retained=tuple(document["retained"]),
            channels=channels,
            merged=merged,
            **arrays,
        )


def _unpack_mask(document: Mapping[str, Any]) -> Mask:
    """The mask (E, I) of retained channels in `document`, a layer of plan.json."""
    mask: Mask = numpy.zeros((document["experts"], document["width"]), dtype=numpy.bool_)
    for expert, text in zip(document["retained"], document["channels"], strict=True):
        bits = numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8)
        # rows are padded to whole bytes
        mask[expert] = numpy.unpackbits(bits, bitorder="little")[: document["width"]]
    return mask


def _sha256(array: NDArray[Any]) -> str:
    """sha256 (hex) of the array's bytes in little-endian order."""
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()
