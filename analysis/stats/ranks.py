"""The papers' averages: displayed columns from benchmarks, and the average rank.

Table 1 of Unified Expert Pruning prints averages and ranks that follow from its printed benchmarks
by these rules, up to rounding:

- Avg: mean of the six displayed columns.
- Avg Rank: mean over columns of a criterion's rank among the pruned criteria (1 = best). Scores are
  ranked after rounding to three decimals, and equal scores get the mean of their ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from moe_lab.analysis.names import COLUMNS

PRINTED_DECIMALS = 3
"""Number of decimals of published scores, to which scores are rounded before they are ranked."""


def displayed_columns(evaluated_benchmarks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Displayed column -> the column's benchmarks that were run. Each benchmark that is in no
    column of `names.COLUMNS` is a column of its own."""
    columns = {
        column: tuple(name for name in benchmarks if name in evaluated_benchmarks)
        for column, benchmarks in COLUMNS.items()
    }
    other_benchmarks = set(evaluated_benchmarks).difference(*columns.values())
    return {
        **{column: benchmarks for column, benchmarks in columns.items() if benchmarks},
        **{name: (name,) for name in evaluated_benchmarks if name in other_benchmarks},
    }


def column_ranks(columns: pd.DataFrame, *, lower_is_better: Collection[str] = ()) -> pd.DataFrame:
    """Rank of each row in each column, by numbers rounded to PRINTED_DECIMALS: rank 1 has the
    highest number, or the lowest in the columns `lower_is_better`. Equal numbers get the mean of
    their ranks."""
    signs = np.array([1.0 if name in lower_is_better else -1.0 for name in columns.columns])
    return (columns.astype(float).round(PRINTED_DECIMALS) * signs).rank()


def average_rank(columns: pd.DataFrame, *, lower_is_better: Collection[str] = ()) -> pd.Series:
    """Avg Rank of each row by the papers' rule: the mean of `column_ranks` over the columns. The
    caller must leave out the unpruned model."""
    ranks = column_ranks(columns, lower_is_better=lower_is_better)
    return ranks.mean(axis=1, skipna=False).rename("Avg Rank")
