"""Fixtures of several modules here."""

from pathlib import Path

import pytest
from studies import StudyRequest, Worker, study_request

from moe_lab.study import run
from moe_lab.study.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").create()


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no time: `studies.Worker` executes them, without a hook and with an empty list of
    executed steps."""
    monkeypatch.setattr(run, "InProcessExecutor", Worker)
    monkeypatch.setattr(Worker, "hook", None)
    monkeypatch.setattr(Worker, "executed_folders", [])


@pytest.fixture(scope="session")
def aimer_study() -> StudyRequest:
    """A study whose scores are of weights: its record does not name the step with the sums of
    weights."""
    return study_request("criterion=aimer", "ratio=0.5")


@pytest.fixture(scope="session")
def reap_study() -> StudyRequest:
    """A study with another criterion, and the same name."""
    return study_request("criterion=reap", "ratio=0.5")
