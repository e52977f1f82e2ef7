"""Estimate of a streamed pass with all forward statistics on one GPU, made without a GPU:
`python -m benchmarks.streaming_estimate --model glm_4_7`.

Weights and hidden states are counted from the configuration, and the kernels of a layer as in
benchmarks.launches, for an H100 with flash attention. Speeds of the disk and of the bus are
assumed. While a layer computes, the weights of the next one are read and copied; its hidden states
are copied between its batches. So a layer takes the longest of (a) computing and copying of hidden
states, (b) reading of weights and (c) copying of weights, and in addition the conversion of its
weights. Not counted: the CPU's work for a batch, and saving of hidden states, which takes at most
2 % of a pass. It is a model and not a measurement; benchmarks.streaming measures.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import launches
from benchmarks.launches import BANDWIDTH, FLOPS, FORWARD, Launches, Pass, count
from benchmarks.measure import parser
from benchmarks.models import CONFIGURATIONS, published_model
from benchmarks.statistics import batch
from moe_lab.models.config_json import Size
from moe_lab.models.discover import moe_layers

BF16 = 2
"""Bytes of a number."""
CONVERSION = 13 / 3
"""Bytes that the conversion of a layer moves, as a multiple of the layer's bytes: stacks of three
projections are read and written (2), two of them are concatenated (4 / 3), and all numbers are
checked (1)."""
PASSES = [row for row in launches.PASSES if row.name in (FORWARD, "statistics")]


def main() -> int:
    """Count, estimate and print."""
    arguments = _arguments()
    config = CONFIGURATIONS[arguments.model]
    n_layers = config["num_hidden_layers"]
    # all layers are taken for MoE layers, although the first ones may be dense, which are smaller
    changes = {"first_k_dense_replace": 0}
    model = published_model(arguments.model, 1, "meta", vocabulary=1024, changes=changes)
    layer_bytes = sum(weight.nbytes for weight in model.get_submodule("model.layers").parameters())
    outside_bytes = 2 * BF16 * config["vocab_size"] * config["hidden_size"]
    batches = arguments.samples * arguments.length // arguments.batch_tokens
    state_bytes = BF16 * batches * arguments.batch_tokens * config["hidden_size"]
    disk, bus = 1e9 * arguments.disk, 1e9 * arguments.bus
    print(f"counted: {batches} batches of {arguments.batch_tokens} tokens, {n_layers} layers")
    print(
        f"counted: weights of a layer {layer_bytes / 1e9:.2f} GB, outside layers "
        f"{outside_bytes / 1e9:.2f} GB"
    )
    print(f"counted: hidden states {state_bytes / 1e9:.1f} GB, copied to and from each layer")
    print(f"assumed: disk {arguments.disk:g} GB/s; bus {arguments.bus:g} GB/s in each direction")
    print(f"assumed: GPU {FLOPS / 1e12:g} TFLOP/s, {BANDWIDTH / 1e12:g} TB/s")
    for row in PASSES:
        launches = _kernels(row, model, arguments)
        parts = {
            "computing": batches * launches.seconds,
            "hidden states": 2 * state_bytes / bus,
            "reading": layer_bytes / disk,
            "copying": layer_bytes / bus,
            "conversion": CONVERSION * layer_bytes / BANDWIDTH,
        }
        busy = parts["computing"] + parts["hidden states"]
        layer = max(busy, parts["reading"], parts["copying"]) + parts["conversion"]
        # nothing computes while the first layer is read
        start = (outside_bytes + layer_bytes) / disk
        alone = start + n_layers * sum(parts.values())
        listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        print(f"{row.name}, counted: {launches.kernels} kernels for a batch in a layer")
        print(f"{row.name}, estimated: seconds of a layer: {listed}; together {layer:.2f}")
        print(
            f"{row.name}, estimated: {(start + n_layers * layer) / 60:.1f} minutes, "
            f"{alone / 60:.1f} if nothing ran at the same time"
        )
    activation_bytes = arguments.batch_tokens * _activations(model)
    peak = 2 * layer_bytes + outside_bytes + activation_bytes
    print(
        f"estimated: memory of the GPU {peak / 1e9:.1f} GB: two layers, what is outside layers, "
        f"and {activation_bytes / 1e9:.1f} GB of activations"
    )
    return 0


def _arguments() -> argparse.Namespace:
    options = parser("streaming_estimate", __doc__)
    options.add_argument("--model", choices=CONFIGURATIONS, default="glm_4_7")
    options.add_argument("--samples", type=int, default=1024)
    options.add_argument("--length", type=int, default=2048, help="tokens in a sample")
    options.add_argument(
        "--batch-tokens",
        type=int,
        default=8192,
        help="tokens in a batch; half of the default on a GPU, for 24 GB",
    )
    options.add_argument("--disk", type=float, default=3.0, help="GB/s from the disk")
    options.add_argument("--bus", type=float, default=25.0, help="GB/s between CPU and GPU")
    return options.parse_args()


def _kernels(row: Pass, model: Any, arguments: argparse.Namespace) -> Launches:
    """The kernels of a batch in one layer."""
    data = batch(arguments.batch_tokens // arguments.length, arguments.length)
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", _flash_attention):
        return count(row, model, data)


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attention in one kernel (B, heads, S, D), as on a GPU. On the device "meta", torch would
    count the products and the softmax of scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    output: torch.Tensor = attention(query, key, value, 0.0, True, scale=scale)[0]
    return output


def _activations(model: Any) -> float:
    """Bytes of activations per token, as moe_lab estimates them."""
    layer = moe_layers(model)[0]
    size = Size(
        parameters=model.num_parameters(),
        layers=1,
        moe_layers=1,
        experts=layer.n_experts,
        top_k=layer.top_k,
        hidden=layer.hidden,
        width=layer.width,
        bytes_per_parameter=BF16,
    )
    return size.activations()


if __name__ == "__main__":
    sys.exit(main())
