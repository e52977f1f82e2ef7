"""Blocks of the papers' tables of scores: numbers, average ranks, and the ends of their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis import names
from analysis.stats import ranks, uncertainty
from analysis.stats.comparison import Comparison, Panel


def rank_block(
    comparison: Comparison, panel: Panel, criteria: Sequence[str] | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Scores, Avg, Avg Rank and First of the unpruned model and of a panel's cells, a row each: numbers, lower and
    upper ends."""
    cells = {name: cell for name, cell in panel.cells.items() if criteria is None or name in criteria}
    target = panel.columns(comparison)
    shown = {"none": comparison.unpruned, **cells} if comparison.unpruned is not None else cells
    frame = comparison.columns.loc[list(shown.values()), list(target)]
    low, high = frame.copy(), frame.copy()
    for column in target:
        ends = comparison.interval((column,))
        low[column], high[column] = (end.loc[frame.index] for end in ends)
    averaged = panel.averaged(comparison)
    frame = frame.assign(Avg=comparison.score(averaged))
    ends = comparison.interval(averaged)
    low, high = low.assign(Avg=ends[0]), high.assign(Avg=ends[1])
    ranked = frame.loc[list(cells.values())]
    frame["Avg Rank"] = ranks.average_rank(ranked[list(target)], lower_is_better=comparison.lower_is_better)
    rank_low, rank_high = average_rank_interval(comparison, {column: list(cells.values()) for column in target})
    low["Avg Rank"], high["Avg Rank"] = pd.Series(rank_low, ranked.index), pd.Series(rank_high, ranked.index)
    frame["First"] = first_places(comparison.draws(averaged), ranked["Avg"], comparison.rows(list(cells.values())))
    return frame, low, high


_SAME = 1e-6
"""Replicates closer than this are equal: single precision adds the same outcomes up to that."""


def first_places(draws: np.ndarray | None, scores: pd.Series, rows: np.ndarray) -> pd.Series:
    """For each of `scores`, whose places in the replicates (replicates, cells) are `rows`, the share of replicates in
    which it is the best; those that share the best score of a replicate share it alike. NaN where a score is a gap,
    and for all where one has no replicates: it might be the best."""
    scored = scores.notna().to_numpy()
    first = pd.Series(np.nan, scores.index)
    if draws is None or not scored.any() or np.isnan(draws[:, rows[scored]]).any():
        return first
    competing = draws[:, rows[scored]]
    leads = competing >= competing.max(axis=1, keepdims=True) - _SAME
    first[scored] = (leads / leads.sum(axis=1, keepdims=True)).mean(axis=0)
    return first


def by_domain(comparison: Comparison) -> dict[tuple[float, str, int], dict[str, Panel]]:
    """What panels share -> domain -> the panel calibrated on it."""
    panels: dict[tuple[float, str, int], dict[str, Panel]] = {}
    for panel in comparison.panels:
        domain = names.domain(panel.calibration)
        if domain:
            panels.setdefault(panel.settings, {}).setdefault(domain, panel)
    return panels


def task_block(
    comparison: Comparison, domains: Mapping[str, Panel], criteria: Sequence[str] | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """One block of T2, the unpruned model first and then a row per method's key: numbers, lower and upper ends."""
    code, math = domains["code"].cells, domains["math"].cells
    shown = [name for name in code if name in math and (criteria is None or name in criteria)]
    full = comparison.unpruned
    sources = {
        column: ([] if full is None else [full]) + [cells[name] for name in shown]
        for columns, cells in ((names.CODE_COLUMNS, code), (names.MATH_COLUMNS, math))
        for column in columns
    }

    def gather(values: Callable[[str], pd.Series]) -> pd.DataFrame:
        return pd.DataFrame(
            {
                column: values(column).loc[cells].to_numpy()
                if column in comparison.parts
                else np.full(len(cells), np.nan)
                for column, cells in sources.items()
            },
            index=([] if full is None else ["none"]) + shown,
        )

    frame = gather(lambda column: comparison.columns[column])
    low = gather(lambda column: comparison.interval((column,))[0])
    high = gather(lambda column: comparison.interval((column,))[1])
    ranked = frame.iloc[len(frame) - len(shown) :]
    frame["Avg Rank"] = ranks.average_rank(ranked[list(sources)])
    competing = {column: cells[len(cells) - len(shown) :] for column, cells in sources.items()}
    rank_low, rank_high = average_rank_interval(
        comparison, competing if set(competing) <= set(comparison.parts) else {}
    )
    if len(rank_low):
        low["Avg Rank"], high["Avg Rank"] = pd.Series(rank_low, ranked.index), pd.Series(rank_high, ranked.index)
    return frame, low, high


def average_rank_interval(comparison: Comparison, sources: Mapping[str, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Interval ends of Avg Rank for each row; NaN where a score that is ranked has no replicates.

    sources: column -> the cells its scores come from, a row each.
    """
    rows = len(next(iter(sources.values()), []))
    missing = np.full(rows, np.nan)
    draws = {column: comparison.draws((column,)) for column in sources}
    drawn = [
        replicates[:, comparison.rows(sources[column])]
        for column, replicates in draws.items()
        if replicates is not None
    ]
    if len(drawn) < len(sources) or not rows:
        return missing, missing
    stacked = np.stack(drawn, axis=2)
    scored = np.stack([comparison.score((column,))[cells].notna() for column, cells in sources.items()], axis=1)
    if (scored & np.isnan(stacked).any(axis=0)).any():
        return missing, missing
    signs = np.array([1.0 if column in comparison.lower_is_better else -1.0 for column in sources])
    return uncertainty.percentiles(ranks.average_rank_draws(stacked[::4], signs))
