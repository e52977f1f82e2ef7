"""Small studies of the shipped model, from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import preloaded

SMALL = ["suite.limit=8", "calibration.tokens=2048", "report=false", "resources.every.memory=1"]
WHEN_AND_WHERE = {"step.json"}
"""Files of a step that say when and where it was done, and the checksums of all its files."""
ANNOUNCED = re.compile(r"\d\d:\d\d:\d\d (\w+/\S+)")


def command(store: Path, *words: str) -> list[str]:
    """What a user types; `words` are options and settings."""
    options = [word for word in words if word.startswith("-")]
    settings = [word for word in words if not word.startswith("-")]
    return [sys.executable, "-m", "moe_lab", *options, *SMALL, *settings, f"store={store}"]


def moe_lab(store: Path, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    store.parent.mkdir(exist_ok=True)
    done = command(store, *words)
    return subprocess.run(done, capture_output=True, text=True, cwd=store.parent, env=environment)


def on_boolq(store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a study of one benchmark, unless it names others, in a Python that has imported what takes long."""
    done = [str(preloaded.python()), *command(store, "suite.benchmarks=[pocket_boolq]", *words)[1:]]
    return subprocess.run(done, capture_output=True, text=True, cwd=store.parent)


def asked(store: Path, *words: str) -> str:
    """What `python -m moe_lab.study` answers."""
    done = [sys.executable, "-m", "moe_lab.study", *words, f"store={store}"]
    answer = subprocess.run(done, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def results(store: Path) -> dict[str, bytes]:
    """All files of all steps, by path, but for what says when and where they were made."""
    folders = [path.parent for path in sorted(store.glob("*/*/step.json"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(store)): path.read_bytes() for path in files if path.name not in WHEN_AND_WHERE}


def ran(store: Path) -> Counter[str]:
    """Which steps workers were given, and how often."""
    lines = [line for log in (store / "logs").glob("*.log") for line in log.read_text().splitlines()]
    return Counter(found[1] for line in lines if (found := ANNOUNCED.fullmatch(line)))


def jobs(printed: str) -> dict[str, str]:
    """Kind -> id of the array, as a submission prints them."""
    return {line.split()[1].rstrip(":"): line.split()[0] for line in printed.splitlines() if line[:1].isdigit()}
