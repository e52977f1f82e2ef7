from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from facts_of import layer, settings
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.allocation import allocate, budgets, check
from moe_lab.allocation.problem import apportion
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError
from moe_lab.pruning.plan import make_channel_plan, make_plan


def test_layers_have_limits_of_their_own() -> None:
    facts = {0: layer(16, top_k=2), 1: layer(24, top_k=4, n_group=4, topk_group=2)}
    scores = {0: [0.0] * 16, 1: [0.0] * 24}
    assert allocate(settings("uniform", 0.5), facts, scores) == {0: 8, 1: 12}
    assert allocate(settings("uniform", 0.45), facts, scores) == {0: 7, 1: 8}
    assert allocate({**settings("uniform", 0.3), "multiple_of": 8}, {0: layer(64, top_k=8)}, {0: [0.0] * 64}) == {0: 16}


@given(st.integers(0, 500), st.floats(0, 0.9))
def test_global_is_a_walk_down_one_list(seed: int, ratio: float) -> None:
    """Lowest first over all layers; layers that hold only top-k are passed over."""
    random = numpy.random.default_rng(seed)
    layers = {0: layer(8, top_k=2), 1: layer(12, top_k=4), 5: layer(8, top_k=1)}
    scores = {index: random.normal(index, 1, size=facts["n_experts"]) for index, facts in layers.items()}
    budget, remove = sum(int(facts["n_experts"] * ratio) for facts in layers.values()), dict.fromkeys(layers, 0)
    for _, index in sorted((score, index) for index, row in scores.items() for score in row):
        if sum(remove.values()) < budget and layers[index]["n_experts"] - remove[index] > layers[index]["top_k"]:
            remove[index] += 1
    if sum(remove.values()) == budget:
        assert allocate(settings("global", ratio), layers, scores) == remove


def test_global_compares_layers_by_another_criterion() -> None:
    layers = {0: layer(4), 1: layer(4)}
    scores = {0: [1.0, 2.0, 3.0, 4.0], 1: [5.0, 6.0, 7.0, 8.0]}
    by = {0: [9.0, 9.0, 9.0, 9.0], 1: [1.0, 8.0, 2.0, 3.0]}
    assert allocate(settings("global", 0.5), layers, scores) == {0: 3, 1: 1}
    assert allocate(settings("global", 0.5), layers, scores, {"by": by}) == {0: 1, 1: 3}


def test_global_in_steps_goes_by_their_means() -> None:
    layers = {0: layer(4), 1: layer(4)}
    scores = {0: [0.0, 9.0, 10.0, 11.0], 1: [3.0, 4.0, 5.0, 6.0]}
    pairs = {**settings("global", 0.25), "multiple_of": 2}
    assert allocate(settings("global", 0.25), layers, scores) == {0: 1, 1: 1}
    assert allocate({**pairs, "ratio": 0.5}, layers, scores) == {0: 2, 1: 2}
    uneven = {0: [0.0, 5.0, 6.0, 7.0] + [8.0] * 4, 1: [3.0, 4.0, 4.2, 4.3] + [9.0] * 4}
    assert allocate(pairs, {0: layer(8), 1: layer(8)}, uneven) == {0: 2, 1: 2}
    grouped = {0: layer(8, n_group=2), 1: layer(8, n_group=2)}
    rows = {0: [0.0, 1.0, 2.0, 3.0, 50.0, 51.0, 52.0, 53.0], 1: [9.0] * 8}
    assert allocate(settings("global", 0.25), grouped, rows) == {0: 0, 1: 4}  # (0 + 50) / 2 is above 9


def test_u_shape_spares_the_ends() -> None:
    def removed(count: int, ratio: float, layers: int = 5, **parameters: float) -> list[int]:
        facts = {index: layer(count) for index in range(layers)}
        return list(
            allocate(settings("u_shaped", ratio, **parameters), facts, {i: [0.0] * count for i in facts}).values()
        )

    # z of (1/4, 1/16, 0, 1/16, 1/4): mean 1/8, deviation sqrt(0.0109375); 64 (1 + 0.2 z) kept: 79.3, 56.4, 48.7.
    assert removed(128, 0.5, beta=0.2) == [49, 71, 79, 72, 49]
    assert removed(100, 0.9, beta=0.5) == [87, 92, 92, 92, 87]  # max(.1, .1 (1 + z / 2)): .16 at the ends, .1 between
    assert removed(128, 0.5, layers=2) == [64, 64]


def test_loss_based_keeps_in_proportion_to_the_smoothed_loss() -> None:
    layers = {0: layer(20), 1: layer(20), 2: layer(20)}
    scores = {index: [0.0] * 20 for index in layers}
    losses = {"statistics": {index: {"layer_loss": numpy.array(x)} for index, x in enumerate((1.0, 4.0, 9.0))}}
    assert allocate(settings("loss_based", 0.5), layers, scores, losses) == {0: 15, 1: 10, 2: 5}
    unsmoothed = settings("loss_based", 0.5, smoothing="none")  # kept 15/7, 60/7, 135/7
    assert allocate(unsmoothed, layers, scores, losses) == {0: 18, 1: 11, 2: 1}
    capped = settings("loss_based", 0.1, smoothing="none")  # 54 kept: the last two are full
    assert allocate(capped, layers, scores, losses) == {0: 6, 1: 0, 2: 0}


@pytest.mark.parametrize(
    ("name", "ratio", "multiple_of", "reason", "nearest"),
    [
        ("uniform", 0.9, 1, r"layer 0\b.*top_k=4", "0.562 is the largest"),  # layer 1 keeps 8 of 16
        ("global", 0.7, 1, r"removes 22 .* 20 ", "0.687 is the largest"),
        ("uniform", 0.0, 7, r"layer 0\b.*multiple of 7", "0.125 is the smallest"),
        ("global", 0.0, 7, r"removes 0 .* 4 ", "0.125 is the smallest"),
        ("uniform", -0.1, 1, r"\[0, 1\)", "0 is the smallest"),
        ("uniform", float("nan"), 1, r"\[0, 1\)", "0.562 is the largest"),
    ],
)
def test_infeasible_ratios_name_a_nearest(name: str, ratio: float, multiple_of: int, reason: str, nearest: str) -> None:
    layers, scores = {0: layer(16, top_k=4), 1: layer(16, top_k=8)}, {0: [0.0] * 16, 1: [0.0] * 16}
    with pytest.raises(UserError, match=f"{re.escape(f'ratio={ratio:g}: ')}.*; {re.escape(nearest)}") as refused:
        allocate({**settings(name, ratio), "multiple_of": multiple_of}, layers, scores)
    assert re.search(reason, str(refused.value))


def test_multiples_and_losses_that_no_layer_can_have() -> None:
    with pytest.raises(UserError, match=r"allocation\.multiple_of"):
        allocate({**settings("uniform", 0.25), "multiple_of": 80}, {0: layer(60)}, {0: [0.0] * 60})
    with pytest.raises(UserError, match=r"layer_loss is \[0.0\]"):
        evidence = {"statistics": {0: {"layer_loss": 0.0}}}
        allocate(settings("loss_based", 0.25), {0: layer(4)}, {0: [0.0] * 4}, evidence)


# ---- dividing whole numbers


def test_largest_remainders_come_first() -> None:
    assert apportion([5, 3, 2], 7, 0, 100).tolist() == [4, 2, 1]  # shares 3.5, 2.1, 1.4
    assert apportion([1, 1, 1], 5, 0, 100).tolist() == [2, 2, 1]  # ties: first
    assert apportion([8, 1, 1], 9, 0, 5).tolist() == [5, 2, 2]  # what a full one cannot take, others get
    assert apportion([8, 1, 1], 9, [0, 4, 1], 16).tolist() == [4, 4, 1]
    assert apportion([5, 3, 2], 16, 0, 100, 4).tolist() == [8, 4, 4]  # shares 8, 4.8, 3.2: two units of four left


# ---- allocation=list

LISTED = {0: layer(8, top_k=2), 3: layer(8, top_k=2)}
SCORES = {0: numpy.arange(8.0), 3: numpy.arange(8.0)}


def listed(path: Path, ratio: float, content: Any = None, multiple_of: int = 1) -> dict[str, Any]:
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {**settings("list", ratio), "path": str(path), "multiple_of": multiple_of}


def test_a_schedule_and_a_plan_say_how_much_each_layer_loses(tmp_path: Path) -> None:
    assert allocate(listed(tmp_path / "list", 0.5, {"3": 6, "0": 2}), LISTED, SCORES) == {0: 2, 3: 6}
    make_plan(SCORES, {0: 1, 3: 3}, LISTED, provenance={}).save(tmp_path / "plan.json")
    assert allocate(listed(tmp_path / "plan.json", 0.25), LISTED, SCORES) == {0: 1, 3: 3}
    random, path = numpy.random.default_rng(0), tmp_path / "channels.json"
    scores = {index: random.random((8, 8)) for index in LISTED}
    keep = {index: random.integers(0, 9, 8) for index in LISTED}
    make_channel_plan(scores, keep, LISTED, zero_expert="drop", provenance={}).save(path)
    chosen = listed(path, 1 - sum(int(row.sum()) for row in keep.values()) / 128)
    found = budgets(chosen, LISTED, scores)
    assert all(found[index].tolist() == keep[index].tolist() for index in LISTED)
    check(AllocationConfig(name="list", path=str(path)), "channel")
    with pytest.raises(UserError, match="lists channels, but the criterion scores experts"):
        check(AllocationConfig(name="list", path=str(path)), "expert")
    with pytest.raises(UserError, match="layer 0 has 8 experts of width 8, expected 8 of 9"):
        wide = {index: layer(8, width=9) for index in LISTED}
        budgets(chosen, wide, {index: numpy.ones((8, 9)) for index in LISTED})


@pytest.mark.parametrize(
    ("content", "multiple_of", "named"),
    [
        ("{", 1, "is damaged"),
        ([1, 2], 1, "expected a schedule"),
        ({"0": 2.5}, 1, "expected a schedule"),
        ({"schema": 1, "layers": {"0": {"experts": 4}}}, 1, "expected a schedule"),
        ({"0": 4}, 1, r"layers \[0\], expected \[0, 3\]"),
        ({"0": 8, "3": 0}, 1, "removes 8 of 8 experts in layer 0, 6 is the nearest feasible"),
        ({"0": 3, "3": 5}, 4, "removes 3 of 8 experts in layer 0, 4 is the nearest feasible"),
        ({"0": 2, "3": 2}, 1, "ratio=0.5, but allocation.path removes 0.25 of all"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: Any, multiple_of: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        allocate(listed(tmp_path / "list", 0.5, content, multiple_of), LISTED, SCORES)


@pytest.mark.parametrize("path", ["nowhere.json", None])
def test_missing_files(path: str | None) -> None:
    with pytest.raises(UserError, match=r"allocation\.path"):
        check(AllocationConfig(name="list", path=path))
