"""CAMERA (arXiv 2508.02322), with the formula of its text. `criterion=camera` has that of its
released code."""

from __future__ import annotations

import numpy

from moe_lab.criteria import Array, Layer, criterion


@criterion(
    "camera.paper",
    granularity="channel",
    needs=("statistics", "channel_weights"),
    reference="CAMERA, arXiv 2508.02322",
)
def paper(layer: Layer, alpha: float = 0.9) -> Array:
    """(||phi||_2 + alpha ||phi||_inf) * ||w_c||_2: the decoding-time energy of the channel, as
    HEAPr (Section 4.2) quotes it.

    phi is the channel's input to down_proj over the tokens routed to the expert, without the gate.
    w_c is the channel's column of down_proj. HEAPr prints the second norm as ||phi||_2 too.

    The paper also ranks and prunes the channels of shared experts. A plan of moe_lab has channels
    of routed experts only."""
    energy = numpy.sqrt(layer["channel_square"]) + alpha * layer["channel_max"]
    return energy * numpy.sqrt(layer["channel_down_square"])
