"""The cost of a plan: the same step, with the same numbers, whether the whole model is in memory or one layer of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from moe_lab.config import CalibrationConfig, Config, ModelConfig
from moe_lab.grid import Cell, plain
from moe_lab.study.graph import NO_ALLOCATION, NO_CRITERION
from moe_lab.study.identity import Step
from moe_lab.study.job import Job
from moe_lab.study.kinds import measuring, pruned, shared
from moe_lab.study.maker import Maker
from moe_lab.study.pruned import NO_RECOVERY, Pruned


def step(model: ModelConfig, text: CalibrationConfig, engine: str) -> Step:
    """The cost step of an unpruned model in a study whose calibration is by that engine."""
    study = CalibrationConfig(name="c", path=text.path, engine=engine, activation_budget=0.5)
    cell = Cell(model, NO_CRITERION, study, NO_ALLOCATION, NO_RECOVERY, 0.0, "none", 0, {"flops": text})
    return Pruned(Maker(replace(Config(), calibration=study)), cell, None).cost()


def test_the_engine_of_the_study_counts_flops_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.save("deepseek_v2", tmp_path / "model")
    words = [f"w{(7 * at) % (tiny.VOCABULARY - 4) + 4}" for at in range(64)]
    (tmp_path / "text.txt").write_text("\n\n".join(words))  # a document is a word to its tokenizer
    model = ModelConfig(name="m", path=str(tmp_path / "model"), device="cpu")
    text = CalibrationConfig(name="t", path=str(tmp_path / "text.txt"), length=16, tokens=64, packing="chunk", seed=0)
    tiny.plan(network, 0.5).save(tmp_path / "plan.json")

    def perform(kind: Any, engine: str, **inputs: Path) -> dict[str, Any]:
        asked = step(model, text, engine)
        folder = tmp_path / f"{kind.__name__}-{engine}"
        folder.mkdir()
        settings = {role: dict(part.settings) for role, part in asked.parts.items()}
        given = {role: str(path) for role, path in inputs.items()}
        kind(Job(kind.__name__, "x", settings, dict(asked.runtime), given, str(folder), str(folder / "partial")))
        found: dict[str, Any] = json.loads(next(folder.glob("[cf]*[ts].json")).read_text())
        return found

    one, other = (step(model, text, engine) for engine in ("resident", "streamed"))
    assert one.id == other.id and other.runtime["text"] == {
        **plain(text),
        "engine": "streamed",
        "activation_budget": 0.5,
    }
    perform(measuring.model, "resident")
    inputs = {"model": tmp_path / "model-resident", "plan": tmp_path}
    resident = perform(pruned.cost, "resident", **inputs)
    monkeypatch.setattr(shared, "_loaded", lambda settings: pytest.fail("the whole model was loaded"))
    assert perform(pruned.cost, "streamed", **inputs) == resident
    assert 0 < resident["flops_ratio"] < 1
