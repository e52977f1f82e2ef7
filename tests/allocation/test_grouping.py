"""Groups of experts to merge, by hand and by naive references; protected experts, which every plan
keeps whole."""

from itertools import chain, combinations, product
from typing import Any

import numpy
import pytest
import tiny
import torch
from example_facts import layer, settings
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import squareform
from tokenizers import pre_tokenizers

import moe_lab
from moe_lab.allocation import allocate, check_fits
from moe_lab.allocation.grouping import (
    GROUPINGS,
    average_linkage,
    groups,
    member_weights,
    nearest_groups,
    salience_groups,
)
from moe_lab.allocation.protection import add_super_experts, super_experts
from moe_lab.allocation.shapes import removals_within_limit
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import make_plan
from moe_lab.search.candidates import Plans
from moe_lab.search.evolution import SearchSettings, space_to_search

# experts x tokens
LOGITS = numpy.array(
    [
        [2, 0, 1],
        [0, 2, 1],
        [1, 1, -2],
        [0.1, 1.8, 1],
    ],
    dtype=float,
)
MEANS = numpy.array(
    [
        [0, 0],
        [1, 0],
        [1.8, 0],
        [5, 1],
    ],
    dtype=float,
)
GATED = numpy.array(
    [
        [1, 0],
        [1, 1],
        [0, 2],
        [-1, -1],
    ],
    dtype=float,
)
TOKENS = numpy.array([0.30, 0.28, 0.22, 0.20])
UPPER_TRIANGLE = [
    [0.3, 0.9, 0.1, 0.5, 0.2],
    [0.4, 0.6, 0.7, 0.8],
    [0.15, 0.6, 0.05],
    [0.3, 0.4],
    [0.9],
]
APART = squareform(numpy.concatenate(UPPER_TRIANGLE))
"""Distances of six experts; 3, 5 and 1 are the nearest to 0, and 5 and 3 to 2."""


def grouped(
    name: str,
    sums: dict[str, Any],
    retained: Any,
    protected: Any = (),
    scores: Any = None,
    **parameters: Any,
) -> list[list[int]]:
    """Groups of four experts, whose scores are equal unless they are given."""
    if scores is None:
        scores = numpy.ones(4)
    allocation = {"replacement": name, "parameters": parameters}
    return groups(allocation, sums, numpy.asarray(scores, dtype=float), retained, protected)


def test_dropped_expert_joins_the_most_similar_logits() -> None:
    sums = {"router_gram": LOGITS @ LOGITS.T}
    # (cos + 1) / 2 = .630158, .998940, .490099
    assert grouped("m_smoe", sums, (0, 1, 2)) == [[0], [1, 3], [2]]
    larger = LOGITS * [[100], [1], [1], [1]]
    sums_of_larger = {"router_gram": larger @ larger.T}
    assert grouped("m_smoe", sums_of_larger, (0, 1, 2)) == [[0], [1, 3], [2]]
    assert grouped("m_smoe", sums, (0, 2)) == [[0, 1, 3], [2]]


@pytest.mark.parametrize("name", ["m_smoe", "m_smoe_unaligned", "ream"])
def test_groupings_by_logits_need_sums_of_them(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} .*hc_smoe"):
        grouped(name, {}, (0, 1))


SUMS = {
    "router_gram": LOGITS @ LOGITS.T,
    "dense_output_sum": MEANS,
    "output_sum": MEANS * TOKENS[:, None],
    "dense_gated_output_sum": GATED,
    "weight_distance_square": (MEANS @ MEANS.T) ** 2,
    "tokens": TOKENS,
}


@pytest.mark.parametrize("retained", [(0, 2, 3), (0, 2)])
@pytest.mark.parametrize("name", GROUPINGS)
def test_protected_experts_are_merged_with_none(name: str, retained: tuple[int, ...]) -> None:
    result = grouped(name, SUMS, retained, protected=(2,), scores=[1, 2, 9, 3])
    assert [2] in result
    assert len(result) == len(retained)
    assert sorted(chain(*result)) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", GROUPINGS)
def test_protected_experts_alone_leave_nothing_to_merge(name: str) -> None:
    all_protected = grouped(name, SUMS, range(4), protected=range(4))
    assert all_protected == [[0], [1], [2], [3]]
    with pytest.raises(UserError, match=r"allocation\.replacement=.*protected"):
        grouped(name, SUMS, (0, 1), protected=(0, 1))


def merged(
    name: str, groups: list[list[int]], values: Any, kept: Any = ()
) -> dict[int, dict[int, float]]:
    """The members' weights from their tokens or scores, whichever the grouping weighs by; the
    others are zeros."""
    zeros = numpy.zeros(len(values))
    if GROUPINGS[name].weights == "scores":
        tokens, scores = zeros, values
    else:
        tokens, scores = values, zeros
    return member_weights(name, groups, {"tokens": tokens}, scores, kept)


def test_groups_have_owners_and_shares() -> None:
    weights = merged("m_smoe", [[0], [1, 3], [2]], TOKENS)
    of_pair = pytest.approx({1: 28 / 48, 3: 20 / 48})
    assert weights == {0: {0: 1.0}, 1: of_pair, 2: {2: 1.0}}
    tokens = numpy.array([3.0, 9.0, 9.0])
    assert list(merged("hc_smoe", [[0, 1, 2]], tokens)) == [1]
    equal = merged("merge_moe", [[0, 1], [2]], numpy.zeros(3))
    assert equal == {0: {0: 0.5, 1: 0.5}, 2: {2: 1.0}}


def test_negative_scores_weigh_nothing() -> None:
    """REAM: where no positive score is left in a group, all of its experts weigh the same."""
    groups = [[0, 1], [2, 3], [4, 5]]
    scores = numpy.array([3.0, -1, -2, 0, 1, 4])
    weights = merged("ream", groups, scores, kept=(0, 3, 4))
    assert weights[0] == {0: 1.0, 1: 0.0}
    assert weights[3] == {2: 0.5, 3: 0.5}
    assert weights[4] == {4: 0.2, 5: 0.8}
    assert len(weights) == 3


def test_groups_fill_from_the_most_salient_expert() -> None:
    by_score = (0, 2, 4)
    assert salience_groups(APART, by_score, group_size=3) == [[0, 3, 5], [2, 1], [4]]
    assert salience_groups(APART, (4, 2, 0), group_size=2) == [[4, 3], [2, 5], [0, 1]]
    assert salience_groups(APART, by_score) == [[0, 3, 5, 1], [2], [4]]  # the default is 16
    equal = numpy.zeros((4, 4))
    lower_ids_first = salience_groups(equal, (3, 1), group_size=2)
    assert lower_ids_first == [[3, 0], [1, 2]]
    with pytest.raises(UserError, match=r"group_size=1.*at least 2"):
        salience_groups(APART, by_score, group_size=1)


def test_groups_are_of_the_nearest_retained_expert() -> None:
    assert nearest_groups(APART, (0, 2, 4)) == [[0, 1, 3], [2, 5], [4]]  # expert 5 is nearer to 2
    equal = numpy.zeros((4, 4))
    assert nearest_groups(equal, (2, 0)) == [[0, 1, 3], [2]]  # the lower id


def naive_ream(logits: NDArray[Any], gated: NDArray[Any]) -> NDArray[Any]:
    """1 - (outputs + logits) / 2 of each pair, from the columns themselves."""
    columns = [row / numpy.linalg.norm(row) for row in logits]
    outputs = [row / numpy.linalg.norm(row) for row in gated]
    apart = numpy.array([[numpy.linalg.norm(a - b) for b in columns] for a in columns])
    farthest = apart.max()
    distances = numpy.zeros_like(apart)
    for i, j in product(range(len(logits)), repeat=2):
        of_outputs = (outputs[i] @ outputs[j] + 1) / 2
        of_logits = 1 - apart[i, j] / farthest
        distances[i, j] = 1 - (of_outputs + of_logits) / 2
    return distances


def test_reams_distance_is_of_gated_outputs_and_logits() -> None:
    rng = numpy.random.default_rng(0)
    logits = rng.normal(size=(9, 40))
    gated = rng.normal(size=(9, 5))
    sums = {"router_gram": logits @ logits.T, "dense_gated_output_sum": gated}
    distances = naive_ream(logits, gated)
    # sqrt(2 - 2 cos) near 0
    numpy.testing.assert_allclose(GROUPINGS["ream"].distances(sums), distances, atol=1e-7)
    # of the kept experts, that of the highest score takes first
    for first, last in ((0, 8), (8, 0)):
        scores = numpy.ones(9)
        scores[first] = 2.0
        expected = salience_groups(distances, (first, last), group_size=5)
        grouping = grouped("ream", sums, (0, 8), scores=scores, group_size=5)
        assert grouping == sorted(map(sorted, expected))
        assert len(grouping[0]) + len(grouping[1]) == 9


def test_merge_moe_joins_the_expert_with_the_nearest_weights() -> None:
    weights = numpy.array([[0.0, 0], [3, 4], [0, 2], [3, 5]])
    differences = weights[:, None] - weights
    sums = {"weight_distance_square": (differences**2).sum(2)}
    assert grouped("merge_moe", sums, (0, 1)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("ratio", "size", "protected", "least"),
    [
        (0.75, 4, (), None),
        (0.75, 2, (), 4),
        (0.75, 4, (7,), 5),
    ],
)
def test_groups_too_small_for_all_experts_are_refused(
    ratio: float, size: int, protected: tuple[int, ...], least: int | None
) -> None:
    """By numbers alone: a matrix of the distances of a million experts would have eight terabytes.
    A protected expert holds no others."""
    million = {0: {**layer(2**20, top_k=2), "protected": protected}}
    message = rf"group_size={size}\b.*\b{least}\b"
    for name in GROUPINGS:
        arguments = {**settings("uniform", ratio, group_size=size), "replacement": name}
        if least is None or name != "ream":
            check_fits(arguments, million, "expert")
        else:
            with pytest.raises(UserError, match=message):
                check_fits(arguments, million, "expert")


def average_distance(features: Any, first: list[int], second: list[int]) -> float:
    """The mean distance of the members of two groups."""
    distances = [numpy.linalg.norm(features[i] - features[j]) for i in first for j in second]
    return float(numpy.mean(distances))


def naive_linkage(features: Any, count: int) -> list[list[int]]:
    """The groups that remain when the nearest two are joined again and again."""
    groups = [[expert] for expert in range(len(features))]
    while len(groups) > count:
        pairs = combinations(groups, 2)
        first, second = min(pairs, key=lambda pair: average_distance(features, *pair))
        groups = [group for group in groups if group not in (first, second)]
        groups.append(sorted(first + second))
    return sorted(groups)


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_those_of_a_naive_average_linkage(seed: int) -> None:
    features = numpy.random.default_rng(seed).normal(size=(12, 5))
    sums = {"dense_output_sum": 22 * features}
    expected = naive_linkage(features, 4)
    assert grouped("hc_smoe", sums, range(4), scores=numpy.ones(12)) == expected


def test_equal_experts_form_as_many_clusters_as_requested() -> None:
    assert len(average_linkage(numpy.zeros((6, 6)), range(4))) == 4


# ---- allocation.protect


def test_published_maxima_give_the_published_experts() -> None:
    """Qwen3-30B-A3B: 744, 540 and 430 in layers 1 to 3, then 63.5; 1.2 elsewhere, so that P99.5 is
    low."""
    layers = {number: numpy.full(128, 1.2) for number in range(48)}
    layers[1][68] = 744
    layers[2][92] = 540
    layers[3][82] = 430
    layers[47][5] = 63.5
    layers[4][1] = 74.4  # a tenth of the largest, and not above it
    assert super_experts(layers, 36) == {1: [68], 2: [92], 3: [82]}
    layers[4][1] = numpy.nextafter(74.4, 75)
    assert super_experts(layers, 36)[4] == [1]
    assert 4 not in super_experts(layers, 4)


@given(st.integers(0, 10_000), st.floats(0.2, 3))
def test_super_experts_are_found_one_by_one(seed: int, spread: float) -> None:
    random = numpy.random.default_rng(seed)
    layers = {number: numpy.exp(random.normal(0, spread, 60)) for number in (1, 2, 5)}
    values = numpy.concatenate(list(layers.values()))
    tenth = float(values.max()) / 10
    bound = max(float(numpy.quantile(values, 0.995)), tenth)
    expected = {}
    for number in (1, 2):
        experts = numpy.flatnonzero(layers[number] > bound).tolist()
        if experts:
            expected[number] = experts
    assert super_experts(layers, 5) == expected


def test_the_share_of_layers_is_rounded() -> None:
    model = {"decoder_layers": 6, "layers": {number: layer(300) for number in range(1, 6)}}
    sums = {}
    for number in model["layers"]:
        largest = numpy.ones(300)
        largest[7] = 50 + number
        sums[number] = {"output_abs_max": largest}
    for share, last in ((0.2, 0), (0.75, 3), (1, 5)):  # 0.75 * 6 = 4.5 is rounded to 4
        chosen = AllocationConfig(protect="super", protect_layers=share)
        marked = add_super_experts(vars(chosen), model, sums)["layers"]
        assert list(marked) == [1, 2, 3, 4, 5]
        for number, facts in marked.items():
            assert facts["protected"] == ([7] if number <= last else [])


HALF_PROTECTED = {0: layer(8), 1: {**layer(8), "protected": [0, 1, 2, 3, 4]}}
ASCENDING = {0: numpy.arange(8.0), 1: numpy.arange(8.0)}


def test_ratios_must_leave_room_for_protected_experts() -> None:
    layers = HALF_PROTECTED
    in_groups = {0: {**layer(8, n_group=2), "protected": [4, 5, 6]}}
    channels = {number: numpy.ones((8, 8)) for number in layers}
    for refused in (
        lambda: allocate(settings("uniform", 0.5), layers, ASCENDING),
        lambda: removals_within_limit(layers, 0.5),
        lambda: allocate(settings("global", 0.75), layers, ASCENDING),
        lambda: allocate(settings("uniform", 0.5), in_groups, {0: numpy.arange(8.0)}),
        lambda: allocate(settings("global", 0.75), layers, channels),
    ):
        with pytest.raises(UserError, match=r"allocation\.protect.* is the largest feasible ratio"):
            refused()
    assert allocate(settings("global", 0.5), layers, ASCENDING) == {0: 7, 1: 1}


def test_plans_must_retain_protected_experts() -> None:
    with pytest.raises(UserError, match=r"layer 1 .* expert 0\b"):
        make_plan(ASCENDING, {0: 0, 1: 5}, HALF_PROTECTED, provenance={})
    channels = numpy.zeros((4, 12), dtype=bool)
    channels[0, 0] = True
    channels[1, 1] = True
    plan = Plan({0: LayerPlan(4, (0, 1), channels)})
    with pytest.raises(UserError, match=r"layer 0 .* expert 1\b"):  # it keeps one of its channels
        plan.check({0: {**layer(4, width=12), "protected": [1]}})


def test_without_protected_experts_nothing_changes() -> None:
    """The others divide what is left: as if the protected experts and their channels were not
    there."""
    random = numpy.random.default_rng(0)
    scores = {0: random.gamma(0.5, size=(6, 8))}
    sums = {0: {"layer_loss": 1.0, "ala_first": random.gamma(1, size=6)}}
    marked = {0: {**layer(6, width=8), "protected": [2]}}
    others = [0, 1, 3, 4, 5]
    scores_of_others = {0: scores[0][others]}
    sums_of_others = {0: {"layer_loss": 1.0, "ala_first": sums[0]["ala_first"][others]}}
    evidence = {"statistics": sums_of_others}
    for intra in ("coverage", "proportional", "uniform", "ranking"):
        chosen = settings("coverage", 0.5, intra=intra, zero_expert="keep_null")
        retained = allocate(chosen, marked, scores, {"statistics": sums})[0]
        chosen["ratio"] = 1 - (24 - 8) / 40
        expected = allocate(chosen, {0: layer(5, width=8)}, scores_of_others, evidence)[0]
        assert retained[2] == 8
        assert retained[others].tolist() == expected.tolist()


def test_schedules_of_a_search_leave_room_for_them() -> None:
    facts = {number: layer(16, top_k=4) for number in range(3)}
    facts[1]["protected"] = list(range(10))
    chosen = settings("evolutionary", 0.5)
    space = space_to_search(chosen, {"layers": facts}, SearchSettings(granularity=1))
    assert space.capacity == (12, 6, 12)
    orders = {number: list(range(16)) for number in range(3)}
    plans = Plans(facts, orders)
    assert plans.plan((8, 6, 8)).retained[1] == tuple(range(10))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Statistics of a model in whose layer 1 the outputs of expert 5 are 300 times as large."""
    folder = tmp_path_factory.mktemp("planted")
    tiny.save("olmoe", folder)
    model, tokenizer = moe_lab.load(str(folder))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with torch.no_grad():
        moe_layers(model)[1].experts.down_proj[5] *= 300
    rows = tiny.tokens(rows=16, length=64).tolist()
    text = [" ".join(f"w{number}" for number in row) for row in rows]
    sizes = {"tokens": 1024, "length": 64}
    return moe_lab.calibrate(model, tokenizer, text, criteria=["frequency", "camera"], **sizes)


@pytest.mark.parametrize(
    ("name", "allocation"),
    [
        ("frequency", "uniform"),
        ("camera", "coverage"),
    ],
)
def test_planted_super_expert_is_retained(name: str, allocation: str, planted: Any) -> None:
    scores = moe_lab.score(name, planted)
    plan = moe_lab.plan(scores, 0.75, allocation, protect="super")
    assert plan.provenance["protected"] == {"1": [5]}
    assert plan.layers[1].is_unchanged(5)
    unprotected = moe_lab.plan(scores, 0.75, allocation)
    assert "protected" not in unprotected.provenance
