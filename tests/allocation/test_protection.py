"""allocation.protect: every plan keeps the protected experts whole, or the setting is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from facts_of import layer, settings
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

import moe_lab
from moe_lab.allocation import allocate, budgets
from moe_lab.allocation.protection import identity, super_experts, with_protected
from moe_lab.allocation.shapes import check_removals
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan, make_plan
from moe_lab.search.candidates import Plans
from moe_lab.search.evolution import problem_of


def test_published_maxima_give_the_published_experts() -> None:
    """Qwen3-30B-A3B: 744, 540 and 430 in layers 1 to 3, then 63.5; 1.2 elsewhere, so that P99.5 is low."""
    layers = {number: numpy.full(128, 1.2) for number in range(48)}
    layers[1][68], layers[2][92], layers[3][82], layers[47][5] = 744, 540, 430, 63.5
    layers[4][1] = 74.4  # a tenth of the largest, and not above it
    assert super_experts(layers, 36) == {1: [68], 2: [92], 3: [82]}
    layers[4][1] = numpy.nextafter(74.4, 75)
    assert super_experts(layers, 36)[4] == [1] and 4 not in super_experts(layers, 4)


@given(st.integers(0, 10_000), st.floats(0.2, 3))
def test_super_experts_are_found_one_by_one(seed: int, spread: float) -> None:
    random = numpy.random.default_rng(seed)
    layers = {number: numpy.exp(random.normal(0, spread, 60)) for number in (1, 2, 5)}
    values = numpy.concatenate(list(layers.values()))
    bound = max(float(numpy.quantile(values, 0.995)), float(values.max()) / 10)
    found = {number: numpy.flatnonzero(row > bound).tolist() for number, row in layers.items() if number < 5}
    expected = {number: experts for number, experts in found.items() if experts}
    assert super_experts(layers, 5) == expected


def protected(settings: Any, model: Any, sums: Any) -> dict[int, list[int]]:
    """Layer -> its protected experts, by the fields of AllocationConfig."""
    marked = with_protected(identity(vars(AllocationConfig(**settings))), model, sums)
    return {number: facts["protected"] for number, facts in marked["layers"].items()}


def test_the_share_of_layers_is_rounded() -> None:
    model = {"decoder_layers": 6, "layers": {number: layer(300) for number in range(1, 6)}}
    sums = {number: {"output_abs_max": numpy.ones(300)} for number in model["layers"]}
    for number in sums:
        sums[number]["output_abs_max"][7] = 50 + number
    for share, last in ((0.2, 0), (0.75, 3), (1, 5)):  # 0.75 * 6 = 4.5 is rounded to 4
        found = protected({"protect": "super", "protect_layers": share}, model, sums)
        assert found == {number: [7] if number <= last else [] for number in range(1, 6)}


def test_more_protected_experts_than_a_layer_keeps_are_refused() -> None:
    layers = {0: layer(8), 1: {**layer(8), "protected": [0, 1, 2, 3, 4]}}
    scores = {0: numpy.arange(8.0), 1: numpy.arange(8.0)}
    grouped = {0: {**layer(8, n_group=2), "protected": [4, 5, 6]}}
    for refused in (
        lambda: allocate(settings("uniform", 0.5), layers, scores),
        lambda: check_removals(layers, 0.5),
        lambda: allocate(settings("global", 0.75), layers, scores),
        lambda: allocate(settings("uniform", 0.5), grouped, {0: numpy.arange(8.0)}),
        lambda: budgets(settings("global", 0.75), layers, {n: numpy.ones((8, 8)) for n in layers}),
    ):
        with pytest.raises(UserError, match=r"allocation\.protect.* is the largest feasible ratio"):
            refused()
    assert allocate(settings("global", 0.5), layers, scores) == {0: 7, 1: 1}
    with pytest.raises(UserError, match=r"layer 1 .* expert 0\b"):
        make_plan(scores, {0: 0, 1: 5}, layers, provenance={})


def test_without_protected_experts_nothing_changes() -> None:
    """The others divide what is left: as if the protected experts and their channels were not there."""
    random = numpy.random.default_rng(0)
    scores = {0: random.gamma(0.5, size=(6, 8))}
    sums = {0: {"layer_loss": 1.0, "ala_first": random.gamma(1, size=6)}}
    marked, rest = {0: {**layer(6, width=8), "protected": [2]}}, [0, 1, 3, 4, 5]
    for intra in ("coverage", "proportional", "uniform", "ranking"):
        chosen = settings("coverage", 0.5, intra=intra, zero_expert="keep_null")
        kept = budgets(chosen, marked, scores, {"statistics": sums})[0]
        alone = {0: {"layer_loss": 1.0, "ala_first": sums[0]["ala_first"][rest]}}
        chosen["ratio"] = 1 - (24 - 8) / 40
        expected = budgets(chosen, {0: layer(5, width=8)}, {0: scores[0][rest]}, {"statistics": alone})[0]
        assert kept[2] == 8 and kept[rest].tolist() == expected.tolist()


def test_a_plan_without_all_their_channels_is_refused() -> None:
    marked = {0: {**layer(4, width=12), "protected": [1]}}
    plan = Plan({0: (0, 1)}, {0: 4}, channels={0: numpy.eye(4, 12, dtype=bool) & (numpy.arange(4) < 2)[:, None]})
    with pytest.raises(UserError, match=r"layer 0 .* expert 1\b"):
        plan.check(marked)


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    file.write_text('{"2": [9, 1, 9], "0": [3]}')
    fields = {"protect": str(file)}
    assert identity(vars(AllocationConfig(**fields))) == {"protect": {"0": [3], "2": [1, 9]}}
    model = {"layers": {0: layer(10), 1: layer(10), 2: layer(10)}}
    assert protected(fields, model, {}) == {0: [3], 1: [], 2: [1, 9]}
    for content in ('{"3": [1]}', '{"1": [10]}', '{"1": [-1]}', '{"a": [1]}', "[1]", "{"):
        file.write_text(content)
        with pytest.raises(UserError, match=r"allocation\.protect"):
            protected(fields, model, {})


def test_schedules_of_a_search_leave_room_for_them() -> None:
    model = tiny.build("olmoe")
    facts = {n: layer(16, top_k=4) for n in range(3)} | {1: {**layer(16, top_k=4), "protected": list(range(10))}}
    assert problem_of(settings("evolutionary", 0.5), {"layers": facts}).fewest == (4, 10, 4)
    plans = Plans(model, {n: list(range(16)) for n in range(3)}, {1: range(10)})
    assert plans.plan((8, 6, 8)).experts[1] == tuple(range(10))


def test_a_planted_outlier_survives(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    model, tokenizer = moe_lab.load(str(tmp_path))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    planted = moe_layers(model)[1]
    with torch.no_grad():
        planted.experts.down_proj[5] *= 300
    text = [" ".join(f"w{number}" for number in row) for row in tiny.tokens(rows=16, length=64).tolist()]
    statistics = moe_lab.calibrate(model, tokenizer, text, criteria=["frequency", "camera"], tokens=1024, length=64)
    for name, allocation in (("frequency", "uniform"), ("frequency", "global"), ("camera", "coverage")):
        scores = moe_lab.score(name, statistics)
        plan = moe_lab.plan(scores, 0.75, allocation, protect="super")
        assert plan.provenance["protected"] == {"1": [5]}
        assert 5 in plan.experts[1] and (not plan.channels or plan.channels[1][5].all())
        assert "protected" not in moe_lab.plan(scores, 0.75, allocation).provenance
