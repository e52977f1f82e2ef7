"""AAR (MoE-Slimming): round widths to whole blocks, as low-bit kernels need, and empty experts with few channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from moe_lab.allocation.problem import Array, Budget, Budgets, RatioTooLarge, RatioTooSmall
from moe_lab.errors import UserError, unknown

ORDERS = ("remainder", "scores")
FIELDS = ("block", "min_channels", "order")


@dataclass(frozen=True)
class Alignment:
    """How widths are rounded."""

    block: int
    """Kept channels of an expert are a multiple of this."""
    min_channels: int
    """Experts with fewer channels than this lose them all."""
    order: str
    """Which experts get the blocks that rounding down leaves over: see `align`."""


def parse(value: Any) -> Alignment | None:
    """Parse allocation.parameters.align: null, or {block, min_channels, order}.

    `min_channels` is `block` and `order` remainder by default. UserError for unknown fields and invalid values.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise UserError(f"allocation.parameters.align={value}: expected null or {{block: 128}}")
    for name in value:
        if name not in FIELDS:
            raise unknown("allocation.parameters.align", str(name), FIELDS)
    block = value.get("block")
    if type(block) is not int or block < 1:
        raise UserError(f"allocation.parameters.align.block={block}: expected a whole number of channels such as 128")
    min_channels = value.get("min_channels", block)
    if type(min_channels) is not int or min_channels < 0:
        raise UserError(f"allocation.parameters.align.min_channels={min_channels}: expected 0 or more channels")
    order = value.get("order", "remainder")
    if order not in ORDERS:
        raise unknown("allocation.parameters.align.order", str(order), ORDERS)
    return Alignment(block, min_channels, order)


def check_fits(alignment: Alignment, layers: Mapping[int, Mapping[str, Any]], ratio: float) -> None:
    """Raise UserError when experts are narrower than a block or min_channels, and RatioTooSmall when whole blocks hold
    fewer channels than `ratio` keeps. `layers`: layer -> n_experts, width.

    A block need not divide the width: MoE-Slimming's Figure 10 has blocks of 256 in experts of 1408 channels, which
    keep 1280 at most.
    """
    for layer, facts in layers.items():
        for name, channels in (("block", alignment.block), ("min_channels", alignment.min_channels)):
            if channels > facts["width"]:
                raise UserError(
                    f"allocation.parameters.align.{name}={channels}: experts of layer {layer} have only "
                    f"{facts['width']} channels, which is the most it can be"
                )
    block = alignment.block
    channels = sum(facts["n_experts"] * facts["width"] for facts in layers.values())
    in_blocks = sum(facts["n_experts"] * (facts["width"] // block * block) for facts in layers.values())
    if int(channels * (1 - ratio)) > in_blocks:
        raise RatioTooSmall(
            f"keeps {int(channels * (1 - ratio))} of {channels} channels, and whole blocks of "
            f"allocation.parameters.align.block={block} hold only {in_blocks}"
        )


def check_protected(alignment: Alignment, layer: int, width: int) -> None:
    """Raise UserError unless a protected expert of so many channels can keep them all."""
    if width % alignment.block:
        raise UserError(
            f"allocation.parameters.align.block={alignment.block}: experts of layer {layer} have {width} channels, and "
            f"allocation.protect keeps some whole: expected a divisor of {width}"
        )


def align(budgets: Budgets, scores: Mapping[int, Array], alignment: Alignment) -> Budgets:
    """Round budgets to whole blocks: layer -> (E,). `scores`: layer -> (E, I).

    Every budget is rounded down, for experts below `min_channels` to 0. The whole blocks that this leaves over go to
    the other experts of the layer, one each, repeatedly until none is left or all experts are full (the paper stops
    after one each):
    remainder (l-r-c)  first to the experts that lost most channels by rounding
    scores (l-r-s)     first to the experts that lost the largest sum of scores by rounding
    If the block does not divide I, an expert is full with its whole blocks, and a layer of full experts loses the
    channels beyond them. Raises RatioTooLarge when a layer that had channels would be left with none.
    """
    aligned = {}
    for layer, kept in budgets.items():
        aligned[layer] = _aligned(kept, scores[layer], alignment)
        if kept.any() and not aligned[layer].any():
            most = int(kept.max())
            raise RatioTooLarge(
                f"allocation.parameters.align (block={alignment.block}, min_channels={alignment.min_channels}) leaves "
                f"no channel in layer {layer}, whose largest expert was to keep {most}: {most} is the most that both "
                "can be"
            )
    return aligned


def _aligned(kept: Budget, scores: Array, alignment: Alignment) -> Budget:
    """The budgets (E,) of one layer in whole blocks. `scores`: (E, I)."""
    block = alignment.block
    active = (kept >= alignment.min_channels) & (kept > 0)
    base = numpy.where(active, kept // block * block, 0)
    lost = _lost_scores(scores, base, kept) if alignment.order == "scores" else kept - base
    room = numpy.where(active, (scores.shape[1] - base) // block, 0)
    blocks = int((kept - base).sum()) // block
    return base + block * _deal(room, numpy.argsort(-lost, kind="stable"), blocks)


def _lost_scores(scores: Array, base: Budget, kept: Budget) -> Array:
    """Sum of the scores of the channels ranked base .. kept - 1 of each expert (E,)."""
    descending = -numpy.sort(-scores, axis=1)
    rank = numpy.arange(scores.shape[1])
    lost: Array = (descending * ((rank >= base[:, None]) & (rank < kept[:, None]))).sum(axis=1)
    return lost


def _deal(room: Budget, order: NDArray[numpy.int64], blocks: int) -> Budget:
    """Deal `blocks` to experts: one each in `order`, repeatedly, to none more than its `room`."""
    given = numpy.zeros_like(room)
    while blocks > 0 and (takers := order[(given < room)[order]][:blocks]).size:
        given[takers] += 1
        blocks -= len(takers)
    return given
