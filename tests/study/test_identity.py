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
from example_steps import Example, cell_of, evaluation_step, step_of

from moe_lab import config
from moe_lab.allocation import IdentifiedAllocation
from moe_lab.calibration import IdentifiedText
from moe_lab.config.base import Group, setting_type
from moe_lab.criteria import IdentifiedCriterion
from moe_lab.evaluation.harness import Harness, IdentifiedBenchmark
from moe_lab.json_files import canonical, digest
from moe_lab.models.files import IdentifiedModel
from moe_lab.paths import resolve
from moe_lab.result_files import FOREIGN
from moe_lab.study import estimates
from moe_lab.study.estimates import resolved_device, resolved_text
from moe_lab.study.step import KINDS, Step, identity_document
from moe_lab.study.steps.passes import Pass
from moe_lab.study.steps.scores import Scores


def test_order_of_keys_does_not_change_a_digest() -> None:
    assert digest({"a": {"b": 1, "c": [2]}, "d": 3}) == digest({"d": 3, "a": {"c": [2], "b": 1}})


def test_nan_has_no_canonical_json() -> None:
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
    "sampling": config.Sampling(temperature=0.5, top_p=0.5, top_k=3, min_p=0.25),
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
STUDY = {
    "CellConfig",
    "Config",
    "ExpectedConfig",
    "ProtocolConfig",
    "SharedBatches",
    "SourceConfig",
    "SuiteConfig",
}
RUN = {"JobConfig", "LauncherConfig", "ResourcesConfig", "TrackerConfig"}
"""Classes that are part of no step: how a study is made of steps, and where these run."""
CONTEXT: dict[str, dict[str, Any]] = {
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
    "benchmark.thinking_tokens": {"chat": True, "max_new_tokens": 2},
    "benchmark.sampling": {"max_new_tokens": 2},
}
"""Field -> what else is set where the field can be."""
OTHER_VALUES: dict[str, Any] = {
    "model.date": "2025-06-30",
    "model.thinking_marks": (("<a>", "</a>"),),
    "calibration.ignored": ("license",),
    "benchmark.held_out": TEXT,
    "benchmark.limit": 3,
    "benchmark.sampling": config.Sampling(temperature=0.5),
    "model.path": "pocket:qwen3_moe",
    "model.tokenizer": "pocket:qwen3_moe",
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


def test_each_class_of_settings_is_of_steps_a_study_or_a_run() -> None:
    of_steps = {type(group).__name__ for group in GROUPS.values()}
    assert {subclass.__name__ for subclass in Group.__subclasses__()} == STUDY | RUN | of_steps


@pytest.fixture
def schedule_files(tmp_path: Path) -> dict[str, str]:
    """Placeholder in CONTEXT and OTHER_VALUES -> path of a schedule of ratios."""
    paths = {f"{{{name}}}": tmp_path / f"{name}.json" for name in ("first", "second")}
    for number, path in enumerate(paths.values()):
        path.write_text(f'{{"0": {number + 1}}}')
    return {placeholder: str(path) for placeholder, path in paths.items()}


@pytest.mark.parametrize(("group", "field"), fields())
def test_fields_are_part_of_the_identity_unless_declared_runtime(
    group: str, field: str, schedule_files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Harness, "data_digest", lambda _, benchmark: f"{benchmark.data} {benchmark.task}"
    )

    def changed(settings: Any, values: dict[str, Any]) -> Any:
        changes = {name: schedule_files.get(str(value), value) for name, value in values.items()}
        return replace(settings, **changes)

    key = f"{group}.{field}"
    settings = changed(GROUPS[group], CONTEXT.get(key, {}))
    kind = setting_type(type(settings), [field])
    value = OTHER_VALUES[key] if key in OTHER_VALUES else another(kind, getattr(settings, field))
    if value is None:
        return
    same_identity = identity(settings) == identity(changed(settings, {field: value}))
    is_runtime = field in getattr(type(settings), "runtime", ())
    assert same_identity == is_runtime or key == "benchmark.parameters"


def identity(settings: Any) -> Any:
    return IDENTIFIED.get(type(settings), type(settings)).of(settings).identity


@pytest.mark.parametrize("group", GROUPS)
def test_an_identity_does_not_depend_on_imports(group: str) -> None:
    settings = replace(BENCHMARK, judge=None) if group == "benchmark" else GROUPS[group]
    identified = IDENTIFIED.get(type(settings), type(settings))
    program = f"import pickle, sys; from {identified.__module__} import {identified.__name__} as C"
    program += "\nprint(C.of(pickle.load(sys.stdin.buffer)).identity)"
    result = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(settings), capture_output=True
    )
    assert result.stdout.decode().strip() == str(identity(settings)), result.stderr.decode()


@pytest.mark.parametrize(
    "settings", [GROUPS[name] for name in GROUPS if type(GROUPS[name]) in IDENTIFIED]
)
def test_settings_of_files_have_no_identity_of_their_own(settings: Any) -> None:
    with pytest.raises(TypeError):
        _ = settings.identity


def test_changed_parameters_give_another_step() -> None:
    criterion = config.CriterionConfig(name="s_family", parameters={"b": 1})
    ids = set()
    for b in (1, 2):
        criterion.parameters["b"] = b
        ids.add(Scores.of(cell_of(MODEL, TEXT, criterion=criterion)).id)
    assert len(ids) == 2


def vllm_id(**arguments: Any) -> str:
    backend = config.BackendConfig(name="vllm", arguments=arguments)
    return evaluation_step(MODEL, BENCHMARK, backend=backend).id


def test_vllm_memory_and_parallelism_do_not_change_identity() -> None:
    assert vllm_id() == vllm_id(gpu_memory_utilization=0.5) == vllm_id(tensor_parallel_size=4)
    assert vllm_id() != vllm_id(max_model_len=1)


# Models


def test_a_model_is_identified_by_its_files(tmp_path: Path) -> None:
    shutil.copytree(resolve("pocket:olmoe"), tmp_path / "copy")
    copy = replace(MODEL, name="other", path=str(tmp_path / "copy"))
    assert (
        Pass.of(cell_of(copy, TEXT), "statistics").id
        == Pass.of(cell_of(MODEL, TEXT), "statistics").id
    )
    (tmp_path / "copy/config.json").write_text((tmp_path / "copy/config.json").read_text() + " ")
    assert identity(copy) != identity(MODEL)


def test_no_id_contains_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node in fp32 and a GPU in the precision of the files share nothing."""
    auto = replace(MODEL, device="auto", dtype="auto")
    ids = []
    for gpus in ([], ["0"]):
        monkeypatch.setattr(estimates, "visible_gpus", lambda gpus=gpus: gpus)
        step = Pass.of(cell_of(resolved_device(auto, config.Config()), TEXT), "statistics")
        ids.append(step.id)
        assert "auto" not in str(step.settings)
    fp32_on_cpu = Pass.of(cell_of(MODEL, TEXT), "statistics").id
    assert ids[0] == fp32_on_cpu != ids[1]


SMALL = replace(MODEL, device="auto", dtype="auto")
LARGE = choices.read_choice(config.ModelConfig, "model", "olmoe_1b_7b")
UNKNOWN = config.ModelConfig(name="big", path="owner/big")
SLURM = config.LauncherConfig(name="slurm")
NO_GPU, ONE_GPU, TWO_GPUS = (config.JobConfig(gpus=gpus) for gpus in range(3))


@pytest.mark.parametrize(
    ("model", "resources", "device"),
    [
        (SMALL, {}, "cpu"),
        (UNKNOWN, {}, "balanced"),
        (LARGE, {}, "balanced"),
        (SMALL, {"models": {"m": ONE_GPU}}, "cuda"),
        (UNKNOWN, {"every": ONE_GPU}, "cuda"),
        (UNKNOWN, {"models": {"big": NO_GPU}}, "cpu"),
        (LARGE, {"every": NO_GPU}, "cpu"),
        (SMALL, {"every": TWO_GPUS}, "balanced"),
    ],
)
def test_device_and_batches_on_a_login_node_are_those_of_its_jobs(
    model: config.ModelConfig,
    resources: dict[str, Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of texts of any length, unless a text states its own number."""
    monkeypatch.setattr(estimates, "visible_gpus", list)
    settings = config.Config(launcher=SLURM, resources=config.ResourcesConfig(**resources))
    resolved_model = resolved_device(model, settings)
    assert resolved_model.device == device
    for given, expected in ((None, 8192 if device == "cpu" else 16384), (5, 5)):
        text = replace(TEXT, length=3, batch_tokens=given)
        assert resolved_text(text, 1, resolved_model, settings).batch_tokens == expected


def test_dtype_auto_of_an_unknown_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """dtype=auto is the precision of the files, which is unknown here."""
    monkeypatch.setattr(estimates, "visible_gpus", list)
    assert resolved_device(UNKNOWN, config.Config(launcher=SLURM)).dtype == "auto"


@pytest.mark.parametrize(
    ("launcher", "gpu_memory", "device"),
    [
        ("inline", 80, "cuda"),
        ("inline", 12, "balanced"),
        ("local", 80, "balanced"),
    ],
)
def test_auto_on_a_machine_with_two_gpus(
    launcher: Any, gpu_memory: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "visible_gpus", lambda: list("01"))
    resources = config.ResourcesConfig(gpu_memory=gpu_memory)
    settings = config.Config(launcher=config.LauncherConfig(launcher), resources=resources)
    assert resolved_device(LARGE, settings).device == device


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {FOREIGN}))
def test_ids_depend_on_the_kind_of_device(kind: str) -> None:
    """CPU or GPU; no id depends on the index of a GPU."""
    changes: dict[str, Any] = {}
    if kind == "finetune":
        changes["recovery"] = config.RecoveryConfig(name="r", instructions="t")
    if kind == "cost":
        changes["criterion"] = config.CriterionConfig(name="aimer")  # counted, without the model
    benchmark = replace(BENCHMARK, judge=None)
    if kind in ("generate", "grade"):
        benchmark = replace(
            benchmark, harness="evalplus", task="pocket:benchmarks/mbpp.jsonl", max_new_tokens=48
        )
    cpu, gpu, second_gpu = (
        step_of(kind, cell_of(replace(MODEL, device=device), TEXT, **changes), benchmark=benchmark)
        for device in ("cpu", "cuda", "cuda:1")
    )
    assert gpu.id == second_gpu.id
    reads_results_of_runs = kind in ("scores", "plan", "grade", "family", "export")
    assert (cpu.id != gpu.id) == (gpu.resources().runs_model or reads_results_of_runs)


# Steps


def test_kind_number_and_inputs_change_the_id() -> None:
    step = Example()
    steps = [
        step,
        Example("scores"),
        Example(number=1),
        Example(input_steps={"a": step}),
        Example(input_steps={"b": step}),
    ]
    assert len({step.id for step in steps}) == len(steps)


def test_labels_and_merges_do_not_change_the_id() -> None:
    assert Example(name="other").id == Example().id
    assert Example(merged_steps=(Example(number=1),)).id == Example().id


def test_a_step_takes_its_identity_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process does not compute it again, as files may have changed."""
    step = Pass.of(cell_of(MODEL, TEXT), "statistics")
    content = pickle.dumps(step)
    monkeypatch.setattr(
        "moe_lab.study.step.identity", lambda _: pytest.fail("it was computed again")
    )
    copy: Step = pickle.loads(content)
    assert (copy.id, copy.folder, copy.settings) == (step.id, step.folder, step.settings)
    assert identity_document(copy)["inputs"] == {"facts": step.loaded.facts.folder}
    assert os.sep in copy.folder
