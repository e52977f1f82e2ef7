"""A store of 100,000 cells: its inodes, the start of a study with nothing left to do, `gc` and
`status`.

    python -m benchmarks.many_cells --store FOLDER

Fills the folder, unless it is a store, with steps under their real ids and sizes, and with content
that is made up: 12 GB for 100,000 cells, 1.2 GB with --seeds 10. The bars are seconds of the
processor of the machine that docs/performance.md is of: where a fixed piece of Python takes longer,
so may they. Exit code 1 when one is missed.
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
from moe_lab.results import DIGITS, RECORD
from moe_lab.study import garbage
from moe_lab.study import run as running
from moe_lab.study.__main__ import find
from moe_lab.study.graph import Graph, build
from moe_lab.study.integrity import STEP
from moe_lab.study.provenance import provenance
from moe_lab.study.record import Study, record_of
from moe_lab.study.runs import begin
from moe_lab.study.status import COMMANDS
from moe_lab.study.step import Step, identity_document
from moe_lab.study.store import Store

TEN = "ten_thousand"
ALL = "all_cells"
SEEDS = {TEN: 10}
"""Studies of the store, and how many of its seeds they have; each seed is 1,020 cells."""
BENCHMARKS = sorted(
    file.stem for file in (Path(__file__).parents[1] / "conf/benchmark").glob("pocket_*.yaml")
)
WORDS = [
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
"""Kind -> bytes of its files in the shipped study."""
PIECE = 1000
"""Bytes of noise that are repeated in a file."""
INODES_BAR = 1.0
OPERATIONS_BAR = 1000.0
MEMORY_BAR = 2.0
SECONDS_BARS = {f"start {TEN}": 15.0, f"start {ALL}": 60.0, "gc": 60.0, f"status {ALL}": 60.0}
"""Part -> its most seconds."""


def main() -> int:
    """Fill the store, run each part in a process of its own, compare with the bars."""
    options = parser("many_cells", __doc__)
    options.add_argument("--store", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=98, help="of 1,020 cells each")
    options.add_argument("--part", help="only this one; its figures as JSON")
    words = options.parse_args()
    if words.part:
        name, *of = words.part.split()
        print(json.dumps(PARTS[name](words, *of)))
        return 0
    if not words.store.exists():
        for first in range(0, words.seeds, 10):
            in_own_process("many_cells", "--part", f"fill {first}")
        for study in (TEN, ALL):
            in_own_process("many_cells", "--part", f"record {study}")
    inodes = sum(1 for _ in words.store.rglob("*"))
    cells = 1020 * words.seeds
    failed = misses(
        "inodes a cell", inodes / cells, "<=", INODES_BAR, f" ({inodes} of {cells:,} cells)"
    )
    before = _slowness()
    for part, bar in SECONDS_BARS.items():
        took = in_own_process("many_cells", "--part", part)
        after = _slowness()
        slowness = min(before, after)
        before = after
        note = "".join(f", {key} {value:.2f}" for key, value in took.items() if key != "seconds")
        failed |= misses(f"{part}, seconds", took["seconds"], "<=", bar * slowness, note)
        if not part.startswith("start"):
            failed |= misses(f"{part}, GiB of memory", took["peak"], "<=", MEMORY_BAR)
    operations = _operations(words.store)
    return int(failed | misses(f"start {TEN}, file operations", operations, "<=", OPERATIONS_BAR))


def _slowness() -> float:
    """How much slower this machine is now than that of the bars. Machines that are shared change: a
    part may take as much longer as the lesser of what is measured before it and after it."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from processes import YARDSTICK_SECONDS, yardstick

    slowness: float = max(1.0, yardstick() / YARDSTICK_SECONDS)
    print(f"  this machine is {slowness:.2f} times as slow as that of the bars", flush=True)
    return slowness


def _asked(
    words: argparse.Namespace, study: str, seeds: Iterable[int]
) -> tuple[Config, list[Request]]:
    with hydra_context():
        config, requests = compose([*WORDS, f"seed={','.join(map(str, seeds))}", f"study={study}"])
    return replace(config, store=str(words.store)), requests


def _study(words: argparse.Namespace, study: str) -> tuple[Config, list[Request]]:
    return _asked(words, study, range(min(SEEDS.get(study, words.seeds), words.seeds)))


def fill(words: argparse.Namespace, first: str) -> dict[str, float]:
    """Put the steps of ten seeds into the store: small ones into a pack, others into folders."""
    store = Store(words.store).create()
    noise = Random(0).randbytes(1 << 20)
    seeds = range(int(first), min(int(first) + 10, words.seeds))
    steps = build(*_asked(words, ALL, seeds)).steps
    about = provenance(time.time())
    small = (step for step in steps if step.small)
    store.packs.publish(store.packs.add(_content(step, about, noise) for step in small))
    for step in steps:
        if not step.small:
            _publish(store, step, noise)
    return {"steps": len(steps)}


def _files(step: Step, noise: bytes) -> dict[str, bytes]:
    start = int(step.id[:4], 16)
    piece = noise[start : start + PIECE]
    return {name: (piece * (1 + size // PIECE))[:size] for name, size in SIZES[step.kind].items()}


def _content(step: Step, about: dict[str, Any], noise: bytes) -> PackedStep:
    files = _files(step, noise)
    hashes = {
        name: {"bytes": len(text), "sha256": sha256(text).hexdigest()}
        for name, text in files.items()
    }
    document = {
        "provenance": about,
        **identity_document(step),
        "files": hashes,
        "time": int(time.time()) // 2 * 2,
    }
    inputs = [needed.id[:DIGITS] for needed in step.inputs.values()]
    return PackedStep(
        step.id[:DIGITS],
        step.folder,
        inputs,
        {**files, STEP: sealed(json.dumps(document)).encode()},
    )


def _publish(store: Store, step: Step, noise: bytes) -> None:
    with store.claim(step) as scratch:
        assert scratch is not None
        for name, content in _files(step, noise).items():
            (scratch / name).write_bytes(content)


def record(words: argparse.Namespace, study: str) -> dict[str, float]:
    """Write run.json and record.json of a study."""
    config, requests = _study(words, study)
    graph = build(config, requests)
    store = Store(words.store).create()
    with begin(store, study, graph.steps) as begun:
        write_sealed(begun.folder / RECORD, record_of(Study(config, graph, store), begun, {}))
    return {}


def start(words: argparse.Namespace, study: str) -> dict[str, float]:
    """A real start that finds all done; `graph`: the seconds of it in which its steps are made."""
    graph = 0.0

    def timed_build(*asked: Any) -> Graph:
        nonlocal graph
        begun = time.process_time()
        made = build(*asked)
        assert made.steps
        graph = time.process_time() - begun
        return made

    with patch.object(running, "build", timed_build):
        return _measured(lambda: running.run(*_study(words, study))) | {"graph": graph}


def gc(words: argparse.Namespace) -> dict[str, float]:
    """What nothing refers to."""
    return _measured(lambda: garbage.gc(Store(words.store)))


def status(words: argparse.Namespace, study: str) -> dict[str, float]:
    """The state of a study."""
    return _measured(lambda: COMMANDS["status"](*find(Store(words.store), study)))


def _measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds and GiB of work; what it prints goes to standard error."""
    with redirect_stdout(sys.stderr):
        _, clock, seconds = timed(work)
    return {"seconds": seconds, "clock": clock, "peak": peak("cpu") / GIB}


def _operations(store: Path) -> int:
    """System calls on files of the store at the start of a study with nothing left to do; 0 without
    strace."""
    if not shutil.which("strace"):
        return 0
    trace = store.with_name(f"{store.name}.trace")
    traced = ["strace", "-f", "-y", "-e", "trace=file,desc", "-o", str(trace)]
    subprocess.run(
        [
            *traced,
            sys.executable,
            "-m",
            "benchmarks.many_cells",
            *sys.argv[1:],
            "--part",
            f"start {TEN}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
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
