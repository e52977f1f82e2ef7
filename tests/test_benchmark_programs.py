"""Benchmarks measure what they say; the command that measures every row about CUDA goes on where it was stopped."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cuda, memory, models, streaming
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


TINY = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": 0}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """A published configuration, small for once."""
    monkeypatch.setitem(models.CONFIGURATIONS, "olmoe_7b", models.CONFIGURATIONS["olmoe_7b"] | TINY | HEADS)
    shape = {"layers": 2, "batches": 2, "rows": 1, "length": 16, "vocabulary": 1024}
    return Namespace(folder=tmp_path / "model", model="olmoe_7b", device="cpu", **shape)


def test_streamed_and_resident_passes_are_measured(asked: Namespace) -> None:
    took = {name: part(asked) for name, part in streaming.PARTS.items()}
    assert all(took[name]["seconds"] > 0 for name in ("read", "resident", "streamed", "short"))
    size = sum(file.stat().st_size for file in asked.folder.glob("*.safetensors"))
    assert took["write"]["GiB"] == size / 2**30


@pytest.mark.parametrize("way", memory.WAYS)
def test_every_way_of_going_back_is_measured(way: str, asked: Namespace) -> None:
    asked.way = way
    assert memory._bytes(asked)["weights"] > 0
