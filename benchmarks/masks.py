"""Cost of masks: `python -m benchmarks.masks [--model olmoe_7b --layers 1]`.

A random half of the experts of each layer is dropped, or replaced by constants, or merged, each
expert into one of the other half. A ratio is the time of the forward pass under the mask, divided
by that of the plain forward pass; the median over pairs of runs in this process. Exit code 1 when a
bar fails."""

from __future__ import annotations

import argparse
import functools
import sys

import numpy
import torch
from transformers import PreTrainedModel

from benchmarks.measure import describe, device_seconds, median_misses, parser
from benchmarks.models import CONFIGURATIONS, published_model
from benchmarks.recovery import random_half
from benchmarks.statistics import batch, plain
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import merge_experts, replace_by_constants

BARS = {"dropped": 1.10, "constants": 1.25, "merged": 2.00}
"""Kind of plan -> its largest ratio."""


def main() -> int:
    """Measure, print, compare with the bars; returns 1 when a bar fails."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    print(describe(arguments.device), flush=True)
    model = published_model(
        arguments.model, arguments.layers, arguments.device, vocabulary=arguments.vocabulary
    )
    text = batch(arguments.rows, arguments.length)
    forward = functools.partial(plain, model, text)
    seconds = functools.partial(device_seconds, model.device.type, forward)
    seconds()  # the first run is slower and not measured
    failed = False
    for name, plan in plans(model).items():
        ratios = []
        for _ in range(arguments.pairs):
            plain_seconds = seconds()
            with mask(model, plan):
                ratios.append(seconds() / plain_seconds)
        what = f"forward under a mask, {name} / plain forward, {text[0].numel()} tokens"
        failed |= median_misses(what, ratios, "<=", BARS[name])
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("masks", __doc__)
    options.add_argument("--model", choices=CONFIGURATIONS, default="olmoe_7b")
    options.add_argument("--layers", type=int, help="all if not given")
    options.add_argument(
        "--vocabulary", type=int, help="words of the published model, all if not given"
    )
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--length", type=int, default=512, help="tokens in a row")
    options.add_argument("--pairs", type=int, default=3)
    return options.parse_args()


def plans(model: PreTrainedModel) -> dict[str, Plan]:
    """Key of BARS -> a plan that drops half of the experts, replaces them by constants, or merges
    each of them into one of the other half."""
    dropping = random_half(model)
    layers = moe_layers(model)
    random = numpy.random.default_rng(0)
    constants = {}
    merged = {}
    for layer in layers:
        layer_plan = dropping.layers[layer.index]
        outputs = random.normal(size=(layer.n_experts, layer.hidden))
        constants[layer.index] = replace_by_constants(layer_plan, outputs, layer.width)
        dropped = sorted({*range(layer.n_experts)} - {*layer_plan.retained})
        pairs = zip(layer_plan.retained, dropped, strict=True)
        groups = {owner: {owner: 0.5, member: 0.5} for owner, member in pairs}
        merged[layer.index] = merge_experts(groups, layer.width)
    return {"dropped": dropping, "constants": Plan(constants), "merged": Plan(merged)}


if __name__ == "__main__":
    sys.exit(main())
