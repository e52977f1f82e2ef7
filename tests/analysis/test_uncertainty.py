from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test, t, ttest_rel
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from statsmodels.stats.multitest import multipletests

from analysis.stats import uncertainty


@pytest.mark.parametrize(("successes", "items"), [(0, 20), (7, 20), (20, 20), (63, 80)])
def test_wilson_equals_scipy(successes: int, items: int) -> None:
    low, high = uncertainty.wilson(np.array([successes]), np.array([items]))
    expected = binomtest(successes, items).proportion_ci(0.95, method="wilson")
    assert low[0] == pytest.approx(expected.low, abs=1e-12)
    assert high[0] == pytest.approx(expected.high, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(5, 60))
def test_mcnemar_equals_statsmodels(seed: int, items: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 2, (2, 4, items)).astype(float)
    found = uncertainty.mcnemar(first, second)
    for a, b, p_value in zip(first, second, found, strict=True):
        table = [[np.sum((a == i) & (b == j)) for j in (0, 1)] for i in (0, 1)]
        assert p_value == pytest.approx(min(1.0, reference_mcnemar(table, exact=True).pvalue), abs=1e-12)


def test_sign_flips_equal_scipys_permutation_test() -> None:
    differences = np.random.default_rng(2).normal(0.25, 1, (1, 12))
    exact = permutation_test(
        (differences[0],), np.sum, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert uncertainty.sign_flip(differences, replicates=40_000)[0] == pytest.approx(exact.pvalue, abs=0.015)


def test_a_p_value_is_never_zero_and_no_difference_is_no_evidence() -> None:
    large, none = np.ones((1, 100)), np.zeros((1, 100))
    assert 0 < uncertainty.sign_flip(large, replicates=1000)[0] <= 2 / 1001
    assert uncertainty.sign_flip(none)[0] == 1.0


def test_holm_on_a_worked_example() -> None:
    """Holm (1979): sorted p-values times 4, 3, 2, 1, made monotone; missing ones do not count."""
    found = uncertainty.holm(np.array([0.01, 0.04, np.nan, 0.03, 0.005]))
    assert found[[0, 1, 3, 4]] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert np.isnan(found[2])
    assert np.isnan(uncertainty.holm(np.array([np.nan]))).all()
    drawn = np.random.default_rng(0).uniform(0, 0.3, (2, 40)).round(2)  # with ties
    for row in drawn:
        assert uncertainty.holm(row) == pytest.approx(multipletests(row, method="holm")[1])


def test_bootstrap_has_the_standard_error_of_a_stratified_mean() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.random((1, 80)), (rng.random((1, 50)) < 0.3).astype(float)
    strata = {"one": {"both": first / 80 / 2}, "two": {"both": second / 50 / 2}}
    draws = uncertainty.bootstrap(strata, replicates=8000)["both"]
    expected = 0.5 * np.sqrt(first.var() / 80 + second.var() / 50)
    assert draws.mean() == pytest.approx(0.5 * (first.mean() + second.mean()), abs=0.002)
    assert draws.std() == pytest.approx(expected, rel=0.05)


def test_bootstrap_is_paired_and_repeatable() -> None:
    outcomes = np.random.default_rng(4).random((1, 40))
    both = np.concatenate([outcomes, outcomes + 0.25]) / 40
    draws = uncertainty.bootstrap({"one": {"score": both, "again": both}}, replicates=700)
    assert draws["score"].shape == (700, 2)
    assert np.allclose(draws["score"][:, 1] - draws["score"][:, 0], 0.25, atol=1e-5)
    assert np.array_equal(draws["score"], draws["again"])
    assert np.array_equal(uncertainty.bootstrap({"one": {"score": both}}, replicates=700)["score"], draws["score"])


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    outcomes = (rng.random((300, 80)) < 0.7).astype(float)
    low, high = uncertainty.wilson(outcomes.sum(axis=1), np.full(300, 80))
    assert 0.90 <= np.mean((low <= 0.7) & (high >= 0.7)) <= 0.99
    low, high = uncertainty.percentiles(uncertainty.bootstrap({"one": {"score": outcomes / 80}})["score"])
    assert 0.90 <= np.mean((low <= 0.7) & (high >= 0.7)) <= 0.99


def test_percentiles_equal_numpys() -> None:
    draws = np.random.default_rng(6).random((4001, 3))
    low, high = uncertainty.percentiles(draws)
    assert low == pytest.approx(np.percentile(draws, 2.5, axis=0))
    assert high == pytest.approx(np.percentile(draws, 97.5, axis=0))


def test_paired_t_is_that_of_one_benchmark_and_welchs_of_several() -> None:
    rng = np.random.default_rng(0)
    strata = [rng.normal(size=(4, items)) / items for items in (7, 30)]
    differences, p_values = uncertainty.paired_t(strata[:1])
    assert p_values[0, 1] == pytest.approx(ttest_rel(strata[0][0], strata[0][1]).pvalue)
    assert differences[0, 1] == pytest.approx((strata[0][0] - strata[0][1]).sum()) and p_values[2, 2] == 1
    apart = [stratum[0] - stratum[3] for stratum in strata]
    spread = [len(part) * part.var(ddof=1) for part in apart]
    freedom = sum(spread) ** 2 / sum(s**2 / (len(part) - 1) for s, part in zip(spread, apart, strict=True))
    statistic = abs(sum(part.sum() for part in apart)) / np.sqrt(sum(spread))
    assert uncertainty.paired_t(strata)[1][0, 3] == pytest.approx(2 * t.sf(statistic, freedom))
    strata[1][2] = np.nan
    assert np.isnan(uncertainty.paired_t(strata)[1][2]).all()


def test_paired_t_errs_as_rarely_as_it_says() -> None:
    rng = np.random.default_rng(1)
    p_values = [
        uncertainty.paired_t([rng.gamma(0.3, size=(2, 40)), rng.gamma(0.3, size=(2, 40))])[1][0, 1] for _ in range(400)
    ]
    assert np.mean(np.array(p_values) < 0.05) < 0.075
