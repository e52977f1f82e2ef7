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
def test_lowest_scores_go_ties_fall_by_index_and_plans_come_back(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float], data: st.DataObject
) -> None:
    remove = data.draw(st.integers(0, len(scores) - 1))
    made = make_plan({0: scores, 7: scores}, {0: remove, 7: 0}, tiny.routers([0, 7], 1), provenance={"ratio": 0.25})
    order = sorted(range(len(scores)), key=lambda expert: scores[expert])  # stable: equal scores stay in index order
    assert made.experts == {0: tuple(sorted(order[remove:])), 7: tuple(range(len(scores)))}
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made.save(path)
    assert Plan.load(path) == made and Plan.load(path).provenance == made.provenance
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


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


@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from(["keep_null", "drop"]), st.data())
def test_the_best_channels_of_each_expert_stay_and_plans_come_back(
    tmp_path_factory: pytest.TempPathFactory, experts: int, width: int, zero: str, data: st.DataObject
) -> None:
    rows = st.lists(st.integers(-2, 2).map(float), min_size=width, max_size=width)
    scores = numpy.array(data.draw(st.lists(rows, min_size=experts, max_size=experts)))
    keep = numpy.array(data.draw(st.lists(st.integers(0, width), min_size=experts, max_size=experts)))
    arguments = {"zero_expert": zero, "provenance": {"a": 1}}
    if not keep.any():
        with pytest.raises(UserError, match="ratio"):
            make_channel_plan({7: scores}, {7: keep}, tiny.routers([7], 1), **arguments)
        return
    made = make_channel_plan({7: scores}, {7: keep}, tiny.routers([7], 1), **arguments)
    assert made.experts[7] == tuple(e for e in range(experts) if keep[e] or zero == "keep_null")
    assert made.widths(7) == tuple(keep[list(made.experts[7])])
    for row, mask in zip(scores, made.channels[7], strict=True):
        order = sorted(range(width), key=lambda channel: row[channel])  # stable: lower index falls first
        assert sorted(numpy.flatnonzero(~mask)) == sorted(order[: width - mask.sum()])
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made.save(path)
    assert Plan.load(path) == made and Plan.load(path).channels[7].tolist() == made.channels[7].tolist()


def test_digest_is_of_what_is_kept() -> None:
    assert plan(seed=1).digest == plan(seed=2).digest
    assert plan().digest != plan((0, 1, 3)).digest
    assert plan().digest != plan(count=5).digest
    assert Plan({2: (0,), 10: (1,)}, {2: 2, 10: 2}).digest == Plan({10: (1,), 2: (0,)}, {10: 2, 2: 2}).digest


MASK = numpy.ones((3, 2), dtype=bool)


@pytest.mark.parametrize(
    "stated",
    [
        ({1: (0, 4)}, {1: 4}),
        ({1: (-1, 2)}, {1: 4}),
        ({1: (2, 0)}, {1: 4}),
        ({1: (0, 0)}, {1: 4}),
        ({1: ()}, {1: 4}),
        ({1: (0,)}, {2: 2}),
        ({1: (0, 2)}, {1: 3}, {}, {1: MASK}),  # channels of an expert that goes
        ({1: (0, 2)}, {1: 4}, {}, {1: MASK}),
        ({0: (0, 1, 2), 1: (0,)}, {0: 3, 1: 1}, {}, {0: MASK}),  # no mask for layer 1
    ],
)
def test_what_a_plan_states_must_agree(stated: Any) -> None:
    with pytest.raises(UserError, match=r"layer 1\b|layers .*\b1\b"):
        Plan(*stated)


@pytest.mark.parametrize(
    ("kept", "count", "router", "nearest"),
    [
        (range(3), 4, (4,), 4),
        ((0, 1, 2, 4, 5), 8, (2, 2), 2),  # unequal groups
        (range(0, 16, 2), 16, (4, 4, 1), 16),  # groups a token reaches must hold top_k experts
    ],
)
def test_routers_must_work_with_what_is_kept(kept: Any, count: int, router: tuple[int, ...], nearest: int) -> None:
    made = Plan({3: tuple(kept)}, {3: count})
    made.check(tiny.routers([3], 2))
    with pytest.raises(UserError, match=rf"layer 3 .*\b{re.escape(str(nearest))}\b"):
        made.check(tiny.routers([3], *router))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite(value: float) -> None:
    with pytest.raises(UserError, match="layer 2, expert 1 "):
        make_plan({2: [1.0, value]}, {2: 0}, tiny.routers([2], 1), provenance={})
    with pytest.raises(UserError, match="layer 2, expert 1, channel 0 "):
        scores, keep = numpy.array([[1.0], [value]]), numpy.array([1, 1])
        make_channel_plan({2: scores}, {2: keep}, tiny.routers([2], 1), provenance={})


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UserError, match=r"plan\.json"):
        Plan.load(path)
    channels = numpy.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], bool)
    Plan({4: (0, 2)}, {4: 3}, {}, {4: channels}).save(path)
    text = path.read_text()
    content = json.loads(text)
    changes: list[dict[str, Any]] = [{"schema": 3}, {"schema": None}, {"digest": "0" * 64}, {"layers": []}]
    about = ({"experts": 4, "keep": [0, "1"]}, {"experts": 4, "keep": [0], "channels": {}})
    damaged = [text[:30], *(json.dumps({**content, **change}) for change in changes)]
    damaged += [json.dumps({**content, "layers": {"1": layer}}) for layer in about]
    for before, after in (('"05"', '"5"'), ('"05"', '"07"'), ('"width": 3', '"width": 30'), ('"05"', '"0g"')):
        assert before in text
        damaged.append(text.replace(before, after, 1))
    for each in damaged:
        path.write_text(each)
        with pytest.raises(UserError, match=r"plan\.json is damaged"):
            Plan.load(path)


def test_plans_and_settings_need_no_torch() -> None:
    modules = ("pruning.plan", "allocation", "recovery", "search.evolution")
    code = f"import sys, {', '.join(f'moe_lab.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
