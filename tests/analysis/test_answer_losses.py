"""The loss on right answers ranks plans with the sign it has, and decides pairs as independent tests say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from analysis import names
from analysis.load.study import load
from analysis.registry import Results, make
from analysis.render.table import Table
from analysis.stats import uncertainty, winners

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(small: Path) -> Results:
    return Results(load(small, "made_up"))


def table(results: Results, name: str) -> pd.DataFrame:
    (found,) = [output for output in make([name], results)[name] if isinstance(output, Table)]
    return found.frame


def losses(results: Results, cell: int, task: str) -> np.ndarray:
    """As the files have them."""
    folder = results.study.document["cells"][cell]["evaluate"][task]
    return pd.read_parquet(results.study.store / folder / "samples.parquet")["answer_loss"].to_numpy()


def test_a_column_is_the_mean_loss_of_its_benchmarks(results: Results) -> None:
    (comparison,) = results.by_answer_loss.comparisons
    cell = int(comparison.cells.index[5])
    tasks = names.COLUMNS["MC Avg"]
    expected = np.mean([losses(results, cell, task).mean() for task in tasks])
    assert comparison.columns["MC Avg"][cell] == pytest.approx(expected)
    assert comparison.columns["Eval+"][cell] == pytest.approx(
        np.mean([losses(results, cell, task).mean() for task in ("humaneval", "mbpp")])
    )


def test_the_lowest_loss_wins_and_ranks_first(results: Results) -> None:
    found = table(results, "ranks.loss")
    shown = [column for column in found if column not in ("Model", "Pruned", "Calibration", "Criterion", "Avg Rank")]
    for _, block in found[found["Criterion"] != "Unpruned"].groupby(["Pruned", "Calibration"]):
        numbers = block.set_index("Criterion")
        assert (numbers[shown].idxmin() == "MAN").all() and (numbers[shown].idxmax() == "Random").all()
        assert numbers["Avg Rank"].to_dict() == {"Frequency": 3.0, "REAP": 2.0, "MAN": 1.0, "Random": 4.0}
    won = table(results, "winners.loss")
    assert set(won["Winner"]) == {"MAN"} and (won["Lead"] < 0).all()


def test_scores_do_not_change_by_losses_beside_them(results: Results) -> None:
    assert not results.comparisons[0].lower_is_better
    assert set(table(results, "winners")["Winner"]) >= {"MAN"}
    assert "answer_loss" not in set(results.study.results["metric"])


def test_pairs_are_decided_as_independent_tests_say(results: Results) -> None:
    (comparison,) = results.comparisons
    panel = comparison.panels[0]
    cells = list(panel.cells.values())
    outcomes = comparison.outcomes["rte"][comparison.rows(cells)]
    p_values = [
        mcnemar([[0, (a > b).sum()], [(a < b).sum(), 0]], exact=True).pvalue for a, b in combinations(outcomes, 2)
    ]
    decided = multipletests(p_values, 0.05, method="holm")[0]
    assert (np.abs(winners._decided(comparison, ("rte",), cells)) == decided).all()
    found = table(results, "pairs")
    assert (found["By both"] <= found[["By score", "By answer loss"]].min(axis=1)).all()
    assert (found["By answer loss"] >= found["By score"]).all() and not found["Opposite"].any()


def test_paired_t_is_that_of_one_benchmark_and_welchs_of_several() -> None:
    rng = np.random.default_rng(0)
    strata = [rng.normal(size=(4, items)) / items for items in (7, 30)]
    differences, p_values = uncertainty.paired_t(strata[:1])
    assert p_values[0, 1] == pytest.approx(stats.ttest_rel(strata[0][0], strata[0][1]).pvalue)
    assert differences[0, 1] == pytest.approx((strata[0][0] - strata[0][1]).sum()) and p_values[2, 2] == 1
    apart = [stratum[0] - stratum[3] for stratum in strata]
    spread = [len(part) * part.var(ddof=1) for part in apart]
    freedom = sum(spread) ** 2 / sum(s**2 / (len(part) - 1) for s, part in zip(spread, apart, strict=True))
    statistic = abs(sum(part.sum() for part in apart)) / np.sqrt(sum(spread))
    assert uncertainty.paired_t(strata)[1][0, 3] == pytest.approx(2 * stats.t.sf(statistic, freedom))
    strata[1][2] = np.nan
    assert np.isnan(uncertainty.paired_t(strata)[1][2]).all()


def test_paired_t_errs_as_rarely_as_it_says() -> None:
    rng = np.random.default_rng(1)
    p_values = [
        uncertainty.paired_t([rng.gamma(0.3, size=(2, 40)), rng.gamma(0.3, size=(2, 40))])[1][0, 1] for _ in range(400)
    ]
    assert np.mean(np.array(p_values) < 0.05) < 0.075


def test_opposite_verdicts_are_counted_as_such(copied: Callable[[], Path]) -> None:
    store = copied()
    for path in (store / "evaluate").glob("*/samples.parquet"):
        frame = pd.read_parquet(path)
        frame.assign(answer_loss=-frame["answer_loss"]).to_parquet(path, index=False)
    found = table(Results(load(store, "made_up")), "pairs")
    means = found[found["Column"] == winners.MEAN]
    assert not found["By both"].any() and (means["Opposite"] == means["Pairs"]).all()


def test_a_store_without_losses_is_read_as_before(copied: Callable[[], Path]) -> None:
    store = copied()
    for path in (store / "evaluate").glob("*/samples.parquet"):
        pd.read_parquet(path).drop(columns="answer_loss").to_parquet(path, index=False)
    results = Results(load(store, "made_up"))
    made = make(["winners.loss", "ranks.loss", "pairs"], results)
    assert made["winners.loss"] == made["ranks.loss"] == []
    assert results.study.gaps == []
    assert table(results, "pairs")["By answer loss"].isna().all()
    assert table(results, "pairs")["By score"].sum() > 0
