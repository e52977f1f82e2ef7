"""calibration.parts: a pass in steps over disjoint rows, whose merged sums are those of one pass."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import example_steps
import numpy as np
import pytest
import tiny
from example_steps import cell_of

from moe_lab import calibration as calibrations
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.config.base import SettingsError, valid
from moe_lab.statistics import read
from moe_lab.statistics.observe import Observer
from moe_lab.study import Step, unmerged
from moe_lab.study.schedule import Schedule, StepError, work
from moe_lab.study.slurm.pack import settle
from moe_lab.study.store import Store, read_step
from moe_lab.study.worker import Here

pytestmark = pytest.mark.slow

MODEL = ModelConfig(name="pocket", path="pocket:olmoe", device="cpu", threads=1)
TEXT = CalibrationConfig(
    name="text",
    path="pocket:calibration/general.jsonl",
    packing="chunk",
    gap="eos",
    length=48,
    tokens=7 * 48,
    batch_size=2,
    seed=3,
)
"""7 rows in 4 batches, the last of 1 row."""
SUMS = "statistics.safetensors"
KINDS = ("statistics", "gradients", "damage", "similarity", "ablation", "scaling")


def step_of(kind: str = "statistics", **settings: Any) -> Step:
    return example_steps.step_of(kind, cell_of(MODEL, replace(TEXT, **settings)))


def do(store: Store, step: Step) -> list[Step]:
    """Do the step and whatever it needs in this process; returns the steps that were run."""
    ran: list[Step] = []
    steps = [*step.inputs.values(), *step.merges, step]
    done = {one.id for one in steps if store.done(one)}
    with Here(store) as execute:

        def counted(one: Step, scratch: Path) -> None:
            ran.append(one)
            execute(one, scratch)

        schedule = Schedule(unmerged(steps, done), done)
        work(schedule, store, counted)
    for error in schedule.failed.values():
        raise error
    return ran


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One pass of each kind over all rows."""
    store = Store(tmp_path_factory.mktemp("whole")).create()
    for kind in KINDS:
        do(store, step_of(kind))
    return store


def compare(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> None:
    assert one.keys() == other.keys()
    for layer, named in one.items():
        assert named.keys() == other[layer].keys()
        for name, values in named.items():
            size = np.abs(other[layer][name]).max()
            np.testing.assert_allclose(values, other[layer][name], rtol=1e-12, atol=1e-12 * size, err_msg=name)


@pytest.mark.parametrize(("kind", "parts"), zip(KINDS, [2, 3] * 3, strict=True))
def test_merged_sums_are_those_of_one_pass(whole: Store, tmp_path: Path, kind: str, parts: int) -> None:
    single, step, store = step_of(kind), step_of(kind, parts=parts), Store(tmp_path).create()
    assert step.id != single.id and not single.merges, "rounding depends on the order of addition"
    assert len(step.merges) == parts and len({share.id for share in (step, *step.merges)}) == parts + 1
    do(store, step)
    made, expected = store.path(step), whole.path(single)
    compare(read(made / SUMS), read(expected / SUMS))
    assert (made / "calibration.json").read_bytes() == (expected / "calibration.json").read_bytes()
    assert {file.name for file in made.glob("*.parquet")} == {file.name for file in expected.glob("*.parquet")}
    assert read_step(made)["provenance"]["merged"] == [store.path(share).name for share in step.merges]


def test_streamed_parts_give_the_sums_of_the_whole_model(whole: Store, tmp_path: Path) -> None:
    store, step = Store(tmp_path).create(), step_of(parts=2, engine="streamed")
    do(store, step)
    compare(read(store.path(step) / SUMS), read(whole.path(step_of()) / SUMS))


def test_a_part_that_is_killed_is_resumed_and_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, step = Store(tmp_path).create(), step_of(parts=2)
    with monkeypatch.context() as patch:
        tiny.count_calls(patch, Observer, "read", kill_at=4)
        with pytest.raises((tiny.Killed, StepError)):
            do(store, step)
    assert [store.done(share) for share in step.merges] == [True, False] and not store.done(step)
    assert do(store, step) == [step.merges[1], step]


def test_rows_are_shared_in_whole_batches() -> None:
    def of(parts: int, rows: int = 7, batch_size: int = 2) -> list[tuple[int, int]]:
        text = CalibrationConfig(name="t", path="t", length=4, tokens=rows * 4 + 3, batch_size=batch_size, parts=parts)
        return calibrations.shares(text)

    assert of(1) == []
    assert of(2) == [(0, 4), (4, 7)] and of(3) == [(0, 2), (2, 4), (4, 7)] and of(4)[-1] == (6, 7)
    assert of(8, rows=8, batch_size=1) == [(row, row + 1) for row in range(8)]


@pytest.mark.parametrize("parts", [0, -1, 5, 8])
def test_parts_that_cannot_be_are_refused(parts: int) -> None:
    """7 rows in 4 batches."""
    with pytest.raises(SettingsError) as error:
        valid(CalibrationConfig, {**asdict(TEXT), "parts": parts}, "calibration")
    assert str(error.value).startswith(f"calibration.parts={parts}")


def test_a_lost_merge_is_noticed_and_parts_of_a_finished_one_are_not_missed(tmp_path: Path) -> None:
    """What the last job of a submission sees in the store."""
    store, step = Store(tmp_path).create(), step_of(parts=2)
    steps = [*step.inputs.values(), *step.merges, step]
    do(store, step)
    for share in step.merges:
        shutil.rmtree(store.path(share))
    assert do(store, step) == []
    schedule = Schedule(steps)
    settle(schedule, store)
    assert not schedule.failed and not schedule.skipped and step.id in schedule.finished
    empty = Store(tmp_path / "empty").create()
    schedule = Schedule(steps)
    settle(schedule, empty)
    assert len(schedule.failed) == 1 and {share.id for share in step.merges} < {*schedule.skipped}
