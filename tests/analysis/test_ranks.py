"""Ranks and uncertainty, against worked examples, scipy and statsmodels."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, studentized_range
from statsmodels.stats.multitest import multipletests

from moe_lab.analysis import names
from moe_lab.analysis.stats import cell_scores, comparison, uncertainty

SIX = ("humaneval", "gsm8k", "math500", "livecodebench", "wildbench", "mmlu")


def test_ties_share_ranks_and_gaps_have_none() -> None:
    columns = pd.DataFrame({"a": [0.50004, 0.5, 0.1], "b": [0.3, 0.2, 0.1]})
    assert cell_scores.column_ranks(columns)["a"].tolist() == [1.5, 1.5, 3.0]
    assert cell_scores.average_rank(columns).tolist() == [1.25, 1.75, 3.0]
    columns = pd.DataFrame({"Eval+": [np.nan, 0.5], "GSM8K": [0.9, 0.1]})
    assert cell_scores.average_rank(columns).isna().tolist() == [True, False]
    assert cell_scores.column_ranks(columns)["GSM8K"].tolist() == [1.0, 2.0]


def test_unknown_benchmarks_are_columns() -> None:
    columns = comparison.displayed_columns(["arc_easy", "perplexity"])
    assert columns == {"MC Avg": ("arc_easy",), "perplexity": ("perplexity",)}


def test_methods_are_ordered_by_criterion_then_variant() -> None:
    methods = [
        ("mine",),
        ("heapr", "global"),
        ("reap", "evolutionary"),
        ("reap", "", "nf4"),
        ("reap",),
        ("heapr",),
    ]
    ordered = names.methods_in_order(names.method_key(*parts) for parts in methods)
    criteria = [names.method_parts(key)[0] for key in ordered]
    assert criteria == ["reap", "reap", "reap", "heapr", "heapr", "mine"]
    reap = [("reap",), ("reap", "", "nf4"), ("reap", "evolutionary")]
    assert ordered[:3] == [names.method_key(*parts) for parts in reap]


UNORDERED_ALLOCATIONS = (
    "evolutionary",
    "global, replacement=ream",
    "uniform, replacement=m_smoe",
    "uniform",
    "mine",
)


def test_methods_of_a_criterion_are_ordered_by_allocation() -> None:
    keys = [names.method_key("reap", allocation) for allocation in UNORDERED_ALLOCATIONS]
    ordered = [names.method_parts(key)[1] for key in names.methods_in_order(keys)]
    assert ordered == [
        "uniform",
        "evolutionary",
        "mine",
        "uniform, replacement=m_smoe",
        "global, replacement=ream",
    ]


@pytest.mark.parametrize("methods", [3, 8, 40])
def test_the_studentised_range_is_scipys(methods: int) -> None:
    ranges = np.array([0.0, 0.3, 1.0, 2.5, 4.0, 7.0])
    for freedom, precision in ((np.inf, 1e-12), (3.5, 1e-6), (20, 1e-6)):
        expected = studentized_range.sf(ranges, methods, freedom)
        p_values = uncertainty.studentized_range(ranges, methods, freedom)
        assert p_values == pytest.approx(expected, abs=precision)
        quantile = studentized_range.ppf(0.95, methods, freedom)
        assert uncertainty.range_quantile(methods, freedom) == pytest.approx(quantile, rel=1e-5)


# ---- uncertainty


@pytest.mark.parametrize(("successes", "items"), [(0, 20), (7, 20), (20, 20), (63, 80)])
def test_wilson_equals_scipy(successes: int, items: int) -> None:
    low, high = uncertainty.wilson(successes, items)
    expected = binomtest(successes, items).proportion_ci(0.95, method="wilson")
    assert low == pytest.approx(expected.low, abs=1e-12)
    assert high == pytest.approx(expected.high, abs=1e-12)


def test_holm_on_a_worked_example() -> None:
    """Holm (1979): sorted p-values times 4, 3, 2, 1, made monotone; missing ones do not count."""
    p_values = uncertainty.holm(np.array([0.01, 0.04, np.nan, 0.03, 0.005]))
    assert p_values[[0, 1, 3, 4]] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert np.isnan(p_values[2])
    assert np.isnan(uncertainty.holm(np.array([np.nan]))).all()
    drawn = np.random.default_rng(0).uniform(0, 0.3, (2, 40)).round(2)  # with ties
    for row in drawn:
        _, corrected, *_ = multipletests(row, method="holm")
        assert uncertainty.holm(row) == pytest.approx(corrected)
