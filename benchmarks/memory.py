"""Memory of gradient statistics: `python -m benchmarks.memory --model olmoe_7b --layers 2`.

The peak memory, weights included, of a forward and backward pass with all gradient statistics is
compared with that of a plain pass (bar: at most 1.10 times as much). Passes run in their own
processes. On the CPU, memory is that of the process without Python and torch; on CUDA, that of the
device. There are two plain passes: with the loss over all logits at once, as it is usually written,
and with the loss in parts, as in the pass with statistics, because the logits of a large vocabulary
could hide everything else. Exit code 1 when a bar fails.
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
    """Measure each pass in its own process, print, compare with the bar; returns 1 when it
    fails."""
    arguments = _arguments()
    if arguments.run:
        print(json.dumps(_bytes(arguments)))
        return 0
    print(describe(arguments.device), flush=True)
    figures = {}
    for name in PASSES:
        figures[name] = in_own_process("memory", "--pass", name)
        weights = figures[name]["weights"] / GIB
        print(
            f"  {name}: {figures[name]['peak'] / GIB:.2f} GiB at most, weights {weights:.2f} GiB",
            flush=True,
        )
    failed = False
    for name in ("plain", "plain_in_parts"):
        ratio = figures["statistics"]["peak"] / figures[name]["peak"]
        failed |= misses(f"statistics / {name}", ratio, "<=", BAR_OBSERVE)
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
    options.add_argument(
        "--pass", dest="run", choices=PASSES, help="run only this pass, and print bytes as JSON"
    )
    return options.parse_args()


def _bytes(arguments: argparse.Namespace) -> dict[str, int]:
    """Bytes of peak memory and of the weights, for the pass that the arguments name."""
    before = peak(arguments.device)
    model = published_model(
        arguments.model, arguments.layers, arguments.device, vocabulary=arguments.vocabulary
    )
    PASSES[arguments.run](model, batch(arguments.rows, arguments.length))
    weights = sum(weight.nbytes for weight in model.parameters())
    return {"peak": peak(arguments.device) - before, "weights": weights}


def _plain_in_parts(model: PreTrainedModel, batch: Batch) -> None:
    with differentiable(model):
        forward_and_backward(model, *batch)


PASSES = {
    "plain": plain_gradients,
    "plain_in_parts": _plain_in_parts,
    "statistics": observe_gradients,
}


if __name__ == "__main__":
    sys.exit(main())
