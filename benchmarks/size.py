"""Time and memory of scoring, pruning and verifying a checkpoint of published size on a small
machine.

`python -m benchmarks.size --folder FOLDER [--layers 16]` writes a checkpoint with random weights in
the layout of the hub, with the configuration of Qwen3-30B-A3B cut to this number of layers (1.16
GiB each). It scores the checkpoint by AIMER, exports half of the experts and compares the export
with the masked model. Each part runs in its own process, whose peak memory is measured. FOLDER
needs twice the size of the checkpoint and is not deleted. Exit code 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from benchmarks.measure import GIB, bytes_of, drop_cache, in_own_process, parser, reading_seconds
from benchmarks.models import QWEN3_30B, write_checkpoint
from moe_lab.pruning.export import export
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import make_plan

PEAKS = {"export": 200e6 / GIB}
"""Part -> bar of its peak memory in GiB."""
OTHER_PEAK = 8.0
"""Bar of the peak memory of other parts in GiB."""
SHARE = 0.8
"""Bar of speed, as a share of the speed of plain reading or copying."""


def main() -> int:
    """Run all parts, each in its own process, print their time and memory, compare with the bars;
    returns 1 when a bar fails."""
    options = parser("size", __doc__)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--part", choices=PARTS)
    arguments = options.parse_args()
    if arguments.part:
        start = time.monotonic()
        figures = PARTS[arguments.part](arguments)
        print(json.dumps({"seconds": time.monotonic() - start, "peak": _peak(), **figures}))
        return 0
    failed = False
    for name, part in PARTS.items():
        figures = in_own_process("size", "--part", name)
        seconds = figures.pop("seconds")
        memory = figures.pop("peak")
        bar = PEAKS.get(name, OTHER_PEAK)
        shares = [value for key, value in figures.items() if key.startswith("share")]
        passed = memory <= bar and all(share >= SHARE for share in shares)
        listed = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
        print(
            f"{part.__doc__} {seconds:.0f} s, at most {memory:.3f} GiB of memory; {listed}; bars: "
            f"{bar:.3g} GiB, shares {SHARE}: {'ok' if passed else 'FAILED'}",
            flush=True,
        )
        failed |= not passed
    return int(failed)


def _peak() -> float:
    """Peak memory of this process in GiB. It is not read from ru_maxrss, which starts at the
    parent's memory."""
    status = Path("/proc/self/status").read_text()
    [kibibytes] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(kibibytes) / 2**20


def write(arguments: argparse.Namespace) -> dict[str, float]:
    """the checkpoint is written:"""
    write_checkpoint(arguments.folder / "model", arguments.layers)
    return {"GiB": bytes_of(arguments.folder / "model") / GIB}


def score(arguments: argparse.Namespace) -> dict[str, float]:
    """AIMER scores are read from it, and a plan made:"""
    from moe_lab import criteria
    from moe_lab.allocation.problem import limits
    from moe_lab.allocation.shapes import same_share
    from moe_lab.statistics.weights import expert_weight_sums

    folder = arguments.folder / "model"
    # not measured: fills a cache below the system's, if there is one, for both measured reads
    reading_seconds(folder)
    plain_seconds = reading_seconds(folder)
    drop_cache(folder)
    start = time.monotonic()
    sums = expert_weight_sums(folder)
    seconds = time.monotonic() - start
    facts = {
        "n_experts": int(QWEN3_30B["num_experts"]),
        "top_k": int(QWEN3_30B["num_experts_per_tok"]),
        "n_group": 1,
        "topk_group": None,
    }
    layers = dict.fromkeys(range(arguments.layers), facts)
    scores = criteria.score("aimer", sums.layers, layers)
    score_lists = {layer: values.tolist() for layer, values in scores.items()}
    budgets = same_share(limits(layers), 0.5)
    plan = make_plan(score_lists, budgets, layers, provenance={"ratio": 0.5})
    plan.save(arguments.folder / "plan.json")
    return {"share of the raw read speed": plain_seconds / seconds}


def write_export(arguments: argparse.Namespace) -> dict[str, float]:
    """half of the experts are exported:"""
    folder = arguments.folder / "model"
    reading_seconds(folder)
    drop_cache(folder)
    start = time.monotonic()
    export(folder, Plan.load(arguments.folder / "plan.json"), arguments.folder / "export")
    os.sync()
    seconds = time.monotonic() - start
    drop_cache(arguments.folder / "export")
    start = time.monotonic()
    for file in sorted((arguments.folder / "export").glob("*.safetensors")):
        shutil.copyfile(file, arguments.folder / "copy")
    os.sync()
    copying = time.monotonic() - start
    (arguments.folder / "copy").unlink()
    return {
        "GiB": bytes_of(arguments.folder / "export") / GIB,
        "share of the speed of cp": copying / seconds,
    }


def compare(arguments: argparse.Namespace) -> dict[str, float]:
    """the export is compared with the masked model, layer by layer:"""
    from moe_lab.pruning.export.verify import verify

    plan = Plan.load(arguments.folder / "plan.json")
    return {"difference": verify(arguments.folder / "model", plan, arguments.folder / "export")}


PARTS = {"write": write, "score": score, "export": write_export, "verify": compare}


if __name__ == "__main__":
    sys.exit(main())
