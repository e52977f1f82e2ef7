"""Writes the benchmark, calibration and search files: `python -m tools.pocket.build`. Seconds; needs no model."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_lab.errors import end_with
from moe_lab.paths import DATA
from tools.pocket.benchmarks import write_benchmarks
from tools.pocket.calibration import write_calibration
from tools.pocket.search import write_search
from tools.pocket.world import build_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DATA)
    folder = parser.parse_args().output
    world = build_world()
    write_benchmarks(world, folder / "benchmarks")
    write_calibration(world, folder / "calibration")
    write_search(world, folder / "search")


if __name__ == "__main__":
    end_with(main)
