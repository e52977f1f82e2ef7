from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of

from analysis.outputs import claims
from analysis.stats.cell_scores import pooled_difference, share_beyond
from analysis.stats.overlap import scores_by_variant

NO_COSTS = pd.DataFrame(columns=["cell", "routed_kept"])
NO_FAMILY = pd.DataFrame()


def first(count: int, items: int = 40) -> list[int]:
    """Outcomes of a plan that solves the first `count` items."""
    return [1] * count + [0] * (items - count)


def searched(last: list[int] | None) -> pd.DataFrame:
    axes = [
        UNPRUNED,
        cell("reap"),
        cell("reap", "evolutionary"),
        cell("ean"),
        cell("ean", "evolutionary"),
        cell("seer"),
        cell("reap", ratio=0.25),
        cell("reap", "evolutionary", ratio=0.25),
    ]
    solved = [first(40), first(10), first(20), first(8), last, first(30), first(20), first(19)]
    return claims.claims([comparison_of(axes, {"gsm8k": solved})], NO_COSTS, NO_FAMILY)


def test_searched_allocations_are_paired_with_uniform_ones_of_the_same_criterion() -> None:
    """At 50 %: +10 and +12 of 40 items, mean 0.275; at 25 %: -1 of 40."""
    found = searched(first(20)).set_index("ratio")
    assert found["difference"].to_dict() == pytest.approx({0.25: -1 / 40, 0.5: 11 / 40})
    assert found["compared"].to_dict() == {0.25: 1, 0.5: 2}
    assert found.loc[0.5, "verdict"] == "holds" and found.loc[0.25, "verdict"] == "undecided"


def test_a_missing_result_takes_its_pair_away_and_nothing_else() -> None:
    row = searched(None).set_index("ratio").loc[0.5]
    assert row["compared"] == 1 and row["difference"] == pytest.approx(10 / 40)
    only_uniform = comparison_of([UNPRUNED, cell("reap")], {"gsm8k": [first(40), first(10)]})
    assert claims.claims([only_uniform], NO_COSTS, NO_FAMILY).empty, "nothing is claimed where nothing can be asked"
    assert claims.verdict(np.nan, 0.1) == "not tested"


CHANNELS = [
    UNPRUNED,
    cell("heapr", "global"),
    cell("camera", "layerwise"),
    cell("reap"),
    cell("man"),
    cell("channel_random", "layerwise"),
    cell("random"),
    cell("heapr", "global", recovery="nf4"),
]
KEPT = [1, 0.5, 0.5, 0.52, 0.6, 0.5, 0.5, 0.5]


def channels() -> pd.DataFrame:
    solved = [first(40), first(30), first(20), first(10), first(40), first(16), first(20), first(2)]
    costs = pd.DataFrame({"cell": range(8), "routed_kept": KEPT})
    return claims.claims([comparison_of(CHANNELS, {"gsm8k": solved})], costs, NO_FAMILY)


def test_channels_meet_only_experts_that_keep_as_much() -> None:
    """HEAPr +20 and CAMERA +10 over REAP; MAN keeps a tenth more and is left out, and so is what was quantised."""
    rows = channels().set_index(["claim", "ratio"])
    row = rows.loc[(claims.CHANNELS, 0.5)]
    assert row["compared"] == 2 and row["difference"] == pytest.approx(15 / 40) and row["verdict"] == "holds"
    assert rows.loc[(claims.CHANNELS, claims.ALL), "difference"] == pytest.approx(15 / 40)


def test_experts_that_are_replaced_are_not_removed() -> None:
    axes = [UNPRUNED, cell("heapr", "global"), cell("reap"), cell("reap", "uniform, replacement=mean_output")]
    costs = pd.DataFrame({"cell": range(4), "routed_kept": [1.0, 0.5, 0.5, 0.5]})
    solved = {"gsm8k": [first(40), first(30), first(10), first(20)]}
    rows = claims.claims([comparison_of(axes, solved)], costs, NO_FAMILY).set_index(["claim", "ratio"])
    row = rows.loc[(claims.CHANNELS, 0.5)]
    assert row["compared"] == 1 and row["difference"] == pytest.approx(20 / 40)


def test_chance_meets_chance_and_a_claim_that_fails_says_so() -> None:
    row = channels().set_index(["claim", "ratio"]).loc[(claims.BY_CHANCE, claims.ALL)]
    assert row["compared"] == 1 and row["difference"] == pytest.approx(-4 / 40)
    assert claims.verdict(row["low"], row["high"]) == row["verdict"] == "does not hold"


def test_p_values_are_corrected_over_all_rows() -> None:
    """Holm by hand: the smallest p times 4, the next times 3, ..., never falling."""
    found = channels().sort_values("p", kind="stable")
    naive = np.maximum.accumulate(found["p"].to_numpy() * [4, 3, 2, 1])
    assert found["p_holm"].tolist() == pytest.approx(naive.tolist())


def family(scores: dict[int, dict[str, list[list[float]]]]) -> pd.DataFrame:
    """b -> calibration set -> layers -> scores of experts, for alpha = beta = 1."""
    rows = [
        {"model": "m", "calibration": name, "layer": layer, "expert": expert, "b": b, "alpha": 1, "beta": 1, "score": s}
        for b, sets in scores.items()
        for name, layers in sets.items()
        for layer, values in enumerate(layers)
        for expert, s in enumerate(values)
    ]
    return pd.DataFrame(rows)


UP, DOWN = [1.0, 2, 3, 4], [4.0, 3, 2, 1]
FAMILY = family({1: {"a": [UP, UP], "b": [UP, UP]}, 0: {"a": [UP, UP], "b": [DOWN, UP]}})


def test_invariance_is_compared_layer_by_layer() -> None:
    """Divided by counts, both layers agree wholly; sums agree in none of layer 0 and all of layer 1."""
    layers = [scores_by_variant(layer) for _, layer in FAMILY.groupby("layer")]
    assert claims.layer_differences(layers, 0.5).tolist() == [1.0, 0.0]
    found = claims.claims([], NO_COSTS, FAMILY)
    assert found["claim"].unique().tolist() == [claims.INVARIANT]
    assert found["difference"].tolist() == [0.5, 0.5, 0.5] and set(found["verdict"]) == {"undecided"}
    one_set = claims.claims([], NO_COSTS, FAMILY[FAMILY["calibration"] == "a"])
    assert one_set.empty


def test_few_layers_have_wide_intervals() -> None:
    """Ten layers: t = 2.2622 with 9 degrees of freedom, times sqrt(10 / 9) = 2.3845, which leaves 0.0171 outside."""
    assert claims.expanded(10) == pytest.approx(1 - 0.0171, abs=5e-5)
    assert claims.expanded(100_000) == pytest.approx(0.95, abs=1e-4)
    assert claims.layer_interval(np.array([0.1, 0.2, 0.3, 0.4])) == pytest.approx((0.1, 0.4))
    many = np.random.default_rng(0).normal(0.1, 1.0, 400)
    low, high = claims.layer_interval(many)
    half = 1.96 * many.std() / 20
    assert (low, high) == pytest.approx((many.mean() - half, many.mean() + half), abs=0.02)
    assert np.isnan(claims.layer_interval(np.array([0.3]))).all()


def test_groups_of_pairs_weigh_alike() -> None:
    """(30 - 10) in one group, the mean of (20 - 10) and (10 - 10) in the other: (20 + 5) / 2 of 40."""
    axes = [UNPRUNED, cell("reap"), cell("ean"), cell("seer"), cell("man")]
    solved = [first(40), first(30), first(20), first(10), first(10)]
    comparison = comparison_of(axes, {"gsm8k": solved})
    found = pooled_difference(comparison, ("GSM8K",), [[(1, 3)], [(2, 3), (4, 3)]])
    assert found["difference"] == pytest.approx(12.5 / 40) and found["compared"] == 3
    assert np.isnan(pooled_difference(comparison, ("GSM8K",), [])["difference"])


def test_bootstrap_p_values_are_two_sided_and_never_zero() -> None:
    assert share_beyond(np.ones(99)) == pytest.approx(2 / 100)
    assert share_beyond(np.array([-1.0, 1, 1, 1, 1, 1, 1, 1, 1])) == pytest.approx(2 * 2 / 10)
    assert share_beyond(np.array([-1.0, 1.0])) == 1
