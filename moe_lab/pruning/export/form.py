"""Shapes of an exported checkpoint: which experts and channels are written for every MoE layer. No torch.

natural  what the plan keeps and nothing else
masked   the shape of the original; what is dropped is zero and is never chosen
padded   every layer as wide as its widest expert, narrower ones filled with zeros
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_lab.errors import UserError, unknown
from moe_lab.pruning.plan import Alignments, Constants, Mask, Plan

RAGGED_FIELD = "expert_widths"
"""Our own field of config.json: layer (as text) -> channels of each expert, for layers whose experts differ."""
CONSTANT_FIELD = "expert_constants"
"""Our own field of config.json: the layers whose experts of width 0 put out constants."""
OWNERS_FIELD = "expert_owners"
"""Our own field of config.json: layer (as text) -> the expert with whose weights each expert is computed."""
KERNEL_BYTES = 16
"""transformers' grouped matrix products need rows of weights whose length is a multiple of this many bytes."""
SHAPES = ("natural", "masked", "padded")
FORMATS = ("safetensors", "compressed_tensors", "gguf")
"""How the tensors of an exported checkpoint can be stored."""
SCHEMES = ("fp8", "w4a16")
"""What compressed_tensors can round weights to."""


def is_stock(widths: Sequence[int], element_size: int) -> bool:
    """Whether experts of these widths fit a family's own module: all equal, not 0, and with aligned rows.

    A weight takes `element_size` bytes.
    """
    return len(set(widths)) == 1 and widths[0] > 0 and widths[0] * element_size % KERNEL_BYTES == 0


@dataclass(frozen=True)
class Member:
    """An expert whose weights are added to a merged one."""

    expert: int
    weight: float
    order: Alignments | None
    """(I,): which of its channels is added to each channel of the merged one; None for channel i to channel i."""


@dataclass(frozen=True)
class LayerForm:
    """How one MoE layer is written."""

    experts: tuple[int, ...]
    """Ids of the experts that are written, in order."""
    dropped: frozenset[int]
    """Ids among `experts` that are written as zeros, and which the router never chooses."""
    channels: Mask | None
    """(E, I): the channels that are kept; None if no expert loses channels."""
    widths: tuple[int, ...]
    """Channels of each written expert in the file, padding included; () where `channels` is None."""
    in_place: bool = False
    """Whether kept channels stay at their original positions."""
    ragged: bool = False
    """Whether the experts are packed one after the other, each with a width of its own."""
    constants: Constants | None = None
    """(N, H): what the N experts of width 0 of a ragged layer put out; None where it is 0."""
    merged: dict[int, tuple[Member, ...]] = field(default_factory=dict)
    """Written expert -> those whose weighted sum it is; others are written as they are."""
    owners: tuple[int, ...] | None = None
    """(E',) the position of the expert with whose weights each expert is computed; None where each has its own."""


@dataclass(frozen=True)
class Form:
    """How all MoE layers are written."""

    layers: dict[int, LayerForm]
    width: int | None
    """Channels per expert of the original; None for a plan of whole experts."""

    @property
    def ragged(self) -> bool:
        """Whether a layer has experts of unequal width."""
        return any(layer.ragged for layer in self.layers.values())

    @property
    def count(self) -> int | None:
        """The number of experts every layer has; None when layers differ."""
        counts = {len(layer.experts) for layer in self.layers.values()}
        return counts.pop() if len(counts) == 1 else None

    @property
    def written(self) -> dict[int, tuple[int, ...]]:
        """Layer -> original ids of the experts that are written, in order."""
        return {index: layer.experts for index, layer in self.layers.items()}

    @property
    def same_width(self) -> int | None:
        """The width that all experts of all layers have; None when they differ, or for whole experts."""
        widths = {self.width_of(layer) for layer in self.layers}
        return widths.pop() if len(widths) == 1 and not self.ragged else None

    def width_of(self, layer: int) -> int | None:
        """Channels of the widest expert of a layer; None for a plan of whole experts."""
        return max(self.layers[layer].widths, default=self.width)


def make_form(plan: Plan, shape: str, element_size: int) -> Form:
    """How `plan` is written in the shape `shape`, for weights of `element_size` bytes each.

    Raises UserError for an unknown shape, and for any but natural where tokens are routed to experts that are constants
    or computed with the weights of others.
    """
    if shape not in SHAPES:
        raise unknown("export", shape, SHAPES)
    if (plan.constants or plan.shares_experts) and shape != "natural":
        raise no_replacements(shape)
    width = next((mask.shape[1] for mask in plan.channels.values()), None)
    makers = {"natural": _natural, "masked": _masked, "padded": _padded}
    return Form({layer: makers[shape](plan, layer, element_size) for layer in sorted(plan.experts)}, width)


def no_replacements(shape: str) -> UserError:
    """The error for a shape that cannot say what dropped experts are replaced by."""
    return UserError(
        f"export={shape} has no place for what dropped experts are replaced by (constants, merged experts): expected "
        "export=natural"
    )


def _natural(plan: Plan, layer: int, element_size: int) -> LayerForm:
    kept = plan.experts[layer]
    if not plan.channels:
        return LayerForm(kept, frozenset(), None, ())
    mask, widths, merged = plan.channels[layer], plan.widths(layer), _merged(plan, layer)
    if min(widths) == mask.shape[1]:
        return LayerForm(kept, frozenset(), mask if merged else None, widths if merged else (), merged=merged)
    ragged, constants, owners = not is_stock(widths, element_size), plan.constants.get(layer), plan.computed_as(layer)
    return LayerForm(kept, frozenset(), mask, widths, ragged=ragged, constants=constants, merged=merged, owners=owners)


def _merged(plan: Plan, layer: int) -> dict[int, tuple[Member, ...]]:
    return {
        owner: tuple(Member(one, group[one], plan.channel_order(layer, one)) for one in sorted(group))
        for owner, group in plan.merged.get(layer, {}).items()
    }


def _masked(plan: Plan, layer: int, element_size: int) -> LayerForm:
    count = plan.n_experts[layer]
    dropped = frozenset(range(count)) - frozenset(plan.experts[layer])
    mask = plan.channels.get(layer)
    widths = () if mask is None else (mask.shape[1],) * count
    return LayerForm(tuple(range(count)), dropped, mask, widths, in_place=True, merged=_merged(plan, layer))


def _padded(plan: Plan, layer: int, element_size: int) -> LayerForm:
    if not plan.channels:
        return _natural(plan, layer, element_size)
    mask, kept = plan.channels[layer], plan.experts[layer]
    step = max(1, KERNEL_BYTES // element_size)
    width = min(mask.shape[1], max(step, -(-max(plan.widths(layer)) // step) * step))
    return LayerForm(kept, frozenset(), mask, (width,) * len(kept), merged=_merged(plan, layer))
