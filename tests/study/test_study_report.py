"""What a run says of the report it had made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_lab.study import record
from moe_lab.study.graph import Graph
from moe_lab.study.record import Study
from moe_lab.study.store import Store


@pytest.mark.parametrize(
    ("printed", "failed", "says"),
    [
        ("report.html\n", ("coverage.fig10", "ranks"), "the report lacks coverage.fig10, ranks"),
        ("", (), "the report failed: KeyError: 'cell'"),
        ("report.html\n", (), "report.html"),
    ],
)
def test_a_report_counts_as_made_when_it_is_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    printed: str,
    failed: tuple[str, ...],
    says: str,
) -> None:
    folder = tmp_path / "reports" / "study"
    (folder / "failed").mkdir(parents=True)
    (folder / "report.html").touch()
    for name in failed:
        (folder / "failed" / f"{name}.log").write_text("Traceback")
    done = SimpleNamespace(returncode=1, stdout=printed, stderr="KeyError: 'cell'")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
    config: Any = SimpleNamespace(study="study", tracker=SimpleNamespace(name="none"))
    complete = record._report(Study(config, Graph([], {"families": {}, "damages": {}}), Store(tmp_path).create()))
    assert says in capsys.readouterr().err
    assert complete == (folder / record.MADE_FROM).exists() == (says == "report.html")
