"""What a calibration pass costs: `python -m benchmarks.statistics`.

Three ratios, each the median over pairs that ran one after the other in this process:
- the pass with all forward statistics against the plain eager forward (bar: at most 1.10);
- the pass with gradient statistics against a plain forward and backward, weights frozen (bar: at most 1.10);
- every expert run on every token, as the REAP observer does, against the pass (bar: at least 5 up to 64 experts, else
9). Seconds are CPU seconds of one thread, so that other work on the machine disturbs little. Exit code 1 when a bar
fails.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from benchmarks.random_model import random_model
from moe_lab.models.decoder import run
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.experts import intermediate, output
from moe_lab.statistics.backward import differentiable, forward_and_backward
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.gradients import GradientTap
from moe_lab.statistics.observe import Observer

Batch = tuple[torch.Tensor, torch.Tensor]
BAR_OBSERVE = 1.10


def main() -> int:
    """Measure, print, compare with the bars."""
    arguments = _arguments()
    torch.set_num_threads(1)
    failed = False
    for n_experts in arguments.experts:
        model = random_model(n_experts, arguments)
        whole, part = _batch(arguments.rows, arguments.length), _batch(arguments.every_rows, arguments.length)
        print(
            f"{n_experts} experts, top-{arguments.top_k}, {arguments.layers} layers, hidden {arguments.hidden}",
            flush=True,
        )
        cost = _ratio(model, _observe, _plain, whole, arguments.pairs)
        failed |= _report(
            f"all forward statistics / plain eager forward, {whole[0].numel()} tokens", cost, "<=", BAR_OBSERVE
        )
        back = _ratio(model, _observe_gradients, _plain_gradients, whole, arguments.pairs)
        failed |= _report(
            f"forward and backward statistics / plain forward and backward, {whole[0].numel()} tokens",
            back,
            "<=",
            BAR_OBSERVE,
        )
        gain = _ratio(model, _every_expert, _observe, part, arguments.every_pairs)
        bar = 5.0 if n_experts <= 64 else 9.0
        failed |= _report(
            f"every expert on every token / all forward statistics, {part[0].numel()} tokens", gain, ">=", bar
        )
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.statistics", description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[64], help="experts per layer, one run each")
    parser.add_argument("--top-k", type=int, default=8, help="experts per token")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="channels per expert")
    parser.add_argument("--rows", type=int, default=8, help="rows of the batch for the first two ratios")
    parser.add_argument("--every-rows", type=int, default=4, help="rows of the batch for the last ratio")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--pairs", type=int, default=3, help="pairs measured for the first two ratios")
    parser.add_argument("--every-pairs", type=int, default=3, help="pairs measured for the last ratio")
    return parser.parse_args()


def _batch(rows: int, length: int) -> Batch:
    ids = torch.randint(1, 1024, (rows, length), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids, dtype=torch.bool)


def _plain(model: PreTrainedModel, batch: Batch) -> None:
    with torch.no_grad():
        run(model, *batch)


def _observe(model: PreTrainedModel, batch: Batch) -> None:
    with Observer(model, ForwardTap) as observer:
        observer.read(*batch)


def _plain_gradients(model: PreTrainedModel, batch: Batch) -> None:
    """The eager model with frozen weights, the loss over all logits at once, one backward pass to the embeddings."""
    ids, _ = batch
    with differentiable(model):
        logits = model(input_ids=ids, use_cache=False).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()


def _observe_gradients(model: PreTrainedModel, batch: Batch) -> None:
    with differentiable(model), Observer(model, GradientTap, reading=forward_and_backward) as observer:
        observer.read(*batch)


def _every_expert(model: PreTrainedModel, batch: Batch) -> None:
    """The REAP observer's way: the forward as it is, and after each block all experts on all tokens."""
    with ExitStack() as stack, torch.no_grad():
        for layer in moe_layers(model):
            hook = functools.partial(_observe_every_expert, layer)
            stack.callback(layer.experts.register_forward_hook(hook).remove)
        run(model, *batch)


def _observe_every_expert(layer: MoELayer, module: torch.nn.Module, given: Any, mixed: torch.Tensor) -> None:
    """Counts, gate and norm sums of the routed tokens, read from the outputs (E, T, H) of all experts on all tokens."""
    hidden, index, weights = given
    outputs = hidden.new_empty(layer.n_experts, *hidden.shape)
    for expert in range(layer.n_experts):
        outputs[expert] = output(module, intermediate(module, hidden, expert), expert)
    for expert in range(layer.n_experts):
        routed = (index == expert).any(-1)
        norms = torch.linalg.vector_norm(outputs[expert][routed], dim=-1)
        (norms * weights[index == expert]).sum()


def _ratio(
    model: PreTrainedModel,
    first: Callable[[PreTrainedModel, Batch], None],
    second: Callable[[PreTrainedModel, Batch], None],
    batch: Batch,
    pairs: int,
) -> list[float]:
    """CPU seconds of `first` over those of `second`, pair by pair, after one unmeasured run of `second`."""
    second(model, batch)
    return [_seconds(first, model, batch) / _seconds(second, model, batch) for _ in range(pairs)]


def _seconds(way: Callable[[PreTrainedModel, Batch], None], model: PreTrainedModel, batch: Batch) -> float:
    start = time.process_time()
    way(model, batch)
    return time.process_time() - start


def _report(what: str, ratios: list[float], relation: str, bar: float) -> bool:
    """Print one ratio with its bar; True when the bar fails."""
    median = statistics.median(ratios)
    good = median <= bar if relation == "<=" else median >= bar
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs"
    print(f"  {what}: {median:.2f} ({spread}), bar {relation} {bar:.2f}: {'ok' if good else 'FAILED'}", flush=True)
    return not good


if __name__ == "__main__":
    sys.exit(main())
