"""The papers' averages: displayed columns from benchmarks, their mean, and the average rank.

The averages and ranks printed in Table 1 of Unified Expert Pruning follow from its printed
benchmarks by these rules, up to their rounding:

- Avg: mean of the six displayed columns;
- Avg Rank: the pruned criteria are ranked in each column (1 = best) on values rounded to three
  decimals, ties share their mean rank, and the mean of these ranks is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.names import COLUMNS


def correlations(experts: pd.DataFrame, measure: str, truth: str) -> dict[str, float]:
    """Pearson's correlation (`linear`) and Spearman's (`rank`) of two measures over `experts`.

    NaN when fewer than three experts have both, or when a measure is the same for all."""
    pairs = experts[[measure, truth]].dropna().astype(float)
    return {"linear": _correlation(pairs), "rank": _correlation(pairs.rank())}


def _correlation(pairs: pd.DataFrame) -> float:
    """Pearson's correlation of two columns; NaN for fewer than three rows, or when a column is
    constant."""
    if len(pairs) < 3 or (pairs.nunique() < 2).any():
        return np.nan
    return float(pairs.corr().to_numpy(float)[0, 1])


def rank_correlation_by_layer(experts: pd.DataFrame, measure: str, truth: str) -> float:
    """Mean over layers of Spearman's correlation within a layer; layers where it is NaN are left
    out."""
    pairs = experts[["layer", measure, truth]].dropna().astype(float)
    ranked = pairs.groupby("layer").rank().groupby(pairs["layer"], sort=False)
    by_layer = [_correlation(layer) for _, layer in ranked]
    defined = [value for value in by_layer if not np.isnan(value)]
    return float(np.mean(defined)) if defined else np.nan


PRINTED_DECIMALS = 3
"""Published scores have three decimals; ranks are computed from these."""


def displayed(available: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Displayed column -> its benchmarks among `available`; a benchmark that is in no column of
    `names.COLUMNS` is a column itself.

    A column is the mean of those of its benchmarks that were run; `partial` lists the columns that
    lack benchmarks.
    """
    columns = {}
    remaining = dict.fromkeys(available)
    for column, benchmarks in COLUMNS.items():
        run = tuple(name for name in benchmarks if name in remaining)
        if run:
            columns[column] = run
        for name in run:
            del remaining[name]
    return columns | {name: (name,) for name in remaining}


def partial(columns: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Displayed column -> number of missing benchmarks, for columns that lack benchmarks of their
    published definition."""
    missing = {
        name: len(COLUMNS[name]) - len(run) for name, run in columns.items() if name in COLUMNS
    }
    return {name: count for name, count in missing.items() if count}


def component_columns(
    scores: pd.DataFrame, columns: Mapping[str, Sequence[str]] | None = None
) -> pd.DataFrame:
    """Average `scores` (rows, benchmarks) to (rows, displayed columns).

    A row that lacks a benchmark of a column has NaN there, never a mean over the other benchmarks.
    """
    if columns is None:
        columns = displayed([str(name) for name in scores.columns])
    means = {name: scores[list(run)].mean(axis=1, skipna=False) for name, run in columns.items()}
    return pd.DataFrame(means, index=scores.index)


def column_ranks(columns: pd.DataFrame, *, lower_is_better: Sequence[str] = ()) -> pd.DataFrame:
    """Rank of each row in each column, 1 = best, ties sharing the mean of their ranks; NaN is not
    ranked."""
    signs = np.array([1.0 if name in lower_is_better else -1.0 for name in columns.columns])
    return (columns.astype(float).round(PRINTED_DECIMALS) * signs).rank()


def average_rank(columns: pd.DataFrame, *, lower_is_better: Sequence[str] = ()) -> pd.Series:
    """Avg Rank of each row by the papers' rule. The caller must leave out the unpruned model, since
    only pruned models are ranked."""
    ranks = column_ranks(columns, lower_is_better=lower_is_better)
    return ranks.mean(axis=1, skipna=False).rename("Avg Rank")
