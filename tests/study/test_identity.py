"""Identity: everything that changes a result, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_steps import Example, cell_of, evaluated, step_of
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.config import (
    AllocationConfig,
    BackendConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    CriterionConfig,
    ExportConfig,
    JudgeConfig,
    LauncherConfig,
    ModelConfig,
    RecoveryConfig,
    ResourcesConfig,
    SourceConfig,
    TimingConfig,
)
from moe_lab.config.identity import identity
from moe_lab.paths import resolve
from moe_lab.study import devices
from moe_lab.study.devices import resolved
from moe_lab.study.step import KINDS, Loads, Step, canonical, digest, identified
from moe_lab.study.steps.passes import StatisticsPass

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=5))
def test_order_of_keys_does_not_matter(document: dict[str, object]) -> None:
    assert digest(dict(reversed(document.items()))) == digest(document)


def test_nan_has_no_identity() -> None:
    with pytest.raises(ValueError):
        canonical({"ratio": float("nan")})


# Settings

TEXT = CalibrationConfig(name="t", path="pocket:calibration/general.jsonl", seed=1)
MODEL = ModelConfig(name="m", path="pocket:olmoe", device="cpu", dtype="float32")
BENCHMARK = BenchmarkConfig(
    name="b", harness="lm_eval", task="pocket:benchmarks/boolq.yaml", reports={"boolq": "acc"}, judge=JudgeConfig()
)
SET = SourceConfig(calibration="t", share=0.5, settings=TEXT)
GROUPS: dict[str, Any] = {
    "model": MODEL,
    "calibration": TEXT,
    "source": SET,
    "criterion": CriterionConfig(name="reap"),
    "allocation": AllocationConfig(),
    "recovery": RecoveryConfig(name="r", instructions="t"),
    "export": ExportConfig("natural"),
    "timing": TimingConfig(device="a GPU"),
    "server": BackendConfig(name="server", command="serve {checkpoint}"),
    "vllm": BackendConfig(name="vllm", arguments={"max_model_len": 1}),
}
OTHER: dict[str, Any] = {
    "model.path": "pocket:qwen3_moe",
    "calibration.path": "pocket:calibration/code.jsonl",
    "calibration.packing": "none",
    "calibration.order": "first",
    "calibration.gap": "eos",
    "calibration.sources": None,
    "calibration.engine": "streamed",
    "calibration.length": 1024,
    "criterion.name": "ean",
    "allocation.name": "global",
    "allocation.path": "{schedule}",
    "allocation.protect": "super",
    "server.name": "hf",
    "vllm.name": "hf",
    "server.arguments": None,
    "vllm.command": None,
}
"""Another valid value of a field. None: the field says nothing here, for it belongs to another choice."""


def fields() -> Iterator[Any]:
    for name, group in GROUPS.items():
        yield from (pytest.param(name, field.name, id=f"{name}.{field.name}") for field in dataclasses.fields(group))


def another(value: Any) -> Any:
    """Another value of the same type."""
    if value is None:
        return 7
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 1
    if isinstance(value, list):
        return [*value, *value, "more"]
    return {**value, "more": 1} if isinstance(value, dict) else f"{value}x"


@pytest.mark.parametrize(("group", "field"), fields())
def test_a_field_is_part_of_the_identity_unless_its_class_says_that_it_changes_no_result(
    group: str, field: str, tmp_path: Path
) -> None:
    (schedule := tmp_path / "schedule.json").write_text('{"0": 1}')
    before = GROUPS[group]
    value = OTHER.get(f"{group}.{field}", another(getattr(before, field)))
    if value is None:
        return
    after = replace(before, **{field: str(schedule) if value == "{schedule}" else value})
    is_runtime = field in getattr(type(before), "runtime", ())
    assert (identified(before).digest == identified(after).digest) == is_runtime


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BenchmarkConfig)])
def test_a_field_of_a_benchmark_counts_by_itself_or_by_its_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lab.evaluation.suite.data_digest", lambda benchmark: f"{benchmark.data} {benchmark.task}")
    monkeypatch.setattr("moe_lab.evaluation.rubric.identity", lambda benchmark: identity(benchmark.judge))
    others = {"harness": "perplexity", "judge": JudgeConfig(model="other"), "parameters": {"header": "x"}}
    before = replace(BENCHMARK, data="owner/set", judge=JudgeConfig(model="one"))
    after = replace(before, **{name: others.get(name, another(getattr(before, name)))})
    is_runtime = name in BenchmarkConfig.runtime
    assert (identified(before).digest == identified(after).digest) == is_runtime or name == "parameters"


def test_where_a_model_is_put_and_how_much_memory_it_takes_is_no_part_of_a_result() -> None:
    def of(**arguments: Any) -> str:
        return evaluated(MODEL, BENCHMARK, backend=BackendConfig(name="vllm", arguments=arguments)).id

    assert of() == of(gpu_memory_utilization=0.5) == of(tensor_parallel_size=4) != of(max_model_len=1)


# Models


def test_a_model_is_its_files_wherever_they_are(tmp_path: Path) -> None:
    shutil.copytree(resolve("pocket:olmoe"), tmp_path / "copy")
    copy = replace(MODEL, name="other", path=str(tmp_path / "copy"))
    assert StatisticsPass.of(cell_of(copy, TEXT)).id == StatisticsPass.of(cell_of(MODEL, TEXT)).id
    (tmp_path / "copy/config.json").write_text((tmp_path / "copy/config.json").read_text() + " ")
    assert identity(replace(copy, top_k=None)) != identity(MODEL)


def test_the_word_auto_is_in_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node in fp32 and a GPU in the precision of the files share nothing."""
    auto, ids = replace(MODEL, device="auto", dtype="auto"), []
    for gpu in (False, True):
        monkeypatch.setattr(devices, "has_gpu", lambda gpu=gpu: gpu)
        one = StatisticsPass.of(cell_of(resolved(auto, Config()), TEXT))
        ids.append(one.id)
        assert "auto" not in str(one.settings)
    assert (
        len({*ids, StatisticsPass.of(cell_of(MODEL, TEXT)).id}) == 2
        and StatisticsPass.of(cell_of(MODEL, TEXT)).id == ids[0]
    )


def test_a_login_node_names_the_device_that_its_jobs_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    slurm = LauncherConfig(name="slurm")
    small, unknown = replace(MODEL, device="auto", dtype="auto"), ModelConfig(name="big", path="owner/big")

    def device(model: ModelConfig, **resources: Any) -> str:
        return resolved(model, Config(launcher=slurm, resources=ResourcesConfig(**resources))).device

    assert (device(small), device(unknown)) == ("cpu", "cuda")
    assert (
        device(small, jobs={"m/every": {"gpus": 1}}) == "cuda"
        and device(unknown, jobs={"m/every": {"gpus": 1}}) == "cuda"
    )
    assert device(unknown, jobs={"big/every": {"gpus": 0}}) == "cpu"
    assert resolved(unknown, Config(launcher=slurm)).dtype == "auto", "the precision of the files"


RUNNING = [name for name, kind in KINDS.items() if kind.loads is Loads.MODEL]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_steps_that_run_the_model_are_about_one_kind_of_device(kind: str) -> None:
    """And no step is about a card."""
    changes = {"recovery": RecoveryConfig(name="r", instructions="t")} if kind == "finetune" else {}
    if kind == "cost":
        changes["criterion"] = CriterionConfig(name="aimer")  # counted, without the model
    task = "pocket:benchmarks/mbpp.jsonl" if kind in ("generate", "grade") else BENCHMARK.task
    harness = "evalplus" if kind in ("generate", "grade") else "lm_eval"
    benchmark = replace(BENCHMARK, harness=harness, task=task, judge=None)
    ids = [
        step_of(kind, cell_of(replace(MODEL, device=device), TEXT, **changes), benchmark=benchmark).id
        for device in ("cpu", "cuda", "cuda:1")
    ]
    assert ids[1] == ids[2]
    needs_run = (kind in RUNNING and kind != "cost") or kind in ("scores", "plan", "grade", "family", "export")
    assert (ids[0] != ids[1]) == needs_run


# Steps


def test_kind_roles_and_inputs_count_and_labels_do_not() -> None:
    one = Example()
    different = [one, Example("scores"), Example(number=1), Example(needed={"a": one}), Example(needed={"b": one})]
    assert len({step.id for step in different}) == len(different)
    assert Example(name="other").id == one.id == Example(merges=(Example(number=1),)).id


def test_a_step_takes_its_identity_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not found out again there, where files may have changed."""
    step = StatisticsPass.of(cell_of(MODEL, TEXT))
    content = pickle.dumps(step)
    monkeypatch.setattr("moe_lab.study.step.identity", lambda _: pytest.fail("it was found out again"))
    there: Step = pickle.loads(content)
    assert (there.id, there.folder, there.settings) == (step.id, step.folder, step.settings)
    assert there.document()["inputs"] == {"facts": step.loaded.facts.folder} and os.sep in there.folder
