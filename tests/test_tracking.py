"""What the tracker is told, read back from what it wrote offline."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from PIL import Image

from moe_lab.config import TrackerConfig
from moe_lab.errors import UserError
from moe_lab.study.record import log_study

SETTINGS = TrackerConfig(name="wandb")
KEY = "0123456789abcdef0123456789abcdef01234567"

PRUNED = {"model": "tiny", "criterion": "man", "ratio": 0.25}
STUDY: dict[str, Any] = {
    "schema": 1,
    "study": "demo",
    "created": 1795255200.0,
    "config": {"suite": {"name": "pocket16"}},
    "cells": [
        {"cell": {"model": "tiny", "criterion": "none", "ratio": 0}, "evaluate": {"arc": "evaluate/arc-0"}},
        {"cell": PRUNED, "plan": "plan/p", "evaluate": {"arc": "evaluate/arc-1"}},
    ],
}


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without a key, and a folder for what the tracker writes."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "told"))
    (tmp_path / "told").mkdir()
    monkeypatch.chdir(tmp_path)
    forget_environment()
    yield tmp_path
    forget_environment()


def forget_environment() -> None:
    """wandb reads the environment once in a process, and another test may have made it do so."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


def test_cells_tables_and_figures_are_told_silently_and_no_key_is(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    table, figure = alone / "ranks.csv", alone / "winners.png"
    table.write_text("criterion,Avg,Rank\nman,0.5,1.0\nreap,N/A,2.0\n")
    Image.new("RGB", (3, 2)).save(figure)
    log_study(SETTINGS, STUDY, {"ranks": table}, [figure])
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""

    written = [file for file in (alone / "told").rglob("*") if file.is_file()]
    tables = [json.loads(file.read_text()) for file in written if file.name.endswith(".table.json")]
    ranks, cells = sorted(tables, key=lambda table: len(table["columns"]))
    assert ranks["columns"] == ["criterion", "Avg", "Rank"]
    assert ranks["data"] == [["man", 0.5, 1.0], ["reap", pytest.approx(math.nan, nan_ok=True), 2.0]]
    assert cells["columns"] == ["model", "criterion", "ratio", "plan", "evaluate/arc"]
    assert cells["data"][0] == ["tiny", "none", 0, None, "evaluate/arc-0"]
    assert cells["data"][1] == ["tiny", "man", 0.25, "plan/p", "evaluate/arc-1"]
    assert [file.name for file in written if file.suffix == ".png"]
    (log,) = [file.read_bytes() for file in written if file.suffix == ".wandb"]
    assert b"demo" in log and b"pocket16" in log
    assert sys.executable.encode() not in log, "a command line may hold what is nobody's business"
    assert not [file for file in written if KEY.encode() in file.read_bytes()]


@pytest.mark.parametrize("place", ["environment", "netrc", "nowhere"])
def test_a_key_is_found_without_a_question_or_a_word(
    place: str, alone: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import wandb

    if place == "environment":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    if place == "netrc":
        (alone / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    modes: list[str | None] = []
    monkeypatch.setattr(wandb, "init", lambda mode, **_: modes.append(mode) or nullcontext(MagicMock()))
    log_study(SETTINGS, STUDY, {}, [])
    assert modes == ["offline" if place == "nowhere" else None] and "".join(capfd.readouterr()) == ""
    assert not [file for file in (alone / "told").rglob("*") if file.is_file() and KEY in file.read_text()]


def test_a_refusal_of_the_tracker_is_one_sentence(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setattr(wandb, "init", MagicMock(side_effect=wandb.Error("the server said no\nand more")))
    with pytest.raises(UserError, match=r"^tracker=wandb was not told \(the server said no\): .*needs no server$"):
        log_study(SETTINGS, STUDY, {}, [])
