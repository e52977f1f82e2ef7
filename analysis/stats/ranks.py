"""The papers' averages: displayed columns from benchmarks, the average rank, and correlations.

Table 1 of Unified Expert Pruning prints averages and ranks that follow from its printed benchmarks
by these rules, up to rounding:

- Avg: mean of the six displayed columns.
- Avg Rank: mean over columns of a criterion's rank among the pruned criteria (1 = best). Scores are
  ranked after rounding to three decimals, and equal scores get the mean of their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moe_lab.analysis.names import COLUMNS


def correlations(experts: pd.DataFrame, measure: str, truth: str) -> dict[str, float]:
    """Pearson's correlation (`linear`) and Spearman's correlation (`rank`) of the columns `measure`
    and `truth` over the rows of `experts`.

    NaN when fewer than three experts have both values, or when one of the columns is constant.
    """
    pairs = experts[[measure, truth]].dropna().astype(float)
    return {"linear": _correlation(pairs), "rank": _correlation(pairs.rank())}


def _correlation(pairs: pd.DataFrame) -> float:
    """Pearson's correlation of two columns."""
    if len(pairs) < 3 or (pairs.nunique() < 2).any():
        return np.nan
    return float(pairs.corr().to_numpy(float)[0, 1])


def rank_correlation_by_layer(experts: pd.DataFrame, measure: str, truth: str) -> float:
    """Mean over layers of Spearman's correlation of the columns `measure` and `truth` within a
    layer.

    Layers with a correlation of NaN are left out.
    """
    pairs = experts[["layer", measure, truth]].dropna().astype(float)
    ranks = pairs.groupby("layer").rank()
    layer_correlations = [
        _correlation(layer_ranks) for _, layer_ranks in ranks.groupby(pairs["layer"], sort=False)
    ]
    numbers = [value for value in layer_correlations if not np.isnan(value)]
    return float(np.mean(numbers)) if numbers else np.nan


PRINTED_DECIMALS = 3
"""Number of decimals of published scores, to which scores are rounded before they are ranked."""


def displayed_columns(evaluated_benchmarks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Displayed column -> the column's benchmarks that were run. Each benchmark that is in no
    column of `names.COLUMNS` is a column of its own."""
    columns = {}
    remaining_benchmarks = dict.fromkeys(evaluated_benchmarks)
    for column, benchmarks in COLUMNS.items():
        column_benchmarks = tuple(name for name in benchmarks if name in remaining_benchmarks)
        if column_benchmarks:
            columns[column] = column_benchmarks
        for name in column_benchmarks:
            del remaining_benchmarks[name]
    return columns | {name: (name,) for name in remaining_benchmarks}


def column_ranks(columns: pd.DataFrame, *, lower_is_better: Sequence[str] = ()) -> pd.DataFrame:
    """Rank of each row in each column, by numbers rounded to PRINTED_DECIMALS: rank 1 has the
    highest number, or the lowest in the columns `lower_is_better`. Equal numbers get the mean of
    their ranks."""
    signs = np.array([1.0 if name in lower_is_better else -1.0 for name in columns.columns])
    return (columns.astype(float).round(PRINTED_DECIMALS) * signs).rank()


def average_rank(columns: pd.DataFrame, *, lower_is_better: Sequence[str] = ()) -> pd.Series:
    """Avg Rank of each row by the papers' rule: the mean of `column_ranks` over the columns. The
    caller must leave out the unpruned model."""
    ranks = column_ranks(columns, lower_is_better=lower_is_better)
    return ranks.mean(axis=1, skipna=False).rename("Avg Rank")
