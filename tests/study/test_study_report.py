"""What a run says of the report it had made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_lab.study import report
from moe_lab.study.graph import Graph
from moe_lab.study.record import Study
from moe_lab.study.store import Store

NO_CELLS = Graph([], {}, {})


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the end of a study with a report that ends as it is told; gives whether it is complete and marked."""
    config: Any = SimpleNamespace(study="study", tracker=SimpleNamespace(name="none"))

    def run(stdout: str, failed: tuple[str, ...] = ()) -> tuple[bool, bool]:
        folder = tmp_path / "reports" / "study"
        folder.mkdir(parents=True)
        (folder / "report.html").touch()
        for name in failed:
            (folder / "failed").mkdir(parents=True, exist_ok=True)
            (folder / "failed" / f"{name}.log").write_text("Traceback")
        done = SimpleNamespace(returncode=1, stdout=stdout, stderr="KeyError: 'cell'")
        monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
        complete = report._report(Study(config, NO_CELLS, Store(tmp_path).create()))
        return complete, (folder / report.MADE_FROM).exists()

    return run


def test_a_report_without_some_output_is_named_and_made_again_next_time(
    reported: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported("report.html\n", ("coverage.fig10", "ranks")) == (False, False)
    assert "the report lacks coverage.fig10, ranks" in capsys.readouterr().err


def test_a_report_with_gaps_of_the_study_alone_is_done(reported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported("report.html\n") == (True, True)


def test_a_report_that_wrote_no_page_failed(reported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported("") == (False, False)
    assert "the report failed: KeyError: 'cell'" in capsys.readouterr().err
