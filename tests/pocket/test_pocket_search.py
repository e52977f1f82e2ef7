"""The search sets: tasks with answers, none of them a benchmark's or the calibration set's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_lab.calibration.batches import answer_batches
from moe_lab.config import CalibrationConfig
from tools.pocket.build import SEARCH_COUNT, calibration_examples, search_examples
from tools.pocket.examples import Example
from tools.pocket.world import World


@pytest.mark.parametrize("name", ["code", "math"])
def test_no_task_is_in_a_benchmark_or_in_the_calibration_set(
    name: str, world: World, items: dict[str, list[Example]]
) -> None:
    tasks = search_examples(world, name)
    keys = {(task.skill, task.key) for task in tasks}
    assert len(keys) == len(tasks) == SEARCH_COUNT
    asked = {(example.skill, example.key) for skill in items.values() for example in skill}
    assert not keys & asked
    assert not keys & {(example.skill, example.key) for example in calibration_examples(world, name)}


@pytest.mark.parametrize("name", ["code", "math"])
def test_its_answers_are_what_is_marked(name: str, data: Path, tokenizer: Any) -> None:
    tasks = [json.loads(line) for line in (data / "search" / f"{name}.jsonl").read_text().splitlines()]
    text = CalibrationConfig(
        name, f"pocket:search/{name}.jsonl", packing="none", length=112, tokens=112 * SEARCH_COUNT,
        batch_size=SEARCH_COUNT, order="first",
    )  # fmt: skip
    [(ids, valid, answers)] = answer_batches(text, tokenizer)
    found = [
        (tokenizer.decode(row[flags & ~marks]), tokenizer.decode(row[marks]))
        for row, flags, marks in zip(ids, valid, answers, strict=True)
    ]
    assert found == [(task["prompt"], task["completion"]) for task in tasks]
