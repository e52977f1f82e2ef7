"""Ranks, tests of them, and uncertainty, against worked examples, Demšar's tables, scipy and
statsmodels."""

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, first_solved, results_of, study_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, studentized_range
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from statsmodels.stats.multitest import multipletests

from analysis import names
from analysis.outputs.ranks import rank_test_table
from analysis.registry import find
from analysis.stats import rank_tests, ranks, uncertainty
from analysis.stats.comparison import Comparison
from benchmarks import best_of_many

SIX = ("humaneval", "gsm8k", "math500", "livecodebench", "wildbench", "mmlu")


def test_ties_share_ranks_and_gaps_have_none() -> None:
    columns = pd.DataFrame({"a": [0.50004, 0.5, 0.1], "b": [0.3, 0.2, 0.1]})
    assert ranks.column_ranks(columns)["a"].tolist() == [1.5, 1.5, 3.0]
    assert ranks.average_rank(columns).tolist() == [1.25, 1.75, 3.0]
    columns = pd.DataFrame({"Eval+": [np.nan, 0.5], "GSM8K": [0.9, 0.1]})
    assert ranks.average_rank(columns).isna().tolist() == [True, False]
    assert ranks.column_ranks(columns)["GSM8K"].tolist() == [1.0, 2.0]


def test_unknown_benchmarks_are_columns() -> None:
    columns = ranks.displayed_columns(["arc_easy", "perplexity"])
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


def ordered(criteria: tuple[str, ...], items: int = 40, benchmarks: tuple[str, ...] = SIX):
    """A comparison in which every criterion, with two seeds, is worse than the one before it on
    every benchmark."""
    axes = [UNPRUNED]
    counts = [items]
    for position, name in enumerate(criteria, 1):
        axes += [cell(name, seed=1), cell(name, seed=2)]
        counts += [items - 5 * position] * 2
    rows = [first_solved(count, items) for count in counts]
    return comparison_of(axes, dict.fromkeys(benchmarks, rows))


@pytest.mark.parametrize("methods", [3, 8, 40])
def test_the_studentised_range_is_scipys(methods: int) -> None:
    ranges = np.array([0.0, 0.3, 1.0, 2.5, 4.0, 7.0])
    for freedom, precision in ((np.inf, 1e-12), (3.5, 1e-6), (20, 1e-6)):
        expected = studentized_range.sf(ranges, methods, freedom)
        p_values = uncertainty.studentized_range(ranges, methods, freedom)
        assert p_values == pytest.approx(expected, abs=precision)
        quantile = studentized_range.ppf(0.95, methods, freedom)
        assert uncertainty.range_quantile(methods, freedom) == pytest.approx(quantile, rel=1e-5)


def seeded(rng: np.random.Generator, methods: tuple[str, ...], of_seed: float) -> Comparison:
    """Methods with three seeds, of which each is better than the one before it, on six
    benchmarks."""
    axes = [UNPRUNED]
    scores = [10.0]
    for position, name in enumerate(methods):
        for seed in range(3):
            axes.append(cell(name, seed=seed))
            scores.append(position + rng.normal(0, of_seed))
    rows = {name: [[score + rng.normal(0, 0.3)] for score in scores] for name in SIX}
    return comparison_of(axes, rows)


@pytest.fixture
def seeded_methods() -> Comparison:
    return seeded(np.random.default_rng(1), ("ean", "man", "reap", "seer"), 0.1)


def test_ranks_are_means_over_seeds_and_blocks(seeded_methods: Comparison) -> None:
    cells = seeded_methods.all_cells
    scores = seeded_methods.results.assign(method=cells["criterion"], seed=cells["seed"])
    pruned = scores.query("method != 'none'").set_index("method")
    of_seeds = [plans[list(SIX)].rank(ascending=False) for _, plans in pruned.groupby("seed")]
    mean = pd.concat(of_seeds).groupby(level=0).mean().mean(axis=1)
    [test] = rank_tests.rank_tests(seeded_methods)
    assert test.ranks.to_dict() == pytest.approx(mean.to_dict())
    assert list(test.ranks.index) == ["seer", "reap", "man", "ean"]


def test_ranks_differ_where_seeds_and_blocks_agree(seeded_methods: Comparison) -> None:
    [test] = rank_tests.rank_tests(seeded_methods)
    assert (test.p_to_best < uncertainty.LEVEL).any()
    assert test.blocks == 6
    assert test.seeds == 3
    for key, p in test.p_to_best.iloc[1:].items():
        behind = test.ranks[key] - test.ranks.iloc[0]
        assert (p < 0.05) == (behind > test.critical_difference), key


def test_table_of_rank_tests_names_blocks_and_seeds(seeded_methods: Comparison) -> None:
    results = results_of(study_of(seeded_methods), [seeded_methods])
    [table] = find("ranks.cd").items(results)
    over = ["6 columns, 3 seeds", "6 benchmarks, 3 seeds"]
    assert table.frame["Over"].unique().tolist() == over


def test_equal_methods_with_common_seed_effects_are_not_separated() -> None:
    """Ranks of one plan each would be far apart on every block."""
    significant = 0
    for study in best_of_many.simulated(best_of_many.Setting(14, "3", 0.4), 20):
        significant += sum(
            (test.p_to_best < uncertainty.LEVEL).any() for test in rank_tests.rank_tests(study)
        )
    assert significant <= 2


def test_no_method_differs_where_all_tie() -> None:
    outcomes = {"man": [1.0, 0.0], "reap": [0.0, 1.0], "ean": [1.0, 0.0]}
    plans = [cell(name, seed=seed) for seed in (1, 2) for name in outcomes]
    rows = [[1.0, 0.0], *outcomes.values(), *outcomes.values()]
    tied = comparison_of([UNPRUNED, *plans], dict.fromkeys(SIX, rows))
    [test] = rank_tests.rank_tests(tied)
    assert (test.p_to_best.iloc[1:] > 0.05).all()
    table = rank_test_table(results_of(study_of(tied), [tied]), "t")
    assert table.frame["Differs from the best"].tolist() == ["best", "no", "no"] * 2


def test_gaps_leave_a_method_out_and_say_so() -> None:
    comparison = ordered(("man", "reap", "ean", "seer"))
    comparison.results.loc[[3, 4], "gsm8k"] = np.nan
    [test] = rank_tests.rank_tests(comparison)
    assert test.incomplete_methods == ("reap",)
    assert list(test.ranks.index) == ["man", "ean", "seer"]
    table = rank_test_table(results_of(study_of(comparison), [comparison]), "t")
    assert table.footnotes == ["Left out for a gap: REAP (Code, 50 %)."]


def test_two_methods_have_no_rank_test() -> None:
    few = ordered(("man", "reap"))
    assert rank_tests.rank_tests(few) == []
    assert rank_test_table(results_of(study_of(few), [few]), "t").frame.empty


def test_benchmarks_that_grade_the_same_answers_count_once() -> None:
    benchmarks = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "gsm8k")
    study_comparison = ordered(("man", "reap", "ean"), benchmarks=benchmarks)
    [test] = rank_tests.rank_tests(study_comparison, rank_tests.BENCHMARKS)
    assert test.blocks == 3


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
    p_values = uncertainty.mcnemar(first, second)
    for a, b, p_value in zip(first, second, p_values, strict=True):
        table = [[np.sum((a == i) & (b == j)) for j in (0, 1)] for i in (0, 1)]
        expected = min(1.0, reference_mcnemar(table, exact=True).pvalue)
        assert p_value == pytest.approx(expected, abs=1e-12)


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
