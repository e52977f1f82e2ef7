"""Cost of keeping only one decoder layer in memory:
`python -m benchmarks.streaming --folder FOLDER --model olmoe_7b`.

Writes a checkpoint with random weights in the layout of the hub into FOLDER, if it does not exist,
and makes calibration passes with all forward statistics, each in its own process:
- resident: the whole model is loaded, then reads the batches;
- streamed: the same batches layer by layer (bar: at most 1.5 times the seconds of the resident pass
  without loading, or, when the disk is the limit, at least 0.8 of the speed at which the files can
  be read);
- short: streamed in the stored precision, with so few tokens that almost all time is reading.
On CUDA the streamed pass may take as much memory as one layer, the memory of the resident pass
without its weights, and 1 GiB for everything else (also a bar).
Files are dropped from the system's cache before each pass. On the CPU, passes are compared by CPU
seconds, which other work on the machine disturbs less; reading, and everything on CUDA, by
wall-clock seconds. Exit code 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from benchmarks.measure import (
    GIB,
    bytes_of,
    describe,
    drop_cache,
    in_own_process,
    parser,
    peak,
    reading_seconds,
    timed,
)
from benchmarks.models import CONFIGURATIONS, published_model
from benchmarks.statistics import batch
from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import use_cpu_experts
from moe_lab.models.streamed import StreamedModel
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.observe import gather
from moe_lab.statistics.streaming import stream

Made = TypeVar("Made")
BAR_SLOWER = 1.5
BAR_READING = 0.8
SHORT = 8
"""Number of tokens of the pass that measures reading."""


def main() -> int:
    """Run all parts, print their time and memory, compare with the bars."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments)))
        return 0
    print(describe(arguments.device), flush=True)
    took = {name: _apart(name) for name in PARTS}
    pairs = [
        (took["read"], took["short"]),
        *((_apart("read"), _apart("short")) for _ in range(arguments.pairs - 1)),
    ]
    reading = sorted(read["seconds"] / short["seconds"] for read, short in pairs)
    spread = f"{reading[0]:.2f} to {reading[-1]:.2f} in {len(pairs)} pairs"
    print(f"  short, share of the raw read speed: {median(reading):.2f} ({spread})")
    measure = "CPU seconds" if arguments.device == "cpu" else "seconds"
    slower = took["streamed"][measure] / took["resident"][measure]
    share = took["read"]["seconds"] / took["streamed"]["seconds"]
    good = slower <= BAR_SLOWER or share >= BAR_READING
    bars = f"bar <= {BAR_SLOWER} or >= {BAR_READING}"
    print(
        f"  streamed / resident, {measure}: {slower:.2f}; {share:.2f} of the raw read speed, "
        f"{bars}: {_says(good)}"
    )
    # no bar for memory: pages of mapped files count as memory of the process
    if arguments.device == "cpu":
        return int(not good)
    room = (
        took["streamed"]["layer GiB"]
        + 1
        + took["resident"]["peak GiB"]
        - took["resident"]["weights GiB"]
    )
    fits = took["streamed"]["peak GiB"] <= room
    print(
        f"  streamed, peak: {took['streamed']['peak GiB']:.2f} GiB, bar <= {room:.2f}: "
        f"{_says(fits)}"
    )
    return int(not (good and fits))


def _apart(name: str) -> dict[str, float]:
    """Run a part in its own process and print its figures."""
    took = in_own_process("streaming", "--part", name)
    print(
        f"  {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in took.items()), flush=True
    )
    return took


def _says(good: bool) -> str:
    return "ok" if good else "FAILED"


def _arguments() -> argparse.Namespace:
    options = parser("streaming", __doc__)
    options.add_argument(
        "--folder", type=Path, required=True, help="where the checkpoint is or will be, and is left"
    )
    options.add_argument("--model", choices=CONFIGURATIONS, default="olmoe_7b")
    options.add_argument("--layers", type=int, help="all if not given")
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--batches", type=int, default=4)
    options.add_argument("--rows", type=int, default=2, help="rows of a batch")
    options.add_argument("--length", type=int, default=512, help="tokens in a row")
    options.add_argument("--pairs", type=int, default=3, help="pairs of reading and a short pass")
    options.add_argument("--part", choices=PARTS, help="only this one, its figures as JSON")
    return options.parse_args()


def _write(arguments: argparse.Namespace) -> dict[str, float]:
    if not arguments.folder.exists():
        model: Any = published_model(arguments.model, arguments.layers, arguments.device)
        model = model.to(torch.bfloat16)
        unfinished = arguments.folder.with_name(f"{arguments.folder.name}.unfinished")
        model.save_pretrained(unfinished, max_shard_size="5GB")
        # renamed last, so that an interrupted write starts again
        unfinished.rename(arguments.folder)
    return {"GiB": bytes_of(arguments.folder) / GIB}


def _read(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds and speed of plain reading of the files."""
    seconds = reading_seconds(arguments.folder)
    return {"seconds": seconds, "GiB/s": bytes_of(arguments.folder) / GIB / seconds}


def _resident(arguments: argparse.Namespace) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    cpu = arguments.device == "cpu"
    drop_cache(arguments.folder)
    start = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.folder,
        dtype=torch.float32 if cpu else torch.bfloat16,
        device_map=arguments.device,
        experts_implementation="eager" if cpu else "grouped_mm",
    ).eval()
    if cpu:
        use_cpu_experts(model, moe_layers(model))
    loading = time.monotonic() - start
    batches = [batch(arguments.rows, arguments.length)] * arguments.batches
    _, found = _timed(arguments.device, lambda: gather(model, ForwardHook, batches))
    weights = sum(weight.nbytes for weight in model.parameters())
    return {**found, "weights GiB": weights / GIB, "loading": loading}


def _streamed(arguments: argparse.Namespace) -> dict[str, float]:
    precision = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    return _stream(arguments, precision, arguments.batches, arguments.rows, arguments.length)


def _short(arguments: argparse.Namespace) -> dict[str, float]:
    return _stream(arguments, torch.bfloat16, 1, 1, SHORT)


def _stream(
    arguments: argparse.Namespace, precision: torch.dtype, batches: int, rows: int, length: int
) -> dict[str, float]:
    given = [batch(rows, length)] * batches
    drop_cache(arguments.folder)

    def run() -> StreamedModel:
        model = StreamedModel(arguments.folder, dtype=precision, device=arguments.device)
        stream(model, ForwardHook, given, out=Path(folder))
        return model

    with tempfile.TemporaryDirectory() as folder:
        model, found = _timed(arguments.device, run)
    layer = max(sum(weight.numel() for weight in layer.parameters()) for layer in model.layers)
    return {**found, "layer GiB": layer * precision.itemsize / GIB}


def _timed(device: str, run: Callable[[], Made]) -> tuple[Made, dict[str, float]]:
    """The result of `run`, and its wall-clock seconds, CPU seconds and peak memory."""
    made, wall, used = timed(run)
    return made, {"seconds": wall, "CPU seconds": used, "peak GiB": peak(device) / GIB}


PARTS = {
    "write": _write,
    "read": _read,
    "resident": _resident,
    "streamed": _streamed,
    "short": _short,
}


if __name__ == "__main__":
    sys.exit(main())
