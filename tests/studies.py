"""Small studies: of the shipped model, from the command line; and of a few steps that take no time,
on real stores."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import preloaded
import pytest

from moe_lab import compose as composition
from moe_lab.config import Config
from moe_lab.grid import Request
from moe_lab.packs import Packs
from moe_lab.study import __main__ as study_command
from moe_lab.study.run import run
from moe_lab.study.step import Step
from moe_lab.study.store import Store

FEW = ["suite.limit=8", "calibration.tokens=2048", "report=false", "resources.every.memory=1"]
WHEN_AND_WHERE = {"step.json"}
"""Files of a step that say when and where it was done, and the checksums of all its files."""
ANNOUNCED = re.compile(r"\d\d:\d\d:\d\d (\w+/\S+)")


def command(store: Path, *words: str) -> list[str]:
    """What a user types; `words` are options and settings."""
    options = [word for word in words if word.startswith("-")]
    settings = [word for word in words if not word.startswith("-")]
    return [sys.executable, "-m", "moe_lab", *options, *FEW, *settings, f"store={store}"]


def moe_lab(
    store: Path, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    store.parent.mkdir(exist_ok=True)
    done = command(store, *words)
    return subprocess.run(done, capture_output=True, text=True, cwd=store.parent, env=environment)


def on_boolq(store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a study of one benchmark, unless it names others, in a Python that has imported what
    takes long."""
    _, _, *started = command(store, "suite.benchmarks=[pocket_boolq]", *words)
    return preloaded.run(store.parent, *started)


def told(store: Path, *words: str) -> str:
    """What `python -m moe_lab.study` answers."""
    done = [sys.executable, "-m", "moe_lab.study", *words, f"store={store}"]
    answer = subprocess.run(done, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def results(store: Path) -> dict[str, bytes]:
    """All files of all steps, by path, but for what says when and where they were made."""
    folders = [
        path.parent
        for path in sorted(store.glob("*/[!.]*/step.json"))
        if path.parts[-3] != "damaged"
    ]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    found = {
        str(path.relative_to(store)): path.read_bytes()
        for path in files
        if path.name not in WHEN_AND_WHERE
    }
    packs = Packs(store / "packs")
    packs.refresh()
    for start, name in packs.steps().items():
        found |= {
            f"{name}/{file}": packs.read(start, file)
            for file in {*packs.files(start)} - WHEN_AND_WHERE
        }
    return found


def ran(store: Path) -> Counter[str]:
    """Which steps workers were given, and how often."""
    lines = [
        line for log in (store / "logs").glob("*.log") for line in log.read_text().splitlines()
    ]
    return Counter(found[1] for line in lines if (found := ANNOUNCED.fullmatch(line)))


def jobs(printed: str) -> dict[str, str]:
    """Kind -> id of the array, as a submission prints them."""
    return {
        line.split()[1].rstrip(":"): line.split()[0]
        for line in printed.splitlines()
        if line[:1].isdigit()
    }


# ---- of a few steps that take no time, run by the real command

SMALL = [
    "suite.benchmarks=[pocket_boolq]",
    "calibration=pocket_code",
    "launcher=inline",
    "report=false",
]
STUDY = "study"
Asked = tuple[Config, list[Request]]
"""Settings and cells of a study."""


class Worker:
    """Does steps in no time: every one leaves two small files. `harm` is called first."""

    harm: Callable[[Step, Path], None] | None = None
    did: ClassVar[list[str]] = []

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None: ...
    def __call__(self, step: Step, scratch: Path) -> None:
        self.did.append(step.folder)
        if Worker.harm:
            Worker.harm(step, scratch)
        (scratch / "result.json").write_text('{"score": 0.5, "of": ["a", 1]}')
        (scratch / "provenance.json").write_text('{"seconds": 1.5}')


def asked(*words: str) -> Asked:
    """What a command line asks for."""
    with composition.started():
        return composition.compose([*SMALL, *words])


def start(store: Path | str, of: Asked, **changes: Any) -> int:
    """Start a study in a store; the exit code."""
    return run(replace(of[0], store=str(store), **changes), of[1]).code


def ask(store: object, *words: str) -> int:
    """Run `python -m moe_lab.study` in this process on a store; the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["study", *words, f"store={store}"])
        return study_command.main()


BEGINNING = f"""
import os, shutil, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from example_steps import Example
from moe_lab.study.runs import begin
from moe_lab.study.store import Store
"""


def killed(script: str, **environment: str) -> None:
    """Run a script in a process of its own, by which it is killed."""
    words = [sys.executable, "-c", BEGINNING + textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == -signal.SIGKILL, done.stderr
