"""The command that measures every row about CUDA: it goes on where it was stopped, and docs list its rows."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
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


def test_goes_on_with_the_rows_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("good", tmp_path / "good.py", "print('speed: 2.0, bar >= 1: ok')"),
        row("broken", tmp_path / "broken.py", "raise SystemExit('no model')"),
        row("long", tmp_path / "long.py", "print('speed: 0.5, bar >= 1: FAILED')", minutes=10),
    ]
    assert measure(tmp_path, rows, monkeypatch) == 2
    assert [file.stem for file in (tmp_path / "out").glob("*.json")] == ["good"]
    rows[1] = row("broken", tmp_path / "broken.py", "print('speed: 3.0, bar >= 1: ok')")
    assert measure(tmp_path, rows, monkeypatch, minutes=20) == 0
    runs = {row.name: len((tmp_path / f"{row.name}.runs").read_text()) for row in rows}
    assert runs == {"good": 1, "broken": 2, "long": 1}
    table = (tmp_path / "out" / "table.md").read_text()
    assert [f"{number}, bar" in table for number in ("2.0", "3.0", "0.5")] == [True] * 3


def test_a_bar_that_a_dry_run_misses_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = row("slow", tmp_path / "slow.py", "print('speed: 0.5, bar >= 1: FAILED')\nraise SystemExit(1)")
    assert measure(tmp_path, [slow], monkeypatch) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    for text in (table, capsys.readouterr().out):
        assert "speed: 0.5, bar >= 1" in text and "FAILED" not in text


def test_a_row_that_takes_too_long_ends_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "child.py").write_text(f"file = open({str(fifo)!r}, 'w')\nimport threading\nthreading.Event().wait()")
    endless = row(
        "endless", tmp_path / "endless.py", f"import subprocess\nsubprocess.run([{sys.executable!r}, 'child.py'])"
    )
    opened = []

    class OutOfTime(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            opened.append(os.open(fifo, os.O_RDONLY))  # returns when the child has opened the other end
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", OutOfTime)
    monkeypatch.setattr(cuda, "ROOT", tmp_path)
    arguments = argparse.Namespace(out=tmp_path, scratch=tmp_path, dry_run=True)
    cuda.run(endless, arguments, limit=1)
    assert os.read(opened[0], 1) == b""  # the end of the child, which held the other end
    assert cuda.result(endless, arguments) is None


def test_a_row_whose_command_changed_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = row("one", tmp_path / "one.py", "print('speed: 2.0, bar >= 1: ok')")
    assert measure(tmp_path, [one], monkeypatch) == 0
    other = Row("one", f"{one.command} --fast", "", 0.001)
    assert measure(tmp_path, [other], monkeypatch) == 0
    assert json.loads((tmp_path / "out" / "one.json").read_text())["command"][-1] == "--fast"
    assert (tmp_path / "one.runs").read_text() == "xx"


def test_the_documentation_has_every_row() -> None:
    section = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("## CUDA")[2]
    commands = [row.command.replace("{scratch}/olmoe_7b", "FOLDER") for row in ROWS]
    assert [f"`python {command}`" in section for command in commands] == [True] * len(ROWS)
