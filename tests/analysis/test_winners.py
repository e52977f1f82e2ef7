"""The winner map and the pairs of criteria that are told apart, by scores and by losses on right answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from handmade import cell, comparison_of
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from synthetic import write_store

from analysis import names
from analysis.load.study import load
from analysis.registry import Results, find
from analysis.stats import winners
from analysis.stats.comparison import Comparison
from analysis.stats.winners import label, winner_map

ITEMS = 200


def comparison(outcomes: dict[str, dict[str, np.ndarray]]) -> Comparison:
    """Cells of one panel from criterion -> benchmark -> outcomes; a benchmark that a criterion lacks is a gap."""
    benchmarks = dict.fromkeys(name for by_name in outcomes.values() for name in by_name)
    rows = {name: [by_name.get(name) for by_name in outcomes.values()] for name in benchmarks}
    return comparison_of([cell(criterion) for criterion in outcomes], rows)


def right(count: int) -> np.ndarray:
    return (np.arange(ITEMS) < count).astype(float)


def test_a_clear_win_is_beyond_noise_and_a_narrow_one_is_not() -> None:
    made = comparison(
        {
            "reap": {"gsm8k": right(180), "math500": right(100)},
            "ean": {"gsm8k": right(90), "math500": right(98)},
            "seer": {"gsm8k": right(60), "math500": right(40)},
        }
    )
    found = winner_map([made]).set_index("column")
    assert found["winners"].to_dict() == {"GSM8K": ("reap",), "MATH-500": ("reap",)}
    assert found["runner_up"].to_dict() == {"GSM8K": "ean", "MATH-500": "ean"}
    assert found["beyond_noise"].to_dict() == {"GSM8K": True, "MATH-500": False}
    assert found.loc["MATH-500", "p"] == pytest.approx(0.5)  # two discordant items, both for the winner
    assert found.loc["MATH-500", "lead"] == pytest.approx(0.01)
    assert found.loc["GSM8K", "lead_low"] > 0.3


def test_a_win_must_hold_against_every_other_criterion() -> None:
    """Far ahead of the runner-up on the same items, yet not surely ahead of a third that errs elsewhere."""
    rng = np.random.default_rng(0)
    first, third = rng.permutation(right(100)), rng.permutation(right(90))
    second = first.copy()
    second[np.flatnonzero(first)[:8]] = 0
    made = comparison({"man": {"gsm8k": first}, "ean": {"gsm8k": second}, "seer": {"gsm8k": third}})
    found = winner_map([made]).iloc[0]
    alone = made.p_values(("GSM8K",), 0, [1, 2])
    assert alone[0] < 0.05 < alone[1], "ahead of the runner-up beyond noise, but not of the third"
    assert found["runner_up"] == "ean" and found["p"] == alone[1]


def test_holm_covers_the_whole_map() -> None:
    columns = {name: right(100) for name in ("gsm8k", "math500", "livecodebench", "wildbench")}
    behind = {name: right(93) for name in columns}
    found = winner_map([comparison({"man": columns, "ean": behind})])
    assert found["p"].tolist() == pytest.approx([2 * 0.5**7] * 4)
    assert found["p_holm"].tolist() == pytest.approx([8 * 0.5**7] * 4)
    assert not found["beyond_noise"].any()


def test_ties_zeros_and_gaps_are_nobodys_win() -> None:
    zero, some = right(0), right(50)
    made = comparison({"reap": {"gsm8k": some, "math500": zero}, "man": {"gsm8k": some[::-1], "math500": zero}})
    found = winner_map([made]).set_index("column")
    assert found["winners"].to_dict() == {"GSM8K": ("reap", "man"), "MATH-500": ("reap", "man")}
    assert label(("reap", "man"), 0.25) == "REAP = MAN" and label(("reap", "man"), 0.0) == "all 0"
    made = comparison({"reap": {"gsm8k": right(50)}, "man": {"math500": right(50)}, "ean": {"gsm8k": right(20)}})
    found = winner_map([made]).set_index("column")
    assert found.loc["MATH-500", "winners"] == ("man",) and found.loc["MATH-500", "runner_up"] == ""
    assert np.isnan(found.loc["MATH-500", "p"]) and not found.loc["MATH-500", "beyond_noise"]
    assert found.loc["GSM8K", "winners"] == ("reap",) and found.loc["GSM8K", "runner_up"] == "ean"


def test_the_published_map_has_the_five_baselines_only() -> None:
    scores = {name: {"gsm8k": right(100 + at)} for at, name in enumerate((*names.BASELINES, "man"))}
    made = comparison(scores)
    assert winner_map([made]).iloc[0]["winners"] == ("man",)
    assert winner_map([made], names.BASELINES).iloc[0]["winners"] == ("mone",)


def test_averaged_columns_resample_shared_answers_together() -> None:
    """HumanEval+ grades HumanEval's answers again: the interval is that of 200 items, not of 400."""
    same = right(100)
    made = comparison({"reap": {"humaneval": same, "humaneval_plus": same}, "man": {"mbpp": same}})
    twice = made.interval(("humaneval", "humaneval_plus"))
    once = made.interval(("humaneval",))
    assert twice[1][0] - twice[0][0] == pytest.approx(once[1][0] - once[0][0], abs=0.01)


def table(results: Results, name: str) -> pd.DataFrame:
    return find(name).items(results)[-1].frame


def test_a_column_is_the_mean_loss_of_its_benchmarks_and_the_lowest_ranks_first(results: Results) -> None:
    (comparison,) = results.by_answer_loss.comparisons
    number = int(comparison.cells.index[5])
    folders = results.study.document["cells"][number]["evaluate"]
    for column, tasks in (("MC Avg", names.COLUMNS["MC Avg"]), ("Eval+", ("humaneval", "mbpp"))):
        files = [results.study.store / folders[task] / "samples.parquet" for task in tasks]
        expected = np.mean([pd.read_parquet(file)["answer_loss"].mean() for file in files])
        assert comparison.columns[column][number] == pytest.approx(expected)
    found = table(results, "ranks.loss").query("Criterion != 'Unpruned'")
    for _, block in found.groupby(["Pruned", "Calibration"]):
        ranked = block.set_index("Criterion")["Avg Rank"].to_dict()
        assert ranked == {"Frequency": 3.0, "REAP": 2.0, "MAN": 1.0, "Random": 4.0}
    won = table(results, "winners.loss")
    assert set(won["Winner"]) == {"MAN"} and (won["Lead"] < 0).all()
    assert not results.comparisons[0].lower_is_better, "scores beside losses are still scores"


def test_pairs_are_decided_as_independent_tests_say(results: Results) -> None:
    (comparison,) = results.comparisons
    cells = list(comparison.panels[0].cells.values())
    outcomes = comparison.outcomes["rte"][comparison.rows(cells)]
    p_values = [
        mcnemar([[0, (a > b).sum()], [(a < b).sum(), 0]], exact=True).pvalue for a, b in combinations(outcomes, 2)
    ]
    decided = multipletests(p_values, 0.05, method="holm")[0]
    assert (np.abs(winners._decided(comparison, ("rte",), cells)) == decided).all()
    found = table(results, "pairs")
    assert (found["By both"] <= found[["By score", "By answer loss"]].min(axis=1)).all()
    assert (found["By answer loss"] >= found["By score"]).all() and not found["Opposite"].any()


def test_opposite_verdicts_are_counted(results: Results) -> None:
    samples = results.study.samples
    opposite = Results(replace(results.study, samples=samples.assign(answer_loss=-samples["answer_loss"])))
    found = table(opposite, "pairs")
    means = found[found["Column"] == winners.MEAN]
    assert not found["By both"].any() and (means["Opposite"] == means["Pairs"]).all()


def test_a_store_without_losses_has_scores_alone(tmp_path: Path) -> None:
    one = {"calibrations": ("pocket_code",), "ratios": (0.5,), "tasks": ("rte",), "overlap": False}
    store = write_store(tmp_path, criteria=("random", "man"), **one)
    for path in (store / "evaluate").glob("*/samples.parquet"):
        pd.read_parquet(path).drop(columns="answer_loss").to_parquet(path, index=False)
    results = Results(load(store, "made_up"))
    assert [find(name).items(results) for name in ("winners.loss", "ranks.loss")] == [[], []]
    found = table(results, "pairs")
    assert found["By answer loss"].isna().all() and found["By score"].sum() > 0 and results.study.gaps == []
