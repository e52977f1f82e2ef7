"""Writes the benchmark, calibration and search files: `python -m moe_lab.pocket.build`. Seconds; needs no model."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_lab.errors import end_with
from moe_lab.pocket.benchmarks import write_benchmarks
from moe_lab.pocket.calibration import write_calibration
from moe_lab.pocket.search import write_search
from moe_lab.pocket.world import build_world

DATA = Path(__file__).parent / "data"


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
