"""What steps that ask a model hand on: its chat template's arguments, and data that is still what it was."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.errors import Unavailable
from moe_lab.evaluation import run, suite
from moe_lab.json_files import write_json
from moe_lab.study.step import Job
from moe_lab.study.steps import evaluation

BENCHMARK = BenchmarkConfig(
    name="code", harness="evalplus", task="pocket:benchmarks/mbpp.jsonl", reports={"mbpp": "base"}
)


def job(tmp_path: Path, data: str) -> Job:
    model = ModelConfig(name="m", path="pocket:olmoe", template_arguments={"enable_thinking": False})
    runtime = {"model": asdict(model), "benchmark": asdict(BENCHMARK), "policy": {}, "backend": asdict(BackendConfig())}
    return Job("evaluate", "x", {"benchmark": {"data": data}}, runtime, {}, str(tmp_path), str(tmp_path))


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nobody(job: Job) -> Any:
        yield None, None

    monkeypatch.setattr(evaluation, "pruned_model", nobody)


def test_a_harness_asks_with_the_models_template_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(subject: Any, *_: Any, **__: Any) -> None:
        given.append(subject.template_arguments)
        write_json(tmp_path / "result.json", {"protocol": {"prompt": "?"}})

    given: list[Any] = []
    monkeypatch.setattr(run, "evaluate", evaluate)
    evaluation.evaluate(job(tmp_path, suite.data_digest(BENCHMARK)))
    assert given == [{"enable_thinking": False}]


def test_data_that_changed_since_it_was_asked_for_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="its data is not what it was"):
        evaluation.evaluate(job(tmp_path, "another"))
