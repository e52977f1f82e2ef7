"""Fixtures of several modules here."""

from pathlib import Path

import pytest
from studies import Asked, Worker, asked

from moe_lab.study import run
from moe_lab.study.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").create()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no time: `studies.Worker` does them, which starts without harm and with nothing
    done."""
    monkeypatch.setattr(run, "InProcessExecutor", Worker)
    monkeypatch.setattr(Worker, "harm", None)
    monkeypatch.setattr(Worker, "did", [])


@pytest.fixture(scope="session")
def one() -> Asked:
    """A study whose scores are of weights: its record does not name the step with the sums of
    weights."""
    return asked("criterion=aimer", "ratio=0.5")


@pytest.fixture(scope="session")
def other() -> Asked:
    """A study with another criterion, and the same name."""
    return asked("criterion=reap", "ratio=0.5")
