from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.errors import UserError
from moe_lab.pruning.plan import Plan, make_channel_plan, make_plan

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=4, max_size=40)


def plan(kept: tuple[int, ...] = (0, 2, 3), count: int = 4, **provenance: Any) -> Plan:
    return Plan({1: kept, 2: (0, 1, 3)}, {1: count, 2: 4}, provenance)


@given(SCORES, st.data())
def test_lowest_scores_go_and_ties_fall_by_index(scores: list[float], data: st.DataObject) -> None:
    remove = data.draw(st.integers(0, len(scores) - 1))
    made = make_plan({5: scores}, {5: remove}, tiny.routers([5], 1), provenance={})
    order = sorted(range(len(scores)), key=lambda expert: scores[expert])  # stable: equal scores stay in index order
    assert made.experts[5] == tuple(sorted(order[remove:]))


@given(st.integers(1, 4), st.integers(2, 6), st.data())
def test_groups_lose_equally(n_group: int, size: int, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(-1, 1), min_size=n_group * size, max_size=n_group * size))
    share = data.draw(st.integers(0, size - 2))
    made = make_plan({0: scores}, {0: share * n_group}, tiny.routers([0], 1, n_group), provenance={})
    for group in range(n_group):
        members = [expert for expert in made.experts[0] if expert // size == group]
        gone = set(range(group * size, (group + 1) * size)) - set(members)
        assert len(gone) == share
        assert all(scores[lost] <= scores[kept] for lost in gone for kept in members)


@given(SCORES, st.data())
def test_saved_plans_come_back(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float], data: st.DataObject
) -> None:
    remove = data.draw(st.integers(0, len(scores) - 1))
    made = make_plan(
        {0: scores, 7: scores}, {0: remove, 7: 0}, tiny.routers([0, 7], 1), provenance={"ratio": 0.25, "model": "m"}
    )
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made.save(path)
    assert Plan.load(path) == made
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_digest_is_of_what_is_kept() -> None:
    assert plan(seed=1).digest == plan(seed=2).digest
    assert plan().digest != plan((0, 1, 3)).digest
    assert plan().digest != plan(count=5).digest
    assert Plan({2: (0,), 10: (1,)}, {2: 2, 10: 2}).digest == Plan({10: (1,), 2: (0,)}, {10: 2, 2: 2}).digest


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ((0, 4), "layer 1 keeps expert 4: expected an id from 0 to 3"),
        ((-1, 2), "layer 1 keeps expert -1"),
        ((2, 0), r"layer 1 keeps \[2, 0\]: expected \[0, 2\]"),
        ((0, 0), r"layer 1 keeps \[0, 0\]: expected \[0\]"),
        ((), "layer 1 keeps no expert of 4"),
    ],
)
def test_ids_are_checked(kept: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(kept)


def test_layers_must_agree() -> None:
    with pytest.raises(UserError, match=r"layers \[0\] .* layers \[1\]"):
        Plan({0: (0,)}, {1: 2})
    with pytest.raises(UserError, match=r"removes experts in layers \[1\], but scores are of layers \[0\]"):
        make_plan({0: [1.0, 2.0]}, {1: 1}, tiny.routers([0, 1], 1), provenance={})


def test_fewer_than_top_k_is_refused() -> None:
    plan().check(tiny.routers(range(8), 3))
    with pytest.raises(UserError, match=r"layer 1 keeps 3 of 4 experts.*at least 4 \(top_k=4\): keep 4 or more"):
        plan().check(tiny.routers(range(8), 4))
    with pytest.raises(UserError, match="layer 0 keeps 1 of 4"):
        make_plan({0: [1.0, 2, 3, 4]}, {0: 3}, tiny.routers([0], 2), provenance={})


def test_unequal_groups_are_refused() -> None:
    uneven = Plan({3: (0, 1, 2, 4, 5)}, {3: 8})
    uneven.check(tiny.routers([3], 2))
    with pytest.raises(UserError, match=r"layer 3 keeps \[3, 2\] experts of the 2 groups.*2 each is nearest"):
        uneven.check(tiny.routers([3], 2, 2))
    with pytest.raises(UserError, match=r"removes 3 of 8 experts in layer 0.*2 groups.*: 2 is the nearest below"):
        make_plan({0: [1.0] * 8}, {0: 3}, tiny.routers([0], 2, 2), provenance={})


def test_groups_a_token_reaches_must_hold_top_k_experts() -> None:
    two_each = Plan({0: tuple(range(0, 16, 2))}, {0: 16})
    two_each.check(tiny.routers([0], 4, 4, 2))
    with pytest.raises(UserError, match=r"keeps 8 of 16 experts.*at least 16 \(top_k=4, n_group=4\)"):
        two_each.check(tiny.routers([0], 4, 4, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite(value: float) -> None:
    with pytest.raises(UserError, match=f"layer 2, expert 1 is {re.escape(str(value))}"):
        make_plan({2: [1.0, value]}, {2: 0}, tiny.routers([2], 1), provenance={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "schema 3"),
        ({"schema": None}, "schema None"),
        ({"digest": "0" * 64}, "is damaged: its digest is 0000"),
        ({"layers": {"1": {"experts": 4, "keep": [0, "1"]}}}, "is damaged: expected layers"),
        ({"layers": {"1": {"experts": 4, "keep": [0], "channels": {}}}}, "is damaged: expected layers"),
        ({"layers": []}, "is damaged: expected layers"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        Plan.load(path)


def test_missing_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UserError, match=r"plan\.json does not exist"):
        Plan.load(path)
    plan().save(path)
    path.write_text(path.read_text()[:30])
    with pytest.raises(UserError, match=r"plan\.json is damaged: expected JSON"):
        Plan.load(path)


def test_plans_and_allocations_need_no_torch() -> None:
    code = "import sys, moe_lab.pruning.plan, moe_lab.allocation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def channel_plan(zero_expert: str = "keep_null") -> Plan:
    scores = numpy.array([[3.0, 1.0, 2.0], [5.0, 5.0, 5.0], [0.0, 9.0, 4.0]])
    keep = {4: numpy.array([2, 0, 1])}
    return make_channel_plan({4: scores}, keep, tiny.routers([4], 2), zero_expert=zero_expert, provenance={})


def test_the_best_channels_of_each_expert_stay() -> None:
    made = channel_plan()
    assert made.channels[4].tolist() == [[True, False, True], [False, False, False], [False, True, False]]
    assert made.experts == {4: (0, 1, 2)}
    assert made.widths(4) == (2, 0, 1)


def test_an_expert_without_channels_can_go() -> None:
    made = channel_plan("drop")
    assert made.experts == {4: (0, 2)}
    assert made.widths(4) == (2, 1)
    assert made != channel_plan()


def test_dropping_too_many_experts_names_the_way_out() -> None:
    scores, keep = {0: numpy.ones((3, 2))}, {0: numpy.array([0, 0, 2])}
    with pytest.raises(UserError, match=r"layer 0 keeps 1 of 3 experts.*zero_expert=keep_null"):
        make_channel_plan(scores, keep, tiny.routers([0], 2), zero_expert="drop", provenance={})


@given(st.integers(1, 5), st.integers(1, 20), st.data())
def test_channel_plans_keep_budgets_and_come_back(experts: int, width: int, data: st.DataObject) -> None:
    rows = st.lists(st.integers(-2, 2).map(float), min_size=width, max_size=width)
    scores = numpy.array(data.draw(st.lists(rows, min_size=experts, max_size=experts)))
    keep = numpy.array(data.draw(st.lists(st.integers(0, width), min_size=experts, max_size=experts)))
    if not keep.any():
        with pytest.raises(UserError, match="keeps no channel"):
            make_channel_plan({7: scores}, {7: keep}, tiny.routers([7], 1), provenance={})
        return
    made = make_channel_plan({7: scores}, {7: keep}, tiny.routers([7], 1), provenance={"a": 1})
    assert made.widths(7) == tuple(keep)
    for row, mask in zip(scores, made.channels[7], strict=True):
        order = sorted(range(width), key=lambda channel: row[channel])  # stable: lower index falls first
        assert sorted(numpy.flatnonzero(~mask)) == sorted(order[: width - mask.sum()])
    content = json.loads(json.dumps({"schema": 1, "digest": made.digest, "layers": made._layers()}))
    back = Plan._from_json(content, "plan.json")
    assert back == made
    assert back.channels[7].tolist() == made.channels[7].tolist()


def test_damaged_channels_are_refused(tmp_path: Path) -> None:
    made, path = channel_plan(), tmp_path / "plan.json"
    made.save(path)
    assert Plan.load(path) == made
    for before, after in (('"05"', '"5"'), ('"05"', '"07"'), ('"width": 3', '"width": 30'), ('"05"', '"0g"')):
        text = path.read_text()
        assert before in text
        damaged = tmp_path / "damaged.json"
        damaged.write_text(text.replace(before, after, 1))
        with pytest.raises(UserError, match="is damaged"):
            Plan.load(damaged)


def test_masks_must_fit_the_experts() -> None:
    mask = numpy.ones((3, 2), dtype=bool)
    with pytest.raises(UserError, match="keeps channels of expert 1, which it does not keep"):
        Plan({0: (0, 2)}, {0: 3}, {}, {0: mask})
    with pytest.raises(UserError, match=r"expected bool \(4, channels\)"):
        Plan({0: (0, 2)}, {0: 4}, {}, {0: mask})
    with pytest.raises(UserError, match="expected all of"):
        Plan({0: (0, 1, 2), 1: (0,)}, {0: 3, 1: 1}, {}, {0: mask})


def test_scores_and_budgets_of_channels_are_checked() -> None:
    with pytest.raises(UserError, match="layer 0, expert 1, channel 0 is nan"):
        make_channel_plan(
            {0: numpy.array([[1.0], [math.nan]])}, {0: numpy.array([1, 1])}, tiny.routers([0], 1), provenance={}
        )
    with pytest.raises(UserError, match="expected 2 numbers from 0 to 1"):
        make_channel_plan({0: numpy.ones((2, 1))}, {0: numpy.array([1, 2])}, tiny.routers([0], 1), provenance={})
