"""What steps that ask a model hand on: its chat template's arguments, and data that is still what it was."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from example_steps import evaluated

from moe_lab.config import BenchmarkConfig, ModelConfig
from moe_lab.errors import Unavailable
from moe_lab.evaluation import run, suite
from moe_lab.json_files import write_json
from moe_lab.study.steps.evaluation import Evaluate
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.recovery import Pruned

BENCHMARK = BenchmarkConfig(
    name="code", harness="evalplus", task="pocket:benchmarks/mbpp.jsonl", reports={"mbpp": "base"}
)


MODEL = ModelConfig(name="m", path="pocket:olmoe", template_arguments={"enable_thinking": False})


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """A step whose model is not loaded."""

    @contextmanager
    def nobody(*_: object) -> Any:
        yield None, None

    monkeypatch.setattr(Pruned, "open", nobody)
    return evaluated(MODEL, BENCHMARK)


def test_a_harness_asks_with_the_models_template_arguments(
    step: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(subject: Any, *_: Any, **__: Any) -> None:
        given.append(subject.template_arguments)
        write_json(tmp_path / "result.json", {"protocol": {"prompt": "?"}})

    given: list[Any] = []
    monkeypatch.setattr(run, "evaluate", evaluate)
    step.work(Files(tmp_path, tmp_path, {}, tmp_path / "log"))
    assert given == [{"enable_thinking": False}]


def test_data_that_changed_since_it_was_asked_for_is_not_taken(
    step: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert step.id
    monkeypatch.setattr(suite, "data_digest", lambda _: "another")
    with pytest.raises(Unavailable, match="its data is not what it was"):
        step.work(Files(tmp_path, tmp_path, {}, tmp_path / "log"))
