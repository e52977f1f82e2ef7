"""Studies of a few steps that take no time, run by the real command on real stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from moe_lab import compose as composition
from moe_lab.config import Config
from moe_lab.grid import Request
from moe_lab.study.run import run
from moe_lab.study.step import Step
from moe_lab.study.store import Store

SMALL = ["suite.benchmarks=[pocket_boolq]", "calibration=pocket_code", "launcher=inline", "report=false"]
STUDY = "study"


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


def asked(*words: str) -> tuple[Config, list[Request]]:
    """What a command line asks for."""
    with composition.started():
        return composition.compose([*SMALL, *words])


def start(store: Path, of: tuple[Config, list[Request]], **changes: Any) -> int:
    """Start a study in a store; the exit code."""
    return run(replace(of[0], store=str(store), **changes), of[1]).code
