from __future__ import annotations

from typing import Any

import numpy
import pytest
from facts_of import layer, settings
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.allocation import allocate
from moe_lab.errors import UserError
from moe_lab.pruning.plan import make_plan

NAMES = ("uniform", "global", "u_shaped", "loss_based")


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[int, Any], dict[int, Any], dict[str, Any], int, float]:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    size = draw(st.integers(2, 12))
    layers = {
        2 * index: layer(groups * size, top_k=draw(st.integers(1, 4)), n_group=groups)
        for index in range(draw(st.integers(1, 5)))
    }
    random = numpy.random.default_rng(draw(st.integers(0, 1000)))
    scores = {index: random.normal(size=groups * size) for index in layers}
    losses = {index: {"layer_loss": random.gamma(0.5) + 1e-9} for index in layers}
    return layers, scores, {"statistics": losses}, draw(st.sampled_from([1, 2, 3, 8])), draw(st.floats(0, 0.99))


@given(cases())
def test_all_remove_the_same_number_within_the_routers_limits(
    case: tuple[dict[int, Any], dict[int, Any], dict[str, Any], int, float],
) -> None:
    layers, scores, evidence, multiple_of, ratio = case
    totals = set()
    for name in NAMES:
        try:
            remove = allocate({**settings(name, ratio), "multiple_of": multiple_of}, layers, scores, evidence)
        except UserError as error:
            assert "feasible" in str(error) or "choose a smaller multiple" in str(error)
            continue
        totals.add(sum(remove.values()))
        kept = {index: facts["n_experts"] - remove[index] for index, facts in layers.items()}
        assert not any(count % multiple_of for count in kept.values())
        make_plan(scores, remove, layers, provenance={})
    assert len(totals) <= 1
    if multiple_of == 1 and totals and layers[0]["n_group"] == 1:
        assert totals == {sum(int(facts["n_experts"] * ratio) for facts in layers.values())}


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
    with pytest.raises(UserError, match=r"allocation.by of layer 1 has the shape \(3,\), expected \(4,\)"):
        allocate(settings("global", 0.5), layers, scores, {"by": {0: by[0], 1: by[1][:3]}})
    with pytest.raises(UserError, match=r"allocation.by: scores are of layers \[0\], expected \[0, 1\]"):
        allocate(settings("global", 0.5), layers, scores, {"by": {0: by[0]}})


def test_global_in_steps_goes_by_their_means() -> None:
    layers = {0: layer(4), 1: layer(4)}
    scores = {0: [0.0, 9.0, 10.0, 11.0], 1: [3.0, 4.0, 5.0, 6.0]}
    pairs = {**settings("global", 0.25), "multiple_of": 2}
    assert allocate(settings("global", 0.25), layers, scores) == {0: 1, 1: 1}
    assert allocate({**pairs, "ratio": 0.5}, layers, scores) == {0: 2, 1: 2}
    assert allocate({**pairs, "ratio": 0.5}, {**layers, 2: layer(4)}, {**scores, 2: [1.0, 1.0, 1.0, 99.0]}) == {
        0: 2,
        1: 2,
        2: 2,
    }
    uneven = {0: [0.0, 5.0, 6.0, 7.0] + [8.0] * 4, 1: [3.0, 4.0, 4.2, 4.3] + [9.0] * 4}
    assert allocate(pairs, {0: layer(8), 1: layer(8)}, uneven) == {0: 2, 1: 2}
    grouped = {0: layer(8, n_group=2), 1: layer(8, n_group=2)}
    rows = {0: [0.0, 1.0, 2.0, 3.0, 50.0, 51.0, 52.0, 53.0], 1: [9.0] * 8}
    assert allocate(settings("global", 0.25), grouped, rows) == {0: 0, 1: 4}  # (0 + 50) / 2 is above 9


def test_u_shape_spares_the_ends() -> None:
    layers = {index: layer(128, top_k=8) for index in range(5)}
    scores = {index: [0.0] * 128 for index in layers}
    # z of (1/4, 1/16, 0, 1/16, 1/4): mean 1/8, deviation sqrt(0.0109375); 64 (1 + 0.2 z) kept: 79.3, 56.4, 48.7.
    assert allocate(settings("u_shaped", 0.5, beta=0.2), layers, scores) == {0: 49, 1: 71, 2: 79, 3: 72, 4: 49}
    # max(.1, .1 (1 + z / 2)): .16 at the ends, .1 between.
    assert allocate(
        settings("u_shaped", 0.9, beta=0.5), {i: layer(100) for i in layers}, {i: [0.0] * 100 for i in layers}
    ) == {0: 87, 1: 92, 2: 92, 3: 92, 4: 87}
    assert allocate(settings("u_shaped", 0.5, beta=0.0), layers, scores) == dict.fromkeys(layers, 64)
    assert allocate(settings("u_shaped", 0.5), {0: layers[0], 3: layers[0]}, {0: [0.0] * 128, 3: [0.0] * 128}) == {
        0: 64,
        3: 64,
    }


def test_loss_based_keeps_in_proportion_to_the_smoothed_loss() -> None:
    layers = {0: layer(20), 1: layer(20), 2: layer(20)}
    scores = {index: [0.0] * 20 for index in layers}
    losses = {"statistics": {index: {"layer_loss": numpy.array(x)} for index, x in enumerate((1.0, 4.0, 9.0))}}
    assert allocate(settings("loss_based", 0.5), layers, scores, losses) == {0: 15, 1: 10, 2: 5}
    unsmoothed = settings("loss_based", 0.5, smoothing="none")  # kept 15/7, 60/7, 135/7
    assert allocate(unsmoothed, layers, scores, losses) == {0: 18, 1: 11, 2: 1}
    capped = settings("loss_based", 0.1, smoothing="none")  # 54 kept: the last two are full
    assert allocate(capped, layers, scores, losses) == {0: 6, 1: 0, 2: 0}


@pytest.mark.parametrize("name", ["global", "u_shaped", "loss_based"])
def test_infeasible_ratios_name_the_nearest(name: str) -> None:
    layers, scores = {0: layer(16, top_k=4), 1: layer(16, top_k=8)}, {0: [0.0] * 16, 1: [0.0] * 16}
    evidence = {"statistics": {0: {"layer_loss": 1.0}, 1: {"layer_loss": 2.0}}}
    assert allocate(settings(name, 0.625), layers, scores, evidence) == {0: 12, 1: 8}
    with pytest.raises(
        UserError, match=r"ratio=0.7 removes 22 experts, but.*only 20 go: 0.625 is the largest feasible"
    ):
        allocate(settings(name, 0.7), layers, scores, evidence)
    with pytest.raises(UserError, match=r"ratio=1.5: expected a number in \[0, 1\), 0.5 is the nearest feasible"):
        allocate(settings(name, 1.5), layers, scores, evidence)
    with pytest.raises(UserError, match=r"ratio=0.0 removes 0 experts, but.*at least 2 go: 0.0667 is the smallest"):
        allocate(
            {**settings(name, 0.0), "multiple_of": 7},
            {0: layer(15), 1: layer(15)},
            {0: [0.0] * 15, 1: [0.0] * 15},
            evidence,
        )


def test_missing_and_broken_evidence() -> None:
    layers, scores = {0: layer(4)}, {0: [0.0] * 4}
    for evidence, message in [
        ({}, "allocation needs layer_loss, which the step statistics measures"),
        ({"statistics": {0: {"tokens": [1]}}}, r"layer 0 has no layer_loss .*\(it has: tokens\)"),
        ({"statistics": {0: {"layer_loss": float("nan")}}}, "layer_loss: layer 0 is nan"),
        ({"statistics": {0: {"layer_loss": 0.0}}}, r"layer_loss is \[0.0\]: expected"),
    ]:
        with pytest.raises(UserError, match=message):
            allocate(settings("loss_based", 0.25), layers, scores, evidence)
    with pytest.raises(UserError, match="scores: layer 0, expert 2 is inf"):
        allocate(settings("uniform", 0.25), layers, {0: [0.0, 1.0, float("inf"), 2.0]})


def test_what_another_step_decides_is_not_decided_here() -> None:
    with pytest.raises(UserError, match=r"allocation=evolutionary cannot say from scores.*decided in the search step"):
        allocate(settings("evolutionary", 0.25), {0: layer(4)}, {0: [0.0] * 4})
    with pytest.raises(UserError, match="allocation=coverage cannot say from scores of experts alone"):
        allocate(settings("coverage", 0.25), {0: layer(4)}, {0: [0.0] * 4})
