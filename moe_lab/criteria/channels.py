"""Criteria of channels: one score for every intermediate unit c of every expert, (E, I).

The loss L is the next-token cross-entropy, summed over the calibration set. Criteria that read
tokens give the channels of an expert that saw no token the lowest possible score.
"""

from __future__ import annotations

import numpy

from moe_lab.criteria import Array, Layer, criterion
from moe_lab.errors import UserError, check_known

HEAPR = "HEAPr: Hessian-based Efficient Atomic Expert Pruning in Output Space"
SLIMMING = "MoE-Slimming, arXiv 2606.18304"
PROJECTIONS = ("down", "gate", "up")
CAMERA_GATES = {"model": "gate", "renormalized": "renormalized"}
"""Gate -> prefix of the names of the channel statistics that are weighted with it."""
UNSEEN = -1.0
"""HEAPr's score for the channels of an expert that saw no token; all other scores are >= 0."""


@criterion("heapr", granularity="channel", needs=("gradients",), reference=HEAPR)
def heapr(layer: Layer) -> Array:
    """1/2 mean_t(phi^2) * mean_t((dL/dphi)^2), the expected rise of the loss when the channel is
    removed.

    L is the loss, and t runs over the tokens routed to the expert. phi is the channel's input to
    down_proj, and w_c is the channel's column of down_proj. The channel adds e_c = phi w_c to the
    expert's output f.

    The paper's score is mean_t 1/2 e_c^T G e_c with G = mean_t d d^T and d = dL/df. Both scores are
    equal: w_c^T d = dL/dphi, so w_c^T G w_c = mean_t (dL/dphi)^2. dL/dphi contains the gate as a
    factor."""
    tokens = layer.tokens[:, None]
    divisor = numpy.maximum(tokens, 1)
    product = (layer["channel_square"] / divisor) * (layer["channel_gradient_square"] / divisor)
    return numpy.where(tokens > 0, product / 2, UNSEEN)


@criterion(
    "camera",
    granularity="channel",
    needs=("statistics", "channel_weights"),
    reference="CAMERA, arXiv 2508.02322",
    uses_gate=True,
)
def camera(layer: Layer, alpha: float = 0.9) -> Array:
    """||w_c||^2 * ((1 - alpha) sum_t (g phi)^2 + alpha max_t (g phi)^2), as the released code
    computes it.

    phi is the channel's input to down_proj, w_c the channel's column of down_proj, g the gate of
    the token. t runs over the tokens routed to the expert.

    The released code renormalises the gates over the top k for DeepSeekMoE, Qwen3 and Mixtral (here
    gate=renormalized). For Qwen1.5 and Qwen2 the released code takes the model's gates (here
    gate=model). UserError for other values of `gate`. The default of the released code is alpha =
    1; the published runs have alpha = 0.9."""
    check_known("gate of camera", layer.gate, CAMERA_GATES)
    if not (isinstance(alpha, (int, float)) and 0 <= alpha <= 1):
        raise UserError(
            f"criterion.parameters.alpha={alpha} of camera: expected a number from 0 to 1, such "
            "as 0.9"
        )
    prefix = CAMERA_GATES[layer.gate]
    total = layer[f"{prefix}_channel_square"]
    largest = layer[f"{prefix}_channel_max"] ** 2
    return layer["channel_down_square"] * ((1 - alpha) * total + alpha * largest)


@criterion("channel_activation", granularity="channel", needs=("statistics",), reference=SLIMMING)
def channel_activation(layer: Layer) -> Array:
    """sqrt(sum_t phi^2).

    phi is the channel's input to down_proj; t runs over the tokens routed to the expert."""
    return numpy.sqrt(layer["channel_square"])


@criterion("channel_weight", granularity="channel", needs=("channel_weights",), reference=SLIMMING)
def channel_weight(layer: Layer, projection: str = "down") -> Array:
    """The Euclidean norm of the channel's weights in one projection, or (`projection=mean`) the
    mean of the norms.

    `projection` is down, gate, up or mean. UserError if the experts have no such projection."""
    names = _projections("channel_weight", projection)
    mean: Array = numpy.sqrt([layer[f"channel_{name}_square"] for name in names]).mean(axis=0)
    return mean


@criterion(
    "channel_weight_activation",
    granularity="channel",
    needs=("statistics", "channel_weights"),
    reference="Wanda, arXiv 2306.11695",
)
def channel_weight_activation(layer: Layer) -> Array:
    """sum_o |w_oc| * sqrt(sum_t phi^2): Wanda's score, summed over the outputs o of down_proj.

    w_oc is the weight of down_proj from the channel c to the output o. phi is the channel's input
    to down_proj; t runs over the tokens routed to the expert."""
    return layer["channel_down_abs"] * numpy.sqrt(layer["channel_square"])


@criterion("channel_gradient", granularity="channel", needs=("gradients",), reference=SLIMMING)
def channel_gradient(layer: Layer) -> Array:
    """sqrt(sum_t (dL/dphi)^2).

    L is the loss, and phi the channel's input to down_proj; t runs over the tokens routed to the
    expert."""
    return numpy.sqrt(layer["channel_gradient_square"])


@criterion(
    "channel_activation_gradient", granularity="channel", needs=("gradients",), reference=SLIMMING
)
def channel_activation_gradient(layer: Layer) -> Array:
    """mean_t |phi dL/dphi|; 0 for an expert that saw no token.

    L is the loss, and phi the channel's input to down_proj; t runs over the tokens routed to the
    expert."""
    return layer["channel_product_abs"] / numpy.maximum(layer.tokens, 1)[:, None]


@criterion(
    "snip", granularity="channel", needs=("weight_gradients",), reference="SNIP, arXiv 1810.02340"
)
def snip(layer: Layer, projection: str = "down") -> Array:
    """sum_o |w_oc dL/dw_oc| over the channel's weights in one projection, or (`projection=mean`)
    the mean of the sums.

    L is the loss. In MoE-Slimming's equation, w_oc leads from the input c to the output o of the
    projection. In the gate and up projections, the channel is an output, and the sum is over its
    inputs. The paper's code takes the mean of the three projections. UserError if the experts have
    no such projection."""
    names = _projections("snip", projection)
    sums: Array = numpy.mean([layer[f"snip_{name}"] for name in names], axis=0)
    return sums


@criterion("channel_random", granularity="channel", needs=(), reference=HEAPR, uses_seed=True)
def channel_random(layer: Layer) -> Array:
    """Uniform on [0, 1): numpy's PCG64(seed), one draw of E x I numbers per layer, in layer
    order."""
    return layer.random.random((layer.n_experts, layer.width))


@criterion("file_channels", granularity="channel", needs=(), reference="docs/usage.md")
def file_channels(layer: Layer, path: str, column: str | None = None) -> Array:
    """Like `file`, for scores of channels: the table also has the column "channel"."""
    return layer["file"]


def _projections(name: str, projection: str) -> tuple[str, ...]:
    """The names of the projections to read. `name`: the criterion, for the message."""
    check_known(f"criterion.parameters.projection of {name}", projection, [*PROJECTIONS, "mean"])
    return PROJECTIONS if projection == "mean" else (projection,)
