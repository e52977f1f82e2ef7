"""Speed of experts of unequal width: `python -m benchmarks.ragged`.

A plan keeps half of all channels, between none and all of them in each expert. Each ratio is the
median over rounds in which all ways ran one after the other in this process:
- the packed experts of one layer against the dense experts they replace, as transformers computes
  them (eager) and as fast as we can (one loop over rows sorted once); bar for many tokens: at most
  0.65;
- the whole model: attention, router and embedding cost the same as before, so there is no bar;
- the masked model against the plain one: the cost of evaluating a plan without cutting weights.
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
    """Measure, print, compare with the bar."""
    arguments = _arguments()
    torch.set_num_threads(1)
    model = random_model(arguments.experts, arguments)
    plan = half(model)
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
            ways = _layer_ways(model, pruned, plan, tokens)
            rounds(ways, 1)  # the first round is slower
            seconds = rounds(ways, arguments.rounds)
            bar = BAR if tokens == arguments.tokens[0] else None
            failed |= _report(f"one layer, {tokens} tokens", seconds, bar)
        ways = _model_ways(model, pruned, plan, arguments)
        rounds(ways, 1)
        seconds = rounds(ways, arguments.rounds)
    _report(
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


def half(model: PreTrainedModel) -> Plan:
    """A plan that retains half of the channels of each layer: for each expert with w of I, another
    one has I - w."""
    random = numpy.random.default_rng(0)
    layers = moe_layers(model)
    plans = {}
    for layer in layers:
        some = random.integers(0, layer.width + 1, layer.n_experts // 2)
        widths = random.permutation(numpy.concatenate((some, layer.width - some)))
        order = random.permuted(numpy.tile(numpy.arange(layer.width), (layer.n_experts, 1)), axis=1)
        plans[layer.index] = LayerPlan(
            layer.n_experts, tuple(range(layer.n_experts)), order < widths[:, None]
        )
    return Plan(plans)


def _layer_ways(
    model: PreTrainedModel, pruned: PreTrainedModel, plan: Plan, tokens: int
) -> dict[str, Callable[[], Any]]:
    layer = moe_layers(model)[0]
    packed = pruned.get_submodule(layer.name)
    hidden = torch.randn(tokens, layer.hidden, generator=torch.Generator().manual_seed(0))
    _, gates, index = layer.router(hidden)
    layer_plan = plan.layers[layer.index]
    masked = planned_experts(layer, layer_plan)
    dense = planned_experts(
        layer, replace(layer_plan, channels=numpy.ones((layer.n_experts, layer.width), dtype=bool))
    )
    return {
        "dense eager": lambda: layer.experts(hidden, index, gates),
        "dense sorted loop": lambda: dense(hidden, index, gates),
        MASKED: lambda: masked(hidden, index, gates),
        PACKED: lambda: packed(hidden, index, gates),
    }


def _model_ways(
    model: PreTrainedModel, pruned: PreTrainedModel, plan: Plan, arguments: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
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


def _report(what: str, seconds: Mapping[str, list[float]], bar: float | None) -> bool:
    """Print the medians and their ratios, with the bar for packed experts; True when the bar
    fails."""
    print(
        f"{what}: "
        + ", ".join(
            f"{name} {1e3 * statistics.median(times):.1f} ms" for name, times in seconds.items()
        )
    )
    failed = False
    for fast in (PACKED, MASKED):
        for slow in (name for name in seconds if name.startswith("dense")):
            pairs = ratios(seconds[fast], seconds[slow])
            median = statistics.median(pairs)
            good = bar is None or fast != PACKED or median <= bar
            failed |= not good
            verdict = (
                f", bar <= {bar:.2f}: {'ok' if good else 'FAILED'}"
                if bar and fast == PACKED
                else ""
            )
            print(
                f"  {fast} / {slow}: {median:.2f} ({min(pairs):.2f} to {max(pairs):.2f}){verdict}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
