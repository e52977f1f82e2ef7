"""What evaluating many plans together saves: `python -m benchmarks.many_plans`.

1. 15 plans of the shipped model and the model itself are evaluated on the 16 shipped benchmarks by one process, with
   steps that share batches and one plan at a time, in stores of their own. Compared are the seconds of the steps on
   benchmarks that generate text, with and without those that grade it, and on benchmarks of likelihoods; every verdict;
   and the peak memory of the process. Ratios are medians over rounds, in which both ways run one after the other.
2. Programs graded by the process that a worker keeps and by one that is started for each step. They are the canonical
   solutions of HumanEval+ with `--data FOLDER`, where HumanEvalPlus.jsonl.gz is, or else programs for the shipped code
   benchmarks.
3. The main job in a new store, and its report.

With `--before FOLDER`, what runs one plan at a time and what is started for each step is the version checked out there.
Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from benchmarks import analysis, grading
from benchmarks.measure import GIB, median_misses, misses, parser, ratios, timed
from moe_lab.start import command

HERE = Path(__file__).parents[1]
CRITERIA = ("frequency", "reap", "ean", "aimer", "random")
RATIOS = (0.125, 0.25, 0.5)
MAIN_JOB = "task_agnostic"
GENERATION_BAR, LIKELIHOOD_BAR, MEMORY_BAR = 0.35, 0.7, 1.5
MAIN_JOB_BAR, REPORT_BAR = 120.0, 5.0
"""Seconds of the main job and of its report."""
TOGETHER = "from moe_lab.__main__ import main; main()"
ALONE = f"from moe_lab.study import schedule; schedule.MOST_TOGETHER = 1; {TOGETHER}"


def main() -> int:
    """Measure, print, compare with the bars."""
    arguments = _arguments()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "plans" in arguments.parts:
            failed |= _plans(root, arguments)
        if "grading" in arguments.parts:
            failed |= grading.kept_misses(arguments.data, arguments.before, str(root / "expected"))
        if "main_job" in arguments.parts:
            failed |= _main_job(root / "main_job")
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("many_plans", __doc__)
    parts = ["plans", "grading", "main_job"]
    options.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options.add_argument("--limit", type=int, default=40, help="items of each benchmark, as in the main job")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--data", type=Path, help="folder with HumanEvalPlus.jsonl.gz, for grading")
    grading.add_before(options)
    return options.parse_args()


# 1. Plans together and alone.


def _plans(root: Path, arguments: argparse.Namespace) -> bool:
    seconds: dict[str, dict[str, list[float]]] = {"together": {}, "alone": {}}
    memory: dict[str, list[float]] = {"together": [], "alone": []}
    differing = compared = 0
    for number in range(arguments.rounds):
        stores = {way: root / f"{way}{number}" for way in seconds}
        for way, store in stores.items():
            program, checkout = (TOGETHER, HERE) if way == "together" else (ALONE, arguments.before)
            _evaluate(store, program, arguments.limit, checkout)
            steps = [json.loads(file.read_text()) for file in _provenances(store)]
            memory[way].append(max(step["peak_memory_bytes"] for step in steps) / GIB)
            for kind, total in _seconds(store).items():
                seconds[way].setdefault(kind, []).append(total)
        wrong, total = _differing(*stores.values())
        differing, compared = differing + wrong, compared + total
    print(f"{len(CRITERIA) * len(RATIOS)} plans and the model itself, {arguments.limit} items of each benchmark")
    together, alone = seconds["together"], seconds["alone"]
    for kind in together:
        medians = statistics.median(together[kind]), statistics.median(alone[kind])
        print(f"  {kind}: {medians[0]:.1f} s together, {medians[1]:.1f} s one at a time")
    failed = misses(f"verdicts that differ, of {compared:,}", differing, "<=", 0)
    for kind, bar in (("generation", GENERATION_BAR), ("likelihoods", LIKELIHOOD_BAR)):
        failed |= median_misses(f"{kind}, together / alone", ratios(together[kind], alone[kind]), "<=", bar)
    return failed | median_misses("peak memory", ratios(memory["together"], memory["alone"]), "<=", MEMORY_BAR)


def _evaluate(store: Path, program: str, limit: int, checkout: Path) -> None:
    """Run the study in a new store, with one worker process of the version in `checkout`."""
    settings = [
        "model=pocket_olmoe",
        f"grid.criterion=[{','.join(CRITERIA)}]",
        f"grid.ratio=[{','.join(map(str, RATIOS))}]",
        "suite=pocket16_brief",
        f"suite.limit={limit}",
        "allow_code_execution=true",
        "launcher.processes=1",
        "report=false",
        f"store={store}",
    ]
    subprocess.run([sys.executable, "-c", program, *settings], check=True, stdout=subprocess.DEVNULL, cwd=checkout)


def _provenances(store: Path) -> list[Path]:
    return [file for kind in ("generate", "evaluate") for file in sorted(store.glob(f"{kind}/*/provenance.json"))]


def _seconds(store: Path) -> Counter[str]:
    """Seconds of the steps on benchmarks that generate text (their grading also apart), and on the others."""
    seconds: Counter[str] = Counter()
    for file in store.glob("*/*/provenance.json"):
        step: dict[str, Any] = json.loads((file.parent / "step.json").read_text())
        if step["kind"] not in ("generate", "evaluate", "grade"):
            continue
        spent = json.loads(file.read_text())["seconds"]
        generates = step["kind"] != "evaluate" or step["settings"]["benchmark"].get("max_new_tokens")
        seconds["generation" if generates else "likelihoods"] += spent
        if step["kind"] == "grade":
            seconds["grading, which generation includes"] += spent
    return seconds


def _differing(store: Path, other: Path) -> tuple[int, int]:
    """How many verdicts differ between the same steps of two stores, and how many there are."""
    differing = compared = 0
    for file in store.glob("*/*/samples.parquet"):
        verdicts, same = (
            parquet.read_table(path, columns=["item", "outcome"]).to_pylist()
            for path in (file, other / file.relative_to(store))
        )
        compared += len(verdicts)
        differing += sum(one != two for one, two in zip(verdicts, same, strict=True))
    return differing, compared


# 3. The main job.


def _main_job(store: Path) -> bool:
    settings = [f"+experiment={MAIN_JOB}", f"store={store}"]
    _, whole, _ = timed(lambda: subprocess.run([*command("moe_lab"), *settings], check=True, stdout=subprocess.DEVNULL))
    failed = misses("main job with its report, seconds", whole, "<=", MAIN_JOB_BAR)
    clock, _ = analysis.report_seconds(store, MAIN_JOB, store.parent / "page")
    return failed | misses("its report again, seconds", clock, "<=", REPORT_BAR)


if __name__ == "__main__":
    sys.exit(main())
