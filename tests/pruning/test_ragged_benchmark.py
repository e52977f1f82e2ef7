from __future__ import annotations

import re
import subprocess
from pathlib import Path

import preloaded

ROOT = Path(__file__).parents[2]
SMALL = "--experts 8 --top-k 2 --layers 1 --hidden 64 --width 32 --tokens 64 8 --rows 1 --length 16 --rounds 1"


def test_the_benchmark_prints_all_ratios_and_says_whether_the_bar_holds() -> None:
    command = preloaded.command("-m", "benchmarks.ragged", *SMALL.split())
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("bar <= 0.65") == 2, done.stderr
    assert re.findall(r"^  (\w+ / [\w ]+): \d+\.\d\d \(", done.stdout, re.MULTILINE) == [
        *["packed / dense eager", "packed / dense sorted loop", "masked / dense eager", "masked / dense sorted loop"]
        * 2,
        *["packed / dense eager", "masked / dense eager"],
    ]
    assert done.returncode == int("FAILED" in done.stdout), done.stderr
