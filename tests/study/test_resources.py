"""What a Slurm job asks for: the most particular that is set, the rest estimated for all its steps together."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import Any

import pytest
from example_steps import cell_of, step_of
from omegaconf import OmegaConf

from moe_lab.config import (
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    ExpectedConfig,
    JobConfig,
    ModelConfig,
    ResourcesConfig,
)
from moe_lab.config.base import Mistakes, valid
from moe_lab.errors import UserError
from moe_lab.study import Step
from moe_lab.study.estimates import Seconds
from moe_lab.study.preflight import preflight
from moe_lab.study.slurm import arrays as module

BIG = ModelConfig(
    name="big",
    path="a/b",
    dtype="bfloat16",
    expected=ExpectedConfig(
        parameters=57_000_000_000, layers=28, moe_layers=28, experts=64, top_k=8, hidden=3584, width=2560
    ),
)
TEXT = CalibrationConfig(name="t", path="a/b", seed=1)
WRITTEN = BenchmarkConfig(name="b", harness="lm_eval", task="t", expected=1000, max_new_tokens=2048)


def hour(_: Step) -> float | None:
    return 3600.0


def resources(steps: list[Step], settings: ResourcesConfig, seconds: Seconds = hour) -> dict[str, Any]:
    """What a job asks for whose steps take an hour each."""
    return module.resources(steps, settings, seconds)


def step(model: ModelConfig = BIG, kind: str = "evaluate") -> Step:
    return step_of(kind, cell_of(model, TEXT), benchmark=WRITTEN)


def settings(text: str) -> ResourcesConfig:
    found: ResourcesConfig = valid(ResourcesConfig, OmegaConf.to_container(OmegaConf.create(text)), "resources")
    return found


def test_nothing_set_is_estimated_and_nothing_is_left_out() -> None:
    asked = resources([step()], ResourcesConfig())
    assert set(asked) == {field.name for field in fields(JobConfig)}
    assert asked["gpus"] == 3 and asked["cpus"] == 24
    assert asked["memory"] > 106, "the weights pass through main memory"
    assert asked["minutes"] % 30 == 0
    assert (asked["partition"], asked["sbatch"], asked["setup"]) == (None, {}, [])


def test_a_pack_asks_for_the_time_of_all_its_steps_and_the_memory_of_one() -> None:
    one, four = (resources([step()] * count, ResourcesConfig()) for count in (1, 4))
    assert (one["minutes"], four["minutes"]) == (120, 480), "with a margin of 2"
    assert {**one, "minutes": 0} == {**four, "minutes": 0}
    assert resources([step()] * 400, ResourcesConfig())["minutes"] == ResourcesConfig().longest


def test_a_pack_with_a_step_of_which_no_time_is_known_asks_for_the_longest() -> None:
    def known_of_evaluations(one: Step) -> float | None:
        return 60.0 if one.kind == "evaluate" else None

    pack = [step(), step(kind="export")]
    assert resources(pack, settings("{longest: 777}"), known_of_evaluations)["minutes"] == 777
    assert resources(pack[:1], settings("{longest: 777}"), known_of_evaluations)["minutes"] == 30
    assert resources(pack, settings("{longest: 777, every: {minutes: 5}}"), known_of_evaluations)["minutes"] == 5


@pytest.mark.parametrize(
    ("every", "minutes"),
    [
        ("{}", 777),
        ("{partition: short}", 60),
        ("{partition: 'short,long'}", 90),
        ("{partition: elsewhere}", 777),
        ("{partition: short, sbatch: {qos: long}}", 777),
        ("{partition: short, minutes: 70}", 70),
    ],
)
def test_minutes_that_are_not_set_are_no_more_than_the_partition_allows(every: str, minutes: int) -> None:
    limits = {"": inf, "short": 60.0, "long": 90.0}
    chosen = settings(f"{{longest: 777, every: {every}}}")
    assert module.resources([step()], chosen, lambda one: None, limits)["minutes"] == minutes


def test_the_most_particular_counts() -> None:
    cluster = settings(
        """
        every: {partition: gpu, sbatch: {exclusive: true, nice: 5}, setup: [module load cuda]}
        jobs:
          evaluate: {partition: long, gpus: 1, minutes: 60, sbatch: {nice: 7}}
          scores: {partition: cpu}
        models:
          big: {gpus: 8, minutes: 90}
          other: {gpus: 3}
        """
    )
    asked = resources([step()], cluster)
    assert (asked["gpus"], asked["cpus"], asked["minutes"]) == (8, 64, 90)
    assert (asked["partition"], asked["setup"]) == ("long", ["module load cuda"])
    assert asked["sbatch"] == {"exclusive": True, "nice": 7}
    assert resources([step(kind="export")], cluster)["gpus"] == 8
    assert resources([step(kind="model")], cluster)["gpus"] == 0, "a job of small steps is about no model"


POCKET = ModelConfig(name="pocket", path="pocket:olmoe", threads=1)


@pytest.mark.parametrize(
    ("kinds", "model", "text", "gpus", "cpus", "memory"),
    [
        (["evaluate"], POCKET, "{}", 0, 1, 4),
        (["plan", "scores"], BIG, "{}", 0, 1, 2),
        (["evaluate"], BIG, "{every: {gpus: 0, cpus: 32}}", 0, 32, None),
        (["evaluate"], BIG, "{gpu_memory: 48}", 4, 32, None),
        (["evaluate"], ModelConfig(name="unknown", path="a/b"), "{}", 1, 8, None),
    ],
)
def test_gpus_and_cores_follow_from_the_work(
    kinds: list[str], model: ModelConfig, text: str, gpus: int, cpus: int, memory: int | None
) -> None:
    asked = resources([step(model, kind) for kind in kinds], settings(text))
    assert (asked["gpus"], asked["cpus"]) == (gpus, cpus) and asked["memory"] <= (memory or 10**6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{jobs: {evalute: {gpus: 1}}}", "did you mean evaluate"),
        ("{jobs: {search: {gpu: 1}}}", "resources.jobs.search.gpu is .*resources.jobs.search.gpus"),
        ("{models: {big: {gpus: many}}}", "resources.models.big.gpus=many"),
        ("{jobs: {search: 4}}", "resources.jobs.search=4: expected settings"),
        ("{jobs: {search: {minutes: 0}}}", "resources.jobs.search.minutes=0"),
        ("{models: {big: {cpus: 0}}}", "resources.models.big.cpus=0"),
    ],
)
def test_what_cannot_be_is_said(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence), Mistakes() as mistakes:
        mistakes += preflight(Config(resources=settings(text)), [])


def test_all_other_options_of_sbatch_are_handed_on() -> None:
    further = {"nodelist": "n7", "w": "n7", "exclusive": True, "nice": 5, "mail-type": "END", "time-min": 10, "tmp": 9}
    chosen = settings(OmegaConf.to_yaml(OmegaConf.create({"every": {"sbatch": further}})))
    assert resources([step()], chosen)["sbatch"] == further
