"""Ranks, tests of them, and uncertainty, against worked examples, Demšar's tables, scipy and statsmodels."""

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, friedmanchisquare, studentized_range
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from statsmodels.stats.multitest import multipletests

from analysis import names
from analysis.outputs.ranks import rank_figure, rank_test_table
from analysis.registry import Results
from analysis.stats import rank_tests, ranks, uncertainty

DEMSAR = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
"""Demšar 2006, Table 5a: critical values of the Nemenyi test at 0.05."""
SIX = ("humaneval", "gsm8k", "math500", "livecodebench", "wildbench", "mmlu")


def test_ties_share_the_mean_rank_on_printed_values_and_gaps_have_neither_mean_nor_rank() -> None:
    columns = pd.DataFrame({"a": [0.50004, 0.5, 0.1], "b": [0.3, 0.2, 0.1]})
    assert ranks.column_ranks(columns)["a"].tolist() == [1.5, 1.5, 3.0]
    assert ranks.average_rank(columns).tolist() == [1.25, 1.75, 3.0]
    benchmarks = pd.DataFrame({"humaneval": [0.4, 0.5], "mbpp": [np.nan, 0.5], "gsm8k": [0.9, 0.1]})
    columns = ranks.component_columns(benchmarks)
    assert np.isnan(columns.loc[0, "Eval+"]) and columns.loc[1, "Eval+"] == 0.5
    assert ranks.average_rank(columns).isna().tolist() == [True, False]
    assert ranks.column_ranks(columns)["GSM8K"].tolist() == [1.0, 2.0]


def test_unknown_benchmarks_are_columns_of_their_own_and_partial_columns_are_told() -> None:
    columns = ranks.displayed(["arc_easy", "perplexity"])
    assert columns == {"MC Avg": ("arc_easy",), "perplexity": ("perplexity",)}
    assert ranks.partial(columns) == {"MC Avg": 7}


def test_methods_stand_in_their_usual_order() -> None:
    keys = [("mine",), ("heapr", "global"), ("reap", "evolutionary"), ("reap", "", "nf4"), ("reap",), ("heapr",)]
    ordered = names.methods_in_order(names.key(*parts) for parts in keys)
    assert [names.parts(key)[0] for key in ordered] == ["reap", "reap", "reap", "heapr", "heapr", "mine"]
    assert ordered[:3] == [names.key("reap"), names.key("reap", "", "nf4"), names.key("reap", "evolutionary")]
    allocations = ["evolutionary", "global, replacement=ream", "uniform, replacement=m_smoe", "uniform", "mine"]
    ordered = names.methods_in_order(names.key("reap", allocation) for allocation in allocations)
    assert [names.parts(key)[1] for key in ordered] == ["uniform", "evolutionary", "mine", *allocations[2:0:-1]]


def ordered(criteria: tuple[str, ...], items: int = 40, benchmarks: tuple[str, ...] = SIX):
    """A comparison in which every criterion is worse than the one before it on every benchmark."""
    axes = [UNPRUNED, *(cell(name) for name in criteria)]
    right = [items, *(items - 5 * (place + 1) for place in range(len(criteria)))]
    rows = [[1.0] * count + [0.0] * (items - count) for count in right]
    return comparison_of(axes, dict.fromkeys(benchmarks, rows))


def test_critical_differences_are_the_published_ones_and_tests_of_ranks_are_scipys() -> None:
    for methods, value in DEMSAR.items():
        spread = np.sqrt(methods * (methods + 1) / (6 * 14))
        assert rank_tests.critical_difference(methods, 14) == pytest.approx(value * spread, abs=1e-3)
    # Demšar's example: four classifiers, 14 data sets, CD = 1.25 at 0.05: a difference of exactly CD has that p
    assert rank_tests.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert rank_tests.nemenyi(np.array([1.25]), 4, 14)[0] == pytest.approx(0.05, abs=2e-3)
    scores = np.random.default_rng(0).integers(0, 6, (5, 9))  # with ties
    assert rank_tests.friedman(scores) == pytest.approx(tuple(friedmanchisquare(*scores)))
    ranges = np.array([0.0, 0.3, 1.0, 2.5, 4.0, 7.0])
    for methods in (2, 3, 8, 40):
        expected = studentized_range.sf(ranges, methods, np.inf)
        assert rank_tests.studentized_range(ranges, methods) == pytest.approx(expected, abs=1e-12)


def test_ranks_are_those_of_the_table_and_friedman_is_scipys() -> None:
    comparison = ordered(("man", "reap", "ean", "random"))
    [panel] = comparison.panels
    found = rank_tests.rank_test(comparison, panel)
    assert list(found.ranks.index) == ["man", "reap", "ean", "random"] and list(found.ranks) == [1, 2, 3, 4]
    scores = comparison.columns.loc[list(panel.cells.values())].to_numpy()
    assert (found.statistic, found.p) == pytest.approx(tuple(friedmanchisquare(*scores)))
    assert found.significant and found.blocks == 6
    assert found.difference == pytest.approx(2.569 * np.sqrt(20 / 36), abs=1e-3)
    # CD = 1.91: 1-2, 2-3 and 3-4 are not told apart, 1-3 are
    assert found.cliques() == [(0, 1), (1, 2), (2, 3)]
    assert list(found.p_to_best()[1:] < 0.05) == [False, True, True]


def test_nothing_is_told_where_friedman_finds_nothing() -> None:
    rows = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    tied = comparison_of([UNPRUNED, cell("man"), cell("reap"), cell("ean")], dict.fromkeys(SIX, rows))
    [found] = rank_tests.rank_tests(tied)
    assert np.isnan(found.p) and not found.significant and found.cliques() == [(0, 2)]
    told = rank_test_table(results_of(study_of(tied), [tied]), "t").frame["Told from the best"]
    assert told.tolist() == ["best", "no", "no"] * 2


def test_gaps_leave_a_method_out_and_say_so() -> None:
    comparison = ordered(("man", "reap", "ean", "random"))
    comparison.results.loc[2, "gsm8k"] = np.nan
    [found] = rank_tests.rank_tests(comparison)
    assert found.incomplete == ("reap",) and list(found.ranks.index) == ["man", "ean", "random"]
    table = rank_test_table(results_of(study_of(comparison), [comparison]), "t")
    assert table.footnotes == ["Left out for a gap: REAP (Code, 50 %)."]
    few = ordered(("man", "reap"))
    assert rank_tests.rank_tests(few) == [] and rank_figure(few, rank_tests.COLUMNS, "f") is None
    assert rank_test_table(results_of(study_of(few), [few]), "t").frame.empty


def test_benchmarks_that_grade_the_same_answers_count_once(results: Results) -> None:
    [comparison] = results.comparisons
    tests = rank_tests.rank_tests(comparison, rank_tests.BENCHMARKS)
    assert {test.blocks for test in tests} == {14} and len(tests) == 6


# ---- uncertainty


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


def test_holm_on_a_worked_example() -> None:
    """Holm (1979): sorted p-values times 4, 3, 2, 1, made monotone; missing ones do not count."""
    found = uncertainty.holm(np.array([0.01, 0.04, np.nan, 0.03, 0.005]))
    assert found[[0, 1, 3, 4]] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert np.isnan(found[2])
    assert np.isnan(uncertainty.holm(np.array([np.nan]))).all()
    drawn = np.random.default_rng(0).uniform(0, 0.3, (2, 40)).round(2)  # with ties
    for row in drawn:
        assert uncertainty.holm(row) == pytest.approx(multipletests(row, method="holm")[1])
