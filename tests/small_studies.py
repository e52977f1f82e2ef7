"""Studies of a few steps that take no time, run by the real command on real stores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moe_lab import compose as composition
from moe_lab.config import Config
from moe_lab.grid import Request
from moe_lab.study import __main__ as command
from moe_lab.study.run import run
from moe_lab.study.step import Step
from moe_lab.study.store import Store

SMALL = ["suite.benchmarks=[pocket_boolq]", "calibration=pocket_code", "launcher=inline", "report=false"]
STUDY = "study"
Asked = tuple[Config, list[Request]]
"""Settings and cells of a study."""


class Worker:
    """Does steps in no time: every one leaves two small files. `harm` is called first."""

    harm: Callable[[Step, Path], None] | None = None
    did: ClassVar[list[str]] = []

    def __init__(self, store: Store) -> None: ...
    def __enter__(self) -> Worker:
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
        return command.main()


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
