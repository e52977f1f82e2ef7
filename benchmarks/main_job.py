"""Seconds of the main job in a new store, and of its report: `python -m benchmarks.main_job`, with
further settings of the main job, if any.

Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import analysis
from benchmarks.measure import misses, parser, timed
from moe_lab.start import command

MAIN_JOB = "task_agnostic"
MAIN_JOB_BAR, REPORT_BAR = 165.0, 5.0
"""Seconds of the main job and of its report."""


def main() -> int:
    """Measure, print, compare with the bars; returns 1 when a bar fails."""
    arguments = parser("main_job", __doc__)
    arguments.add_argument("settings", nargs="*")
    settings = arguments.parse_args().settings
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        job = [*command("moe_lab"), f"+experiment={MAIN_JOB}", f"store={store}", *settings]
        _, wall, _ = timed(lambda: subprocess.run(job, check=True, stdout=subprocess.DEVNULL))
        failed = misses("main job with its report, seconds", wall, "<=", MAIN_JOB_BAR)
        wall, _ = analysis.report_seconds(store, MAIN_JOB, Path(folder) / "page")
        failed |= misses("its report again, seconds", wall, "<=", REPORT_BAR)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
