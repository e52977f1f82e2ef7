"""How a pruned MoE layer is stored, in memory and in files alike. No torch.

A form is one of three shapes:

natural  only what the plan retains
masked   the shape of the original; dropped experts and channels are zeros, and the router never
         chooses a dropped expert. Experts that are replaced by constants are stored as constants
padded   every expert as wide as the widest of its layer, filled with channels of zeros
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TypeAlias

from moe_lab.errors import UserError, check_known
from moe_lab.pruning.layer_plan import Constants, LayerPlan, StoredExpert
from moe_lab.pruning.plan import Plan

WIDTH_STEP = 8
"""Channels. transformers' grouped matrix products need rows of weights of a multiple of 16 bytes,
which are 8 numbers in 16 bits. The rule is the same for wider numbers, so that the form of a layer
does not depend on the precision."""


@dataclass(frozen=True)
class LayerForm:
    """How one MoE layer is stored."""

    experts: tuple[int, ...]
    """Ids of the stored experts."""
    stored: tuple[StoredExpert, ...]
    """In the order of `experts`."""
    width: int | None = None
    """Channels of each stored expert, if all have the same number; None: as many as before, or
    packed experts."""
    widths: tuple[int, ...] | None = None
    """Channels of each stored expert, for packed experts: they are stored one after the other.
    None: the experts are stacked."""
    owners: tuple[int, ...] | None = None
    """(E',) for packed experts: the position of each expert's owner, with whose weights it is
    computed; None: each expert is its own owner."""
    constants: Constants | None = None
    """(N, H) for packed experts: constant outputs of the N null experts; None: 0."""
    novices: Mapping[int, Constants] = field(default_factory=dict)
    """Id of each null expert of which only the constant output (H,) is stored -> this output."""

    @property
    def has_zeros(self) -> bool:
        """Whether any stored expert is zeros in place of a dropped expert, which the router never
        chooses."""
        return not all(expert.members for expert in self.stored)


Form: TypeAlias = dict[int, LayerForm]
"""How all MoE layers are stored, by number, ascending."""


def make_form(plan: Plan, shape: str) -> Form:
    """Number of a layer -> form of the layer, for a model that is pruned by `plan`. UserError for
    an unknown shape, and for one that cannot hold what replaces dropped experts."""
    check_known("export", shape, FORMS)
    check_replacement(shape, plan.has_constants, plan.shares_experts)
    make_layer = FORMS[shape]
    return {number: make_layer(plan.layers[number]) for number in sorted(plan.layers)}


def check_replacement(shape: str | None, constants: bool, merged: bool) -> None:
    """Raise UserError if an export of this `shape` (None: no export) cannot hold what replaces
    dropped experts. `merged`: whether the router keeps the rows of merged experts."""
    if (merged and shape in ("masked", "padded")) or (constants and shape == "padded"):
        raise UserError(
            f"export={shape} cannot hold what replaces dropped experts (constants, merged "
            "experts): expected export=natural"
        )


def fits_family_module(widths: Sequence[int]) -> bool:
    """Whether the experts module of the model's family can hold experts of these `widths`."""
    return len(set(widths)) == 1 and widths[0] > 0 and widths[0] % WIDTH_STEP == 0


def _natural_form(layer: LayerPlan) -> LayerForm:
    """The layer in the shape "natural": the retained experts, each with its retained channels."""
    widths = layer.widths
    if layer.channels is None or min(widths) == layer.width:  # no channel is dropped
        return _stacked_form(layer, layer.width)
    if fits_family_module(widths):
        return _stacked_form(layer, widths[0])
    # Only packed experts may have owners and constants: an expert that is computed with its owner,
    # or replaced by a constant, has width 0, so `fits_family_module` is False.
    stored = tuple(
        layer.stored_expert(expert, width)
        for expert, width in zip(layer.retained, widths, strict=True)
    )
    return LayerForm(
        layer.retained,
        stored,
        widths=widths,
        owners=layer.owner_positions,
        constants=layer.constants,
    )


def _masked_form(layer: LayerPlan) -> LayerForm:
    """The layer in the shape "masked": all experts with all channels, with zeros for dropped
    experts and dropped channels, or with constants alone."""
    experts = range(layer.n_experts)
    stored = tuple(layer.masked_expert(expert) for expert in experts)
    novices = {}
    if layer.constants is not None:
        novices = dict(zip(layer.null_experts, layer.constants, strict=True))
    return LayerForm(tuple(experts), stored, novices=novices)


def _padded_form(layer: LayerPlan) -> LayerForm:
    """The layer in the shape "padded": all retained experts, each with as many channels as the
    widest of them. This number is rounded up to a multiple of WIDTH_STEP."""
    if layer.width is None:  # a plan of whole experts: no channel is dropped
        return _stacked_form(layer, None)
    # if all retained experts have width 0, they get one step of channels
    aligned = WIDTH_STEP * ceil(max(1, *layer.widths) / WIDTH_STEP)
    return _stacked_form(layer, min(layer.width, aligned))


def _stacked_form(layer: LayerPlan, width: int | None) -> LayerForm:
    """A form in which each retained expert has `width` channels. None: the original width."""
    stored = tuple(layer.stored_expert(expert, width) for expert in layer.retained)
    return LayerForm(layer.retained, stored, width=None if width == layer.width else width)


FORMS: dict[str, Callable[[LayerPlan], LayerForm]] = {
    "natural": _natural_form,
    "masked": _masked_form,
    "padded": _padded_form,
}
"""Shape -> function that makes the form of a layer."""
