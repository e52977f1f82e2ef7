"""Passes of benchmarks.launches measured beside their estimates:
`python -m benchmarks.passes --device cuda`.

Each pass reads a batch in turns with the plain pass of its kind. Printed are the median ratio of
their times, and the kernels and the time of a layer, beside the estimates that benchmarks.launches
makes for an H100. Bars are for a GPU and full size. Exit code 1 when a bar fails.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.launches import PASSES, Pass, batch, count
from benchmarks.measure import describe, device_seconds, median_misses, parser
from benchmarks.models import CONFIGURATIONS, published_model
from moe_lab.models import rows
from moe_lab.models.load import set_arithmetic

PASS_OF_NAME = {row.name: row for row in PASSES}


def main() -> int:
    """Count, measure, print, compare with the bars; returns 1 when a bar fails."""
    options = parser("passes", __doc__)
    options.add_argument("--model", choices=CONFIGURATIONS, default="qwen3_30b")
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--tokens", type=int, default=4096, help="tokens in the batch")
    options.add_argument("--pairs", type=int, default=5, help="measured pairs")
    arguments = options.parse_args()
    set_arithmetic(1)
    if arguments.device != "cpu":
        print(describe(arguments.device), flush=True)
    counted = published_model(arguments.model, 1, "meta", vocabulary=1024)
    model = published_model(arguments.model, arguments.layers, arguments.device, vocabulary=1024)
    failures = [
        misses_bar(row, model, counted, arguments) for row in PASSES if row.plain != row.name
    ]
    return int(any(failures))


def misses_bar(row: Pass, model: Any, counted: Any, arguments: Any) -> bool:
    """Print a pass; True when it misses its bar. `counted`: one layer of `model` on the device
    "meta"."""
    data = batch(row, arguments.tokens)
    estimate, plain = (count(each, counted, data) for each in (row, PASS_OF_NAME[row.plain]))
    pairs = seconds(row, model, data, arguments)
    measured = median(own for own, _ in pairs) / arguments.layers
    what = (
        f"{row.name}, a layer: {estimate.kernels} kernels, {1e3 * estimate.seconds:.2f} ms by the "
        f"estimate, {1e3 * measured:.2f} ms measured; of {row.plain}: estimate "
        f"{estimate.seconds / plain.seconds:.2f}, measured"
    )
    ratios = [own / of_plain for own, of_plain in pairs]
    return median_misses(what, ratios, "<=", row.most_time)


def seconds(row: Pass, model: Any, data: Any, arguments: Any) -> list[tuple[float, float]]:
    """Seconds of a pass and of its plain pass for a batch, in pairs, after one that is not
    measured."""
    return [
        (
            batch_seconds(row, model, data, arguments.device),
            batch_seconds(PASS_OF_NAME[row.plain], model, data, arguments.device),
        )
        for _ in range(arguments.pairs + 1)
    ][1:]


def batch_seconds(row: Pass, model: Any, data: Any, device: str) -> float:
    """Seconds of the second batch of a pass; the first also allocates the sums."""
    devices = rows.TRITON_DEVICES if row.uses_triton else ()
    with patch.object(rows, "TRITON_DEVICES", devices), row.context(model) as read:
        read(*data)
        return device_seconds(device, lambda: read(*data))


if __name__ == "__main__":
    sys.exit(main())
