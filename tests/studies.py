"""Small studies: of the shipped model, from the command line; and of a few steps that take no time,
with real stores."""

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
from moe_lab.errors import run_and_exit
from moe_lab.grid import Request
from moe_lab.packs import Packs
from moe_lab.study import commands
from moe_lab.study.run import run
from moe_lab.study.step import Step
from moe_lab.study.store import Store

FEW_ITEMS = ["suite.limit=8", "calibration.tokens=2048", "report=false", "resources.every.memory=1"]
UNCOMPARED_FILES = {"step.json"}
"""Files of a step with its time and machine, and with the checksums of all its files."""
STEP_LINE = re.compile(r"\d\d:\d\d:\d\d (\w+/\S+)")


def command(store: Path, *arguments: str) -> list[str]:
    """The command line of a study; `arguments` are options and settings."""
    options = [argument for argument in arguments if argument.startswith("-")]
    settings = [argument for argument in arguments if not argument.startswith("-")]
    return [sys.executable, "-m", "moe_lab", *options, *FEW_ITEMS, *settings, f"store={store}"]


def moe_lab(
    store: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line of a study to its end."""
    store.parent.mkdir(exist_ok=True)
    return subprocess.run(
        command(store, *arguments),
        capture_output=True,
        text=True,
        cwd=store.parent,
        env=environment,
    )


def run_on_boolq(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a study of one benchmark, unless the arguments name others, in a Python that has already
    imported the large libraries."""
    _, _, *module_and_arguments = command(store, "suite.benchmarks=[pocket_boolq]", *arguments)
    return preloaded.run(store.parent, *module_and_arguments)


def study_output(store: Path, *arguments: str) -> str:
    """The output of a command of `moe-lab`, which must succeed."""
    result = preloaded.run(Path.cwd(), "moe_lab", *arguments, f"store={store}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def results(store: Path) -> dict[str, bytes]:
    """Path -> content of all files of all steps, except UNCOMPARED_FILES."""
    folders = [
        path.parent
        for path in sorted(store.glob("*/[!.]*/step.json"))
        if path.parts[-3] != "damaged"
    ]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    contents = {
        str(path.relative_to(store)): path.read_bytes()
        for path in files
        if path.name not in UNCOMPARED_FILES
    }
    packs = Packs(store / "packs")
    packs.refresh()
    for start, name in packs.steps().items():
        contents |= {
            f"{name}/{file}": packs.read(start, file)
            for file in {*packs.files(start)} - UNCOMPARED_FILES
        }
    return contents


def executed_steps(store: Path) -> Counter[str]:
    """Folder of each step that workers received -> number of times."""
    lines = [
        line for log in (store / "logs").glob("*.log") for line in log.read_text().splitlines()
    ]
    return Counter(match[1] for line in lines if (match := STEP_LINE.fullmatch(line)))


def jobs(output: str) -> dict[str, str]:
    """Kind of jobs -> id of their array, from the output of a submission."""
    return {
        line.split()[1].rstrip(":"): line.split()[0]
        for line in output.splitlines()
        if line[:1].isdigit()
    }


# ---- of a few steps that take no time, run by the real command

SMALL_STUDY = [
    "suite.benchmarks=[pocket_boolq]",
    "calibration=pocket_code",
    "launcher=inline",
    "report=false",
]
STUDY = "study"
StudyRequest = tuple[Config, list[Request]]
"""Settings and cells of a study."""


class Worker:
    """Performs steps in no time: each step leaves two small files. `hook` is called before the
    files are written."""

    hook: Callable[[Step, Path], None] | None = None
    executed_folders: ClassVar[list[str]] = []

    def __init__(self, store: Store, models: object = None) -> None:
        self.store = store

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None: ...
    def __call__(self, step: Step, scratch: Path) -> None:
        self.executed_folders.append(step.folder)
        if Worker.hook:
            Worker.hook(step, scratch)
        (scratch / "result.json").write_text(
            '{"schema": 1, "results": [], "protocol": {}, "of": ["a", 1]}'
        )
        (scratch / "provenance.json").write_text('{"seconds": 1.5}')


def study_request(*settings: str) -> StudyRequest:
    """The settings and cells of the study that a command line describes."""
    with composition.hydra_context():
        return composition.compose([*SMALL_STUDY, *settings])


def start(store: Path | str, study: StudyRequest, **changes: Any) -> int:
    """Run a study in a store. Returns the exit code."""
    config, requests = study
    return run(replace(config, store=str(store), **changes), requests).code


def study_command(store: object, *arguments: str) -> int:
    """Run a verb of `moe-lab` in this process on a store. Returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        run_and_exit(lambda: commands.main([*arguments, f"store={store}"]))
    return int(str(ended.value.code))


SCRIPT_START = f"""
import os, shutil, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from example_steps import Example
from moe_lab.study.runs import create_run
from moe_lab.study.store import Store
"""


def run_until_killed(script: str, **environment: str) -> None:
    """Run a script that kills its own process."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT_START + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
