from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import analysis
from analysis import names
from analysis.stats import ranks

PUBLISHED = Path(analysis.__file__).parent / "published"
COMPONENTS = ["Eval+", "livecodebench", "wildbench", "gsm8k", "math500", "MC Avg"]
PRINTED = {"livecodebench": "LiveCode", "wildbench": "WildBench", "gsm8k": "GSM8K", "math500": "MATH-500"}


def published(paper: str, table: int) -> pd.DataFrame:
    frame = pd.read_csv(PUBLISHED / f"{paper}.csv", dtype={"paper": str})
    return frame[frame["table"] == table]


def blocks(paper: str, table: int) -> list[tuple[tuple[str, float], pd.DataFrame, pd.DataFrame]]:
    """(model, ratio), the pruned rows and the unpruned row of each block of a published table, wide."""
    frame = published(paper, table)
    wide = frame.pivot_table(index=["model", "ratio", "criterion"], columns="benchmark", values="value")
    models = wide.reset_index().query("criterion != 'none'").groupby(["model", "ratio"])
    return [(key, rows.set_index("criterion"), wide.loc[[(key[0], 0.0, "none")]]) for key, rows in models]


def test_olmoe_table_1_has_its_printed_ranks() -> None:
    [olmoe] = [rows for (model, _), rows, _ in blocks("unified", 1) if model == "olmoe_1b_7b"]
    order = list(names.RANKED)
    found = ranks.average_rank(olmoe.loc[order, COMPONENTS])
    assert found.round(2).tolist() == [5.67, 5.42, 4.58, 2.83, 5.00, 2.00, 2.50]


def test_every_printed_average_and_rank_of_table_1() -> None:
    found = blocks("unified", 1)
    assert len(found) == 4
    for _, rows, full in found:
        assert np.abs(rows[COMPONENTS].mean(axis=1, skipna=False) - rows["Avg"]).max() < 0.005
        assert np.abs(full[COMPONENTS].mean(axis=1, skipna=False) - full["Avg"]).max() < 0.005
        assert np.abs(ranks.average_rank(rows[COMPONENTS]) - rows["Avg Rank"]).max() <= 0.005


def test_every_printed_rank_of_table_2_is_over_four_columns() -> None:
    found = blocks("unified", 2)
    assert len(found) == 6
    for _, rows, _ in found:
        assert len(rows) == 9
        columns = rows[["Eval+", "livecodebench", "gsm8k", "math500"]]
        assert np.abs(ranks.average_rank(columns) - rows["Avg Rank"]).max() <= 0.0051


def test_components_of_table_1_follow_from_the_benchmarks_of_table_5() -> None:
    """Within rounding of printed values; the benchmarks are printed with three decimals too."""
    wide = published("unified", 5).pivot_table(
        index=["model", "ratio", "criterion"], columns="benchmark", values="value"
    )
    columns = ranks.component_columns(wide)
    printed = published("unified", 1).pivot_table(
        index=["model", "ratio", "criterion"], columns="benchmark", values="value"
    )
    compared = columns.loc[printed.index]
    assert len(compared) == 32
    for column in COMPONENTS:
        assert np.abs(compared[PRINTED.get(column, column)] - printed[column]).max() < 0.00151


@pytest.mark.parametrize("table", [1, 2])
def test_code_and_math_averages_of_evoesap(table: int) -> None:
    frame = published("evoesap", table)
    wide = frame.pivot_table(index=["model", "ratio", "criterion", "allocation"], columns="benchmark", values="value")
    code = wide[["Eval+", "livecodebench"]].mean(axis=1) - wide["Code"]
    math = wide[["gsm8k", "math500"]].mean(axis=1) - wide["Math"]
    assert len(wide) > 15
    assert code.abs().max() < 0.005
    assert math.abs().max() < 0.005


def test_ties_share_the_mean_rank_on_printed_values() -> None:
    columns = pd.DataFrame({"a": [0.50004, 0.5, 0.1], "b": [0.3, 0.2, 0.1]})
    assert ranks.column_ranks(columns)["a"].tolist() == [1.5, 1.5, 3.0]
    assert ranks.average_rank(columns).tolist() == [1.25, 1.75, 3.0]


def test_lower_may_be_better() -> None:
    columns = pd.DataFrame({"perplexity": [9.0, 7.0, 8.0]})
    assert ranks.average_rank(columns, lower_is_better=["perplexity"]).tolist() == [3.0, 1.0, 2.0]


def test_a_gap_is_neither_averaged_nor_ranked() -> None:
    benchmarks = pd.DataFrame({"humaneval": [0.4, 0.5], "mbpp": [np.nan, 0.5], "gsm8k": [0.9, 0.1]})
    columns = ranks.component_columns(benchmarks)
    assert np.isnan(columns.loc[0, "Eval+"]) and columns.loc[1, "Eval+"] == 0.5
    assert columns.mean(axis=1, skipna=False).isna().tolist() == [True, False]
    assert ranks.average_rank(columns).isna().tolist() == [True, False]
    assert ranks.column_ranks(columns)["GSM8K"].tolist() == [1.0, 2.0]


def test_unknown_benchmarks_are_columns_of_their_own_and_partial_columns_are_told() -> None:
    columns = ranks.displayed(["arc_easy", "perplexity"])
    assert columns == {"MC Avg": ("arc_easy",), "perplexity": ("perplexity",)}
    assert ranks.partial(columns) == {"MC Avg": 7}


def test_ranks_of_replicates_equal_ranks_one_by_one() -> None:
    draws = np.random.default_rng(0).random((5, 4, 3))
    one_by_one = [ranks.average_rank(pd.DataFrame(draw)) for draw in draws]
    assert np.allclose(ranks.average_rank_draws(draws, np.array([-1.0, -1.0, -1.0])), np.array(one_by_one))
