from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from facts_of import layer, settings

from moe_lab.allocation import allocate, budgets, check
from moe_lab.allocation.shapes import is_plan, read
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError
from moe_lab.pruning.plan import make_channel_plan, make_plan

LAYERS = {0: layer(8, top_k=2), 3: layer(8, top_k=2)}
SCORES = {0: numpy.arange(8.0), 3: numpy.arange(8.0)}


def written(folder: Path, content: Any) -> str:
    path = folder / "list.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def listed(path: str, ratio: float) -> dict[str, Any]:
    return {**settings("list", ratio), "path": path}


def test_schedule(tmp_path: Path) -> None:
    path = written(tmp_path, {"3": 6, "0": 2})
    assert not is_plan(read(path))
    assert allocate(listed(path, 0.5), LAYERS, SCORES) == {0: 2, 3: 6}


def test_plan_of_experts(tmp_path: Path) -> None:
    make_plan(SCORES, {0: 1, 3: 3}, LAYERS, provenance={}).save(tmp_path / "plan.json")
    assert is_plan(read(str(tmp_path / "plan.json")))
    assert allocate(listed(str(tmp_path / "plan.json"), 0.25), LAYERS, SCORES) == {0: 1, 3: 3}


def test_plan_of_channels(tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    scores = {index: random.random((8, 8)) for index in LAYERS}
    keep = {index: random.integers(0, 9, 8) for index in LAYERS}
    path = tmp_path / "plan.json"
    make_channel_plan(scores, keep, LAYERS, zero_expert="drop", provenance={}).save(path)
    removed = 1 - sum(int(row.sum()) for row in keep.values()) / 128
    found = budgets(listed(str(path), removed), LAYERS, scores)
    assert {index: row.tolist() for index, row in found.items()} == {index: row.tolist() for index, row in keep.items()}
    check(AllocationConfig(name="list", path=str(path)), "channel")
    with pytest.raises(UserError, match="lists channels, but the criterion scores experts: choose a criterion that"):
        check(AllocationConfig(name="list", path=str(path)), "expert")
    with pytest.raises(UserError, match="layer 0 has 8 experts of width 8, expected 8 of 9: the plan is of another"):
        wide = {index: layer(8, width=9) for index in LAYERS}
        budgets(listed(str(path), removed), wide, {index: numpy.ones((8, 9)) for index in LAYERS})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged: expected JSON"),
        ([1, 2], r"expected a schedule such as .* or a plan.json"),
        ({"0": 2.5}, "expected a schedule"),
        ({"schema": 1, "layers": {"0": {"experts": 4}}}, "expected a schedule"),
        ({"0": 4}, r"is about layers \[0\], expected \[0, 3\]"),
        ({"0": 8, "3": 0}, "removes 8 of 8 experts in layer 0, 6 is the nearest feasible"),
        ({"0": 2, "3": 2}, "ratio=0.5, but allocation.path removes 0.25 of all: set ratio=0.25"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        allocate(listed(written(tmp_path, content), 0.5), LAYERS, SCORES)


def test_steps_hold_for_lists_too(tmp_path: Path) -> None:
    path = written(tmp_path, {"0": 3, "3": 5})
    with pytest.raises(UserError, match="removes 3 of 8 experts in layer 0, 4 is the nearest feasible"):
        allocate({**listed(path, 0.5), "multiple_of": 4}, LAYERS, SCORES)


def test_missing_files() -> None:
    with pytest.raises(UserError, match=r"allocation.path=nowhere.json cannot be read: No such file"):
        check(AllocationConfig(name="list", path="nowhere.json"))
    with pytest.raises(UserError, match=r"allocation=list needs allocation.path"):
        check(AllocationConfig(name="list"))
