"""The command that measures every row about CUDA: it goes on where it was stopped, and docs list its rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cuda
from benchmarks.cuda import ROOT, ROWS, Row


def measure(folder: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch, minutes: float = 5) -> int:
    monkeypatch.setattr(cuda, "ROWS", rows)
    words = ["cuda", "--dry-run", "--minutes", str(minutes), "--out", str(folder / "out"), "--scratch", str(folder)]
    monkeypatch.setattr(sys, "argv", words)
    return cuda.main()


def row(name: str, code: Path, text: str, **about: Any) -> Row:
    code.write_text(f"with open({str(code.with_suffix('.runs'))!r}, 'a') as file: file.write('x')\n{text}")
    return Row(name, str(code), "", **{"minutes": 0.001, **about})


def test_goes_on_with_the_rows_that_are_missing_or_whose_command_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar that a dry run misses has not failed."""
    rows = [
        row("good", tmp_path / "good.py", "print('speed: 2.0, bar >= 1: ok')"),
        row("broken", tmp_path / "broken.py", "raise SystemExit('no model')"),
        row("long", tmp_path / "long.py", "print('speed: 0.5, bar >= 1: FAILED')\nraise SystemExit(1)", minutes=10),
    ]
    assert measure(tmp_path, rows, monkeypatch) == 2
    assert [file.stem for file in (tmp_path / "out").glob("*.json")] == ["good"]
    rows[1] = row("broken", tmp_path / "broken.py", "print('speed: 3.0, bar >= 1: ok')")
    assert measure(tmp_path, rows, monkeypatch, minutes=20) == 0
    rows[0] = Row("good", f"{rows[0].command} --fast", "", 0.001)
    assert measure(tmp_path, rows, monkeypatch, minutes=20) == 0
    runs = {row.name: len((tmp_path / f"{row.name}.runs").read_text()) for row in rows}
    assert runs == {"good": 2, "broken": 2, "long": 1}
    table = (tmp_path / "out" / "table.md").read_text()
    assert all(f"{number}, bar" in table for number in ("2.0", "3.0", "0.5")) and "FAILED" not in table


def test_the_documentation_has_every_row() -> None:
    section = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("## CUDA")[2]
    commands = [row.command.replace("{scratch}/olmoe_7b", "FOLDER") for row in ROWS]
    assert [f"`python {command}`" in section for command in commands] == [True] * len(ROWS)
