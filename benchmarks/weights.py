"""Cost of scoring by weights alone: `python -m benchmarks.weights [--device cuda]`.

- Streamed: a checkpoint with random weights and Qwen3-30B-A3B's configuration, cut to `--layers`
  layers (1.16 GiB each), is scored from its files by the CPU or a CUDA device, in pairs with plain
  reading of the files (bar: at least 0.8 of the bytes per second). Files are dropped from the
  system's cache before each run.
- Resident, with `--device cuda`: the sums of all experts of OLMoE-1B-7B and Qwen3-30B-A3B are
  computed in bfloat16 in the device's memory (bars: 20 and 60 ms).

Exit code 1 when a bar fails.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measure import GIB, describe, drop_cache, parser, reading_seconds
from benchmarks.models import write_checkpoint
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.statistics.weights import expert_weight_sums, rows_absolute_and_square

SHARE = 0.8
"""Bar of the streamed speed, as a share of the speed of plain reading."""
RESIDENT = {
    "OLMoE-1B-7B": (16, (64, 2 * 1024, 2048), (64, 2048, 1024), 20.0),
    "Qwen3-30B-A3B": (48, (128, 2 * 768, 2048), (128, 2048, 768), 60.0),
}
"""Model -> MoE layers, shapes of gate_up_proj and down_proj of a layer, limit in milliseconds for
the sums."""


def main() -> int:
    """Measure, print, compare with the bars; returns 1 when a bar fails."""
    options = parser("weights", __doc__)
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument(
        "--layers", type=int, default=2, help="layers of the checkpoint that is streamed"
    )
    options.add_argument(
        "--folder", type=Path, help="where it is, or is written and left; else it is temporary"
    )
    options.add_argument("--pairs", type=int, default=3)
    arguments = options.parse_args()
    print(describe(arguments.device), flush=True)
    failed = False
    if arguments.device != "cpu":
        for name, (layers, gate_up, down, bar) in RESIDENT.items():
            failed |= _resident_fails(name, layers, (gate_up, down), bar)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "model"
        if not folder.exists():
            write_checkpoint(folder, arguments.layers)
        return int(failed | _streamed_fails(folder, arguments.device, arguments.pairs))


def _streamed_fails(folder: Path, device: str, pairs: int) -> bool:
    """Print the speed of scoring as a share of the speed of reading, the median over pairs; True
    when the bar fails."""
    if device != "cpu":  # the first use of a device is slow, so it is not measured
        rows_absolute_and_square(torch.ones(1, 1, 8, device=device))
    sizes = {name: entry.size for name, entry in open_checkpoint(folder).tensors.items()}
    scored = sum(size for name, size in sizes.items() if ".experts." in name)
    # not measured: fills a cache below the system's, if there is one, for both measured reads
    reading_seconds(folder)
    shares = []
    rates = []
    for _ in range(pairs):
        reading_speed = sum(sizes.values()) / reading_seconds(folder)
        drop_cache(folder)
        wall = time.monotonic()
        cpu = time.process_time()
        expert_weight_sums(folder, device=device)
        shares.append(scored / (time.monotonic() - wall) / reading_speed)
        rates.append(scored / (time.process_time() - cpu) / GIB)
    share = statistics.median(shares)
    passed = share >= SHARE
    print(
        f"streamed, {device}, {scored / GIB:.1f} GiB of experts: {share:.2f} of the speed of "
        f"reading, {statistics.median(rates):.1f} GiB in a second of processor time; "
        f"bar >= {SHARE}: {'ok' if passed else 'FAILED'}",
        flush=True,
    )
    return not passed


def _resident_fails(
    name: str, layers: int, shapes: tuple[tuple[int, ...], ...], bar: float
) -> bool:
    """Print the milliseconds of the sums of all experts, the median over runs; True when the bar
    fails.

    shapes: of gate_up_proj and down_proj of a layer."""
    torch.cuda.empty_cache()  # the memory of the previous model
    needed = 2 * layers * sum(torch.Size(shape).numel() for shape in shapes)
    free = torch.cuda.mem_get_info()[0]
    if needed + GIB > free:
        print(
            f"resident, {name}: its experts take {needed / GIB:.0f} GiB, {free / GIB:.0f} are "
            "free: not measured"
        )
        return False
    weights = [
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        for _ in range(layers)
        for shape in shapes
    ]
    times = []
    for _ in range(12):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        sums = [torch.stack(rows_absolute_and_square(tensor)) for tensor in weights]
        stacked = torch.stack(sums).cpu()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    assert bool(stacked.isfinite().all())
    median: float = statistics.median(times[2:])  # the first runs are slower
    print(
        f"resident, {name}, {needed / GIB:.1f} GiB: {median:.1f} ms, "
        f"{2 * needed / 1e9 / median:.2f} TB/s; bar <= {bar:.0f} ms: "
        f"{'ok' if median <= bar else 'FAILED'}",
        flush=True,
    )
    return median > bar


if __name__ == "__main__":
    sys.exit(main())
