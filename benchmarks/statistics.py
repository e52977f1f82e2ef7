"""Cost of a calibration pass: `python -m benchmarks.statistics [--model olmoe_7b --layers 1]`.

Ratios of seconds, medians over pairs of runs in this process:

- forward: the pass with all forward statistics / the plain forward pass (bar: at most 1.10, on
  CUDA 1.25);
- gradients: the pass with gradient statistics / a plain forward and backward pass with frozen
  weights (bar: at most 1.10, on CUDA 1.25);
- every: a pass that runs every expert on every token, as the REAP observer does / the pass with all
  forward statistics (bar: at least 5 up to 64 experts, else 9);
- similarity: the pass for groupings of similar experts / a pass that runs every expert on every
  token (bar: at most 1.10).

On the CPU, seconds are CPU seconds, which other work on the machine disturbs little, and the plain
model has eager experts; on CUDA its experts run by grouped_mm. Exit code 1 when a bar fails.
`--model` takes a published configuration instead of the small one. benchmarks.memory measures the
memory.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from benchmarks.measure import describe, device_seconds, median_misses, parser
from benchmarks.models import CONFIGURATIONS, published_model, random_model
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.experts import run
from moe_lab.statistics.damage import SimilarityHook
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.gradients import GradientHook, differentiable, forward_and_backward
from moe_lab.statistics.observe import Observer

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids (rows, length), and booleans (rows, length) that mark valid tokens."""
Pass = Callable[[PreTrainedModel, Batch], None]
BAR_OBSERVE = 1.10
"""Bar of forward, gradients and similarity."""
BAR_CUDA = 1.25
"""Bar of forward and gradients on CUDA."""
FEW_EXPERTS = 64
BAR_FEW = 5.0
"""Bar of every, for layers of at most FEW_EXPERTS experts."""
BAR_MANY = 9.0
"""Bar of every, for layers of more experts."""


def main() -> int:
    """Measure, print, compare with the bars; returns 1 when a bar fails."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    print(describe(arguments.device), flush=True)
    failed = False
    for model in _models(arguments):
        layers = moe_layers(model)
        first = layers[0]
        print(
            f"{arguments.model or 'small'}: {len(layers)} layers, {first.n_experts} experts, "
            f"top-{first.top_k}, hidden {first.hidden}, width {first.width}, {model.dtype}",
            flush=True,
        )
        for part in arguments.parts:
            failed |= PARTS[part](model, arguments)
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("statistics", __doc__)
    options.add_argument(
        "--model", choices=CONFIGURATIONS, help="a published configuration instead of the small one"
    )
    options.add_argument(
        "--layers", type=int, help="of the published model all if not given, of the small one 4"
    )
    options.add_argument(
        "--vocabulary", type=int, help="words of the published model, all if not given"
    )
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which ratios"
    )
    options.add_argument(
        "--experts",
        type=int,
        nargs="+",
        default=[64],
        help="small: experts per layer, one run each",
    )
    options.add_argument("--top-k", type=int, default=8, help="small: experts per token")
    options.add_argument("--hidden", type=int, default=512, help="small: hidden size")
    options.add_argument("--width", type=int, default=256, help="small: channels per expert")
    options.add_argument(
        "--rows", type=int, default=8, help="rows of the batch for the first two ratios"
    )
    options.add_argument(
        "--every-rows", type=int, default=4, help="rows of the batch for every and similarity"
    )
    options.add_argument("--length", type=int, default=512, help="tokens in a row")
    options.add_argument(
        "--pairs", type=int, default=3, help="pairs measured for the first two ratios"
    )
    options.add_argument(
        "--every-pairs", type=int, default=3, help="pairs measured for every and similarity"
    )
    return options.parse_args()


def _models(arguments: argparse.Namespace) -> Iterator[PreTrainedModel]:
    """Yield the published model, or else a small model for each number of experts."""
    if arguments.model:
        yield published_model(
            arguments.model, arguments.layers, arguments.device, vocabulary=arguments.vocabulary
        )
        return
    arguments.layers = arguments.layers or 4
    for n_experts in arguments.experts:
        yield random_model(n_experts, arguments)


def _forward_misses(model: PreTrainedModel, arguments: argparse.Namespace) -> bool:
    text = batch(arguments.rows, arguments.length)
    ratios = _ratios(model, _observe, plain, text, arguments.pairs)
    what = f"all forward statistics / plain forward, {text[0].numel()} tokens"
    return median_misses(what, ratios, "<=", _bar(arguments))


def _gradients_miss(model: PreTrainedModel, arguments: argparse.Namespace) -> bool:
    text = batch(arguments.rows, arguments.length)
    ratios = _ratios(model, observe_gradients, plain_gradients, text, arguments.pairs)
    what = f"forward and backward statistics / plain forward and backward, {text[0].numel()} tokens"
    return median_misses(what, ratios, "<=", _bar(arguments))


def _bar(arguments: argparse.Namespace) -> float:
    """The bar of forward and gradients."""
    return BAR_OBSERVE if arguments.device == "cpu" else BAR_CUDA


def _every_misses(model: PreTrainedModel, arguments: argparse.Namespace) -> bool:
    text = batch(arguments.every_rows, arguments.length)
    ratios = _ratios(model, _every_expert, _observe, text, arguments.every_pairs)
    bar = BAR_FEW if moe_layers(model)[0].n_experts <= FEW_EXPERTS else BAR_MANY
    what = f"every expert on every token / all forward statistics, {text[0].numel()} tokens"
    return median_misses(what, ratios, ">=", bar)


def _similarity_misses(model: PreTrainedModel, arguments: argparse.Namespace) -> bool:
    text = batch(arguments.every_rows, arguments.length)
    ratios = _ratios(model, _observe_similarity, _every_expert, text, arguments.every_pairs)
    what = f"pass for groupings / every expert on every token, {text[0].numel()} tokens"
    return median_misses(what, ratios, "<=", BAR_OBSERVE)


PARTS = {
    "forward": _forward_misses,
    "gradients": _gradients_miss,
    "every": _every_misses,
    "similarity": _similarity_misses,
}
"""Name -> function that measures and prints a ratio, and returns whether it misses its bar."""


def batch(rows: int, length: int) -> Batch:
    """Random token ids (rows, length), and a mask that marks all of them as valid."""
    ids = torch.randint(1, 1024, (rows, length), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids, dtype=torch.bool)


def plain(model: PreTrainedModel, batch: Batch) -> None:
    """The model's own forward pass, without the head."""
    with torch.no_grad():
        run(model, *batch)


def _observe(model: PreTrainedModel, batch: Batch) -> None:
    with Observer(model, ForwardHook) as observer:
        observer.run_batch(*batch)


def _observe_similarity(model: PreTrainedModel, batch: Batch) -> None:
    with Observer(model, SimilarityHook) as observer:
        observer.run_batch(*batch)


def plain_gradients(model: PreTrainedModel, batch: Batch) -> None:
    """Forward and backward pass with frozen weights: the loss is over all logits at once, gradients
    go to the embeddings."""
    ids, _ = batch
    with differentiable(model):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits
        targets = ids[:, 1:].to(logits.device)
        cross_entropy(
            logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="sum"
        ).backward()


def observe_gradients(model: PreTrainedModel, batch: Batch) -> None:
    """The pass with all gradient statistics."""
    with differentiable(model), Observer(model, GradientHook) as observer:
        observer.run_batch(*batch, forward_and_backward)


def _every_expert(model: PreTrainedModel, batch: Batch) -> None:
    """Statistics as in the REAP observer: the unchanged forward pass; after each MoE block, all its
    experts run on all tokens."""
    with ExitStack() as stack, torch.no_grad():
        for layer in moe_layers(model):
            hook = functools.partial(_observe_every_expert, layer)
            stack.callback(layer.experts.register_forward_hook(hook).remove)
        run(model, *batch)


def _observe_every_expert(
    layer: MoELayer, module: torch.nn.Module, inputs: Any, mixed: torch.Tensor
) -> None:
    """Hook that computes sums of gates times norms of routed tokens, from the outputs (E, T, H) of
    all experts on all tokens."""
    hidden, index, weights = inputs
    outputs = hidden.new_empty(layer.n_experts, *hidden.shape)
    for expert in range(layer.n_experts):
        outputs[expert] = layer.expert_output(hidden, expert)
    for expert in range(layer.n_experts):
        routed = (index == expert).any(-1)
        norms = torch.linalg.vector_norm(outputs[expert][routed], dim=-1)
        (norms * weights[index == expert]).sum()


def _ratios(
    model: PreTrainedModel, numerator: Pass, denominator: Pass, batch: Batch, pairs: int
) -> list[float]:
    """Seconds of `numerator` divided by those of `denominator`, for each of `pairs` pairs of runs,
    after one run of `denominator` that is not measured."""
    device = model.device.type

    def seconds(run: Pass) -> float:
        return device_seconds(device, functools.partial(run, model, batch))

    denominator(model, batch)
    return [seconds(numerator) / seconds(denominator) for _ in range(pairs)]


if __name__ == "__main__":
    sys.exit(main())
