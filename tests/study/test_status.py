"""`python -m moe_lab.study status` and `why`, while a study runs and afterwards."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from example_steps import Example
from processes import until
from small_studies import STUDY, Asked, Worker, ask, start

from moe_lab.study import Step
from moe_lab.study.runs import begin
from moe_lab.study.store import Store

pytestmark = pytest.mark.usefixtures("quick")


class Running:
    """A study in another thread, which stops at its plan until `go_on` is called."""

    def __init__(self, place: Path, of: Asked) -> None:
        self.gate, self.at_plan, self.codes = threading.Event(), threading.Event(), list[int]()
        Worker.harm = self.harm
        self.thread = threading.Thread(target=lambda: self.codes.append(start(place, of)))
        self.thread.start()
        until(self.at_plan.is_set)

    def harm(self, step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            self.at_plan.set()
            self.gate.wait()

    def go_on(self) -> None:
        self.gate.set()
        self.thread.join()


@pytest.fixture
def running(tmp_path: Path, quick: None, one: Asked) -> Any:
    study = Running(tmp_path / "store", one)
    yield study
    study.go_on()


def cells(table: str) -> dict[str, list[str]]:
    """First cell of each row of a printed table -> its other cells."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


Study = Callable[..., str]


@pytest.fixture
def study(capsys: pytest.CaptureFixture[str]) -> Study:
    """Runs commands of `python -m moe_lab.study` on a store; gives what they print."""

    def run(name: str, store: Path, of: str = STUDY) -> str:
        capsys.readouterr()
        assert ask(store, name, of) == 0
        return capsys.readouterr().out

    return run


def test_the_table_of_a_study_while_it_runs_and_at_its_end(running: Running, tmp_path: Path, study: Study) -> None:
    table = cells(study("status", tmp_path / "store"))
    assert table["step"] == ["done", "running", "pending", "one takes", "left, about"]
    assert table["plan"] == ["", "1", "", "", ""]
    done, under_way, pending, *_ = table["all"]
    assert under_way == "1" and int(pending) >= 2
    running.go_on()
    assert running.codes == [0]
    table = cells(study("status", tmp_path / "store"))
    assert table["step"] == ["done", "one takes", "left, about"]
    assert table["all"][0] == str(int(done) + 1 + int(pending)) and table["plan"] == ["1", "0:00:02", "0:00:00"]


def test_the_table_of_one_step(running: Running, tmp_path: Path, study: Study) -> None:
    assert set(cells(study("status", tmp_path / "store", "plan/"))) == {"step", "plan", "all"}


def test_steps_of_a_killed_command_are_missing(tmp_path: Path, study: Study) -> None:
    """Its claim ends with it."""
    store, steps = Store(tmp_path).create(), [Example()]
    process = ExitStack()
    process.enter_context(begin(store, STUDY, steps))
    assert cells(study("status", tmp_path))["step"][0] == "pending"
    process.close()
    out = study("status", tmp_path)
    assert cells(out)["step"][0] == "missing" and "same command" in out.splitlines()[-1]


def test_what_waits_for_a_running_command_is_pending(running: Running, tmp_path: Path, study: Study) -> None:
    out = study("why", tmp_path / "store")
    by = f"process {os.getpid()} on {socket.gethostname()}"
    assert f"running: being computed by {by}" in out and "pending: another run will compute it" in out
