"""MoE-Slimming (arXiv 2606.18304): smoothings of layer losses and the assignment of blocks, as its
text and its released code have them where moe_lab.allocation differs, and the code's prior of
routers and scores of channels by gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from operator import itemgetter

import numpy

from moe_lab.allocation.coverage import (
    ORDERS,
    PRIORS,
    Alignment,
    in_rounds,
    lost_channels,
    lost_scores,
)
from moe_lab.allocation.problem import Array, Budgets, apportion
from moe_lab.allocation.shapes import SMOOTHINGS
from moe_lab.criteria import criterion
from moe_lab.criteria.channels import (
    SLIMMING,
    channel_activation_gradient,
    channel_gradient,
    snip,
)

ROOTS = 4
"""How often the released code smooths the layer losses of its default, loss_coverage."""


def four_roots(x: Array, _mean: float) -> Array:
    """The smoothing of loss_coverage, the default of the released code: four times the square root,
    each time clipped to one standard deviation (of a sample) around the mean. x: (n,)."""
    for _ in range(ROOTS):
        x = numpy.sqrt(x)
        deviation = x.std(ddof=1) if len(x) > 1 else 0.0
        x = numpy.clip(x, x.mean() - deviation, x.mean() + deviation)
    return x


def log_of_loss(x: Array, mean: float) -> Array:
    """ln(1 + 5 l) of the layer losses l = x mean (n,), which are not divided by their mean first
    (Appendix C.3.3)."""
    return numpy.log1p(5 * x * mean)


SMOOTHINGS["moe_slimming.four_roots"] = four_roots
SMOOTHINGS["moe_slimming.log"] = log_of_loss
ORDERS["moe_slimming.one_block"] = partial(in_rounds, losses_of=lost_channels, most=1)
ORDERS["moe_slimming.one_block_scores"] = partial(in_rounds, losses_of=lost_scores, most=1)
"""Alignment-aware redistribution (Appendix A.2): an expert gets at most one block, in the order of
lost channels (l-r-c in Table 8) or of lost scores (l-r-s). Further blocks are lost."""


def router_output(sums: Array) -> Array:
    """The softmax over experts (E,) of the mean absolute logit of each, which the released code has
    in place of the sum of gates. sums (2, E): sums of absolute logits, and numbers of tokens."""
    from scipy.special import softmax

    prior: Array = softmax(sums[0] / sums[1])
    return prior


PRIORS["moe_slimming.router"] = ("similarity", "router_absolute", router_output)
PRIORS["moe_slimming.moving_average"] = ("moving_averages", "moving_average", itemgetter(0))
"""`ala1` as an exponential moving average over batches (Section 4.1)."""


for _function, _pass in (
    (channel_gradient, "layer_loss_gradients"),
    (channel_activation_gradient, "layer_loss_gradients"),
    (snip, "layer_loss_weight_gradients"),
):
    criterion(
        f"moe_slimming.{_function.__name__}",
        granularity="channel",
        needs=(_pass,),
        reference=SLIMMING,
    )(_function)
"""The criteria of the same names, with the loss L of moe_slimming_passes.LayerLossHook."""


def headroom(budgets: Budgets, scores: Mapping[int, Array], alignment: Alignment) -> Budgets:
    """Layer -> number of channels of each expert (E,), by the rule of the released code.

    A budget is rounded down to whole blocks, and becomes 0 if it is then below `min_channels`. The
    blocks that all layers lose are divided among the layers by largest remainders, in proportion to
    the blocks that a layer could still take. In a layer they go to the experts with channels, one
    each in the order of lost channels, and what is left to the experts with the most room. This
    repeats until no block is left. An expert that is then below `min_channels` loses its blocks
    again.
    """
    block = alignment.block
    before = numpy.array(list(budgets.values()))
    blocks = before // block  # (L, E)
    fewest = -(-alignment.minimum_channels // block)
    blocks[blocks < fewest] = 0
    most = next(iter(scores.values())).shape[1] // block
    lost_blocks = before.sum() / block - blocks.sum()
    leftover_blocks = math.ceil(lost_blocks - 0.5)  # half a block is lost
    while leftover_blocks > 0 and (blocks < most).any():
        room = (most - blocks).sum(axis=1)
        is_open = room > 0
        added = numpy.zeros_like(room)
        added[is_open] = apportion(
            room[is_open], min(leftover_blocks, int(room.sum())), low=0, high=room[is_open]
        )
        placed = blocks.sum()
        for row, lost, number in zip(blocks, before % block, added.tolist(), strict=True):
            active = numpy.flatnonzero((row > 0) & (row < most))
            first = active[numpy.argsort(-lost[active], kind="stable")][:number]
            row[first] += 1
            by_room = numpy.argsort(row, kind="stable")
            by_room = by_room[row[by_room] < most]
            row[by_room[: number - len(first)]] += 1
        leftover_blocks -= int(blocks.sum() - placed)
    blocks[blocks < fewest] = 0
    return dict(zip(budgets, blocks * block, strict=True))


ORDERS["moe_slimming.headroom"] = headroom
