"""Memory agrees with what was published and grows with the work; time is what steps of the store took; what this
machine lacks is noticed before anything is loaded."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from moe_lab.config import BenchmarkConfig, CalibrationConfig, ModelConfig, RecoveryConfig, TimingConfig
from moe_lab.json_files import write_json
from moe_lab.models.config_json import size_of
from moe_lab.study import estimates
from moe_lab.study.estimates import Memory, Times, forecast, gpus, largest_memory, memory_of
from moe_lab.study.step import Part, Step
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.kind import Reads
from moe_lab.study.steps.memory import LOGITS, hidden_states
from moe_lab.study.store import Store

ROOT = Path(__file__).parents[2]
SEARCHED = ("olmoe_1b_7b", "deepseek_v2_lite_chat", "ernie_21b_a3b", "qwen3_30b_a3b_instruct")
TEXT = CalibrationConfig(name="t", path="a/b", length=4096, tokens=524288, batch_size=4)
BENCHMARK = BenchmarkConfig(name="b", harness="lm_eval", task="t", expected=1000, batch_size=64)
L40S = 48.0
MODELS = [name for name, kind in KINDS.items() if kind.reads is Reads.MODEL]
LAYERED = [name for name, kind in KINDS.items() if kind.checkpoint_reads]


def model(name: str = "olmoe_1b_7b", **changes: Any) -> dict[str, Any]:
    loaded = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(ROOT / "conf/model" / f"{name}.yaml"))
    settings = OmegaConf.to_object(loaded)
    assert isinstance(settings, ModelConfig)
    return asdict(replace(settings, **changes))


def step(kind: str, about: dict[str, Any] | None = None, **runtime: Any) -> Step:
    """A step of any kind; what its kind needs and is not given is the ordinary."""
    rest = {"text": asdict(TEXT), "recovery": asdict(RecoveryConfig()), "benchmark": asdict(BENCHMARK)}
    settings = Part({"parameters": runtime.pop("parameters", {})})
    timed = Part(asdict(TimingConfig()))
    return Step(
        kind, "s", {"allocation": settings, "timing": timed}, {}, {"model": about or model(), **rest, **runtime}
    )


def known(one: Step) -> Memory:
    memory = memory_of(one)
    assert memory is not None
    return memory


def searches() -> dict[str, dict[str, float]]:
    """Model -> what EvoESAP's Table 3 prints of its search."""
    rows: dict[str, dict[str, float]] = {}
    with (ROOT / "analysis/published/evoesap.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["table"] == "3":
                rows.setdefault(row["model"], {})[row["benchmark"]] = float(row["value"])
    return rows


@pytest.mark.parametrize("name", SEARCHED)
def test_published_searches_ran_on_as_many_gpus_as_estimated(name: str) -> None:
    text = replace(TEXT, tokens=262144, batch_size=1)
    assert gpus(known(step("search", model(name), text=asdict(text))), L40S) == searches()[name]["gpus_L40S"]


def test_gradients_take_more_memory_unless_recomputed() -> None:
    forward, backward = known(step("statistics")), known(step("gradients"))
    assert backward.bytes > 1.5 * forward.bytes
    assert known(step("gradients", text=asdict(replace(TEXT, checkpointing=True)))).bytes < backward.bytes


STREAMING = replace(TEXT, engine="streamed", activation_budget=1.0)


@pytest.mark.parametrize("kind", LAYERED)
def test_one_layer_in_memory_is_what_a_streamed_step_takes(kind: str) -> None:
    """Qwen2-57B: 3.6 GiB of experts and attention in a layer, 2 of embeddings and head, 6 of a batch of 16,384 tokens;
    for the gradients of weights, 6.6 of these in fp32; for alignments, as much and 3.1 of products of channels."""
    whole, layered = (
        known(step(kind, model("qwen2_57b_a14b"), text=asdict(text), calibration=asdict(text)))
        for text in (TEXT, STREAMING)
    )
    assert whole.bytes > 117 * 2**30
    sums = {"weight_gradients": 6.6, "activation_alignment": 9.7}.get(kind, 0)
    assert 12 * 2**30 < layered.bytes - sums * 2**30 < 15 * 2**30
    more = known(step(kind, model("qwen2_57b_a14b"), text=asdict(replace(STREAMING, activation_budget=3.0))))
    assert more.bytes - layered.bytes == pytest.approx(2 * 2**30)
    assert layered.on_gpu


def test_what_needs_the_whole_model_takes_it_by_either_engine() -> None:
    for kind in set(MODELS) - set(LAYERED):
        assert known(step(kind, text=asdict(STREAMING))) == known(step(kind)), kind


def test_gradients_of_weights_are_held_in_full() -> None:
    """57B - 4B parameters of routed experts in fp32."""
    big = model("qwen2_57b_a14b")
    assert known(step("weight_gradients", big)).bytes - known(step("gradients", big)).bytes > 180 * 2**30


def test_changed_weights_are_a_second_model() -> None:
    tuned = Step("evaluate", "s", {}, {"finetune": step("finetune")}, step("evaluate").runtime)
    assert known(tuned).bytes > known(step("evaluate")).bytes + 12 * 2**30


def test_routers_are_trained_without_a_second_model_and_a_teacher_takes_more_of_a_batch() -> None:
    """OLMoE: 12.9 GiB of weights; four more tensors of the size of the logits of 16,384 tokens."""
    dora, distilled, routers = (
        known(step("finetune", recovery=asdict(RecoveryConfig(**settings)))).bytes
        for settings in ({"instructions": "t"}, {"distill": "t"}, {"distill": "t", "train": "routers"})
    )
    assert distilled - dora == 4 * 16384 * LOGITS
    assert distilled - routers == pytest.approx(1.1 * 12.9 * 2**30, rel=0.02)


def test_a_fit_has_no_gradients_and_holds_sums_of_experts_that_are_merged() -> None:
    """OLMoE: 16 layers of 64 experts, at most half as many merged ones, each with 1024 * (1024 + 2048) sums in fp64."""
    dora, fit = (
        known(step("finetune", recovery=asdict(RecoveryConfig(**settings)))).bytes
        for settings in ({"instructions": "t"}, {"fit": "t"})
    )
    sums = 16 * 32 * 1024 * (1024 + 2048) * 8
    activations = 15 * 16384 * 2 * (20 * 2048 + 6 * 8 * 1024)  # of one layer instead of all
    assert fit - dora == pytest.approx(sums - activations, rel=1e-6)


def test_weights_are_read_without_a_gpu_and_without_room_for_them() -> None:
    for kind in (name for name, kind in KINDS.items() if kind.reads is Reads.CHECKPOINT):
        memory = known(step(kind, model("qwen3_30b_a3b")))
        assert not memory.on_gpu and memory.bytes < 2 * 2**30


def test_small_models_and_models_meant_for_the_cpu_ask_for_no_gpu() -> None:
    pocket = step("statistics", model("pocket_olmoe"), text=asdict(replace(TEXT, tokens=4096, length=512)))
    assert gpus(known(pocket), 80) == 0 and gpus(known(step("statistics", model(device="cpu"))), 80) == 0


def test_gpus_follow_from_memory() -> None:
    assert gpus(known(step("statistics")), 80) == 1
    assert gpus(known(step("statistics", model("qwen2_57b_a14b"))), 80) == 2
    assert gpus(known(step("statistics", model("deepseek_v3"))), 80) > 16


def test_a_model_nothing_is_known_of_has_no_estimate() -> None:
    nowhere = step("statistics", asdict(ModelConfig(name="n", path="a/b")))
    assert memory_of(nowhere) is None
    assert largest_memory([nowhere]) == "unknown" and largest_memory([]) == ""
    assert largest_memory([nowhere, step("statistics")]).endswith(" GiB or more")


def test_no_torch_is_needed() -> None:
    code = "import sys, moe_lab.study.run; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout.replace("'", '"')) == []


# Time


def facts(name: str) -> Step:
    return Step("model", name, {"model": Part({"hub": name})})


def reading(rows: int, of: str = "one", kind: str = "statistics", about: dict[str, Any] | None = None) -> Step:
    """A pass over so many rows of 10 tokens."""
    text = Part({"rows": rows, "length": 10})
    return Step(
        kind, of, {"calibration": text}, {"model": facts(of)}, {"model": about or model(), "calibration": asdict(TEXT)}
    )


def asking(kind: str, limit: int | None, of: str = "one", data: str = "d") -> Step:
    benchmark = {**asdict(BENCHMARK), "limit": limit}
    inputs = {"model": facts(of)} if kind == "evaluate" else {}
    part = Part({"data": data, "limit": limit})
    return Step(kind, "a", {"benchmark": part}, inputs, {"model": model(), "benchmark": benchmark})


def finish(store: Store, done: Step, seconds: Any, **more: Any) -> None:
    with store.claim(done) as scratch:
        assert scratch is not None
        write_json(scratch / "provenance.json", {"seconds": seconds, **more})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").create()


def test_a_pass_takes_what_another_over_the_same_model_took_by_tokens(store: Store) -> None:
    finish(store, reading(3), 30.0)
    finish(store, reading(5, of="other"), 5.0)
    times = Times(store)
    assert times.seconds(reading(12)) == pytest.approx(120.0)
    assert times.seconds(reading(12, kind="damage")) is None


def in_parts(rows: int, parts: int) -> Step:
    whole = reading(rows)
    size = rows // parts
    shares = [
        replace(whole, parts={**whole.parts, "rows": Part({"first": first, "end": first + size})})
        for first in range(0, rows, size)
    ]
    return replace(whole, merges=shares)


def test_parts_of_a_pass_are_counted_by_their_rows_and_the_merge_reads_only_files(store: Store) -> None:
    finish(store, reading(3), 30.0)
    merge = in_parts(12, 3)
    times = Times(store)
    assert [times.seconds(share) for share in merge.merges] == pytest.approx([40.0] * 3)
    assert times.seconds(merge) == 0
    table = forecast([*merge.merges, merge], set(), 80.0, times.seconds)
    assert list(table.columns[1].cells) == ["4"] and table.columns[-2].footer == "0.03"
    assert all(known(share).on_gpu for share in merge.merges) and not known(merge).on_gpu
    assert known(merge).bytes < known(reading(12)).bytes / 2


def test_the_time_of_a_merge_is_not_that_of_a_pass(store: Store) -> None:
    merge = in_parts(12, 3)
    finish(store, merge, 1.0, merged=["a", "b", "c"])
    assert Times(store).seconds(reading(12)) is None
    finish(store, merge.merges[0], 8.0)
    assert Times(store).seconds(reading(12)) == pytest.approx(24.0)


def test_a_share_keeps_hidden_states_of_its_rows() -> None:
    merge = in_parts(12, 3)
    streamed = {**asdict(TEXT), "engine": "streamed", "length": 10, "tokens": 120, "activation_budget": 1e9}
    runtime = {"model": model(), "calibration": streamed}
    whole, share, merge = (replace(one, runtime=runtime) for one in (reading(12), merge.merges[0], merge))
    kind, size = KINDS["statistics"], size_of(ModelConfig(**model()))
    assert size
    of_share, of_whole = (hidden_states(kind, one, size) for one in (share, whole))
    assert of_share == pytest.approx(of_whole / 3) and of_share > 0
    huge = replace(merge, runtime={"model": model(), "calibration": {**streamed, "tokens": 10**15}})
    assert estimates.disk_problems("/", [huge]) == [], "it only reads and writes sums"


def test_a_pass_over_another_model_takes_what_its_active_parameters_say(store: Store) -> None:
    layer = {"n_experts": 4, "top_k": 2, "expert_parameters": 10**8}
    with store.claim(facts("small")) as scratch:
        assert scratch is not None
        write_json(scratch / "facts.json", {"parameters": 6 * 10**8, "layers": {"0": layer}})
    finish(store, reading(1, of="small"), 4.0)
    active = 1.28e9  # of OLMoE, 4e8 of the small one
    assert Times(store).seconds(reading(1)) == pytest.approx(4.0 * active / 4e8, rel=0.02)
    nowhere = asdict(ModelConfig(name="n", path="a/b"))
    assert Times(store).seconds(reading(1, about=nowhere)) is None


def test_a_benchmark_takes_what_its_items_took(store: Store) -> None:
    finish(store, asking("evaluate", 100), 10.0)
    finish(store, asking("grade", 10), 5.0)
    times = Times(store)
    assert times.seconds(asking("evaluate", None)) == pytest.approx(100.0), "1,000 are expected of it"
    assert times.seconds(asking("evaluate", 50)) == pytest.approx(5.0)
    assert times.seconds(asking("grade", 20)) == pytest.approx(10.0)
    assert times.seconds(asking("evaluate", 100, data="another")) is None


def test_steps_that_do_not_say_what_they_took_count_as_none(store: Store) -> None:
    finish(store, reading(1), "long")
    for rows, content in enumerate(("", "[]"), 2):
        finish(store, reading(rows), 1.0)
        (store.path(reading(rows)) / "step.json").write_text(content)
    (store.root / "statistics" / "a-note.txt").write_text("x")
    assert Times(store).seconds(reading(1)) is None


def test_a_fine_tuning_says_nothing_of_one_that_trains_other_parts_or_has_a_teacher(store: Store) -> None:
    dora, distilled, routers, slower = (
        replace(reading(3, kind="finetune"), parts={**reading(3).parts, "recovery": Part({"epochs": 2, **settings})})
        for settings in (
            {"adapter": "dora"},
            {"adapter": "dora", "teacher": "unpruned"},
            {"trained": "routers", "teacher": "unpruned"},
            {"trained": "routers", "teacher": "unpruned", "learning_rate": 1e-6},
        )
    )
    fit = replace(dora, parts={**dora.parts, "recovery": Part({"fitted": "down projections"})})
    finish(store, routers, 2.0)
    times = Times(store)
    assert [times.seconds(other) for other in (dora, distilled, slower)] == [None, None, pytest.approx(2.0)]
    finish(store, fit, 2.0)
    times = Times(store)
    assert times.seconds(dora) is None
    assert times.seconds(fit) == pytest.approx(2.0)


def test_a_cost_that_is_counted_says_nothing_of_one_that_reads_a_text(store: Store) -> None:
    counted, read = (replace(reading(3, kind="cost"), parts=parts) for parts in ({}, reading(3).parts))
    finish(store, counted, 2.0)
    assert Times(store).seconds(read) is None and Times(store).seconds(counted) == pytest.approx(2.0)


def test_the_forecast_adds_up_what_is_known_and_counts_what_is_not(store: Store) -> None:
    finish(store, reading(1), 3600.0)
    steps = [reading(1), reading(2), reading(3), reading(1, kind="damage")]
    table = forecast(steps, {steps[0].id}, 80.0, Times(store).seconds)
    hours = dict(zip(table.columns[0].cells, table.columns[-2].cells, strict=True))
    assert hours == {"statistics": "5.00", "damage": "unknown"}
    assert table.columns[-2].footer == "5.00 + 1 unknown" == table.columns[-1].footer, "on one GPU each"


# What this machine has

GIB = 2**30
MODEL: dict[str, Any] = {
    "name": "m",
    "path": "owner/m",
    "dtype": "bfloat16",
    "expected": {
        "parameters": 10 * GIB,
        "layers": 48,
        "moe_layers": 48,
        "experts": 128,
        "top_k": 8,
        "hidden": 2048,
        "width": 768,
    },
}


def bare(kind: str, **runtime: Any) -> Step:
    return Step(kind, "x", {}, {}, {"model": MODEL, **runtime})


def text(engine: str) -> dict[str, Any]:
    return {"tokens": 2**19, "engine": engine}


ASKED = {"limit": None, "expected": 2**15, "max_new_tokens": 2**11}


@pytest.mark.parametrize(
    ("steps", "gib"),
    [
        ([bare("export"), bare("export")], 40.0),
        ([bare("export", export={"format": "gguf"})], 40.0),
        ([bare("statistics", calibration=text("streamed"))], 4.0),
        ([bare("gradients", calibration=text("streamed"))], 100.0),
        ([bare("cost", text=text("streamed")), bare("cost", text=text("resident"))], 4.0),
        ([bare("gradients", calibration=text("resident")), bare("plan")], 0.0),
        ([bare("generate", benchmark=ASKED)], 1.0),
    ],
)
def test_what_is_written_is_held_against_what_is_free(
    steps: list[Step], gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "not" / "there")
    for free, fits in ((gib * GIB, True), (gib * GIB - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        problems = estimates.disk_problems(store, steps)
        assert problems == [] if fits else f"about {gib:.1f} GiB would be written" in problems[0]


def test_the_converter_to_gguf_holds_a_matrix_of_all_experts_of_a_layer() -> None:
    plain, converted = (memory_of(bare("export", export={"format": name})) for name in ("safetensors", "gguf"))
    assert plain is not None and converted is not None
    size = estimates.size_of(ModelConfig(**MODEL))
    assert size is not None
    assert converted.bytes - plain.bytes >= 8 * size.experts * size.expert / 3 > 0


@pytest.mark.parametrize(
    ("one", "changes", "says"),
    [
        (bare("cost", text=text("resident")), {}, "cost of model=m loads 20.0 GiB .* 19.0 GiB of main memory: set cal"),
        (bare("evaluate", benchmark=ASKED), {}, "evaluate of model=m loads 20.0 GiB of weights.* leave it out"),
        (bare("evaluate", benchmark=ASKED), {"dtype": "auto"}, "loads 40.0 GiB"),
        (bare("cost", text=text("streamed")), {}, None),
        (bare("weights"), {}, None),
        (bare("evaluate", benchmark=ASKED), {"device": "cuda"}, None),
        (bare("generate", benchmark=ASKED, backend={"name": "server"}), {}, None),
        (bare("evaluate", benchmark=ASKED), {"expected": None}, None),
    ],
)
def test_what_is_loaded_is_held_against_main_memory(
    one: Step, changes: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(one, runtime={**one.runtime, "model": {**MODEL, "device": "cpu", **changes}})
    for memory, fits in ((19 * GIB, says is None), (40 * GIB, True)):
        monkeypatch.setattr(estimates, "main_memory", lambda memory=memory: memory)
        problems = estimates.memory_problems([asked, asked])
        assert problems == [] if fits else len(problems) == 1 and re.search(str(says), problems[0])
