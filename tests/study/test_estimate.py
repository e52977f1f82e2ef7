"""Estimates agree with what was measured and published, know every kind of step, and grow with the work."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from moe_lab.config import BenchmarkConfig, CalibrationConfig, ModelConfig, RecoveryConfig, TimingConfig
from moe_lab.grid import plain
from moe_lab.study.estimate import KINDS, PREFIX_REUSE, STREAMED, WORK, Estimate, estimate, gpus, hours, memory
from moe_lab.study.estimate_memory import LAYERED
from moe_lab.study.identity import Part, Step

ROOT = Path(__file__).parents[2]
SEARCHED = ("olmoe_1b_7b", "deepseek_v2_lite_chat", "ernie_21b_a3b", "qwen3_30b_a3b_instruct")
TEXT = CalibrationConfig(name="t", path="a/b", length=4096, tokens=524288, batch_size=4)
BENCHMARK = BenchmarkConfig(name="b", harness="lm_eval", task="t", expected=1000, batch_size=64)
L40S = 48.0


def model(name: str = "olmoe_1b_7b", **changes: Any) -> dict[str, Any]:
    loaded = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(ROOT / "conf/model" / f"{name}.yaml"))
    found = OmegaConf.to_object(loaded)
    assert isinstance(found, ModelConfig)
    return plain(replace(found, **changes))


def step(kind: str, about: dict[str, Any] | None = None, **runtime: Any) -> Step:
    """A step of any kind; what its kind needs and is not given is the ordinary."""
    rest = {"text": plain(TEXT), "recovery": plain(RecoveryConfig()), "benchmark": plain(BENCHMARK)}
    asked = Part({"parameters": runtime.pop("parameters", {})})
    timed = Part(plain(TimingConfig()))
    return Step(kind, "s", {"allocation": asked, "timing": timed}, {}, {"model": about or model(), **rest, **runtime})


def known(one: Step) -> Estimate:
    found = estimate(one)
    assert found is not None
    return found


def searches() -> dict[str, dict[str, float]]:
    """Model -> what EvoESAP's Table 3 prints of its search."""
    found: dict[str, dict[str, float]] = {}
    with (ROOT / "analysis/published/evoesap.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["table"] == "3":
                found.setdefault(row["model"], {})[row["benchmark"]] = float(row["value"])
    return found


def test_every_kind_of_step_is_known() -> None:
    from moe_lab.study.kinds import KINDS as done

    assert set(KINDS) == set(done) and len(KINDS) == len(done)
    assert all(known(step(kind)).seconds > 0 for kind in KINDS)


@pytest.mark.parametrize("name", SEARCHED)
def test_published_searches_take_about_as_long_as_estimated(name: str) -> None:
    """Theirs run every candidate in full; GPUs of one model work one after the other."""
    row = searches()[name]
    text = replace(TEXT, tokens=262144, batch_size=1)
    parameters = {"population": 32, "elites": 4, "generations": int(row["generations"])}
    found = known(step("search", model(name), text=plain(text), parameters=parameters))
    in_full = found.seconds / PREFIX_REUSE / 3600
    assert row["search_time_h"] / 2 < in_full < row["search_time_h"] * 2
    assert gpus(found, L40S) == row["gpus_L40S"]


def test_gradients_cost_three_passes_and_more_memory_unless_recomputed() -> None:
    forward, backward = known(step("statistics")), known(step("gradients"))
    assert 2.5 < backward.seconds / forward.seconds < 3.5
    assert backward.memory > 1.5 * forward.memory
    recomputed = known(step("gradients", text=plain(replace(TEXT, checkpointing=True))))
    assert recomputed.memory < backward.memory
    assert known(step("statistics", text=plain(replace(TEXT, tokens=1048576)))).seconds == pytest.approx(
        2 * forward.seconds, rel=0.05
    )


STREAMING = replace(TEXT, engine="streamed", activation_budget=1.0)


@pytest.mark.parametrize("kind", LAYERED)
def test_one_layer_in_memory_is_what_a_streamed_step_takes(kind: str) -> None:
    """Qwen2-57B: 3.6 GiB of experts and attention in a layer, 2 of embeddings and head, 6 of a batch of 16,384 tokens;
    for the gradients of weights, 6.6 of these in fp32."""
    whole, layered = (
        known(step(kind, model("qwen2_57b_a14b"), text=plain(text), calibration=plain(text)))
        for text in (TEXT, STREAMING)
    )
    assert whole.memory > 117 * 2**30
    assert 12 * 2**30 < layered.memory - (6.6 * 2**30 if kind == "weight_gradients" else 0) < 15 * 2**30
    more = known(step(kind, model("qwen2_57b_a14b"), text=plain(replace(STREAMING, activation_budget=3.0))))
    assert more.memory - layered.memory == pytest.approx(2 * 2**30)
    assert layered.seconds - whole.seconds == pytest.approx(LAYERED[kind] * whole.loading, rel=0.3)
    assert layered.loading < whole.loading / 4 and layered.on_gpu


def test_what_needs_the_whole_model_takes_it_by_either_engine() -> None:
    for kind in set(WORK) - set(LAYERED):
        assert known(step(kind, text=plain(STREAMING))) == known(step(kind)), kind


def test_gradients_of_weights_are_held_in_full() -> None:
    """57B - 4B parameters of routed experts in fp32."""
    big = model("qwen2_57b_a14b")
    assert known(step("weight_gradients", big)).memory - known(step("gradients", big)).memory > 180 * 2**30


def test_generated_benchmarks_are_paid_by_token_and_batch() -> None:
    choice = known(step("evaluate"))
    written = known(step("evaluate", benchmark=plain(replace(BENCHMARK, max_new_tokens=2048))))
    assert written.seconds > 10 * choice.seconds
    wide = known(step("evaluate", benchmark=plain(replace(BENCHMARK, max_new_tokens=2048, batch_size=128))))
    assert wide.seconds == pytest.approx(written.seconds / 2, rel=0.1)
    few = known(step("evaluate", benchmark=plain(replace(BENCHMARK, max_new_tokens=2048, limit=64))))
    assert few.seconds == pytest.approx(written.seconds / 16, rel=0.1)


def test_changed_weights_are_a_second_model() -> None:
    tuned = Step("evaluate", "s", {}, {"finetune": step("finetune")}, step("evaluate").runtime)
    assert known(tuned).memory > known(step("evaluate")).memory + 12 * 2**30


def test_weights_are_read_without_a_gpu_and_without_room_for_them() -> None:
    for kind in STREAMED:
        found = known(step(kind, model("qwen3_30b_a3b")))
        assert not found.on_gpu and found.memory < 2 * 2**30 and found.seconds > 60


def test_small_models_and_models_meant_for_the_cpu_ask_for_no_gpu() -> None:
    pocket = step("statistics", model("pocket_olmoe"), text=plain(replace(TEXT, tokens=4096, length=512)))
    assert gpus(known(pocket), 80) == 0 and gpus(known(step("statistics", model(device="cpu"))), 80) == 0
    assert known(step("statistics", model(device="cpu"))).seconds > 100 * known(step("statistics")).seconds


def test_gpus_follow_from_memory() -> None:
    assert gpus(known(step("statistics")), 80) == 1
    assert gpus(known(step("statistics", model("qwen2_57b_a14b"))), 80) == 2
    assert gpus(known(step("statistics", model("deepseek_v3"))), 80) > 16


def test_hours_load_a_model_once_and_pay_every_gpu_of_it() -> None:
    one = step("statistics", model("qwen2_57b_a14b"))
    work, paid = hours([one], 80)
    assert paid == pytest.approx(2 * work)
    twice, _ = hours([one, one], 80)
    found = known(one)
    assert twice - work == pytest.approx(found.seconds / 3600) and found.loading > 60
    assert hours([step("scores")], 80)[1] == 0


def test_what_is_not_known_is_not_guessed() -> None:
    nowhere = step("statistics", plain(ModelConfig(name="n", path="a/b")))
    assert estimate(nowhere) is None and hours([nowhere], 80) == (0, 0)
    assert memory([nowhere]) == "unknown" and memory([]) == ""
    assert memory([nowhere, step("statistics")]).endswith(" GiB or more")


def test_no_torch_is_needed() -> None:
    code = "import sys, moe_lab.study.resources; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_work_and_kinds_do_not_overlap() -> None:
    assert not set(WORK) & set(STREAMED)
