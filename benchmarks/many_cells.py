"""A store of 100,000 cells: its inodes, the start of a study with nothing left to do, `gc` and
`status`.

    python -m benchmarks.many_cells --store FOLDER

If the folder does not exist, it is filled with steps that have their real ids and sizes, and random
content: 12 GB for 100,000 cells, 1.2 GB with --seeds 10. Bars are CPU seconds on the machine of
docs/performance.md; they are scaled by the time that a fixed piece of Python takes on this machine.
Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks.measure import GIB, in_own_process, misses, parser, peak, timed
from moe_lab.compose import compose, hydra_context
from moe_lab.config import Config
from moe_lab.grid import Request
from moe_lab.json_files import sealed, write_sealed
from moe_lab.packs import PackedStep
from moe_lab.result_files import ID_DIGITS, RECORD
from moe_lab.study import garbage
from moe_lab.study import run as running
from moe_lab.study.commands import find
from moe_lab.study.graph import Graph, build
from moe_lab.study.provenance import STEP, provenance
from moe_lab.study.record import Study, record_of
from moe_lab.study.runs import create_run
from moe_lab.study.status import COMMANDS
from moe_lab.study.step import Step, identity_document
from moe_lab.study.store import Store

TEN = "ten_thousand"
ALL = "all_cells"
SEEDS = {TEN: 10}
"""Study -> its number of seeds, if it has fewer than the store; a seed is 1,020 cells."""
BENCHMARKS = sorted(
    file.stem for file in (Path(__file__).parents[1] / "conf/benchmark").glob("pocket_*.yaml")
)
OVERRIDES = [
    *("launcher=inline", "report=false", "allow_code_execution=true", "model=pocket_olmoe"),
    f"suite.benchmarks=[{','.join(BENCHMARKS)}]",
    "criterion=frequency,seer,ean,reap,mone,man,msan,gate_ean,gate_energy,mone_freq",
    "calibration=pocket_general,pocket_code,pocket_math",
    "gate=model,renormalized",
    f"ratio={','.join(str(number / 100) for number in range(1, 18))}",
]
SIZES = {
    "model": {"facts.json": 620},
    "statistics": {
        "statistics.safetensors": 137_312,
        "calibration.json": 1948,
        "experts.parquet": 9588,
    },
    "scores": {"scores.parquet": 1443},
    "plan": {"plan.json": 1435},
    "cost": {"cost.json": 492},
    "generate": {"answers.jsonl": 13_790},
    "contamination": {"contamination.json": 826},
    "evaluate": {"result.json": 769, "samples.parquet": 5602},
    "grade": {"result.json": 1264, "samples.parquet": 8563},
}
"""Kind of step -> file -> its bytes in the shipped study."""
PIECE = 1000
"""Number of random bytes that are repeated in a file."""
INODES_BAR = 1.0
"""Most inodes per cell."""
OPERATIONS_BAR = 1000.0
"""Most system calls on files of the store at a start."""
MEMORY_BAR = 2.0
"""Most memory in GiB."""
SECONDS_BARS = {f"start {TEN}": 15.0, f"start {ALL}": 60.0, "gc": 60.0, f"status {ALL}": 60.0}
"""Part -> most CPU seconds."""


def main() -> int:
    """Fill the store, run each part in its own process, compare with the bars; returns 1 when a bar
    is missed."""
    options = parser("many_cells", __doc__)
    options.add_argument("--store", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=98, help="of 1,020 cells each")
    options.add_argument("--part", help="run only this part, and print its figures as JSON")
    arguments = options.parse_args()
    if arguments.part:
        name, *values = arguments.part.split()
        print(json.dumps(PARTS[name](arguments, *values)))
        return 0
    if not arguments.store.exists():
        for first in range(0, arguments.seeds, 10):
            in_own_process("many_cells", "--part", f"fill {first}")
        for study in (TEN, ALL):
            in_own_process("many_cells", "--part", f"record {study}")
    inodes = sum(1 for _ in arguments.store.rglob("*"))
    cells = 1020 * arguments.seeds
    failed = misses(
        "inodes a cell", inodes / cells, "<=", INODES_BAR, f" ({inodes} of {cells:,} cells)"
    )
    # the speed of a shared machine varies: the faster of the speeds before and after a part counts
    slowness_before = _slowness()
    for part, bar in SECONDS_BARS.items():
        figures = in_own_process("many_cells", "--part", part)
        slowness_after = _slowness()
        scaled_bar = bar * min(slowness_before, slowness_after)
        slowness_before = slowness_after
        note = "".join(f", {key} {value:.2f}" for key, value in figures.items() if key != "seconds")
        failed |= misses(f"{part}, seconds", figures["seconds"], "<=", scaled_bar, note)
        if not part.startswith("start"):
            failed |= misses(f"{part}, GiB of memory", figures["peak"], "<=", MEMORY_BAR)
    operations = _operations(arguments.store)
    return int(failed | misses(f"start {TEN}, file operations", operations, "<=", OPERATIONS_BAR))


def _slowness() -> float:
    """Seconds of a fixed piece of Python, divided by its seconds on the machine of the bars; at
    least 1."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from processes import YARDSTICK_SECONDS, yardstick

    slowness: float = max(1.0, yardstick() / YARDSTICK_SECONDS)
    print(f"  this machine is {slowness:.2f} times as slow as that of the bars", flush=True)
    return slowness


def _composed(
    arguments: argparse.Namespace, study: str, seeds: Iterable[int]
) -> tuple[Config, list[Request]]:
    """Config and requests of a study with these seeds."""
    overrides = [*OVERRIDES, f"seed={','.join(map(str, seeds))}", f"study={study}"]
    with hydra_context():
        config, requests = compose(overrides)
    return replace(config, store=str(arguments.store)), requests


def _study(arguments: argparse.Namespace, study: str) -> tuple[Config, list[Request]]:
    """Config and requests of a study with all its seeds."""
    seeds = min(SEEDS.get(study, arguments.seeds), arguments.seeds)
    return _composed(arguments, study, range(seeds))


def fill(arguments: argparse.Namespace, first: str) -> dict[str, float]:
    """Add the steps of ten seeds, from seed `first` on, to the store: small steps to a pack, others
    as folders."""
    store = Store(arguments.store).create()
    noise = Random(0).randbytes(1 << 20)
    seeds = range(int(first), min(int(first) + 10, arguments.seeds))
    steps = build(*_composed(arguments, ALL, seeds)).steps
    step_provenance = provenance(time.time())
    small = (step for step in steps if step.small)
    store.packs.publish(store.packs.add(_packed(step, step_provenance, noise) for step in small))
    for step in steps:
        if not step.small:
            _publish(store, step, noise)
    return {"steps": len(steps)}


def _files(step: Step, noise: bytes) -> dict[str, bytes]:
    """File -> random content, for the files of a step."""
    start = int(step.id[:4], 16)
    piece = noise[start : start + PIECE]
    return {name: (piece * (1 + size // PIECE))[:size] for name, size in SIZES[step.kind].items()}


def _packed(step: Step, step_provenance: dict[str, Any], noise: bytes) -> PackedStep:
    """A small step with random content, to be added to a pack."""
    files = _files(step, noise)
    hashes = {
        name: {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        for name, content in files.items()
    }
    document = {
        "provenance": step_provenance,
        **identity_document(step),
        "files": hashes,
        "time": int(time.time()) // 2 * 2,
    }
    inputs = [needed.id[:ID_DIGITS] for needed in step.inputs.values()]
    return PackedStep(
        step.id[:ID_DIGITS],
        step.folder,
        inputs,
        {**files, STEP: sealed(json.dumps(document)).encode()},
    )


def _publish(store: Store, step: Step, noise: bytes) -> None:
    with store.claim(step) as scratch:
        assert scratch is not None
        for name, content in _files(step, noise).items():
            (scratch / name).write_bytes(content)


def record(arguments: argparse.Namespace, study: str) -> dict[str, float]:
    """Write run.json and record.json of a study."""
    config, requests = _study(arguments, study)
    graph = build(config, requests)
    store = Store(arguments.store).create()
    with create_run(store, study, graph.steps) as run:
        write_sealed(run.folder / RECORD, record_of(Study(config, graph, store), run, {}))
    return {}


def start(arguments: argparse.Namespace, study: str) -> dict[str, float]:
    """Figures of the start of a study whose steps are all done; `graph`: the CPU seconds in which
    its graph is built."""
    graph_seconds = 0.0

    def timed_build(config: Config, requests: list[Request]) -> Graph:
        nonlocal graph_seconds
        begin_seconds = time.process_time()
        graph = build(config, requests)
        assert graph.steps
        graph_seconds = time.process_time() - begin_seconds
        return graph

    with patch.object(running, "build", timed_build):
        figures = _measured(lambda: running.run(*_study(arguments, study)))
    return figures | {"graph": graph_seconds}


def gc(arguments: argparse.Namespace) -> dict[str, float]:
    """Figures of the command `gc`, which finds nothing to delete."""
    return _measured(lambda: garbage.gc(Store(arguments.store)))


def status(arguments: argparse.Namespace, study: str) -> dict[str, float]:
    """Figures of the command `status` for a study."""
    return _measured(lambda: COMMANDS["status"](*find(Store(arguments.store), study)))


def _measured(work: Callable[[], object]) -> dict[str, float]:
    """CPU seconds, wall-clock seconds (`clock`) and peak GiB of `work`, whose output goes to
    standard error."""
    with redirect_stdout(sys.stderr):
        _, wall, cpu = timed(work)
    return {"seconds": cpu, "clock": wall, "peak": peak("cpu") / GIB}


def _operations(store: Path) -> int:
    """System calls on files of the store at the start of a study with nothing left to do; 0 without
    strace."""
    if not shutil.which("strace"):
        return 0
    trace = store.with_name(f"{store.name}.trace")
    strace = ["strace", "-f", "-y", "-e", "trace=file,desc", "-o", str(trace)]
    benchmark = [sys.executable, "-m", "benchmarks.many_cells", *sys.argv[1:]]
    subprocess.run(
        [*strace, *benchmark, "--part", f"start {TEN}"], check=True, stdout=subprocess.DEVNULL
    )
    with trace.open(errors="replace") as lines:
        count = sum(str(store.absolute()) in line and "resumed" not in line for line in lines)
    trace.unlink()
    return count


PARTS: dict[str, Callable[..., dict[str, float]]] = {
    part.__name__: part for part in (fill, record, start, gc, status)
}

if __name__ == "__main__":
    sys.exit(main())
