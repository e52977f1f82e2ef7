"""Cost of calibration with only one decoder layer in memory at a time:
`python -m benchmarks.streaming --folder FOLDER --model olmoe_7b`.

If FOLDER does not exist, a checkpoint with random weights in the layout of the hub is written into
it. Then calibration passes with all forward statistics run, each in its own process:

- resident: the whole model is loaded, then reads the batches;
- streamed: the same batches are read layer by layer (bar: at most 1.5 times the seconds of the
  resident pass without loading; or, when the disk is the limit, at least 0.8 of the speed of plain
  reading of the files);
- short: streamed in the stored precision, with so few tokens that almost all time is reading.

On CUDA, memory of the streamed pass has a bar too: the memory of one layer, plus the memory of the
resident pass without its weights, plus 1 GiB. Files are dropped from the system's cache before each
pass. On the CPU, passes are compared by CPU seconds, which other work on the machine disturbs less;
reading, and everything on CUDA, by wall-clock seconds. Exit code 1 when a bar fails.
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
from moe_lab.statistics.observe import collect_statistics
from moe_lab.statistics.streaming import stream

T = TypeVar("T")
BAR_SLOWER = 1.5
BAR_READING = 0.8
SHORT = 8
"""Number of tokens of the short pass."""


def main() -> int:
    """Run all parts, print their time and memory, compare with the bars; returns 1 when a bar
    fails."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments)))
        return 0
    print(describe(arguments.device), flush=True)
    figures = {name: _run_part(name) for name in PARTS}
    shares = [figures["read"]["seconds"] / figures["short"]["seconds"]]
    for _ in range(arguments.pairs - 1):
        read = _run_part("read")
        short = _run_part("short")
        shares.append(read["seconds"] / short["seconds"])
    spread = f"{min(shares):.2f} to {max(shares):.2f} in {len(shares)} pairs"
    print(f"  short, share of the raw read speed: {median(shares):.2f} ({spread})")
    streamed = figures["streamed"]
    resident = figures["resident"]
    unit = "CPU seconds" if arguments.device == "cpu" else "seconds"
    slowdown = streamed[unit] / resident[unit]
    share = figures["read"]["seconds"] / streamed["seconds"]
    is_fast = slowdown <= BAR_SLOWER or share >= BAR_READING
    bars = f"bar <= {BAR_SLOWER} or >= {BAR_READING}"
    print(
        f"  streamed / resident, {unit}: {slowdown:.2f}; {share:.2f} of the raw read speed, "
        f"{bars}: {_verdict(is_fast)}"
    )
    # no bar for memory: pages of mapped files count as memory of the process
    if arguments.device == "cpu":
        return int(not is_fast)
    memory_bar = streamed["layer GiB"] + 1 + resident["peak GiB"] - resident["weights GiB"]
    fits = streamed["peak GiB"] <= memory_bar
    print(
        f"  streamed, peak: {streamed['peak GiB']:.2f} GiB, bar <= {memory_bar:.2f}: "
        f"{_verdict(fits)}"
    )
    return int(not (is_fast and fits))


def _run_part(name: str) -> dict[str, float]:
    """Run a part in its own process; prints and returns its figures."""
    figures = in_own_process("streaming", "--part", name)
    listed = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
    print(f"  {name}: {listed}", flush=True)
    return figures


def _verdict(passed: bool) -> str:
    return "ok" if passed else "FAILED"


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
    """Write the checkpoint if it does not exist."""
    if not arguments.folder.exists():
        model: Any = published_model(arguments.model, arguments.layers, arguments.device)
        model = model.to(torch.bfloat16)
        unfinished = arguments.folder.with_name(f"{arguments.folder.name}.unfinished")
        model.save_pretrained(unfinished, max_shard_size="5GB")
        # renamed last, so that an interrupted write starts again
        unfinished.rename(arguments.folder)
    return {"GiB": bytes_of(arguments.folder) / GIB}


def _read(arguments: argparse.Namespace) -> dict[str, float]:
    """Read the files without a model."""
    seconds = reading_seconds(arguments.folder)
    return {"seconds": seconds, "GiB/s": bytes_of(arguments.folder) / GIB / seconds}


def _resident(arguments: argparse.Namespace) -> dict[str, float]:
    """Load the whole model, then make the calibration pass, which alone is timed."""
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
    _, figures = _timed(arguments.device, lambda: collect_statistics(model, ForwardHook, batches))
    weights = sum(weight.nbytes for weight in model.parameters())
    return {**figures, "weights GiB": weights / GIB, "loading": loading}


def _streamed(arguments: argparse.Namespace) -> dict[str, float]:
    precision = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    return _stream(arguments, precision, arguments.batches, arguments.rows, arguments.length)


def _short(arguments: argparse.Namespace) -> dict[str, float]:
    return _stream(arguments, torch.bfloat16, 1, 1, SHORT)


def _stream(
    arguments: argparse.Namespace, precision: torch.dtype, batches: int, rows: int, length: int
) -> dict[str, float]:
    """Make a streamed calibration pass over `batches` batches of `rows` rows of `length` tokens."""
    text = [batch(rows, length)] * batches
    drop_cache(arguments.folder)

    def run() -> StreamedModel:
        model = StreamedModel(arguments.folder, dtype=precision, device=arguments.device)
        stream(model, ForwardHook, text, out=Path(folder))
        return model

    with tempfile.TemporaryDirectory() as folder:
        model, figures = _timed(arguments.device, run)
    largest = max(sum(weight.numel() for weight in layer.parameters()) for layer in model.layers)
    return {**figures, "layer GiB": largest * precision.itemsize / GIB}


def _timed(device: str, run: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """(result of `run`, its figures: wall-clock seconds, CPU seconds and peak memory)."""
    result, wall, cpu = timed(run)
    return result, {"seconds": wall, "CPU seconds": cpu, "peak GiB": peak(device) / GIB}


PARTS = {
    "write": _write,
    "read": _read,
    "resident": _resident,
    "streamed": _streamed,
    "short": _short,
}
"""Name -> function that runs a part and returns its figures."""


if __name__ == "__main__":
    sys.exit(main())
