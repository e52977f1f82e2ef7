"""Scores of selected cells on the papers' averages, differences between cells, and the intervals
and significance of both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.stats.comparison import (
    Comparison,
    Panel,
    Target,
    mean_quantities,
    overall_columns,
)
from moe_lab.analysis.stats.quantity import AVG, PRINTED_DECIMALS

CODE_BENCHMARKS = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "Eval+", "LiveCode", "Code")
WRITING_AND_MATH = ("WildBench", "GSM8K", "MATH-500", "Math")

GROUPS = ("MC Avg", "Code", "Math", "WildBench", AVG)
"""Entries of a list of columns: the papers' averages over several benchmarks."""
MEAN = "Mean"
"""Entry of a list of columns that stands for the mean of the benchmarks in this list."""
COMMON_SENSE_MEAN = "CSQA Avg"
"""Entry of a list of columns that stands for the mean of `names.COMMON_SENSE`."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of cells."""

    frame: pd.DataFrame
    """A row per cell. The columns `X low` and `X high` are the ends of the 95 % interval of `X`."""
    lower_is_better: set[str] = field(default_factory=set)
    """Columns in which less is better."""


def mean_definitions(comparisons: Iterable[Comparison]) -> str:
    """A sentence for each mean: `Avg: mean of the displayed columns (more is better).`"""
    sentences = []
    for quantity in mean_quantities(comparisons).values():
        mean = "exponential of the mean loss" if quantity.scale == "perplexity" else "mean"
        sentences.append(
            f"{quantity.mean_name}: {mean} of the displayed columns ({quantity.direction})."
        )
    return " ".join(sentences)


def notes_on_average(comparisons: Iterable[Comparison]) -> list[str]:
    """At most one sentence, which names the displayed columns that Avg leaves out."""
    columns: set[str] = set()
    for comparison in comparisons:
        displayed = comparison.benchmarks_of
        columns |= set(displayed) - set(comparison.average_columns(displayed))
    if not columns:
        return []
    return [
        f"Avg is without {names.enumeration(sorted(map(names.benchmark, columns)))}: there, less "
        "is better."
    ]


def mean_target(comparison: Comparison, cells: Sequence[int], benchmarks: Iterable[str]) -> Target:
    """`Comparison.average_columns` of the entries of `benchmarks` on which at least one of these
    cells was evaluated."""
    known = [name for name in benchmarks if name in comparison.results]
    return comparison.average_columns(comparison.evaluated(known, cells))


def mean_text(target: Target, benchmarks: Sequence[str]) -> str:
    """Text such as `Mean of ARC-C and PIQA (2 of the paper's 7 benchmarks)`.

    target: the benchmarks of the mean; benchmarks: those of the mean in the paper.
    """
    text = f"Mean of {names.enumeration(map(names.benchmark, target))}"
    if len(target) < len(benchmarks):
        text += f" ({len(target)} of the paper's {len(benchmarks)} benchmarks)"
    return text


def column_targets(
    comparison: Comparison, cells: Sequence[int], columns: Sequence[str]
) -> dict[str, Target]:
    """Display name of a column -> its target, for the entries of `columns` on which at least one of
    these cells was evaluated.

    columns: each entry is the name of a benchmark, of a displayed column or of an average in
    GROUPS, or it is MEAN or COMMON_SENSE_MEAN. The entry AVG stands for the mean over
    `overall_columns`. A mean of losses has another name in the result.
    """
    targets: dict[str, Target] = {
        COMMON_SENSE_MEAN: mean_target(comparison, cells, names.COMMON_SENSE),
        MEAN: mean_target(comparison, cells, columns),
    }
    known = [*map(str, comparison.results), *comparison.benchmarks_of]
    for name in comparison.evaluated(known, cells):
        targets[name] = (name,)
    averaged_columns = overall_columns(comparison, cells)
    for name, target in names.AVERAGES.items():
        if set(target) <= set(averaged_columns):
            targets[name] = target
    mean_name = comparison.quantity(averaged_columns).mean_name
    targets[mean_name] = averaged_columns
    requested_names = [mean_name if name == AVG else name for name in columns]
    return {names.benchmark(name): targets[name] for name in requested_names if targets.get(name)}


def scores(comparison: Comparison, text: pd.DataFrame, targets: Mapping[str, Target]) -> Numbers:
    """Scores of cells on `targets` with intervals, after the columns of `text`, which has a row per
    cell.

    targets: displayed column -> its target.
    """
    numbers = Numbers(text.copy())
    for name, target in targets.items():
        columns = [name, f"{name} low", f"{name} high"]
        numbers.frame[columns] = comparison.displayed_scores(target)
        if comparison.quantity(target).lower_is_better:
            numbers.lower_is_better.add(name)
    return numbers


def differences(
    comparison: Comparison, target: Target, reference_of_cell: Mapping[int, int]
) -> pd.DataFrame:
    """Score of each cell minus the score of its reference cell, paired by seed and item.

    The result has a row for each cell. Columns: `difference`; `low` and `high`, the ends of its
    95 % interval; `p`, the two-sided p-value, not corrected for several tests.
    Differences are in the unit of displayed scores.
    """
    score = comparison.score(target)
    quantity = comparison.quantity(target)
    rows = []
    for cell, reference in reference_of_cell.items():
        estimate = comparison.difference(target, cell, reference)
        rows.append([*quantity.displayed_estimate(score[reference], estimate), estimate.p])
    return pd.DataFrame(
        rows, index=list(reference_of_cell), columns=["difference", "low", "high", "p"], dtype=float
    )


def rank_block(
    comparison: Comparison, panel: Panel, criteria: Sequence[str] | None = None
) -> Numbers:
    """A block of Table 1 of Unified Expert Pruning: a row for the unpruned model, and a row for
    each method of the panel. The index is the cells.

    Columns: `Model`, `Pruned`, `Calibration` and `Criterion`; the displayed columns of the panel;
    the mean over those of `Comparison.average_columns`; `Avg Rank`.

    criteria: keys of the methods in the block; None for all.
    """
    cells = {key: cell for key, cell in panel.cells.items() if criteria is None or key in criteria}
    unpruned = {} if comparison.unpruned_cell is None else {"none": comparison.unpruned_cell}
    cell_of_row = {**unpruned, **cells}
    text = {
        "Model": comparison.model,
        "Pruned": panel.pruned_text,
        "Calibration": names.calibration(panel.calibration),
        "Criterion": list(map(names.method, cell_of_row)),
    }
    targets: dict[str, Target] = {names.benchmark(column): (column,) for column in panel.columns}
    score_columns = list(targets)
    average_columns = comparison.average_columns(panel.columns)
    targets[comparison.quantity(average_columns).mean_name] = average_columns
    numbers = scores(comparison, pd.DataFrame(text, index=list(cell_of_row.values())), targets)
    scores_of_methods = numbers.frame.loc[list(cells.values()), score_columns]
    numbers.frame["Avg Rank"] = average_rank(
        scores_of_methods, lower_is_better=numbers.lower_is_better
    )
    numbers.lower_is_better.add("Avg Rank")
    return numbers


def column_ranks(columns: pd.DataFrame, *, lower_is_better: Collection[str] = ()) -> pd.DataFrame:
    """Rank of each row in each column, by numbers rounded to PRINTED_DECIMALS: rank 1 has the
    highest number, or the lowest in the columns `lower_is_better`. Equal numbers get the mean of
    their ranks."""
    signs = np.array([1.0 if name in lower_is_better else -1.0 for name in columns.columns])
    return (columns.astype(float).round(PRINTED_DECIMALS) * signs).rank()


def average_rank(columns: pd.DataFrame, *, lower_is_better: Collection[str] = ()) -> pd.Series:
    """Avg Rank of each row by the papers' rule: the mean of `column_ranks` over the columns. The
    caller must leave out the unpruned model.

    Table 1 of Unified Expert Pruning prints ranks that follow from its printed benchmarks by this
    rule, up to rounding."""
    ranks = column_ranks(columns, lower_is_better=lower_is_better)
    return ranks.mean(axis=1, skipna=False)
