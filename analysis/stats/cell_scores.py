"""Scores of selected cells on the papers' averages with intervals; differences between cells and
their significance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.stats import ranks
from analysis.stats.comparison import Comparison, Panel, Target, group_targets, means, overall
from analysis.stats.quantity import AVG
from analysis.stats.uncertainty import Estimate

CODING = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "Eval+", "LiveCode", "Code")
WRITING_AND_MATH = ("WildBench", "GSM8K", "MATH-500", "Math")

GROUPS = ("MC Avg", "Code", "Math", "WildBench", AVG)
"""The averages of `group_targets`."""
MEAN = "Mean"
"""In a list of columns: the mean of the list's benchmarks."""
COMMON = "CSQA Avg"
"""In a list of columns: the mean of `names.COMMON_SENSE`."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of cells, indexed by cell, with the ends of their 95 % intervals where they have
    any."""

    frame: pd.DataFrame
    low: pd.DataFrame
    high: pd.DataFrame
    best: dict[str, str] = field(default_factory=dict)
    """Displayed name of a column of scores -> whether its best is its max or its min."""


def means_in_words(comparisons: Iterable[Comparison]) -> str:
    """What the mean over displayed columns is: `Avg: mean of the displayed columns (more is
    better).`"""
    sentences = []
    for quantity in means(comparisons).values():
        of = "exponential of the mean loss" if quantity.scale == "perplexity" else "mean"
        sentences.append(f"{quantity.mean}: {of} of the displayed columns ({quantity.direction}).")
    return " ".join(sentences)


def not_averaged(comparisons: Iterable[Comparison]) -> list[str]:
    """A sentence about the displayed columns that Avg leaves out; empty when Avg is the mean of
    all."""
    columns: set[str] = set()
    for comparison in comparisons:
        columns |= set(comparison.benchmarks_of) - set(comparison.average)
    if not columns:
        return []
    return [
        (
            f"Avg is without {names.listing(sorted(map(names.benchmark, columns)))}: there, less "
            "is better."
        )
    ]


def mean_target(comparison: Comparison, cells: Sequence[int], benchmarks: Iterable[str]) -> Target:
    """Those of `benchmarks` on which at least one of these cells was evaluated and in which more is
    better."""
    run = comparison.benchmarks.loc[list(cells)].notna().any()
    return comparison.averaged(name for name in benchmarks if run.get(name, False))


def averaged(target: Target, benchmarks: Sequence[str]) -> str:
    """What a figure averages over, in words: `Mean of ARC-C and PIQA (2 of the paper's 7
    benchmarks)`."""
    part = (
        ""
        if len(target) == len(benchmarks)
        else f" ({len(target)} of the paper's {len(benchmarks)} benchmarks)"
    )
    return f"Mean of {names.listing(map(names.benchmark, target))}{part}"


def column_targets(
    comparison: Comparison, cells: Sequence[int], columns: Sequence[str]
) -> dict[str, Target]:
    """Display name -> target, for those of `columns` on which these cells were evaluated.

    columns: benchmarks, displayed columns, GROUPS, COMMON and MEAN."""
    run = comparison.benchmarks.loc[list(cells)].notna().any()
    targets: dict[str, Target] = {
        COMMON: mean_target(comparison, cells, names.COMMON_SENSE),
        MEAN: mean_target(comparison, cells, columns),
    }
    for name in (*map(str, run.index[run]), *comparison.evaluated(cells)):
        targets[name] = (name,)
    targets |= group_targets(comparison, cells)
    mean = comparison.quantity(overall(comparison, cells)).mean
    shown = [mean if name == AVG else name for name in columns]
    return {names.benchmark(name): targets[name] for name in shown if targets.get(name)}


def scores(comparison: Comparison, cells: Sequence[int], targets: Mapping[str, Target]) -> Numbers:
    """Scores of `cells` (rows) on `targets` (columns) with their intervals; NaN where a cell lacks
    a benchmark."""
    index = list(cells)
    numbers = Numbers(
        frame=pd.DataFrame(index=index),
        low=pd.DataFrame(index=index),
        high=pd.DataFrame(index=index),
    )
    for name, target in targets.items():
        numbers.frame[name], numbers.low[name], numbers.high[name] = comparison.shown(target)
        numbers.best[names.benchmark(name)] = comparison.quantity(target).best
    return numbers


def differences(comparison: Comparison, target: Target, against: Mapping[int, int]) -> pd.DataFrame:
    """Score of each cell minus that of its reference cell, paired by seed and item.

    against: cell -> its reference cell. Columns: difference, low, high (95 %), p (two-sided, not
    corrected). NaN where outcomes are missing. Differences are in the unit in which scores are
    shown.
    """
    score = comparison.score(target)
    rows = []
    for cell, other in against.items():
        estimate = comparison.difference(target, cell, other)
        ends = np.array([estimate.value, *estimate.interval])
        rows.append([*comparison.quantity(target).shown_difference(score[other], ends), estimate.p])
    return pd.DataFrame(
        rows, index=list(against), columns=["difference", "low", "high", "p"], dtype=float
    )


def pooled_difference(
    comparison: Comparison, target: Target, groups: Sequence[Sequence[tuple[int, int]]]
) -> tuple[int, Estimate]:
    """Mean difference in score over pairs (cell, other), paired by seed and item, and the number of
    pairs.

    All groups of pairs have the same weight. A pair with a missing result is left out and not
    counted.
    """
    score = comparison.score(target)
    complete = [[pair for pair in pairs if score[list(pair)].notna().all()] for pairs in groups]
    complete = [pairs for pairs in complete if pairs]
    weights: dict[int, float] = {}
    for pairs in complete:
        for cell, other in pairs:
            share = 1 / len(pairs) / len(complete)
            weights[cell] = weights.get(cell, 0.0) + share
            weights[other] = weights.get(other, 0.0) - share
    return sum(map(len, complete)), comparison.estimate(target, weights) if weights else Estimate(
        np.nan
    )


def cost(study: Study, cells: Sequence[int], column: str) -> pd.Series:
    """One number of cost.json for each of `cells`, NaN where the cost was not counted."""
    return study.costs.set_index("cell")[column].astype(float).reindex(list(cells))


def rank_block(
    comparison: Comparison, panel: Panel, criteria: Sequence[str] | None = None
) -> Numbers:
    """One block of Table 1: the unpruned model and these criteria on all displayed columns, their
    mean over the columns of `Panel.averaged` under its name, and average ranks."""
    cells = {
        name: cell for name, cell in panel.cells.items() if criteria is None or name in criteria
    }
    rows = {"none": comparison.unpruned, **cells} if comparison.unpruned is not None else cells
    columns = panel.columns(comparison)
    averaged = panel.averaged(comparison)
    targets = {
        **{column: (column,) for column in columns},
        comparison.quantity(averaged).mean: averaged,
    }
    numbers = scores(comparison, list(rows.values()), targets)
    frame = numbers.frame
    ranked = numbers.frame.loc[list(cells.values()), list(columns)]
    frame["Avg Rank"] = ranks.average_rank(ranked, lower_is_better=comparison.lower_is_better)
    numbers.best["Avg Rank"] = "min"
    frame["Model"], frame["Pruned"] = comparison.model, panel.pruned
    frame["Calibration"], frame["Criterion"] = (
        names.calibration(panel.calibration),
        list(map(names.method, rows)),
    )
    return numbers


def by_domain(comparison: Comparison) -> dict[tuple[float, str], dict[str, Panel]]:
    """(Ratio, gate) -> domain -> the panel whose calibration set is of that domain."""
    panels: dict[tuple[float, str], dict[str, Panel]] = {}
    for panel in comparison.panels:
        domain = names.domain(panel.calibration)
        if domain:
            panels.setdefault(panel.settings, {}).setdefault(domain, panel)
    return panels


def task_block(
    comparison: Comparison, domains: Mapping[str, Panel], criteria: Sequence[str] | None
) -> Numbers:
    """One block of Table 2 with intervals: the unpruned model first, then a row per method that was
    calibrated on both code and math."""
    code = domains["code"].cells
    math = domains["math"].cells
    competing = [name for name in code if name in math and (criteria is None or name in criteria)]
    unpruned = [] if comparison.unpruned is None else [comparison.unpruned]
    panels = dict.fromkeys(names.CODE_COLUMNS, code) | dict.fromkeys(names.MATH_COLUMNS, math)
    cells_of_column = {
        column: [of_panel[name] for name in competing] for column, of_panel in panels.items()
    }

    def gather(values: Callable[[str], pd.Series]) -> pd.DataFrame:
        missing = np.full(len(unpruned) + len(competing), np.nan)
        gathered = {
            column: values(column).loc[unpruned + cells].to_numpy()
            if column in comparison.benchmarks_of
            else missing
            for column, cells in cells_of_column.items()
        }
        return pd.DataFrame(gathered, index=(["none"] if unpruned else []) + competing)

    frame = gather(lambda column: comparison.columns[column])
    low = gather(lambda column: comparison.interval((column,))[0])
    high = gather(lambda column: comparison.interval((column,))[1])
    ranked = frame.iloc[len(unpruned) :]
    frame["Avg Rank"] = ranks.average_rank(ranked)
    return Numbers(frame, low, high)
