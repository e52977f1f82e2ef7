"""A device that this machine does not have is a sentence before anything is run, not an error of every step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from example_steps import evaluated

from moe_lab.config import BenchmarkConfig, LauncherConfig, ModelConfig
from moe_lab.study import devices
from moe_lab.study.preflight import lacking as lacking_of


def lacking(named: str, launcher: str = "inline") -> list[str]:
    model = ModelConfig(name="m", path="a/b", device=named)
    benchmark = BenchmarkConfig(name="b", harness="perplexity", task="pocket:calibration/general.jsonl")
    return lacking_of([evaluated(model, benchmark), evaluated(model, benchmark)], LauncherConfig(name=launcher))


def test_devices_are_looked_for_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(words: list[str], **_: Any) -> SimpleNamespace:
        asked.append(words[-1])
        error = "AssertionError: no CUDA" if words[-1] == "cuda:9" else f"UserError: model.device={words[-1]}: none"
        return SimpleNamespace(returncode=1, stdout="", stderr=f"Traceback\n{error}\n")

    monkeypatch.setattr(devices.subprocess, "run", answer)
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["0"])
    assert [lacking(named) for named in ("auto", "cpu", "balanced", "cuda", "cuda:0")] == [[]] * 5 and not asked
    assert lacking("cuda:1", "slurm") == [] and not asked, "its nodes may have two"
    for named, says in {"cuda:1": "none", "cuda:9": "no CUDA"}.items():
        assert lacking(named) == [f"model.device={named}: {says}"]
    monkeypatch.setattr(devices, "visible_gpus", list)
    assert lacking("cuda") == ["model.device=cuda: none"]
    assert asked == ["cuda:1", "cuda:9", "cuda"]
