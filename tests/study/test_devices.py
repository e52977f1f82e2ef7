"""A device that this machine does not have is a sentence before anything is run, not an error of every step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_lab.config import Config, LauncherConfig, ModelConfig
from moe_lab.grid import Cell
from moe_lab.study import launch, preflight
from moe_lab.study.graph import NO_ALLOCATION, NO_CALIBRATION, NO_CRITERION
from moe_lab.study.steps import costs
from moe_lab.study.steps.recovery import NO_RECOVERY


def lacking(named: str, launcher: str = "inline") -> list[str]:
    model = ModelConfig(name="m", path="a/b", device=named)
    cell = Cell(model, NO_CRITERION, NO_CALIBRATION, NO_ALLOCATION, NO_RECOVERY, 0.0, "none", 0, {})
    return preflight.lacking(Config(launcher=LauncherConfig(name=launcher)), [([cell, cell], [])])


def test_devices_are_looked_for_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(words: list[str], **_: Any) -> SimpleNamespace:
        asked.append(words[-1])
        error = "AssertionError: no CUDA" if words[-1] == "cuda:9" else f"UserError: model.device={words[-1]}: none"
        return SimpleNamespace(returncode=1, stdout="", stderr=f"Traceback\n{error}\n")

    monkeypatch.setattr(costs.subprocess, "run", answer)
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["0"])
    assert [lacking(named) for named in ("auto", "cpu", "balanced", "cuda", "cuda:0")] == [[]] * 5 and not asked
    assert lacking("cuda:1", "slurm") == [] and not asked, "its nodes may have two"
    for named, says in {"cuda:1": "none", "cuda:9": "no CUDA"}.items():
        assert lacking(named) == [f"model.device={named}: {says}"]
    monkeypatch.setattr(launch, "visible_gpus", list)
    assert lacking("cuda") == ["model.device=cuda: none"]
    assert asked == ["cuda:1", "cuda:9", "cuda"]
