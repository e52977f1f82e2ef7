"""Groups of experts to merge: examples worked out by hand, a naive average linkage, naive distances."""

from __future__ import annotations

import re
from itertools import chain, combinations
from typing import Any

import numpy
import pytest
from facts_of import layer, settings
from numpy.typing import NDArray

from moe_lab.allocation import check, fits
from moe_lab.allocation.grouping import GROUPINGS, average_linkage, by_salience, groups, nearest, weighted
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError

LOGITS = numpy.array([[2, 0, 1], [0, 2, 1], [1, 1, -2], [0.1, 1.8, 1]], dtype=float)  # experts x tokens
MEANS = numpy.array([[0, 0], [1, 0], [1.8, 0], [5, 1]], dtype=float)
GATED = numpy.array([[1, 0], [1, 1], [0, 2], [-1, -1]], dtype=float)
TOKENS = numpy.array([0.30, 0.28, 0.22, 0.20])
SALIENCE = numpy.array([5, 1, 4, 0.5, 2, 0.2])
"""An example of REAM's groups, with the distances of six experts."""
APART = numpy.array(
    [
        [0, 0.3, 0.9, 0.1, 0.5, 0.2],
        [0.3, 0, 0.4, 0.6, 0.7, 0.8],
        [0.9, 0.4, 0, 0.15, 0.6, 0.05],
        [0.1, 0.6, 0.15, 0, 0.3, 0.4],
        [0.5, 0.7, 0.6, 0.3, 0, 0.9],
        [0.2, 0.8, 0.05, 0.4, 0.9, 0],
    ]
)


def grouped(
    name: str, sums: dict[str, Any], kept: Any, protected: Any = (), scores: Any = None, **parameters: Any
) -> list[list[int]]:
    """Groups of four experts, whose scores are equal unless they are given."""
    scores = numpy.ones(4) if scores is None else numpy.asarray(scores, dtype=float)
    return groups({"replacement": name, "parameters": parameters}, sums, scores, kept, protected)


@pytest.mark.parametrize("name", ["m_smoe", "m_smoe_unaligned"])
def test_a_dropped_expert_joins_the_one_with_the_most_similar_logits(name: str) -> None:
    sums = {"router_gram": LOGITS @ LOGITS.T}
    assert grouped(name, sums, (0, 1, 2)) == [[0], [1, 3], [2]]  # (cos + 1) / 2 = .630158, .998940, .490099
    larger = LOGITS * [[100], [1], [1], [1]]
    assert grouped(name, {"router_gram": larger @ larger.T}, (0, 1, 2)) == [[0], [1, 3], [2]]
    assert grouped(name, sums, (0, 2)) == [[0, 1, 3], [2]]
    with pytest.raises(UserError, match=f"{re.escape(name)}.*hc_smoe"):
        grouped(name, {}, (0, 1))


def test_protected_experts_are_merged_with_none() -> None:
    sums = {
        "router_gram": LOGITS @ LOGITS.T,
        "dense_output_sum": MEANS,
        "output_sum": MEANS * TOKENS[:, None],
        "dense_gated_output_sum": GATED,
        "weight_distance_square": (MEANS @ MEANS.T) ** 2,
        "tokens": TOKENS,
    }
    assert grouped("m_smoe", sums, (0, 1, 2), protected=(1,)) == [[0, 3], [1], [2]]
    assert grouped("hc_smoe", sums, (0, 2, 3), protected=(2,)) == [[0, 1], [2], [3]]
    for name in GROUPINGS:
        for kept in ((0, 2, 3), (0, 2)):
            made = grouped(name, sums, kept, protected=(2,), scores=[1, 2, 9, 3])
            assert [2] in made and len(made) == len(kept) and sorted(chain(*made)) == [0, 1, 2, 3]
        assert grouped(name, sums, range(4), protected=range(4)) == [[0], [1], [2], [3]]
        with pytest.raises(UserError, match="all protected"):
            grouped(name, sums, (0, 1), protected=(0, 1))


def merged(name: str, groups: list[list[int]], values: Any, kept: Any = ()) -> dict[int, dict[int, float]]:
    """The members' weights from their tokens or scores, whichever the grouping weighs by; the others are zeros."""
    nothing = numpy.zeros(len(values))
    by_scores = GROUPINGS[name].weights == "scores"
    return weighted(name, groups, {"tokens": nothing if by_scores else values}, values if by_scores else nothing, kept)


def test_the_most_used_expert_stands_for_its_group_and_members_weigh_as_they_are_used() -> None:
    weights = merged("m_smoe", [[0], [1, 3], [2]], TOKENS)
    assert weights == {0: {0: 1.0}, 1: pytest.approx({1: 28 / 48, 3: 20 / 48}), 2: {2: 1.0}}
    assert list(merged("hc_smoe", [[0, 1, 2]], numpy.array([3.0, 9.0, 9.0]))) == [1]
    assert merged("merge_moe", [[0, 1], [2]], numpy.zeros(3)) == {0: {0: 0.5, 1: 0.5}, 2: {2: 1.0}}


def test_ream_weighs_by_salience_and_the_kept_expert_stands_for_its_group() -> None:
    weights = merged("ream", [[0, 3, 5], [1, 2], [4]], SALIENCE, kept=(0, 2, 4))
    assert weights[0] == pytest.approx({0: 5 / 5.7, 3: 0.5 / 5.7, 5: 0.2 / 5.7})
    assert weights[2] == pytest.approx({1: 0.2, 2: 0.8}) and weights[4] == {4: 1.0}
    # a negative score counts as 0; where no positive one is left, all weigh the same
    assert merged("ream", [[0, 1], [2, 3]], numpy.array([3.0, -1.0, -2.0, 0.0]), kept=(0, 3)) == {
        0: {0: 1.0, 1: 0.0},
        3: {2: 0.5, 3: 0.5},
    }
    # routers limited to groups keep an expert although a dropped one of another group has a higher score
    assert list(merged("ream", [[0, 1]], numpy.array([1.0, 2.0]), kept=(0,))) == [0]


def test_groups_fill_from_the_most_salient_expert_on() -> None:
    by_score = (0, 2, 4)
    assert by_salience(APART, by_score, group_size=3) == [[0, 3, 5], [2, 1], [4]]
    assert nearest(APART, by_score) == [[0, 1, 3], [2, 5], [4]]  # expert 5 is nearer to 2
    assert nearest(numpy.zeros((4, 4)), (2, 0)) == [[0, 1, 3], [2]]  # equally near: the lower id
    assert by_salience(APART, (4, 2, 0), group_size=2) == [[4, 3], [2, 5], [0, 1]]
    assert by_salience(APART, by_score) == [[0, 3, 5, 1], [2], [4]]  # the default is 16
    assert by_salience(numpy.zeros((4, 4)), (3, 1), group_size=2) == [[3, 0], [1, 2]]  # equal: the lower id first
    with pytest.raises(UserError, match=r"group_size=1.*at least 2"):
        by_salience(APART, by_score, group_size=1)


def naive_ream(logits: NDArray[Any], gated: NDArray[Any]) -> NDArray[Any]:
    """1 - (outputs + logits) / 2 of each pair, from the columns themselves."""
    count = len(logits)
    columns = [row / numpy.linalg.norm(row) for row in logits]
    apart = numpy.array([[numpy.linalg.norm(a - b) for b in columns] for a in columns])
    distances = numpy.zeros((count, count))
    for i in range(count):
        for j in range(count):
            cosine = gated[i] @ gated[j] / numpy.linalg.norm(gated[i]) / numpy.linalg.norm(gated[j])
            distances[i, j] = 1 - ((cosine + 1) / 2 + 1 - apart[i, j] / apart.max()) / 2
    return distances


def test_reams_distance_is_of_gated_outputs_and_logits() -> None:
    rng = numpy.random.default_rng(0)
    logits, gated = rng.normal(size=(9, 40)), rng.normal(size=(9, 5))
    distances = GROUPINGS["ream"].distances({"router_gram": logits @ logits.T, "dense_gated_output_sum": gated})
    numpy.testing.assert_allclose(distances, naive_ream(logits, gated), atol=1e-7)  # sqrt(2 - 2 cos) near cos = 1


def test_ream_takes_the_kept_experts_by_score() -> None:
    sums = {"router_gram": LOGITS @ LOGITS.T, "dense_gated_output_sum": GATED}
    # 1 is nearer to 0 than to 2, and 3 nearer to 0: whoever comes first, takes 3 or 1
    distances = naive_ream(LOGITS, GATED)
    for scores in ([2, 0, 1, 0], [1, 0, 2, 0]):
        first = int(numpy.argmax(scores))
        taken = min((1, 3), key=lambda expert: distances[first, expert])
        made = grouped("ream", sums, (0, 2), scores=scores, group_size=2)
        assert sorted([first, taken]) in made and len(made) == 2
    with pytest.raises(UserError, match="hc_smoe"):
        grouped("ream", {"dense_gated_output_sum": GATED}, (0, 2))


def test_merge_moe_joins_the_expert_with_the_nearest_weights() -> None:
    weights = numpy.array([[0.0, 0], [3, 4], [0, 2], [3, 5]])
    squares = ((weights[:, None] - weights) ** 2).sum(2)
    numpy.testing.assert_allclose(GROUPINGS["merge_moe"].distances({"weight_distance_square": squares})[0, 1], 5)
    assert grouped("merge_moe", {"weight_distance_square": squares}, (0, 1)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("ratio", "size", "protected", "least"),
    [(0.75, 4, (), None), (0.75, 2, (), 4), (0.75, 4, (7,), 5), (31 / 32, 16, (), 32)],
)
def test_groups_that_cannot_hold_all_experts_are_refused_before_anything_runs(
    ratio: float, size: int, protected: tuple[int, ...], least: int | None
) -> None:
    """By numbers alone: a matrix of the distances of a million experts would have eight terabytes. A protected expert
    holds no others."""
    million = {0: {**layer(2**20, top_k=2), "protected": protected}}
    for name in GROUPINGS:
        asked = {**settings("uniform", ratio, group_size=size), "replacement": name}
        if least is None or name != "ream":
            fits(asked, million, "expert")
        else:
            with pytest.raises(UserError, match=rf"group_size={re.escape(str(size))}\b.*\b{re.escape(str(least))}\b"):
                fits(asked, million, "expert")


def test_parameters_of_a_replacement_are_checked() -> None:
    check(AllocationConfig(replacement="ream", parameters={"group_size": 8}))
    for name, own in (("ream", {"group_size": 8.5}), ("ream", {"grup_size": 8}), ("m_smoe", {"group_size": 8})):
        with pytest.raises(UserError, match=r"allocation\.parameters.*group_size"):
            check(AllocationConfig(replacement=name, parameters=own))


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_those_of_a_naive_average_linkage(seed: int) -> None:
    features = numpy.random.default_rng(seed).normal(size=(12, 5))
    groups = [[expert] for expert in range(12)]
    while len(groups) > 4:

        def distance(pair: tuple[list[int], list[int]]) -> float:
            return float(numpy.mean([numpy.linalg.norm(features[i] - features[j]) for i in pair[0] for j in pair[1]]))

        first, second = min(combinations(groups, 2), key=distance)
        groups = [group for group in groups if group not in (first, second)] + [sorted(first + second)]
    tokens = numpy.arange(1.0, 13)
    routed = {"output_sum": features * tokens[:, None], "tokens": tokens}
    for name, sums in (("hc_smoe", {"dense_output_sum": 22 * features}), ("hc_smoe_routed", routed)):
        assert grouped(name, sums, range(4), scores=numpy.ones(12)) == sorted(groups)


def test_equal_experts_still_give_as_many_groups_as_asked() -> None:
    assert len(average_linkage(numpy.zeros((6, 6)), range(4))) == 4
