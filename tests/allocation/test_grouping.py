"""Groups of experts to merge: examples worked out by hand, and a naive average linkage."""

from __future__ import annotations

from itertools import combinations

import numpy
import pytest

from moe_lab.allocation.grouping import groups, hc_smoe, hc_smoe_routed, m_smoe, weighted
from moe_lab.errors import UserError

LOGITS = numpy.array([[2, 0, 1], [0, 2, 1], [1, 1, -2], [0.1, 1.8, 1]], dtype=float)  # experts x tokens
MEANS = numpy.array([[0, 0], [1, 0], [1.8, 0], [5, 1]], dtype=float)


def test_a_dropped_expert_joins_the_one_with_the_most_similar_logits() -> None:
    sums = {"router_gram": LOGITS @ LOGITS.T}
    assert m_smoe(sums, (0, 1, 2)) == [[0], [1, 3], [2]]  # (cos + 1) / 2 = .630158, .998940, .490099
    larger = LOGITS * [[100], [1], [1], [1]]
    assert m_smoe({"router_gram": larger @ larger.T}, (0, 1, 2)) == [[0], [1, 3], [2]]
    assert m_smoe(sums, (0, 2)) == [[0, 1, 3], [2]]
    with pytest.raises(UserError, match="hc_smoe"):
        m_smoe({}, (0, 1))


def test_protected_experts_are_merged_with_none() -> None:
    tokens = numpy.array([0.30, 0.28, 0.22, 0.20])
    sums = {"router_gram": LOGITS @ LOGITS.T, "dense_output_sum": MEANS, "tokens": tokens}
    assert groups("m_smoe", sums, (0, 1, 2), protected=(1,)) == [[0, 3], [1], [2]]
    assert groups("hc_smoe", sums, (0, 2, 3), protected=(2,)) == [[0, 1], [2], [3]]
    assert groups("hc_smoe", sums, range(4), protected=range(4)) == [[0], [1], [2], [3]]
    with pytest.raises(UserError, match="all protected"):
        groups("hc_smoe", sums, (0, 1), protected=(0, 1))


def test_groups_are_weighted_by_routing_frequency() -> None:
    merged = weighted([[0], [1, 3], [2]], numpy.array([0.30, 0.28, 0.22, 0.20]))
    assert merged == {
        0: {0: 1.0},
        1: {1: pytest.approx(0.583333, abs=1e-6), 3: pytest.approx(0.416667, abs=1e-6)},
        2: {2: 1.0},
    }
    assert sum(share * value for share, value in zip(merged[1].values(), (2, 5), strict=True)) == pytest.approx(3.25)


def test_the_most_used_expert_stands_for_its_group_and_unused_ones_weigh_the_same() -> None:
    assert list(weighted([[0, 1, 2]], numpy.array([3.0, 9.0, 9.0]))) == [1]
    assert weighted([[0, 1], [2]], numpy.zeros(3)) == {0: {0: 0.5, 1: 0.5}, 2: {2: 1.0}}


@pytest.mark.parametrize(
    ("count", "groups"), [(4, [[0], [1], [2], [3]]), (3, [[0], [1, 2], [3]]), (2, [[0, 1, 2], [3]])]
)
def test_clusters_by_average_linkage(count: int, groups: list[list[int]]) -> None:
    tokens = numpy.array([4.0, 5.0, 6.0, 7.0])
    assert hc_smoe({"dense_output_sum": 22 * MEANS}, range(count)) == groups
    assert hc_smoe_routed({"output_sum": MEANS * tokens[:, None], "tokens": tokens}, range(count)) == groups


def test_average_is_not_single_linkage() -> None:
    features = numpy.array([[0.0], [2.0], [3.9], [5.6]])
    assert hc_smoe({"dense_output_sum": features}, range(2)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_those_of_a_naive_average_linkage(seed: int) -> None:
    features = numpy.random.default_rng(seed).normal(size=(12, 5))
    groups = [[expert] for expert in range(12)]
    while len(groups) > 4:

        def distance(pair: tuple[list[int], list[int]]) -> float:
            return float(numpy.mean([numpy.linalg.norm(features[i] - features[j]) for i in pair[0] for j in pair[1]]))

        first, second = min(combinations(groups, 2), key=distance)
        groups = [group for group in groups if group not in (first, second)] + [sorted(first + second)]
    assert sorted(hc_smoe({"dense_output_sum": features}, range(4))) == sorted(groups)


def test_equal_experts_still_give_as_many_groups_as_asked() -> None:
    assert len(hc_smoe({"dense_output_sum": numpy.zeros((6, 3))}, range(4))) == 4
