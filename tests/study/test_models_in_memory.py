"""Models that a process holds from one step to the next."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from example_steps import Example

from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.evaluation.engines import vllm
from moe_lab.models import load
from moe_lab.models.discover import routed_layers
from moe_lab.recovery import apply
from moe_lab.study.schedule import InProcessExecutor
from moe_lab.study.steps.files import Files, Models
from moe_lab.study.store import Store

MODEL = ModelConfig(name="m", path="pocket:olmoe", device="cpu")
OTHER = replace(MODEL, name="other", top_k=2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models, copies and engines that are created, in order; no weights are read, and
    no engine is started."""
    events: list[str] = []

    def note(name: str, result: Any) -> Any:
        events.append(name)
        return result

    monkeypatch.setattr(load, "load_model", lambda model: note(model.name, (model.name, "tokens")))
    monkeypatch.setattr(apply, "recovered", lambda network, plan, **_: note(network + plan, plan))
    monkeypatch.setattr(Models, "use", lambda *_: None)
    monkeypatch.setattr(vllm.OpenEngine, "open", lambda *_: note("engine", "engine"))
    monkeypatch.setattr(vllm.OpenEngine, "close", lambda _: events.append("end"))
    return events


def test_a_model_and_its_copy_are_made_once_for_several_steps(calls: list[str]) -> None:
    models = Models()
    for plan in ("a", "a", "b"):
        assert models.recover(MODEL, plan, bits=4) == plan
        models.load(replace(MODEL))
    assert calls == ["m", "ma", "mb"]


def test_another_model_replaces_the_first_and_its_copy(calls: list[str]) -> None:
    models = Models()
    for model in (MODEL, OTHER, MODEL):
        models.load(model)
        models.recover(model, "a")
    assert calls == [f"{name}{plan}" for name in ("m", OTHER.name, "m") for plan in ("", "a")]


def test_the_implementation_of_experts_names_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()
    for devices, name in (((), "eager"), (("cpu",), "eager+triton")):
        monkeypatch.setattr("moe_lab.models.rows.TRITON_DEVICES", devices)
        models.use(tiny.build("olmoe"))
        assert models.experts == name


def test_a_skeleton_has_the_top_k_override() -> None:
    layers = routed_layers(Models().skeleton(OTHER))
    assert {layer.top_k for layer in layers} == {OTHER.top_k}


def test_an_engine_and_a_loaded_model_are_not_held_together(calls: list[str]) -> None:
    models = Models()
    models.load(MODEL)
    models.engine(Path("x"), BackendConfig(name="vllm"), MODEL, None)
    models.load(MODEL)
    assert calls == ["m", "engine", "end", "m"]


class Loading(Example):
    """A step that loads MODEL."""

    def work(self, files: Files) -> None:
        files.models.load(MODEL)


def test_studies_of_a_process_share_the_models_in_memory(
    calls: list[str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "models", Models())
    for number in range(2):
        step = Loading(number=number)
        with store.claim(step) as scratch, InProcessExecutor(store) as execute:
            assert scratch
            execute(step, scratch)
    assert calls == ["m"]
