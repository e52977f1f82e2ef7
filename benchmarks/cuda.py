"""Measure all rows about CUDA in docs/performance.md, most important first:
`python -m benchmarks.cuda --out FOLDER`.

Each row is a separate program, whose output is kept in FOLDER. FOLDER/table.md has all results so
far, with the device and the versions. A row starts only if `--minutes` leaves its estimated time;
running the same command again continues with the missing rows. Needed are torch, transformers,
pytest and this repository, and for the last row the packages that tests/ imports. `--dry-run` runs
every row at a small size on the CPU, which takes minutes; its bars do not count. Exit code 1 when a
bar failed, 2 when rows are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import describe, parser

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(r": (ok|FAILED|absent)$|\d (passed|failed|skipped)\b.* in ")
"""Pattern of output lines to keep: a figure with its verdict (or absent, if it could not be
measured), or the number of passed tests."""

UNCOUNTED = re.compile(r": FAILED$")
"""Pattern of a failed bar, which does not count in a dry run: bars are for a GPU and full size."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    command: str
    """Arguments of python. {scratch} stands for a folder with room for a checkpoint."""
    small: str
    """Further arguments in a dry run."""
    minutes: float
    """Estimated time on an H100, including loading; not measured yet."""

    @property
    def stem(self) -> str:
        """Stem of the names of the row's files."""
        return self.name.replace(", ", "-").replace(" ", "_")


SMALL_MODEL = "--layers 1 --vocabulary 1024 --rows 1 --length 8 --device cpu"
ROWS = [
    Row(
        "passes",
        "-m benchmarks.passes --device cuda",
        "--device cpu --model olmoe_7b --layers 1 --tokens 64 --pairs 1",
        3,
    ),
    Row(
        "statistics, 64 experts",
        "-m benchmarks.statistics --device cuda --model olmoe_7b --parts forward every",
        f"{SMALL_MODEL} --every-rows 1 --pairs 1 --every-pairs 1",
        2,
    ),
    Row(
        "gradients",
        "-m benchmarks.statistics --device cuda --model olmoe_7b --parts gradients",
        f"{SMALL_MODEL} --pairs 1",
        2,
    ),
    Row("rounding", "-m benchmarks.rounding --device cuda", "--device cpu", 1),
    Row("weights", "-m benchmarks.weights --device cuda", "--device cpu --layers 1 --pairs 1", 2),
    Row("memory", "-m benchmarks.memory --device cuda --model olmoe_7b", SMALL_MODEL, 3),
    Row(
        "statistics, 128 experts",
        "-m benchmarks.statistics --device cuda --model qwen3_30b --parts forward every",
        f"{SMALL_MODEL} --every-rows 1 --pairs 1 --every-pairs 1",
        3,
    ),
    Row(
        "streaming",
        (
            "-m benchmarks.streaming --device cuda --model olmoe_7b --folder {scratch}/olmoe_7b "
            "--rows 8 --length 2048"
        ),
        "--layers 1 --batches 1 --rows 1 --length 8 --pairs 1 --device cpu",
        6,
    ),
    Row(
        "similarity",
        "-m benchmarks.statistics --device cuda --model olmoe_7b --parts similarity",
        f"{SMALL_MODEL} --every-rows 1 --every-pairs 1",
        2,
    ),
    Row(
        "masks", "-m benchmarks.masks --device cuda --model olmoe_7b", f"{SMALL_MODEL} --pairs 1", 2
    ),
    Row(
        "distillation",
        "-m benchmarks.distillation --device cuda --model olmoe_7b",
        f"{SMALL_MODEL} --pairs 1",
        4,
    ),
    Row("tests", "-m pytest -m cuda tests/models tests/identities", "", 3),
]


def main() -> int:
    """Run the missing rows and write the table; returns the exit code."""
    arguments = _arguments()
    end = time.monotonic() + 60 * arguments.minutes
    for folder in (arguments.out, arguments.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        remaining = end - time.monotonic()
        if result(row, arguments) is not None:
            print(f"{row.name}: measured before", flush=True)
        elif remaining < 60 * row.minutes:
            print(f"{row.name}: not begun, as it may take {row.minutes:g} minutes", flush=True)
        else:
            run(row, arguments, remaining)
        (arguments.out / "table.md").write_text(table(arguments), encoding="utf-8")
    results = [result(row, arguments) for row in ROWS]
    if None in results:
        return 2
    return 0 if arguments.dry_run else max(measured["code"] for measured in results if measured)


def _arguments() -> argparse.Namespace:
    options = parser("cuda", __doc__)
    options.add_argument("--minutes", type=float, default=9, help="time limit of all rows together")
    options.add_argument(
        "--out", type=Path, required=True, help="folder of the outputs and of table.md"
    )
    options.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()) / "moe_lab-cuda"
    )
    options.add_argument("--dry-run", action="store_true", help="every row small and on the CPU")
    return options.parse_args()


def command(row: Row, arguments: argparse.Namespace) -> list[str]:
    """Arguments of python for a row."""
    parts = [part.format(scratch=arguments.scratch) for part in row.command.split()]
    return parts + row.small.split() if arguments.dry_run else parts


def result(row: Row, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Figures, exit code, seconds and conditions of a row that was measured with the same command;
    None for any other row."""
    file = arguments.out / f"{row.stem}.json"
    if not file.exists():
        return None
    measured: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return measured if measured["command"] == command(row, arguments) else None


def run(row: Row, arguments: argparse.Namespace, limit: float) -> None:
    """Run a row for at most `limit` seconds, and write its output and its result. A row that is
    stopped or crashes has output, but no result."""
    parts = command(row, arguments)
    print(f"{row.name}: python {' '.join(parts)}", flush=True)
    log = arguments.out / f"{row.stem}.txt"
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *parts],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            start_new_session=True,  # so that killpg also ends the programs that a row starts
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print(f"    stopped after {limit:.0f} seconds: {log} has what it printed", flush=True)
            return
    figures = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        text = UNCOUNTED.sub(": does not count", line) if arguments.dry_run else line
        print(textwrap.indent(text, "    "), flush=True)
        if FIGURE.search(line):
            figures.append(text.strip())
    if not figures:
        print(f"    broke with exit code {code}: {log} has what it printed", flush=True)
        return
    measured = {
        "command": parts,
        "figures": figures,
        "code": code,
        "seconds": round(time.monotonic() - start),
        "conditions": describe("cpu" if arguments.dry_run else "cuda"),
    }
    (arguments.out / f"{row.stem}.json").write_text(
        json.dumps(measured, indent=1), encoding="utf-8"
    )


def table(arguments: argparse.Namespace) -> str:
    """Text of table.md: the conditions, and a Markdown table of all results so far."""
    results = {row: result(row, arguments) for row in ROWS}
    conditions = sorted({measured["conditions"] for measured in results.values() if measured})
    lines = [*conditions, "", "| what | command | measured |", "|---|---|---|"]
    for row, measured in results.items():
        figures = "missing"
        if measured:
            figures = "; ".join(measured["figures"]) + f" ({measured['seconds']} s)"
        lines.append(f"| {row.name} | `python {row.command}` | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
