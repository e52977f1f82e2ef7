"""Scores of selected cells on the papers' averages with intervals; differences between cells and their significance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.stats import ranks, uncertainty
from analysis.stats.comparison import Comparison, Panel, Target

CODING = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "Eval+", "LiveCode", "Code")
WRITING_AND_MATH = ("WildBench", "GSM8K", "MATH-500", "Math")

GROUPS = ("MC Avg", "Code", "Math", "WildBench", "Avg")
"""The averages of `group_targets`."""
MEAN = "Mean"
"""In a list of columns: the mean of the list's benchmarks."""
COMMON = "CSQA Avg"
"""In a list of columns: the mean of `names.COMMON_SENSE`."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of cells, indexed by cell, with the ends of their 95 % intervals where they have any."""

    frame: pd.DataFrame
    low: pd.DataFrame
    high: pd.DataFrame


def group_targets(comparison: Comparison, cells: Sequence[int]) -> dict[str, Target]:
    """The papers' averages that these cells were evaluated on, by name: MC Avg, Code, Math, WildBench, Avg.

    Code and Math are means of their two displayed columns, Avg is the mean of all displayed columns in which more is
    better.
    """
    displayed = comparison.averaged(_displayed(comparison, cells))
    groups: dict[str, Target] = {
        "MC Avg": ("MC Avg",),
        "Code": names.CODE_COLUMNS,
        "Math": names.MATH_COLUMNS,
        "WildBench": ("WildBench",),
    }
    targets = {name: target for name, target in groups.items() if set(target) <= set(displayed)}
    return {**targets, "Avg": displayed} if displayed else targets


def not_averaged(comparisons: Iterable[Comparison]) -> list[str]:
    """A sentence about the displayed columns that Avg leaves out; empty when Avg is the mean of all."""
    left = {
        names.benchmark(column)
        for comparison in comparisons
        for column in set(comparison.parts) - set(comparison.averaged(comparison.parts))
    }
    return [f"Avg is without {names.listing(sorted(left))}: there, less is better."] if left else []


def mean_target(comparison: Comparison, cells: Sequence[int], benchmarks: Iterable[str]) -> Target:
    """Those of `benchmarks` on which at least one of these cells was evaluated and in which more is better."""
    run = comparison.benchmarks.loc[list(cells)].notna().any()
    return comparison.averaged(name for name in benchmarks if run.get(name, False))


def averaged(target: Target, benchmarks: Sequence[str]) -> str:
    """What a figure averages over, in words: `Mean of ARC-C and PIQA (2 of the paper's 7 benchmarks)`."""
    part = "" if len(target) == len(benchmarks) else f" ({len(target)} of the paper's {len(benchmarks)} benchmarks)"
    return f"Mean of {names.listing(map(names.benchmark, target))}{part}"


def column_targets(comparison: Comparison, cells: Sequence[int], columns: Sequence[str]) -> dict[str, Target]:
    """Display name -> target, for those of `columns` on which these cells were evaluated.

    columns: benchmarks, displayed columns, GROUPS, COMMON and MEAN."""
    groups, run = group_targets(comparison, cells), comparison.benchmarks.loc[list(cells)].notna().any()
    means = {COMMON: mean_target(comparison, cells, names.COMMON_SENSE), MEAN: mean_target(comparison, cells, columns)}
    every = {
        **{str(name): (str(name),) for name in run.index[run]},
        **_displayed(comparison, cells),
        **groups,
        **{name: target for name, target in means.items() if target},
    }
    return {names.benchmark(name): every[name] for name in columns if name in every}


def _displayed(comparison: Comparison, cells: Sequence[int]) -> dict[str, Target]:
    """The displayed columns that these cells were evaluated on."""
    run = comparison.columns.loc[list(cells)].notna().any()
    return {str(name): (str(name),) for name in run.index[run]}


def scores(comparison: Comparison, cells: Sequence[int], targets: Mapping[str, Target]) -> Numbers:
    """Scores of `cells` (rows) on `targets` (columns) with their intervals; NaN where a cell lacks a benchmark."""
    index, rows = list(cells), comparison.rows(cells)
    values = {name: (comparison.score(target), *comparison.interval(target)) for name, target in targets.items()}
    score, low, high = (
        pd.DataFrame({name: parts[at].to_numpy()[rows] for name, parts in values.items()}, index=index)
        for at in range(3)
    )
    return Numbers(score, low, high)


def differences(comparison: Comparison, target: Target, against: Mapping[int, int]) -> pd.DataFrame:
    """Score of each cell minus that of its reference cell, paired over the items that all cells share.

    against: cell -> its reference cell. Columns: difference, low, high (95 %), p (two-sided, not corrected). NaN where
    outcomes are missing.
    """
    p_values: dict[int, float] = {}
    for other in dict.fromkeys(against.values()):  # one call for all cells with this reference
        cells = [cell for cell, base in against.items() if base == other]
        p_values |= zip(cells, comparison.p_values(target, other, cells), strict=True)
    rows = []
    for cell, other in against.items():
        low, high = comparison.lead(target, cell, other)
        rows.append((comparison.difference(target, cell, other), low, high, float(p_values[cell])))
    return pd.DataFrame(rows, index=list(against), columns=["difference", "low", "high", "p"], dtype=float)


def pooled_difference(
    comparison: Comparison, target: Target, groups: Sequence[Sequence[tuple[int, int]]]
) -> dict[str, float]:
    """Mean difference in score over pairs (cell, other), paired over the items that all cells share.

    All groups of pairs have the same weight. Returns compared (number of pairs), difference, low, high (95 %, the same
    drawn items for all cells), p. A pair with a missing result is left out and not counted. NaN when no pair is left,
    or outcomes are missing.
    """
    empty = {"compared": 0, **dict.fromkeys(("difference", "low", "high", "p"), np.nan)}
    score = comparison.score(target)
    complete = [[pair for pair in pairs if score[list(pair)].notna().all()] for pairs in groups]
    complete = [pairs for pairs in complete if pairs]
    if not complete:
        return empty
    weights = np.zeros(len(score))
    for pairs in complete:
        for cell, other in pairs:
            weights[comparison.rows([cell, other])] += np.array([1, -1]) / len(pairs) / len(complete)
    used = np.flatnonzero(weights)
    means = [np.mean([comparison.difference(target, *pair) for pair in pairs]) for pairs in complete]
    pooled = {**empty, "compared": sum(map(len, complete)), "difference": float(np.mean(means))}
    draws = comparison.paired_draws(target)
    if draws is None or np.isnan(draws[:, used]).any():
        return pooled
    spread = draws[:, used] @ weights[used]
    low, high = uncertainty.percentiles(spread)
    return {**pooled, "low": float(low), "high": float(high), "p": share_beyond(spread)}


def share_beyond(draws: np.ndarray) -> float:
    """Two-sided bootstrap p-value: twice the smaller share of replicates on either side of 0, never exactly 0."""
    smaller = min((draws <= 0).sum(), (draws >= 0).sum())
    return float(min(1.0, 2 * (smaller + 1) / (len(draws) + 1)))


def cost(study: Study, cells: Sequence[int], column: str) -> pd.Series:
    """One number of cost.json for each of `cells`, NaN where the cost was not counted."""
    return study.costs.set_index("cell")[column].astype(float).reindex(list(cells))


def scored_block(
    comparison: Comparison, panel: Panel, cells: Mapping[str, int], mean: str, averaged: Target
) -> Numbers:
    """Rows of a table of scores: the unpruned model and `cells` (method -> cell) on all displayed columns, their mean
    over the columns `averaged` under the name `mean`, and average ranks."""
    rows = {"none": comparison.unpruned, **cells} if comparison.unpruned is not None else cells
    columns = panel.columns(comparison)
    numbers = scores(comparison, list(rows.values()), {**{column: (column,) for column in columns}, mean: averaged})
    frame, ranked = numbers.frame, numbers.frame.loc[list(cells.values()), list(columns)]
    frame["Avg Rank"] = ranks.average_rank(ranked, lower_is_better=comparison.lower_is_better)
    frame["Model"], frame["Pruned"] = comparison.model, panel.pruned
    frame["Calibration"], frame["Criterion"] = names.calibration(panel.calibration), list(map(names.method, rows))
    return numbers


def rank_block(comparison: Comparison, panel: Panel, criteria: Sequence[str] | None) -> Numbers:
    """One block of Table 1: `scored_block` with intervals of average ranks, and how often each criterion is first."""
    cells = {name: cell for name, cell in panel.cells.items() if criteria is None or name in criteria}
    competing, averaged = list(cells.values()), panel.averaged(comparison)
    block = scored_block(comparison, panel, cells, "Avg", averaged)
    ends = average_rank_interval(comparison, {column: competing for column in panel.columns(comparison)})
    block.low["Avg Rank"], block.high["Avg Rank"] = (pd.Series(end, competing) for end in ends)
    average = block.frame["Avg"][competing]
    block.frame["First"] = first_places(comparison.draws(averaged), average, comparison.rows(competing))
    return block


_SAME = 1e-6
"""Replicates closer than this are equal: float32 sums of the same outcomes differ by less."""


def first_places(draws: np.ndarray | None, average: pd.Series, rows: np.ndarray) -> pd.Series:
    """Share of bootstrap replicates in which each cell has the best average; ties share a replicate equally.

    draws: (replicates, cells); rows: the columns of `draws` that belong to `average`. NaN where the average is a gap.
    All are NaN when a cell has no replicates, as it might be the best."""
    scored = average.notna().to_numpy()
    first = pd.Series(np.nan, average.index)
    if draws is None or not scored.any() or np.isnan(draws[:, rows[scored]]).any():
        return first
    competing = draws[:, rows[scored]]
    leads = competing >= competing.max(axis=1, keepdims=True) - _SAME
    first[scored] = (leads / leads.sum(axis=1, keepdims=True)).mean(axis=0)
    return first


def by_domain(comparison: Comparison) -> dict[tuple[float, str, int], dict[str, Panel]]:
    """(Ratio, gate, seed) -> domain -> the panel whose calibration set is of that domain."""
    panels: dict[tuple[float, str, int], dict[str, Panel]] = {}
    for panel in comparison.panels:
        domain = names.domain(panel.calibration)
        if domain:
            panels.setdefault(panel.settings, {}).setdefault(domain, panel)
    return panels


def task_block(comparison: Comparison, domains: Mapping[str, Panel], criteria: Sequence[str] | None) -> Numbers:
    """One block of Table 2 with intervals: the unpruned model first, then a row per method that was calibrated on both
    code and math."""
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
    """Ends of the 95 % interval of Avg Rank for each row; all NaN when a ranked score has no replicates.

    sources: column -> the cells that its scores come from, one per row.
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
