"""Time of the analysis: all tables, figures and the page of a study of 200 cells, and loading
10,000 results.

    python -m benchmarks.analysis

Both stores are synthetic, in the layout of a real run. Times are wall-clock and CPU seconds of one
process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import DEVNULL

from benchmarks.measure import timed
from moe_lab.analysis import report
from moe_lab.analysis.load.study import load
from moe_lab.analysis.registry import Results
from moe_lab.start import command

REBUILD, LOAD = 60, 5
"""Bars in CPU seconds: of making a report, and of loading results."""
CRITERIA = ("frequency", "reap", "man", "ean")
"""Criteria of the store with 10,000 results."""


def report_seconds(store: Path, study: str, out: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds of `moe-lab report report` on a finished study, including the
    start of the process."""
    arguments = [f"store={store}", f"study={study}", f"out={out}"]
    code, wall, cpu = timed(
        lambda: subprocess.call(command("moe_lab.analysis", "report", *arguments), stdout=DEVNULL)
    )
    if code == 2 or not (out / report.PAGE).exists():
        raise RuntimeError(f"no report of study={study} in {store}")
    return wall, cpu


def _seconds(wall: float, cpu: float, allowed: int) -> str:
    return f"{wall:.1f} s ({cpu:.1f} s of the processor; {allowed} allowed)"


def main() -> int:
    """Print both times; returns 1 when one exceeds its limit."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "analysis"))
    from synthetic import write_store

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        study = write_store(root / "study", ratios=(0.125, 0.25, 0.375, 0.5, 0.625, 0.75))
        cells = len(load(study, "made_up").cells)

        def rebuild() -> Path:
            results = Results(load(study, "made_up"))
            return report.write_report(report.Publisher(results, root / "out"))

        _, wall, rebuild_cpu = timed(rebuild)
        files = sum(path.is_file() for path in (root / "out").rglob("*"))
        print(f"rebuild: {cells} cells, {files} files: {_seconds(wall, rebuild_cpu, REBUILD)}")
        ratios = [number / 128 for number in range(1, 53)]
        many = write_store(root / "many", criteria=CRITERIA, ratios=ratios, items=10, overlap=False)
        loaded, wall, load_cpu = timed(lambda: load(many, "made_up"))
        print(f"load: {len(loaded.results):,} results: {_seconds(wall, load_cpu, LOAD)}")
    return int(rebuild_cpu > REBUILD or load_cpu > LOAD)


if __name__ == "__main__":
    sys.exit(main())
