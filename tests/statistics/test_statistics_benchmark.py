from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = "--experts 8 --top-k 2 --layers 1 --hidden 64 --width 32 --rows 1 --every-rows 1 --length 64 --pairs 1"


def test_the_benchmark_prints_all_ratios_and_says_whether_they_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.statistics", *SMALL.split(), "--every-pairs", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("bar <= 1.10") == 2
    assert done.stdout.count("bar >= 5.00") == 1
    assert done.returncode == int("FAILED" in done.stdout), done.stderr
