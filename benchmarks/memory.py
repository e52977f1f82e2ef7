"""Memory of gradient statistics: `python -m benchmarks.memory --model olmoe_7b --layers 2`.

Compares peak memory, weights included, of a forward and backward pass with all gradient statistics
and of a plain one (bar: at most 1.10 times as much). Each runs in its own process. On the CPU it is
the memory of the process without that of Python and torch before a model is made; on CUDA that of
the device. There are two plain passes: one with the loss over all logits at once, as one would
usually write it, and, because the logits of a large vocabulary could hide everything else, one with
the loss in parts like the statistics' pass. Exit code 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import json
import sys

from transformers import PreTrainedModel

from benchmarks.measure import GIB, describe, in_own_process, misses, parser, peak
from benchmarks.models import CONFIGURATIONS, published_model
from benchmarks.statistics import BAR_OBSERVE, Batch, batch, observe_gradients, plain_gradients
from moe_lab.statistics.gradients import differentiable, forward_and_backward


def main() -> int:
    """Measure each way in its own process, print, compare with the bar."""
    arguments = _arguments()
    if arguments.way:
        print(json.dumps(_bytes(arguments)))
        return 0
    print(describe(arguments.device), flush=True)
    took = {}
    for way in WAYS:
        took[way] = in_own_process("memory", "--way", way)
        weights, all_of_it = (took[way][name] / GIB for name in ("weights", "peak"))
        print(f"  {way}: {all_of_it:.2f} GiB at most, weights {weights:.2f} GiB", flush=True)
    failed = False
    for way in ("plain", "plain_in_parts"):
        ratio = took["statistics"]["peak"] / took[way]["peak"]
        failed |= misses(f"statistics / {way}", ratio, "<=", BAR_OBSERVE)
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("memory", __doc__)
    options.add_argument("--model", choices=CONFIGURATIONS, default="olmoe_7b")
    options.add_argument("--layers", type=int, help="all if not given")
    options.add_argument(
        "--vocabulary", type=int, help="words of the published model, all if not given"
    )
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--rows", type=int, default=4)
    options.add_argument("--length", type=int, default=512, help="tokens in a row")
    options.add_argument("--way", choices=WAYS, help="only this one, its bytes as JSON")
    return options.parse_args()


def _bytes(arguments: argparse.Namespace) -> dict[str, int]:
    before = peak(arguments.device)
    model = published_model(
        arguments.model, arguments.layers, arguments.device, vocabulary=arguments.vocabulary
    )
    WAYS[arguments.way](model, batch(arguments.rows, arguments.length))
    weights = sum(weight.nbytes for weight in model.parameters())
    return {"peak": peak(arguments.device) - before, "weights": weights}


def _plain_in_parts(model: PreTrainedModel, batch: Batch) -> None:
    with differentiable(model):
        forward_and_backward(model, *batch)


WAYS = {
    "plain": plain_gradients,
    "plain_in_parts": _plain_in_parts,
    "statistics": observe_gradients,
}


if __name__ == "__main__":
    sys.exit(main())
