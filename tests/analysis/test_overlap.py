from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from handmade import family

from analysis.stats import overlap


def test_bottom_sets_are_made_as_plans_are() -> None:
    assert overlap.bottom(np.array([3.0, 1, 1, 1, 0]), 0.5).tolist() == [False, True, False, False, True]
    assert overlap.bottom(np.arange(7.0), 0.25).sum() == 1
    assert overlap.bottom(np.arange(7.0), 0.1).sum() == 0


def test_three_readings_of_overlap_by_hand() -> None:
    """Bottom sets {0,1}, {0,1}, {0,2} of four experts."""
    frame = family({"a": [[1, 2, 3, 4]], "b": [[1, 2, 3, 4]], "c": [[1, 3, 2, 4]]})
    found = overlap.calibration_overlap(frame, [0.5]).iloc[0]
    assert found["triple"] == 0.5
    assert found["pairwise"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found["jaccard"] == pytest.approx(1 / 3)
    assert (found["chance_triple"], found["chance_pairwise"]) == (0.25, 0.5)


def test_overlap_is_averaged_over_layers_of_any_size() -> None:
    frame = family({"a": [[1, 2, 3, 4], [1, 2]], "b": [[1, 2, 3, 4], [2, 1]]})
    assert overlap.calibration_overlap(frame, [0.5]).iloc[0]["triple"] == 0.5


def test_chance_levels_are_what_random_scores_reach() -> None:
    scores = np.random.default_rng(0).random((3, 4000, 32))
    for ratio in overlap.RATIOS:
        found = overlap.agreement(overlap.bottom(scores, ratio))
        for measure in ("triple", "pairwise"):
            assert found[measure] == pytest.approx(found[f"chance_{measure}"], abs=0.01)
        assert found["jaccard"] == pytest.approx(found["chance_jaccard"], abs=0.03)


def test_the_constant_score_is_not_available() -> None:
    frame = pd.concat(
        [family({"a": [[1, 1]], "b": [[1, 1]]}, overlap.DEGENERATE), family({"a": [[1, 2]], "b": [[1, 2]]}, (1, 0, 1))]
    )
    found = overlap.calibration_overlap(frame, [0.5]).set_index("beta")["triple"]
    assert np.isnan(found[0]) and found[1] == 1.0
    effects = overlap.component_effects(overlap.pooled(overlap.calibration_overlap(frame, [0.5])))
    assert set(effects["level"][effects["component"] == "beta"]) == {1}


def test_one_calibration_set_has_no_overlap() -> None:
    assert overlap.calibration_overlap(family({"a": [[1, 2]]})).empty


def test_proxy_against_exact_damage_by_hand() -> None:
    proxy = family({"a": [[1, 2, 3, 4], [1, 2, 3, 4]]}, (0, 1, 1))
    exact = family({"a": [[1, 2, 3, 4], [4, 3, 2, 1]]}).drop(columns=overlap.VARIANT)
    found = overlap.proxy_overlap(proxy, exact, [0.5]).iloc[0]
    assert (found["overlap"], found["lowest"], found["chance"]) == (0.5, 0.0, 0.5)
    for variant in ((0, 1, 2), (0, 2, 1), (1, 1, 1)):
        other = family({"a": [[1, 2, 3, 4], [4, 3, 2, 1]]}, variant)
        assert overlap.proxy_overlap(pd.concat([other, proxy]), exact, [0.5]).iloc[0]["overlap"] == 0.5, "another score"
