from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of
from scipy.stats import friedmanchisquare, studentized_range

from analysis.load.study import load
from analysis.outputs.ranks import rank_figure, rank_test_table
from analysis.registry import Results
from analysis.render import style
from analysis.stats import rank_tests

DEMSAR = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
"""Demšar 2006, Table 5a: critical values of the Nemenyi test at 0.05."""
SIX = ("humaneval", "gsm8k", "math500", "livecodebench", "wildbench", "mmlu")


def ordered(criteria: tuple[str, ...], items: int = 40, benchmarks: tuple[str, ...] = SIX):
    """A comparison in which every criterion is worse than the one before it on every benchmark."""
    axes = [UNPRUNED, *(cell(name) for name in criteria)]
    right = [items, *(items - 5 * (place + 1) for place in range(len(criteria)))]
    rows = [[1.0] * count + [0.0] * (items - count) for count in right]
    return comparison_of(axes, dict.fromkeys(benchmarks, rows))


def test_critical_differences_are_the_published_ones() -> None:
    for methods, value in DEMSAR.items():
        spread = np.sqrt(methods * (methods + 1) / (6 * 14))
        assert rank_tests.critical_difference(methods, 14) == pytest.approx(value * spread, abs=1e-3)
    # Demšar's example: four classifiers, 14 data sets, average ranks 3.143, 2.000, 2.893, 1.964; CD = 1.25 at 0.05 ...
    assert rank_tests.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    # a difference of exactly CD has exactly that p
    assert rank_tests.nemenyi(np.array([1.25]), 4, 14)[0] == pytest.approx(0.05, abs=2e-3)


def test_ranks_are_those_of_the_table_and_friedman_is_scipys() -> None:
    comparison = ordered(("man", "reap", "ean", "random"))
    [panel] = comparison.panels
    found = rank_tests.rank_test(comparison, panel)
    assert list(found.ranks.index) == ["man", "reap", "ean", "random"] and list(found.ranks) == [1, 2, 3, 4]
    scores = comparison.columns.loc[list(panel.cells.values())].to_numpy()
    assert (found.statistic, found.p) == pytest.approx(tuple(friedmanchisquare(*scores)))
    assert (
        found.significant
        and found.blocks == 6
        and found.difference == pytest.approx(2.569 * np.sqrt(20 / 36), abs=1e-3)
    )
    # CD = 1.91: 1-2, 2-3 and 3-4 are not told apart, 1-3 are
    assert found.cliques() == [(0, 1), (1, 2), (2, 3)]
    assert list(found.p_to_best()[1:] < 0.05) == [False, True, True]


def test_nothing_is_told_where_friedman_finds_nothing() -> None:
    rows = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    tied = comparison_of([UNPRUNED, cell("man"), cell("reap"), cell("ean")], dict.fromkeys(SIX, rows))
    [found] = rank_tests.rank_tests(tied)
    assert np.isnan(found.p) and not found.significant and found.cliques() == [(0, 2)]
    assert rank_test_table(results_of(study_of(tied), [tied]), "t").frame["Told from the best"].tolist() == [
        "best", "no", "no",
    ] * 2  # fmt: skip


def test_gaps_leave_a_method_out_and_say_so() -> None:
    comparison = ordered(("man", "reap", "ean", "random"))
    comparison.benchmarks.loc[2, "gsm8k"] = np.nan
    [found] = rank_tests.rank_tests(comparison)
    assert found.incomplete == ("reap",) and list(found.ranks.index) == ["man", "ean", "random"]
    table = rank_test_table(results_of(study_of(comparison), [comparison]), "t")
    assert table.footnotes == ["Left out for a gap: REAP (Code, 50 %)."]
    few = ordered(("man", "reap"))
    assert rank_tests.rank_tests(few) == [] and rank_figure(few, rank_tests.COLUMNS, "f") is None
    assert rank_test_table(results_of(study_of(few), [few]), "t").frame.empty


def test_benchmarks_that_grade_the_same_answers_count_once(small: Path) -> None:
    results = Results(load(small, "made_up"))
    [comparison] = results.comparisons
    tests = rank_tests.rank_tests(comparison, rank_tests.BENCHMARKS)
    assert {test.blocks for test in tests} == {14} and len(tests) == 6
    with style.look():
        figure = rank_figure(comparison, rank_tests.BENCHMARKS, "f")
    titles = [axes.get_title(loc="left") for axes in figure.drawing.axes]
    assert titles[1] == "Code, 25 % pruned: Friedman p < 0.001"
    words = [text.get_text() for text in figure.drawing.axes[1].texts]
    assert any(text.startswith("MAN") for text in words) and any(text.startswith("CD = ") for text in words)
    frame = rank_test_table(results, "t").frame
    ranks = frame[frame["Over"] == "6 columns"].groupby(["Pruned", "Calibration"])["Avg Rank"].sum()
    assert np.allclose(ranks, 1 + 2 + 3 + 4)


def test_every_caption_of_scores_says_what_it_rests_on(small: Path) -> None:
    from analysis.registry import make, outputs
    from analysis.render.table import Table

    made = make(outputs(), Results(load(small, "made_up")))
    measured = [output for outputs in made.values() for output in outputs if isinstance(output, Table)]
    scored = [table for table in measured if table.low is not None]
    assert {"ranks", "winners", "unified.table5", "pareto"} <= {table.name for table in scored}
    for table in (*scored, *(table for table in measured if table.name == "ranks.cd")):
        metric = "metric answer_loss" if table.name.endswith(".loss") else "metric acc and pass@1"
        for words in ("n = 30 items", metric, "seed 42", "gate model", "65,000 calibration tokens"):
            assert words in table.caption, table.name
        assert "lm_eval 0.0-synthetic" in table.caption and "torch 0.0-synthetic" in table.caption
    for table in measured:
        if table.name in ("unified.fig4", "unified.fig3", "coverage"):
            assert "seed 42; gate model; 65,000 calibration tokens" in table.caption, table.name


def test_tests_of_ranks_are_scipys() -> None:
    scores = np.random.default_rng(0).integers(0, 6, (5, 9))  # with ties
    assert rank_tests.friedman(scores) == pytest.approx(tuple(friedmanchisquare(*scores)))
    ranges = np.array([0.0, 0.3, 1.0, 2.5, 4.0, 7.0])
    for methods in (2, 3, 8, 40):
        expected = studentized_range.sf(ranges, methods, np.inf)
        assert rank_tests.studentized_range(ranges, methods) == pytest.approx(expected, abs=1e-12)
    quantile = studentized_range.ppf(1 - rank_tests.LEVEL, 6, np.inf) / np.sqrt(2)
    assert rank_tests.critical_difference(6, 7) == pytest.approx(quantile)
