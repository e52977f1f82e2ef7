"""Blocks of the papers' tables of scores: numbers, average ranks, and the ends of their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis import names
from analysis.stats import ranks, uncertainty
from analysis.stats.cell_scores import Numbers, scores
from analysis.stats.comparison import Comparison, Panel, Target


def scored_block(
    comparison: Comparison, panel: Panel, cells: Mapping[str, int], mean: str, averaged: Target
) -> Numbers:
    """Scores of the unpruned model and of `cells` (by method), a row each, their `mean` over the columns `averaged`,
    and average ranks."""
    rows = {"none": comparison.unpruned, **cells} if comparison.unpruned is not None else cells
    columns = panel.columns(comparison)
    numbers = scores(comparison, list(rows.values()), {**{column: (column,) for column in columns}, mean: averaged})
    frame, ranked = numbers.frame, numbers.frame.loc[list(cells.values()), list(columns)]
    frame["Avg Rank"] = ranks.average_rank(ranked, lower_is_better=comparison.lower_is_better)
    frame["Model"], frame["Pruned"] = comparison.model, panel.pruned
    frame["Calibration"], frame["Criterion"] = names.calibration(panel.calibration), list(map(names.method, rows))
    return numbers


def rank_block(comparison: Comparison, panel: Panel, criteria: Sequence[str] | None) -> Numbers:
    """One block of T1: `scored_block` with intervals of average ranks, and how often each criterion is first."""
    cells = {name: cell for name, cell in panel.cells.items() if criteria is None or name in criteria}
    competing, averaged = list(cells.values()), panel.averaged(comparison)
    block = scored_block(comparison, panel, cells, "Avg", averaged)
    ends = average_rank_interval(comparison, {column: competing for column in panel.columns(comparison)})
    block.low["Avg Rank"], block.high["Avg Rank"] = (pd.Series(end, competing) for end in ends)
    average = block.frame["Avg"][competing]
    block.frame["First"] = first_places(comparison.draws(averaged), average, comparison.rows(competing))
    return block


_SAME = 1e-6
"""Replicates closer than this are equal: single precision adds the same outcomes up to that."""


def first_places(draws: np.ndarray | None, average: pd.Series, rows: np.ndarray) -> pd.Series:
    """For each average, whose places in the replicates (replicates, cells) are `rows`, the share of replicates in
    which it is the best; those that share the best score of a replicate share it alike. NaN where a score is a gap,
    and for all where one has no replicates: it might be the best."""
    scored = average.notna().to_numpy()
    first = pd.Series(np.nan, average.index)
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


def task_block(comparison: Comparison, domains: Mapping[str, Panel], criteria: Sequence[str] | None) -> Numbers:
    """One block of T2, the unpruned model first and then a row per method's key: numbers, lower and upper ends."""
    code, math = domains["code"].cells, domains["math"].cells
    competing = [name for name in code if name in math and (criteria is None or name in criteria)]
    unpruned = [] if comparison.unpruned is None else [comparison.unpruned]
    cells = dict.fromkeys(names.CODE_COLUMNS, code) | dict.fromkeys(names.MATH_COLUMNS, math)
    sources = {column: [cells[column][name] for name in competing] for column in cells}

    def gather(values: Callable[[str], pd.Series]) -> pd.DataFrame:
        missing = np.full(len(unpruned) + len(competing), np.nan)
        gathered = {
            column: values(column).loc[unpruned + own].to_numpy() if column in comparison.parts else missing
            for column, own in sources.items()
        }
        return pd.DataFrame(gathered, index=(["none"] if unpruned else []) + competing)

    frame = gather(lambda column: comparison.columns[column])
    low, high = (gather(lambda column, end=end: comparison.interval((column,))[end]) for end in (0, 1))  # type: ignore
    ranked = frame.iloc[len(unpruned) :]
    frame["Avg Rank"] = ranks.average_rank(ranked)
    if competing and set(sources) <= set(comparison.parts):
        ends = average_rank_interval(comparison, sources)
        low["Avg Rank"], high["Avg Rank"] = (pd.Series(end, ranked.index) for end in ends)
    return Numbers(frame, low, high)


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
