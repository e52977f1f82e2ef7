"""AAR (MoE-Slimming): round widths to whole blocks, as low-bit kernels need, and empty experts with few channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from moe_lab.allocation.problem import Array, Budget, Budgets, RatioTooLarge, RatioTooSmall
from moe_lab.config.base import SETTINGS, Count, Positive, valid
from moe_lab.errors import UserError


@dataclass(config=SETTINGS, frozen=True)
class Alignment:
    """How widths are rounded: allocation.parameters.align."""

    block: Positive
    """Kept channels of an expert are a multiple of this."""
    min_channels: Count | None = None
    """Experts with fewer channels than this lose them all; null takes `block`."""
    order: Literal["remainder", "scores"] = "remainder"
    """Which experts get the blocks that rounding down leaves over: see `align`."""

    @property
    def fewest(self) -> int:
        """The smallest number of channels that an expert can keep."""
        return self.block if self.min_channels is None else self.min_channels


def alignment_of(settings: Mapping[str, Any]) -> Alignment | None:
    """The alignment that the fields of AllocationConfig ask for, if any. UserError for a value that cannot work."""
    value = settings["parameters"].get("align")
    return None if value is None else valid(Alignment, value, "allocation.parameters.align")


def check_fits(alignment: Alignment, layers: Mapping[int, Mapping[str, Any]], ratio: float) -> None:
    """Raise UserError when experts are narrower than a block or min_channels, and RatioTooSmall when whole blocks hold
    fewer channels than `ratio` keeps. `layers`: layer -> n_experts, width.

    A block need not divide the width: MoE-Slimming's Figure 10 has blocks of 256 in experts of 1408 channels, which
    keep 1280 at most.
    """
    block = alignment.block
    width = min((facts["width"] for facts in layers.values()), default=block)
    for name, least in (("block", block), ("min_channels", alignment.fewest)):
        if least > width:
            raise UserError(
                f"allocation.parameters.align.{name}={least}: experts have {width} channels, the most it can be"
            )
    channels = sum(facts["n_experts"] * facts["width"] for facts in layers.values())
    in_blocks = sum(facts["n_experts"] * (facts["width"] // block * block) for facts in layers.values())
    if int(channels * (1 - ratio)) > in_blocks:
        raise RatioTooSmall(
            f"keeps {int(channels * (1 - ratio))} of {channels} channels, and whole blocks of "
            f"allocation.parameters.align.block={block} hold only {in_blocks}"
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
                f"allocation.parameters.align (block={alignment.block}, min_channels={alignment.fewest}) leaves no "
                f"channel in layer {layer}, whose largest expert was to keep {most}, which is the most both can be"
            )
    return aligned


def _aligned(kept: Budget, scores: Array, alignment: Alignment) -> Budget:
    """The budgets (E,) of one layer in whole blocks. `scores`: (E, I)."""
    block = alignment.block
    active = (kept >= alignment.fewest) & (kept > 0)
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
