"""The cost of a plan: counted without the model where nothing depends on where tokens go, else the same, with the same
numbers, whether the whole model is in memory or one layer of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
from example_steps import Example, cell_of, done

from moe_lab.config import CalibrationConfig, CriterionConfig, ModelConfig, RecoveryConfig
from moe_lab.models import load
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan
from moe_lab.study.steps.costs import Cost
from moe_lab.study.steps.passes import loaded_as
from moe_lab.study.steps.plans import drops_whole_experts
from moe_lab.study.steps.recovery import Pruned
from moe_lab.study.steps.recovery import unpruned as unpruned_model
from moe_lab.study.store import Store

EXPERTS, CHANNELS = CriterionConfig(name="aimer"), CriterionConfig(name="channel_weight")
PLANS = {EXPERTS.name: Example(), CHANNELS.name: Example(number=1)}


def step(
    model: ModelConfig, text: CalibrationConfig, criterion: CriterionConfig | None = None, engine: str = "resident"
) -> Cost:
    """The cost of a plan made by `criterion`, or of the unpruned model, counted by that engine."""
    text = replace(text, engine=engine)
    unpruned = Cost.of(unpruned_model(model), text)
    if criterion is None:
        return unpruned
    whole = drops_whole_experts(cell_of(model, text, criterion=criterion))
    pruned = Pruned(loaded_as(model), PLANS[criterion.name], None, None, RecoveryConfig(), whole)
    return Cost.of(pruned, text, unpruned)


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


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").create()


def cost(store: Store, asked: Cost) -> dict[str, Any]:
    """What a step counts."""
    found: dict[str, Any] = json.loads((done(store, asked) / "cost.json").read_text())
    return found


def publish(store: Store, criterion: CriterionConfig, plan: Plan) -> None:
    with store.claim(PLANS[criterion.name]) as scratch:
        assert scratch is not None
        plan.save(scratch / "plan.json")


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
    model: ModelConfig, text: CalibrationConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.build("deepseek_v2")
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the model was loaded"))
    before = cost(store, step(model, text))
    assert before["flops_ratio"] == 1
    for criterion, plan in ((EXPERTS, tiny.plan(network, 0.5)), (CHANNELS, channel_plan(network, lambda _: 7))):
        publish(store, criterion, plan)
        found = cost(store, step(model, text, criterion))
        assert found["flops_per_token_unpruned"] == before["flops_per_token"] and 0 < found["flops_ratio"] < 1


def test_the_engine_of_the_study_counts_flops_and_changes_nothing(
    model: ModelConfig, text: CalibrationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    one, other = (step(model, text, CHANNELS, engine) for engine in ("resident", "streamed"))
    assert one.id == other.id and other.text == replace(text, engine="streamed")
    for asked in (one, other):
        store = Store(tmp_path / str(len(counted))).create()
        publish(store, CHANNELS, channel_plan(tiny.build("deepseek_v2"), lambda expert: 5 + expert))
        counted.append(cost(store, asked))
        monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the whole model was loaded"))
    assert counted[0] == counted[1] and 0 < counted[0]["flops_ratio"] < 1


def test_only_a_cost_that_depends_on_routing_depends_on_the_text(model: ModelConfig, text: CalibrationConfig) -> None:
    other, longer = replace(text, path=model.path + "/config.json", tokens=32), replace(text, length=32)
    for criterion, texts in ((None, 1), (EXPERTS, 1), (CHANNELS, 2)):
        assert len({step(model, each, criterion).id for each in (text, other)}) == texts
        assert step(model, longer, criterion).id != step(model, text, criterion).id


def test_a_checkpoint_of_uneven_experts_is_counted_on_the_text(model: ModelConfig, text: CalibrationConfig) -> None:
    file = Path(model.path) / "config.json"
    assert step(model, text).text is None
    file.write_text(json.dumps({**json.loads(file.read_text()), "pruned": {"layers": {"1": {"widths": [3, 5]}}}}))
    assert step(model, text).text is not None
