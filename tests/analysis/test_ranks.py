from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.stats import ranks


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
