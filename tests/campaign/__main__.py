"""`python -m tests.campaign`: every part once, or those that are named, and a table of what came of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from moe_lab.study.step import code_state

from . import commands, kills, models, programs

PARTS = ("programs", "models", "commands", "kills")


def main() -> int:
    """Exit code 0 when all is as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--kills", type=int, default=200, help="how many kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims of kills")
    parser.add_argument("--processes", type=int, default=2, help="commands, or programs, at the same time")
    parser.add_argument("--out", type=Path, help="a JSON file for the table and everything that was not as expected")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    print(f"seed {asked.seed}, {os.cpu_count()} processors, Python {platform.python_version()}", flush=True)
    parts: dict[str, Any] = {}
    for part in asked.parts or PARTS:
        begin = time.monotonic()
        count, wrong = attack(part, asked)
        parts[part] = {"number": count, "seconds": round(time.monotonic() - begin), "not as expected": wrong}
        for sentence in wrong:
            print(f"{part}: {sentence}", flush=True)
        if asked.out:
            document = {"seed": asked.seed, "processors": os.cpu_count(), "code": code_state(), "parts": parts}
            asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'':10}{'number':>10}{'seconds':>10}{'not as expected':>18}")
    for part, found in parts.items():
        print(f"{part:10}{found['number']:>10}{found['seconds']:>10}{len(found['not as expected']):>18}")
    return 1 if any(found["not as expected"] for found in parts.values()) else 0


def attack(part: str, asked: argparse.Namespace) -> tuple[int, list[str]]:
    """How many attacks a part made, and a sentence for each that did not end as expected."""
    if part == "programs":
        graded = programs.graded(processes=asked.processes)
        return len(graded.verdicts), graded.wrong
    if part == "models":
        return len(models.BROKEN), models.wrong(models.started)
    if part == "commands":
        rows = commands.every_command()
        return len(rows), commands.wrong(commands.started, rows, asked.processes)
    found = kills.killed(asked.kills, asked.seed)
    for name, count in sorted(found.kills.items()):
        print(f"  {count:4} {name}")
    return found.kills.total(), found.problems


if __name__ == "__main__":
    sys.exit(main())
