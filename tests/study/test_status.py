"""What is said of a study: by `status` and `why` while it runs and afterwards, and of its report at the end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_steps import Example
from processes import until
from small_studies import STUDY, Asked, Worker, ask, start

from moe_lab.study import record
from moe_lab.study.graph import Graph
from moe_lab.study.runs import begin
from moe_lab.study.step import Step
from moe_lab.study.store import Store

pytestmark = pytest.mark.usefixtures("quick")


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


def test_the_table_of_a_study_while_it_runs_and_at_its_end(tmp_path: Path, one: Asked, study: Study) -> None:
    gate, at_plan, codes = threading.Event(), threading.Event(), list[int]()

    def harm(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            at_plan.set()
            gate.wait()

    Worker.harm = harm
    thread = threading.Thread(target=lambda: codes.append(start(tmp_path / "store", one)), daemon=True)
    thread.start()
    until(at_plan.is_set)
    table = cells(study("status", tmp_path / "store"))
    assert table["step"] == ["done", "running", "pending", "one takes", "left, about"]
    assert table["plan"] == ["", "1", "", "", ""]
    done, under_way, pending, *_ = table["all"]
    assert under_way == "1" and int(pending) >= 2
    assert set(cells(study("status", tmp_path / "store", "plan/"))) == {"step", "plan", "all"}
    why, by = study("why", tmp_path / "store"), f"process {os.getpid()} on {socket.gethostname()}"
    assert f"running: being computed by {by}" in why and "pending: another run will compute it" in why
    gate.set()
    thread.join()
    assert codes == [0]
    table = cells(study("status", tmp_path / "store"))
    assert table["step"] == ["done", "one takes", "left, about"]
    assert table["all"][0] == str(int(done) + 1 + int(pending)) and table["plan"] == ["1", "0:00:02", "0:00:00"]


def test_steps_of_a_killed_command_are_missing(tmp_path: Path, study: Study) -> None:
    """Its claim ends with it."""
    store, steps = Store(tmp_path).create(), [Example()]
    process = ExitStack()
    process.enter_context(begin(store, STUDY, steps))
    assert cells(study("status", tmp_path))["step"][0] == "pending"
    process.close()
    out = study("status", tmp_path)
    assert cells(out)["step"][0] == "missing" and "same command" in out.splitlines()[-1]


# The report of a run


def test_a_report_counts_as_made_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config: Any = SimpleNamespace(study="study", tracker=SimpleNamespace(name="none"))
    study = record.Study(config, Graph([], {"families": {}, "damages": {}}), Store(tmp_path).create())
    folder = tmp_path / "reports" / "study"
    (folder / "failed").mkdir(parents=True)
    (folder / "report.html").touch()
    lacking = [folder / "failed" / f"{name}.log" for name in ("coverage.fig10", "ranks")]
    for printed, failed, says in (
        ("", [], "the report failed: KeyError: 'cell'"),
        ("report.html\n", lacking, "the report lacks coverage.fig10, ranks"),
        ("report.html\n", [], "report.html"),
    ):
        for file in failed:
            file.touch()
        done = SimpleNamespace(returncode=1, stdout=printed, stderr="KeyError: 'cell'")
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **options: done)
        complete = record._report(study)
        assert says in capsys.readouterr().err
        assert complete == (folder / record.MADE_FROM).exists() == (says == "report.html")
        for file in failed:
            file.unlink()
