"""`python -m tests.campaign`: every part once, or those that are named, and a table of what came of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_lab.evaluation.sandbox.client import namespaces_missing
from moe_lab.study import code_state

from . import commands, kills, models, programs

COUNTS = ("kills", "wrong inputs", "escapes", "results lost", "traces printed", "not as expected")


def main() -> int:
    """Exit code 0 when all is as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--kills", type=int, default=200, help="how many kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims of kills")
    parser.add_argument("--scenarios", nargs="+", choices=kills.SHARES, default=[*kills.SHARES], help="what is killed")
    parser.add_argument("--processes", type=int, default=2, help="commands, or programs, at the same time")
    parser.add_argument("--out", type=Path, help="a JSON file for the table and everything that was not as expected")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    print(f"seed {asked.seed}, {os.cpu_count()} processors, Python {platform.python_version()}", flush=True)
    document: dict[str, Any] = {"seed": asked.seed, "processors": os.cpu_count(), "code": code_state(), "parts": {}}
    for part in asked.parts or PARTS:
        begin = time.monotonic()
        counts, wrong = PARTS[part](asked)
        counts["not as expected"] = len(wrong)
        seconds = round(time.monotonic() - begin)
        document["parts"][part] = {"seconds": seconds, "counts": counts, "not as expected": wrong}
        print("\n".join(f"{part}: {sentence}" for sentence in wrong), end="\n" if wrong else "", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["parts"]))
    return 1 if any(part["not as expected"] for part in document["parts"].values()) else 0


def table(parts: Mapping[str, Any]) -> str:
    """A row per part, with its counts."""
    lines = [f"{'':10}{'seconds':>8}" + "".join(f"{name:>17}" for name in COUNTS)]
    for part, found in parts.items():
        cells = "".join(f"{found['counts'].get(name, '-'):>17}" for name in COUNTS)
        lines.append(f"{part:10}{found['seconds']:>8}{cells}")
    return "\n".join(lines)


def _kills(asked: argparse.Namespace) -> tuple[dict[str, int], list[str]]:
    found = kills.killed(asked.kills, asked.seed, {name: kills.SHARES[name] for name in asked.scenarios})
    for name, count in sorted(found.kills.items()):
        print(f"  {count:4} {name}")
    kinds = Counter(kind for kind, _ in found.problems)
    counts = {
        "kills": found.kills.total(),
        "results lost": kinds["lost"] + kinds["other result"],
        "traces printed": kinds["trace"],
    }
    return counts, [f"{kind}: {sentence}" for kind, sentence in found.problems]


def _programs(asked: argparse.Namespace) -> tuple[dict[str, int], list[str]]:
    if missing := namespaces_missing():
        return {}, [f"not one was graded, for there are no namespaces: {missing}"]
    found = programs.graded(processes=asked.processes)
    wrong = [f"{name}: its verdict is {verdict}" for name, verdict in found.unexpected.items()]
    wrong += [f"{count} {kind} between them have another verdict" for kind, count in found.others.items()]
    return {"wrong inputs": len(found.verdicts), "escapes": len(found.escapes)}, wrong + found.escapes


def _commands(asked: argparse.Namespace) -> tuple[dict[str, int], list[str]]:
    found = commands.answers(commands.started, commands.every_command(), asked.processes)
    wrong = [_said(str(row), ended) for row, ended in found.items() if not commands.as_expected(row, ended)]
    return {"wrong inputs": len(found), "traces printed": sum(ended.has_trace for ended in found.values())}, wrong


def _models(asked: argparse.Namespace) -> tuple[dict[str, int], list[str]]:
    found = models.refusals(models.started)
    rows = {row.name: row for row in models.BROKEN}
    wrong = [_said(name, ended) for name, ended in found.items() if not models.as_expected(rows[name], ended)]
    return {"wrong inputs": len(found), "traces printed": sum(ended.has_trace for ended in found.values())}, wrong


def _said(what: str, ended: commands.Ended) -> str:
    lines = ended.said.strip().splitlines() or ["nothing"]
    return f"{what}: exit code {ended.code}: {lines[-1][:200] if ended.has_trace else lines[0][:200]}"


PARTS: Mapping[str, Callable[[argparse.Namespace], tuple[dict[str, int], list[str]]]] = {
    "programs": _programs,
    "models": _models,
    "commands": _commands,
    "kills": _kills,
}

if __name__ == "__main__":
    sys.exit(main())
