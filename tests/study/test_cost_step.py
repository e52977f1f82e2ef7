"""The cost of a plan: counted without the model where nothing depends on where tokens go, else the same, with the same
numbers, whether the whole model is in memory or one layer of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny

from moe_lab.config import CalibrationConfig, Config, CriterionConfig, ModelConfig
from moe_lab.grid import Cell
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan
from moe_lab.study.estimates import memory_of, memory_problems
from moe_lab.study.graph import NO_ALLOCATION, NO_CALIBRATION, NO_CRITERION
from moe_lab.study.step import Job, Step
from moe_lab.study.steps import costs, inputs, passes
from moe_lab.study.steps.builder import Builder
from moe_lab.study.steps.recovery import NO_RECOVERY, PrunedModel

EXPERTS, CHANNELS = CriterionConfig(name="aimer"), CriterionConfig(name="channel_weight")
PLAN = Step("plan", "a")


def step(
    model: ModelConfig, text: CalibrationConfig, criterion: CriterionConfig | None = None, engine: str = "resident"
) -> Step:
    """The cost step of a plan made by `criterion`, or of the unpruned model, in a study calibrated by that engine."""
    text = replace(text, engine=engine, activation_budget=0.5)
    chosen = criterion or NO_CRITERION
    cell = Cell(model, chosen, NO_CALIBRATION, NO_ALLOCATION, NO_RECOVERY, 0.0, "none", 0, {"flops": text})
    builder = Builder(Config())
    return costs.COST.step(PrunedModel(builder, cell, PLAN if criterion else None))


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    tiny.save("deepseek_v2", tmp_path / "model")
    return ModelConfig(name="m", path=str(tmp_path / "model"), device="cpu")


@pytest.fixture
def text(tmp_path: Path) -> CalibrationConfig:
    words = [f"w{(7 * at) % (tiny.VOCABULARY - 4) + 4}" for at in range(64)]
    (tmp_path / "text.txt").write_text("\n\n".join(words))  # a document is a word to its tokenizer
    return CalibrationConfig(
        name="t", path=str(tmp_path / "text.txt"), length=16, tokens=64, packing="chunk", seed=0, batch_size=2
    )


Perform = Callable[..., dict[str, Any]]


@pytest.fixture
def perform(tmp_path: Path) -> Perform:
    """Do a step, and give the JSON it leaves. `folders`: role -> folder."""

    def do(kind: Any, asked: Step, name: str, **folders: Path) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        settings = {role: dict(part.settings) for role, part in asked.parts.items()}
        given = {role: str(path) for role, path in folders.items()}
        kind(Job(kind.__name__, "x", settings, dict(asked.runtime), given, str(folder), str(folder / "partial")))
        found: dict[str, Any] = json.loads(next(folder.glob("[cf]*[ts].json")).read_text())
        return found

    return do


def channel_plan(network: Any, width: Callable[[int], int]) -> Plan:
    """Each expert keeps its first `width(expert)` channels."""
    layers = moe_layers(network)
    counts = {layer.index: layer.n_experts for layer in layers}
    channels = {index: numpy.zeros((count, layers[0].width), dtype=bool) for index, count in counts.items()}
    for mask in channels.values():
        for expert, row in enumerate(mask):
            row[: width(expert)] = True
    return Plan({index: tuple(range(count)) for index, count in counts.items()}, counts, {}, channels)


def test_whole_experts_and_even_channels_are_counted_without_the_model(
    model: ModelConfig, text: CalibrationConfig, perform: Perform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.build("deepseek_v2")
    perform(passes.model, step(model, text), "facts")
    monkeypatch.setattr(inputs, "_loaded", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(costs, "engine", lambda *_: pytest.fail("the text was read"))
    before = perform(costs.cost, step(model, text), "unpruned", model=tmp_path / "facts")
    assert before["flops_ratio"] == 1
    for criterion, plan in ((EXPERTS, tiny.plan(network, 0.5)), (CHANNELS, channel_plan(network, lambda _: 7))):
        folder = tmp_path / criterion.name
        folder.mkdir()
        plan.save(folder / "plan.json")
        given = {"model": tmp_path / "facts", "plan": folder, "unpruned": tmp_path / "unpruned"}
        found = perform(costs.cost, step(model, text, criterion), f"cost-{criterion.name}", **given)
        assert found["flops_per_token_unpruned"] == before["flops_per_token"] and 0 < found["flops_ratio"] < 1
        del given["unpruned"]
        assert perform(costs.cost, step(model, text), f"again-{criterion.name}", **given) == found


def test_the_engine_of_the_study_counts_flops_and_changes_nothing(
    model: ModelConfig, text: CalibrationConfig, perform: Perform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel_plan(tiny.build("deepseek_v2"), lambda expert: 5 + expert).save(tmp_path / "plan.json")
    one, other = (step(model, text, CHANNELS, engine) for engine in ("resident", "streamed"))
    assert one.id == other.id and other.runtime["text"] == {
        **asdict(text),
        "engine": "streamed",
        "activation_budget": 0.5,
    }
    perform(passes.model, one, "facts")
    given = {"model": tmp_path / "facts", "plan": tmp_path}
    resident = perform(costs.cost, one, "resident", **given)
    monkeypatch.setattr(inputs, "_loaded", lambda settings: pytest.fail("the whole model was loaded"))
    assert perform(costs.cost, other, "streamed", **given) == resident
    assert 0 < resident["flops_ratio"] < 1


def test_only_a_cost_that_depends_on_routing_depends_on_the_text(model: ModelConfig, text: CalibrationConfig) -> None:
    other, longer = replace(text, path=model.path + "/config.json", tokens=32), replace(text, length=32)
    for criterion, texts in ((None, 1), (EXPERTS, 1), (CHANNELS, 2)):
        assert len({step(model, each, criterion).id for each in (text, other)}) == texts
        assert step(model, longer, criterion).id != step(model, text, criterion).id


def test_a_checkpoint_of_uneven_experts_is_counted_on_the_text(model: ModelConfig, text: CalibrationConfig) -> None:
    file = Path(model.path) / "config.json"
    assert "text" not in step(model, text).parts
    file.write_text(json.dumps({**json.loads(file.read_text()), "expert_widths": {"1": [3, 5]}}))
    assert "text" in step(model, text).parts


def test_a_cost_that_needs_no_model_asks_for_no_memory(
    model: ModelConfig, text: CalibrationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_lab.study.estimates.main_memory", lambda: 1)
    small, large = (step(model, text, criterion, "resident") for criterion in (EXPERTS, CHANNELS))
    assert not memory_problems([small]) and memory_problems([large])
    assert memory_of(small).bytes < memory_of(large).bytes  # type: ignore[union-attr]
