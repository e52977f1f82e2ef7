"""Identity: everything that changes a result, and nothing else."""

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import choices
import pytest
from example_steps import Example, cell_of, evaluated, step_of

from moe_lab import config
from moe_lab.allocation import IdentifiedAllocation
from moe_lab.calibration import IdentifiedText
from moe_lab.config.base import Group, type_at
from moe_lab.criteria import IdentifiedCriterion
from moe_lab.evaluation.harness import Harness, IdentifiedBenchmark
from moe_lab.json_files import canonical, digest
from moe_lab.models.files import IdentifiedModel
from moe_lab.paths import resolve
from moe_lab.study import estimates
from moe_lab.study.estimates import resolved
from moe_lab.study.step import KINDS, Step
from moe_lab.study.steps.passes import Pass
from moe_lab.study.steps.scores import Scores


def test_order_of_keys_does_not_matter_and_nan_has_no_identity() -> None:
    assert digest({"a": {"b": 1, "c": [2]}, "d": 3}) == digest({"d": 3, "a": {"c": [2], "b": 1}})
    with pytest.raises(ValueError):
        canonical({"ratio": float("nan")})


# Settings

TEXT = config.CalibrationConfig(name="t", path="pocket:calibration/general.jsonl", seed=1)
MODEL = config.ModelConfig(name="m", path="pocket:olmoe", device="cpu", dtype="float32")
JUDGE = config.JudgeConfig(model="m", url="http://localhost:8000/v1")
BENCHMARK = config.BenchmarkConfig(
    name="b",
    harness="lm_eval",
    task="pocket:benchmarks/boolq.yaml",
    reports={"boolq": "acc"},
    judge=JUDGE,
)
SET = config.SourceConfig(calibration="t", share=0.5, settings=TEXT)
SHAPE = config.ExpectedConfig(
    parameters=1, layers=1, moe_layers=1, experts=2, top_k=1, hidden=2, width=2
)
GROUPS: dict[str, Any] = {
    "model": MODEL,
    "calibration": TEXT,
    "criterion": config.CriterionConfig(name="reap"),
    "allocation": config.AllocationConfig(),
    "recovery": config.RecoveryConfig(name="r", instructions="t"),
    "export": config.ExportConfig("natural"),
    "timing": config.TimingConfig(device="a GPU"),
    "server": config.BackendConfig(name="server", command="serve {checkpoint}"),
    "vllm": config.BackendConfig(name="vllm", arguments={"max_model_len": 1}),
    "benchmark": replace(BENCHMARK, data="owner/set"),
    "judge": JUDGE,
}
IDENTIFIED = {
    config.ModelConfig: IdentifiedModel,
    config.CalibrationConfig: IdentifiedText,
    config.CriterionConfig: IdentifiedCriterion,
    config.AllocationConfig: IdentifiedAllocation,
    config.BenchmarkConfig: IdentifiedBenchmark,
}
"""Class of settings that stand for something else, such as the content of a file -> the class that
identifies it."""
STUDY = {"CellConfig", "Config", "ExpectedConfig", "ProtocolConfig", "SourceConfig", "SuiteConfig"}
RUN = {"JobConfig", "LauncherConfig", "ResourcesConfig", "TrackerConfig"}
"""Classes that are part of no step: how a study is made of steps, and where these run."""
BESIDE: dict[str, dict[str, Any]] = {
    "calibration.sources": {
        "path": "",
        "sources": [SET, replace(SET, settings=replace(TEXT, name="u"))],
    },
    "allocation.by": {"name": "global", "by": "reap"},
    "allocation.search": {"name": "evolutionary", "search": "t"},
    "allocation.path": {"name": "list", "path": "{first}"},
    "allocation.protect_layers": {"protect": "super"},
    "recovery.distill": {"instructions": None, "distill": "t"},
    "recovery.fit": {"instructions": None, "fit": "t"},
    "recovery.temperature": {"instructions": None, "distill": "t"},
    "vllm.name": {"arguments": {}},
}
"""Field -> what else is set where the field can be."""
OTHER: dict[str, Any] = {
    "model.date": "2025-06-30",
    "calibration.ignored": ("license",),
    "benchmark.limit": 3,
    "model.path": "pocket:qwen3_moe",
    "model.device": "cuda",
    "model.expected": SHAPE,
    "calibration.path": "pocket:calibration/code.jsonl",
    "calibration.length": 1024,
    "calibration.is_default": True,
    "calibration.tokens": 2**20,
    "calibration.sources": [
        SET,
        replace(SET, settings=replace(TEXT, path="pocket:calibration/code.jsonl")),
    ],
    "criterion.name": "ean",
    "allocation.name": "global",
    "allocation.path": "{second}",
    "allocation.protect": "super",
    "server.name": "hf",
    "server.arguments": None,
    "vllm.name": "hf",
    "vllm.command": None,
    "benchmark.harness": "perplexity",
    "benchmark.parameters": {"header": "x"},
    "benchmark.judge": replace(JUDGE, model="other"),
}
"""Another valid value of a field. None: the field says nothing here, for it belongs to another
choice."""


def fields() -> Iterator[Any]:
    for name, group in GROUPS.items():
        yield from (
            pytest.param(name, field.name, id=f"{name}.{field.name}")
            for field in dataclasses.fields(group)
        )


def another(kind: Any, value: Any) -> Any:
    """Another value of a setting of this type."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if get_origin(kind) is list:
        return value[:-1] or 2 * value
    if get_origin(kind) is dict:
        return {**value, "more": "x"}
    others = {
        bool: lambda: not value,
        int: lambda: (value or 1) + 1,
        float: lambda: value / 2 or 1.0,
    }
    return others.get(kind, lambda: f"{value or ''}x")()


def test_each_class_of_settings_is_one_of_these() -> None:
    of_steps = {type(group).__name__ for group in GROUPS.values()}
    assert {each.__name__ for each in Group.__subclasses__()} == STUDY | RUN | of_steps


@pytest.mark.parametrize(("group", "field"), fields())
def test_fields_are_part_of_the_identity_unless_declared_runtime(
    group: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Harness, "data_digest", lambda _, benchmark: f"{benchmark.data} {benchmark.task}"
    )
    schedules = {f"{{{name}}}": str(tmp_path / f"{name}.json") for name in ("first", "second")}
    for number, file in enumerate(schedules.values()):
        Path(file).write_text(f'{{"0": {number + 1}}}')

    def changed(settings: Any, values: dict[str, Any]) -> Any:
        return replace(
            settings, **{name: schedules.get(str(value), value) for name, value in values.items()}
        )

    key = f"{group}.{field}"
    before = changed(GROUPS[group], BESIDE.get(key, {}))
    kind = type_at(type(before), [field])
    value = OTHER[key] if key in OTHER else another(kind, getattr(before, field))
    if value is None:
        return
    after = changed(before, {field: value})
    is_runtime = field in getattr(type(before), "runtime", ())
    assert (identity(before) == identity(after)) == is_runtime or key == "benchmark.parameters"


def identity(settings: Any) -> Any:
    return IDENTIFIED.get(type(settings), type(settings)).of(settings).identity


@pytest.mark.parametrize("group", GROUPS)
def test_an_identity_does_not_depend_on_what_was_imported(group: str) -> None:
    settings = replace(BENCHMARK, judge=None) if group == "benchmark" else GROUPS[group]
    of = IDENTIFIED.get(type(settings), type(settings))
    program = f"import pickle, sys; from {of.__module__} import {of.__name__} as of\n"
    program += "print(of.of(pickle.load(sys.stdin.buffer)).identity)"
    alone = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(settings), capture_output=True
    )
    assert alone.stdout.decode().strip() == str(identity(settings)), alone.stderr.decode()


@pytest.mark.parametrize(
    "settings", [GROUPS[name] for name in GROUPS if type(GROUPS[name]) in IDENTIFIED]
)
def test_settings_that_stand_for_a_file_have_no_identity_of_their_own(settings: Any) -> None:
    with pytest.raises(TypeError):
        _ = settings.identity


def test_parameters_that_change_in_between_give_another_step() -> None:
    criterion = config.CriterionConfig(name="s_family", parameters={"b": 1})
    ids = set()
    for b in (1, 2):
        criterion.parameters["b"] = b
        ids.add(Scores.of(cell_of(MODEL, TEXT, criterion=criterion)).id)
    assert len(ids) == 2


def test_vllm_memory_and_parallelism_do_not_change_identity() -> None:
    def of(**arguments: Any) -> str:
        return evaluated(
            MODEL, BENCHMARK, backend=config.BackendConfig(name="vllm", arguments=arguments)
        ).id

    assert (
        of() == of(gpu_memory_utilization=0.5) == of(tensor_parallel_size=4) != of(max_model_len=1)
    )


# Models


def test_a_model_is_its_files_wherever_they_are(tmp_path: Path) -> None:
    shutil.copytree(resolve("pocket:olmoe"), tmp_path / "copy")
    copy = replace(MODEL, name="other", path=str(tmp_path / "copy"))
    assert (
        Pass.of(cell_of(copy, TEXT), "statistics").id
        == Pass.of(cell_of(MODEL, TEXT), "statistics").id
    )
    (tmp_path / "copy/config.json").write_text((tmp_path / "copy/config.json").read_text() + " ")
    assert identity(copy) != identity(MODEL)


def test_the_word_auto_is_in_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node in fp32 and a GPU in the precision of the files share nothing."""
    auto = replace(MODEL, device="auto", dtype="auto")
    ids = []
    for gpu in (False, True):
        monkeypatch.setattr(estimates, "visible_gpus", lambda gpu=gpu: ["0"] * gpu)
        one = Pass.of(cell_of(resolved(auto, config.Config()), TEXT), "statistics")
        ids.append(one.id)
        assert "auto" not in str(one.settings)
    here = Pass.of(cell_of(MODEL, TEXT), "statistics").id
    assert ids[0] == here != ids[1]


def test_a_login_node_names_the_device_that_its_jobs_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimates, "visible_gpus", list)
    slurm = config.LauncherConfig(name="slurm")
    small = replace(MODEL, device="auto", dtype="auto")
    unknown = config.ModelConfig(name="big", path="owner/big")

    def device(model: config.ModelConfig, **resources: Any) -> str:
        return resolved(
            model, config.Config(launcher=slurm, resources=config.ResourcesConfig(**resources))
        ).device

    assert (device(small), device(unknown)) == ("cpu", "balanced")
    one = config.JobConfig(gpus=1)
    none = config.JobConfig(gpus=0)
    assert device(small, models={"m": one}) == device(unknown, every=one) == "cuda"
    assert device(unknown, models={"big": none}) == device(unknown, every=none) == "cpu"
    large = choices.choose(config.ModelConfig, "model", "olmoe_1b_7b")
    assert device(large) == device(small, every=config.JobConfig(gpus=2)) == "balanced"
    assert resolved(unknown, config.Config(launcher=slurm)).dtype == "auto", (
        "the precision of the files"
    )
    monkeypatch.setattr(estimates, "visible_gpus", lambda: list("01"))
    for launcher, memory, found in (
        ("inline", 80, "cuda"),
        ("inline", 12, "balanced"),
        ("local", 80, "balanced"),
    ):
        resources = config.ResourcesConfig(gpu_memory=memory)
        launches = config.LauncherConfig(launcher)
        assert (
            resolved(large, config.Config(launcher=launches, resources=resources)).device == found
        )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_steps_that_run_the_model_are_about_one_kind_of_device(kind: str) -> None:
    """And no step is about a card."""
    changes = (
        {"recovery": config.RecoveryConfig(name="r", instructions="t")}
        if kind == "finetune"
        else {}
    )
    if kind == "cost":
        changes["criterion"] = config.CriterionConfig(name="aimer")  # counted, without the model
    task = "pocket:benchmarks/mbpp.jsonl" if kind in ("generate", "grade") else BENCHMARK.task
    harness = "evalplus" if kind in ("generate", "grade") else "lm_eval"
    benchmark = replace(BENCHMARK, harness=harness, task=task, judge=None)
    cpu, gpu, other_gpu = (
        step_of(kind, cell_of(replace(MODEL, device=device), TEXT, **changes), benchmark=benchmark)
        for device in ("cpu", "cuda", "cuda:1")
    )
    assert gpu.id == other_gpu.id
    reads_results_of_runs = kind in ("scores", "plan", "grade", "family", "export")
    assert (cpu.id != gpu.id) == (gpu.resources().runs_model or reads_results_of_runs)


# Steps


def test_kind_roles_and_inputs_count_and_labels_do_not() -> None:
    one = Example()
    different = [
        one,
        Example("scores"),
        Example(number=1),
        Example(needed={"a": one}),
        Example(needed={"b": one}),
    ]
    assert len({step.id for step in different}) == len(different)
    assert Example(name="other").id == one.id == Example(merges=(Example(number=1),)).id


def test_a_step_takes_its_identity_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not found out again there, where files may have changed."""
    step = Pass.of(cell_of(MODEL, TEXT), "statistics")
    content = pickle.dumps(step)
    monkeypatch.setattr(
        "moe_lab.study.step.identity", lambda _: pytest.fail("it was computed again")
    )
    there: Step = pickle.loads(content)
    assert (there.id, there.folder, there.settings) == (step.id, step.folder, step.settings)
    assert (
        there.document()["inputs"] == {"facts": step.loaded.facts.folder} and os.sep in there.folder
    )
