"""Memory agrees with what was published and grows with the work; time is what steps of the store
took; what this machine lacks is noticed before anything is loaded."""

import csv
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import choices
import pytest
from example_steps import cell_of, evaluation_step, step_of
from rich.filesize import decimal
from studies import start, study_request

from moe_lab.config import (
    AllocationConfig,
    BackendConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    CriterionConfig,
    ExpectedConfig,
    ExportConfig,
    LauncherConfig,
    ModelConfig,
    RecoveryConfig,
    Sampling,
)
from moe_lab.errors import UserError, user_errors
from moe_lab.json_files import write_json
from moe_lab.models import config_json
from moe_lab.study import estimates
from moe_lab.study.estimates import (
    forecast_table,
    largest_memory,
    resolved_text,
    seconds_estimator,
)
from moe_lab.study.resources import answer_bytes
from moe_lab.study.step import Step
from moe_lab.study.steps import KINDS
from moe_lab.study.store import Store

ROOT = Path(__file__).parents[2]
TEXT = CalibrationConfig(
    name="t", path="a/b", length=4096, tokens=524288, batch_tokens=16384, seed=1
)
BENCHMARK = BenchmarkConfig(
    name="b", harness="lm_eval", task="pocket:benchmarks/boolq.yaml", expected=1000, batch_size=64
)
CODE = BenchmarkConfig(
    name="code", harness="evalplus", task="pocket:benchmarks/mbpp.jsonl", max_new_tokens=2048
)
SERVER = BackendConfig(name="server", command="serve {checkpoint} {port}")
CHANNELS = CriterionConfig(name="heapr")
"""A criterion whose plans have FLOPs that depend on routing."""


def model(name: str = "olmoe_1b_7b", **changes: Any) -> ModelConfig:
    return replace(choices.read_choice(ModelConfig, "model", name), **changes)


def step(
    kind: str,
    about: ModelConfig | None = None,
    text: CalibrationConfig = TEXT,
    **changes: Any,
) -> Step:
    """A step of any kind about a model, that runs it."""
    benchmark = CODE if kind in ("generate", "grade") else BENCHMARK
    if kind == "cost":
        changes = {"criterion": CHANNELS, **changes}
    if kind == "finetune":
        changes = {"recovery": RecoveryConfig(name="r", instructions="t"), **changes}
    return step_of(kind, cell_of(about or model(), text, **changes), benchmark=benchmark)


def memory(step: Step) -> float:
    """Estimated bytes of a step about a model of known size."""
    estimate = step.resources().memory
    assert estimate is not None
    return estimate


def test_a_distillation_holds_five_tensors_of_the_size_of_the_logits_of_a_batch() -> None:
    def memory_of(role: str, batch_tokens: int) -> float:
        text = replace(TEXT, batch_tokens=batch_tokens)
        return memory(step("finetune", text=text, recovery=RecoveryConfig("r", **{role: "t"})))

    def bytes_of_a_row(role: str) -> float:
        return memory_of(role, 3 * TEXT.length) - memory_of(role, 2 * TEXT.length)

    size = config_json.size_of(model())
    assert size is not None
    further_bytes = bytes_of_a_row("distill") - bytes_of_a_row("instructions")
    assert further_bytes == pytest.approx(4 * TEXT.length * size.logit_bytes)


def test_gpus_of_published_searches_are_estimated() -> None:
    """Table 3 of EvoESAP has the numbers, for GPUs of 48 GiB."""
    text = replace(TEXT, tokens=262144, batch_tokens=4096)
    with (ROOT / "analysis/published/evoesap.csv").open(encoding="utf-8") as lines:
        published = {
            row["model"]: float(row["value"])
            for row in csv.DictReader(lines)
            if (row["table"], row["benchmark"]) == ("3", "gpus_L40S")
        }
    searches = {name: step("search", model(name), text) for name in published}
    gpus = {name: search.resources().gpus(48.0) for name, search in searches.items()}
    assert gpus == published


STREAMING = replace(TEXT, engine="streamed")
STREAMED = [
    name
    for name, kind in KINDS.items()
    if not kind.whole_model and name != "contamination" and "text" in kind.__dataclass_fields__
]


@pytest.mark.parametrize("kind", STREAMED)
def test_memory_of_a_streamed_step_is_that_of_two_layers(kind: str) -> None:
    """Qwen2-57B: 7.5 GiB of experts and attention in two layers, 2 of embeddings and head, 6 of a
    batch of 16,384 tokens; for the gradients of weights, 6.6 of these in fp32; for alignments, as
    much and 3.1 of products of channels."""
    big = model("qwen2_57b_a14b")
    layered = step(kind, big, STREAMING)
    if kind != "sequential":  # which is always streamed
        assert memory(step(kind, big)) > 117 * 2**30
    of_weights = dict.fromkeys(("weight_gradients", "layer_loss_weight_gradients"), 6.6)
    sums = {**of_weights, "activation_alignment": 9.7}.get(kind, 0)
    assert 15 * 2**30 < memory(layered) - sums * 2**30 < 18 * 2**30
    assert layered.resources().on_gpu


@pytest.mark.parametrize(
    ("launcher", "about", "text", "engine", "parts"),
    [
        ("slurm", model("olmoe_1b_7b", device="cuda"), TEXT, "resident", 1),
        ("slurm", model("qwen2_57b_a14b"), TEXT, "streamed", 2),
        ("local", model("qwen2_57b_a14b"), TEXT, "streamed", 5),
        ("local", model("qwen2_57b_a14b"), replace(TEXT, tokens=8 * 4096), "streamed", 2),
        ("local", model("qwen2_57b_a14b"), replace(TEXT, parts=3), "streamed", 3),
        ("local", model("qwen2_57b_a14b"), replace(TEXT, engine="resident"), "resident", 1),
        ("local", model("qwen2_57b_a14b", device="cpu"), TEXT, "resident", 1),
        ("inline", model("qwen2_57b_a14b"), TEXT, "streamed", 1),
        ("slurm", ModelConfig(name="n", path="a/b"), TEXT, "resident", 1),
        ("slurm", model("qwen2_57b_a14b", path="o/unknown"), TEXT, "resident", 1),
        ("slurm", model("qwen2_57b_a14b", path="o/gptq"), TEXT, "resident", 1),
        ("slurm", model("qwen2_57b_a14b", path="o/fp8"), TEXT, "streamed", 2),
    ],
)
def test_models_larger_than_one_gpu_are_streamed_in_parts(
    launcher: Any,
    about: ModelConfig,
    text: CalibrationConfig,
    engine: str,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has five GPUs of 80 GiB; models that moe_lab does not dequantise, and those of
    unknown format, are not streamed. Engine and parts do not change the id of the pass."""
    monkeypatch.setattr(estimates, "visible_gpus", lambda: list("01234"))
    configs = {
        "Qwen/Qwen2-57B-A14B": {"model_type": "qwen2_moe"},
        "o/gptq": {"quantization_config": {"quant_method": "gptq"}},
        "o/fp8": {"quantization_config": {"quant_method": "fp8"}},
    }
    monkeypatch.setattr(config_json, "hub_json", lambda name, *_: configs.get(name, {}))
    divided_text = resolved_text(text, 1, about, Config(launcher=LauncherConfig(name=launcher)))
    assert (divided_text.engine, divided_text.parts) == (engine, parts)
    calibration = step("statistics", about, divided_text)
    assert calibration.id == step("statistics", about, text).id
    assert len(calibration.merged_steps) == (parts if parts > 1 else 0)
    assert all(part.resources().gpus(80) == 1 for part in calibration.merged_steps)


def test_more_parts_than_batches_are_refused() -> None:
    """Four batches of two rows; a row longer than batch_tokens is a batch."""
    text = replace(TEXT, length=8, tokens=56, batch_tokens=23)
    with pytest.raises(UserError, match=r"calibration\.parts=5 .* 4 batches .*at most 4"):
        resolved_text(replace(text, parts=5), 1, model(device="cpu"), Config())
    longer_text = replace(text, batch_tokens=3, parts=7)
    assert resolved_text(longer_text, 1, model(device="cpu"), Config()).batches == 7


def test_changed_weights_take_the_memory_of_a_second_model() -> None:
    recovery = RecoveryConfig(name="r", bits=4)
    allocation = AllocationConfig(replacement="hc_smoe")
    for changed in (step("evaluate", recovery=recovery), step("evaluate", allocation=allocation)):
        assert memory(changed) > memory(step("evaluate")) + 12 * 2**30


@pytest.mark.parametrize(
    ("kind", "gib", "units"),
    [
        ("statistics", 132.15, 524288),
        ("weight_gradients", 476.21, 524288),
        ("search", 132.15, 1404 * 524288),
        ("sequential", 16.71, 524288),
        ("finetune", 410.09, 2 * 524288),
        ("evaluate", 122.21, 1000 * 128),
        ("generate", 170.27, 1000 * (128 + 2048)),
        ("export", 1.17, 1),
        ("scores", 0.59, 1),
    ],
)
def test_resources_of_steps_about_qwen2_57b(kind: str, gib: float, units: float) -> None:
    needed = step(kind, model("qwen2_57b_a14b", device="cuda")).resources()
    assert needed.memory == pytest.approx(gib * 2**30, abs=0.005 * 2**30)
    assert needed.units == units
    assert needed.on_gpu == (gib > 10)


def test_an_unknown_model_has_no_estimate() -> None:
    unknown = step("statistics", ModelConfig(name="n", path="a/b"))
    assert unknown.resources().memory is None
    assert largest_memory([unknown]) == "unknown"
    assert largest_memory([]) == ""
    assert largest_memory([unknown, step("statistics")]).endswith(" GiB or more")


# Time


def reading(
    tokens: int, of: ModelConfig | None = None, kind: str = "statistics", parts: int = 1
) -> Step:
    """A pass over so many tokens, in rows of 10 and batches of a row."""
    text = replace(TEXT, length=10, tokens=tokens, batch_tokens=10, parts=parts)
    return step(kind, of, text)


def asking(limit: int | None, **changes: Any) -> Step:
    return evaluation_step(model(), replace(BENCHMARK, limit=limit, **changes))


def finish(store: Store, step: Step, seconds: Any, **fields: Any) -> None:
    with store.claim(step) as scratch:
        assert scratch is not None
        resources = step.resources()
        times = {"seconds": seconds, "units": resources.units, "pace": resources.rate_key}
        write_json(scratch / "provenance.json", {**times, **fields})


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks whose data is their name."""
    monkeypatch.setattr(
        "moe_lab.evaluation.harness.Harness.data_digest", lambda self, benchmark: benchmark.name
    )


@pytest.mark.parametrize(
    ("finished", "requested", "seconds"),
    [
        (reading(30), reading(120), 120.0),
        (reading(30), reading(120, kind="damage"), None),
        (reading(30), reading(120, of=model("deepseek_v3")), None),
        (asking(100), asking(None), 300.0),
        (asking(100), asking(50), 15.0),
        (asking(100), asking(100, name="another"), None),
        (
            step("finetune"),
            step("finetune", recovery=RecoveryConfig(instructions="t", learning_rate=1.0)),
            30.0,
        ),
        (step("finetune"), step("finetune", recovery=RecoveryConfig(distill="t")), None),
        (step("finetune"), step("finetune", recovery=RecoveryConfig(fit="t")), None),
        (step("cost", criterion=CriterionConfig(name="aimer")), step("cost"), None),
        *((step(kind, model()), step(kind, model()), 30.0) for kind in ("scores", "plan")),
        *(
            (step(kind, model()), step(kind, model("deepseek_v3")), None)
            for kind in ("model", "scores", "plan")
        ),
    ],
)
def test_time_is_learned_from_finished_steps(
    store: Store, finished: Step, requested: Step, seconds: float | None
) -> None:
    """The finished one took 30 s; a benchmark without a limit has 1,000 items."""
    finish(store, finished, 30.0)
    assert seconds_estimator(store)(requested) == (
        None if seconds is None else pytest.approx(seconds)
    )


MERGE = reading(120, parts=3)


@pytest.fixture
def merged(store: Store) -> Store:
    """A store in which MERGE is finished."""
    finish(store, MERGE, 1.0, merged=["a", "b", "c"])
    return store


def test_the_time_of_a_merge_is_not_that_of_a_pass(merged: Store) -> None:
    assert seconds_estimator(merged)(reading(120)) is None
    table = forecast_table([*MERGE.merged_steps, MERGE], set(), 80.0, seconds_estimator(merged))
    assert table.columns[-2].footer == "unknown"


def test_parts_of_a_pass_take_equal_times_and_their_merge_none(merged: Store) -> None:
    finish(merged, reading(30), 30.0)
    seconds = seconds_estimator(merged)
    assert [seconds(part) for part in MERGE.merged_steps] == pytest.approx([40.0] * 3)
    assert seconds(MERGE) == 0
    table = forecast_table([*MERGE.merged_steps, MERGE], set(), 80.0, seconds)
    assert list(table.columns[1].cells) == ["4"]
    assert table.columns[-2].footer == "0.03"


def test_a_merge_needs_no_gpu_and_little_memory() -> None:
    assert all(part.resources().on_gpu for part in MERGE.merged_steps)
    assert not MERGE.resources().on_gpu
    assert memory(MERGE) < memory(reading(120)) / 2


def test_a_part_stores_hidden_states_of_its_rows() -> None:
    text = replace(STREAMING, length=10, tokens=120, batch_tokens=10)
    undivided = step("statistics", text=text)
    merge = step("statistics", text=replace(text, parts=3))
    disk = undivided.resources().disk
    assert disk > 0
    assert merge.merged_steps[0].resources().disk == pytest.approx(disk / 3)
    huge = step("statistics", text=replace(text, parts=3, tokens=10**15, batch_tokens=10**14))
    assert estimates.disk_problems("/", [huge]) == [], "it only reads and writes sums"


def test_texts_that_a_model_generates_take_16_bytes_a_token() -> None:
    benchmark = replace(BENCHMARK, limit=3, max_new_tokens=50)
    assert answer_bytes(benchmark) == 3 * 50 * 16


@pytest.mark.parametrize("kind", ["generate", "grade"])
def test_several_answers_to_an_item_take_as_many_times_longer(kind: str) -> None:
    several = replace(CODE, sampling=Sampling(temperature=1.0, samples=6))
    cell = cell_of(model(), TEXT)
    once, often = (
        step_of(kind, cell, benchmark=benchmark).resources() for benchmark in (CODE, several)
    )
    assert (often.units, often.disk) == (6 * once.units, 6 * once.disk)


def test_the_forecast_adds_known_times_and_counts_unknown_ones(store: Store) -> None:
    finish(store, reading(10), 3600.0)
    steps = [reading(10), reading(20), reading(30), reading(10, kind="damage")]
    table = forecast_table(steps, {steps[0].id}, 80.0, seconds_estimator(store))
    hours = dict(zip(table.columns[0].cells, table.columns[-2].cells, strict=True))
    assert hours == {"statistics": "5.00", "damage": "unknown"}
    assert table.columns[-2].footer == "5.00 + 1 unknown" == table.columns[-1].footer, (
        "on one GPU each"
    )


# What this machine has

GIB = 2**30
SHAPE = ExpectedConfig(
    parameters=10 * GIB, layers=48, moe_layers=48, experts=128, top_k=8, hidden=2048, width=768
)
MODEL = ModelConfig(name="m", path="owner/m", dtype="bfloat16", expected=SHAPE)


def text(engine: str) -> CalibrationConfig:
    return replace(TEXT, tokens=2**19, engine=engine)


def exported(format: Any) -> Step:
    return step_of("export", cell_of(MODEL, TEXT), Config(export=ExportConfig("natural", format)))


@pytest.mark.parametrize(
    ("steps", "gib"),
    [
        ([exported("safetensors")] * 2, 40.0),
        ([exported("gguf")], 40.0),
        ([step("statistics", MODEL, text("streamed"))], 6.0),
        ([step("gradients", MODEL, text("streamed"))], 102.0),
        ([step("cost", MODEL, text("streamed")), step("cost", MODEL, text("resident"))], 6.0),
        ([step("gradients", MODEL, text("resident")), step("plan", MODEL)], 0.0),
    ],
)
def test_steps_that_write_more_than_the_free_disk_are_refused(
    steps: list[Step], gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "not" / "there")
    disk = SimpleNamespace(free=gib * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    assert estimates.disk_problems(store, steps) == []
    disk.free -= 1
    problem = estimates.disk_problems(store, steps)[0]
    assert f"about {decimal(int(gib * GIB))} would be written" in problem


@pytest.mark.parametrize(
    ("tokens", "bytes_of_states"), [(2**16, 3 * 2**16 * 7 * 2**10), (2**20, None)]
)
def test_hidden_states_at_most_double_the_main_memory(
    tokens: int, bytes_of_states: int | None
) -> None:
    """Qwen2-57B: 7 KiB of a token between two layers."""
    big = model("qwen2_57b_a14b")
    text = replace(STREAMING, tokens=tokens)
    gpu, cpu = (
        memory(step("statistics", replace(big, device=device), text)) for device in ("cuda", "cpu")
    )
    assert cpu == (2 * gpu if bytes_of_states is None else gpu + bytes_of_states)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            lambda m: step("cost", m),
            {},
            "cost of model=m loads 20.0 GiB .* 19.0 GiB of main memory: set cal",
        ),
        (
            lambda m: evaluation_step(m, BENCHMARK),
            {"dtype": "float32"},
            "evaluate of model=m loads 40.0 GiB .* leave it out",
        ),
        (lambda m: step("cost", m, text("streamed")), {}, None),
        (lambda m: step("weights", m), {}, None),
        (lambda m: evaluation_step(m, BENCHMARK), {"device": "cuda"}, None),
        (lambda m: evaluation_step(m, BENCHMARK, backend=SERVER), {}, None),
        (lambda m: evaluation_step(m, BENCHMARK), {"expected": None}, None),
    ],
)
def test_models_larger_than_main_memory_are_refused(
    make: Callable[[ModelConfig], Step],
    changes: dict[str, Any],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = make(replace(MODEL, **{"device": "cpu", **changes}))
    monkeypatch.setattr(estimates, "main_memory", lambda: 40 * GIB)
    assert not list(user_errors(estimates.check_memory, loading))
    monkeypatch.setattr(estimates, "main_memory", lambda: 19 * GIB)
    errors = list(user_errors(estimates.check_memory, loading))
    if message is None:
        assert errors == []
    else:
        assert len(errors) == 1
        assert re.search(message, errors[0])


@pytest.mark.usefixtures("fake_worker")
def test_a_finished_study_is_not_refused_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_request()
    with monkeypatch.context() as patch:
        patch.setattr(estimates, "main_memory", lambda: 1000.0)
        with pytest.raises(UserError, match="main memory"):
            start(tmp_path, study)
    assert start(tmp_path, study) == 0
    monkeypatch.setattr(estimates, "main_memory", lambda: 1000.0)
    assert start(tmp_path, study) == 0
