"""Speed of experts of unequal width: `python -m benchmarks.ragged`.

A plan retains half of all channels, between none and all of them in each expert. A ratio is the
median over rounds, in which all variants run one after the other in this process:

- packed experts of one layer against dense experts, as transformers computes them (eager) and in a
  loop over rows that are sorted once, which is faster. Bar for many tokens: at most 0.65;
- the whole pruned model against the unpruned one. No bar, as attention, router and embedding cost
  the same in both;
- masked experts, and the masked model, against the plain ones: the cost of evaluating a plan
without cutting weights.

Seconds are CPU seconds of one thread, which other work on the machine disturbs little. Exit code 1
when a bar fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
from transformers import PreTrainedModel

from benchmarks.measure import parser, ratios, rounds
from benchmarks.models import random_model
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask, planned_experts
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune

BAR = 0.65
PACKED = "packed"
MASKED = "masked"


def main() -> int:
    """Measure, print, compare with the bar; returns 1 when it fails."""
    arguments = _arguments()
    torch.set_num_threads(1)
    model = random_model(arguments.experts, arguments)
    plan = half_of_channels(model)
    pruned = prune(model, plan)
    print(
        f"{arguments.experts} experts of 0 to {arguments.width} channels, mean "
        f"{arguments.width / 2:.0f} of {arguments.width}, top-{arguments.top_k}, hidden "
        f"{arguments.hidden}",
        flush=True,
    )
    failed = False
    with torch.no_grad():
        for tokens in arguments.tokens:
            variants = _layer_variants(model, pruned, plan, tokens)
            rounds(variants, 1)  # the first round is slower
            seconds = rounds(variants, arguments.rounds)
            bar = BAR if tokens == arguments.tokens[0] else None
            failed |= _fails(f"one layer, {tokens} tokens", seconds, bar)
        variants = _model_variants(model, pruned, plan, arguments)
        rounds(variants, 1)
        seconds = rounds(variants, arguments.rounds)
    _fails(
        f"{arguments.layers} layers with attention, {arguments.rows * arguments.length} tokens",
        seconds,
        None,
    )
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("ragged", __doc__)
    options.add_argument("--experts", type=int, default=64, help="experts per layer")
    options.add_argument("--top-k", type=int, default=8, help="experts per token")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument(
        "--width", type=int, default=256, help="channels per expert before pruning"
    )
    options.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[4096, 64],
        help="tokens of one layer; the bar is for the first",
    )
    options.add_argument(
        "--rows", type=int, default=8, help="rows of the batch for the whole model"
    )
    options.add_argument("--length", type=int, default=512, help="tokens in a row")
    options.add_argument(
        "--rounds", type=int, default=7, help="rounds measured, after one that is not"
    )
    return options.parse_args()


def half_of_channels(model: PreTrainedModel) -> Plan:
    """A random plan that retains half of the channels of each layer: for each expert with w of I
    channels, there is another expert with I - w."""
    random = numpy.random.default_rng(0)
    layers = moe_layers(model)
    plans = {}
    for layer in layers:
        half_of_widths = random.integers(0, layer.width + 1, layer.n_experts // 2)
        widths = random.permutation(
            numpy.concatenate((half_of_widths, layer.width - half_of_widths))
        )
        order = random.permuted(numpy.tile(numpy.arange(layer.width), (layer.n_experts, 1)), axis=1)
        plans[layer.index] = LayerPlan(
            layer.n_experts, tuple(range(layer.n_experts)), order < widths[:, None]
        )
    return Plan(plans)


def _layer_variants(
    model: PreTrainedModel, pruned: PreTrainedModel, plan: Plan, tokens: int
) -> dict[str, Callable[[], Any]]:
    """Name -> the experts of the first layer on random hidden states."""
    layer = moe_layers(model)[0]
    packed = pruned.get_submodule(layer.name)
    hidden = torch.randn(tokens, layer.hidden, generator=torch.Generator().manual_seed(0))
    _, gates, index = layer.router(hidden)
    layer_plan = plan.layers[layer.index]
    masked = planned_experts(layer, layer_plan)
    all_channels = numpy.ones((layer.n_experts, layer.width), dtype=bool)
    dense = planned_experts(layer, replace(layer_plan, channels=all_channels))
    return {
        "dense eager": lambda: layer.experts(hidden, index, gates),
        "dense sorted loop": lambda: dense(hidden, index, gates),
        MASKED: lambda: masked(hidden, index, gates),
        PACKED: lambda: packed(hidden, index, gates),
    }


def _model_variants(
    model: PreTrainedModel, pruned: PreTrainedModel, plan: Plan, arguments: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Name -> a forward pass of the whole model on random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 1024, (arguments.rows, arguments.length), generator=generator)

    def masked() -> None:
        with mask(model, plan):
            model.base_model(input_ids=ids, use_cache=False)

    return {
        "dense eager": lambda: model.base_model(input_ids=ids, use_cache=False),
        MASKED: masked,
        PACKED: lambda: pruned.base_model(input_ids=ids, use_cache=False),
    }


def _fails(what: str, seconds: Mapping[str, list[float]], bar: float | None) -> bool:
    """Print the median of each variant, and the ratios of packed and masked experts to dense ones,
    with the bar for packed experts; True when the bar fails."""
    medians = [f"{name} {1e3 * statistics.median(times):.1f} ms" for name, times in seconds.items()]
    print(f"{what}: {', '.join(medians)}")
    failed = False
    for variant in (PACKED, MASKED):
        for dense in (name for name in seconds if name.startswith("dense")):
            pairs = ratios(seconds[variant], seconds[dense])
            median = statistics.median(pairs)
            verdict = ""
            if bar is not None and variant == PACKED:
                passed = median <= bar
                failed |= not passed
                verdict = f", bar <= {bar:.2f}: {'ok' if passed else 'FAILED'}"
            print(
                f"  {variant} / {dense}: {median:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
                f"{verdict}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
