"""The papers' tables of scores: averages and ranks (T1), calibrated on the task (T2), every benchmark (T5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis import names, ranks, uncertainty
from analysis.chosen import not_averaged
from analysis.comparison import Comparison, Panel
from analysis.frames import records
from analysis.load import Study
from analysis.settings import pruned
from analysis.tables import PERCENT, RANK, SCORE, Table, setting


def rank_table(
    study: Study,
    comparisons: Iterable[Comparison],
    *,
    name: str = "ranks",
    criteria: Sequence[str] | None = None,
) -> Table:
    """T1: displayed columns, Avg and Avg Rank (with 95 % intervals) of the unpruned model and every criterion.

    One block per model, ratio and calibration set. `First` is the share of bootstrap replicates in which a
    criterion has the best Avg, split when several have it. Average ranks are among the criteria shown, the unpruned
    model excluded.
    """
    blocks = [rank_block(comparison, panel, criteria) for comparison in comparisons for panel in comparison.panels]
    columns = list(dict.fromkeys(column for block in blocks for column in block[0].columns))
    order = [c for c in columns if c not in ("Avg", "Avg Rank", "First")] + ["Avg", "Avg Rank", "First"]
    frame, low, high = (pd.concat(parts, ignore_index=True) for parts in zip(*blocks, strict=True))
    scores = [column for column in order if column not in (*_PANEL, "Avg Rank", "First")]
    lower = {column for comparison in comparisons for column in comparison.lower_is_better}
    return Table(
        name=name,
        title="Scores, average and average rank",
        caption="Avg is the mean of the displayed columns; ranks are taken on values rounded to three decimals, ties "
        "share the mean of their ranks, the unpruned model is not ranked. First: how often a criterion has the best "
        f"Avg when items are resampled, shared when several have it. {setting(study)}",
        frame=frame[order].rename(columns=names.benchmark),
        formats={**{names.benchmark(column): SCORE for column in scores}, "Avg Rank": RANK, "First": PERCENT},
        best={**{names.benchmark(c): "min" if c in lower else "max" for c in scores}, "Avg Rank": "min"},
        blocks=_PANEL[:3],
        low=low.rename(columns=names.benchmark),
        high=high.rename(columns=names.benchmark),
        footnotes=[*_partial_columns(comparisons), *not_averaged(comparisons)],
    )


_PANEL = ["Model", "Pruned", "Calibration", "Criterion"]


def rank_block(
    comparison: Comparison, panel: Panel, criteria: Sequence[str] | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """One block of T1, a row per cell: numbers, lower and upper ends."""
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
    rank_low, rank_high = _rank_ends(comparison, {column: list(cells.values()) for column in target})
    low["Avg Rank"], high["Avg Rank"] = pd.Series(rank_low, ranked.index), pd.Series(rank_high, ranked.index)
    frame["First"] = first_places(comparison.draws(averaged), ranked["Avg"], comparison.rows(list(cells.values())))
    labels = [
        (comparison.model, panel.pruned, names.calibration(panel.calibration), names.method(name)) for name in shown
    ]
    text = pd.DataFrame(labels, columns=_PANEL, index=frame.index)
    return pd.concat([text, frame], axis=1), low, high


def _rank_ends(comparison: Comparison, sources: Mapping[str, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Interval ends of Avg Rank for each row; NaN where a score that is ranked has no replicates.

    sources: column -> the cells its scores come from, a row each.
    """
    rows = len(next(iter(sources.values()), []))
    missing = np.full(rows, np.nan)
    draws = {column: comparison.draws((column,)) for column in sources}
    known = [found[:, comparison.rows(sources[column])] for column, found in draws.items() if found is not None]
    if len(known) < len(sources) or not rows:
        return missing, missing
    stacked = np.stack(known, axis=2)
    scored = np.stack([comparison.score((column,))[cells].notna() for column, cells in sources.items()], axis=1)
    if (scored & np.isnan(stacked).any(axis=0)).any():
        return missing, missing
    signs = np.array([1.0 if column in comparison.lower_is_better else -1.0 for column in sources])
    return uncertainty.percentiles(ranks.average_rank_draws(stacked[::4], signs))


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


def _partial_columns(comparisons: Iterable[Comparison]) -> list[str]:
    """A sentence for every column that lacks benchmarks, for each model where models differ."""
    told: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for comparison in comparisons:
        for column in comparison.parts:
            run = comparison.parts[column] if column in ranks.partial(comparison.parts) else ()
            told.setdefault(column, {}).setdefault(run, []).append(comparison.model)
    return [
        f"{column} is the mean of {len(run)} of its {len(names.COLUMNS[column])} benchmarks"
        f"{f' for {names.listing(models)} ({names.listing(map(names.benchmark, run))})' if len(found) > 1 else ''}, "
        "the others were not run."
        for column, found in told.items()
        for run, models in found.items()
        if run
    ]


def task_specific_table(
    study: Study,
    comparisons: Iterable[Comparison],
    *,
    name: str = "task_specific",
    criteria: Sequence[str] | None = None,
) -> Table:
    """T2: coding columns of the model pruned with code calibration beside mathematics columns of the one pruned with
    mathematics calibration; Avg Rank over the four. Empty when one of the two calibration sets was not run."""
    rows, low, high = [], [], []
    for comparison in comparisons:
        for domains in by_domain(comparison).values():
            if {"code", "math"} <= set(domains):
                block = task_block(comparison, domains, criteria)
                labels = {"Model": comparison.model, "Pruned": domains["code"].pruned}
                rows.append(block[0].assign(**labels))
                low.append(block[1])
                high.append(block[2])
    columns = [*names.CODE_COLUMNS, *names.MATH_COLUMNS]
    empty = pd.DataFrame(columns=["Model", "Pruned", "Criterion", *columns, "Avg Rank"])
    frame = pd.concat(rows, ignore_index=True)[list(empty.columns)] if rows else empty
    return Table(
        name=name,
        title="Calibrated on the task",
        caption="Coding columns come from the model pruned with code calibration, mathematics columns from the one "
        f"pruned with mathematics calibration; Avg Rank is over these four columns. {setting(study)}",
        frame=frame,
        formats={**dict.fromkeys(columns, SCORE), "Avg Rank": RANK},
        best={**dict.fromkeys(columns, "max"), "Avg Rank": "min"},
        blocks=("Model", "Pruned"),
        low=pd.concat(low, ignore_index=True) if low else None,
        high=pd.concat(high, ignore_index=True) if high else None,
    )


def by_domain(comparison: Comparison) -> dict[tuple[float, str, int], dict[str, Panel]]:
    """What panels share -> domain -> the panel calibrated on it."""
    found: dict[tuple[float, str, int], dict[str, Panel]] = {}
    for panel in comparison.panels:
        domain = names.domain(panel.calibration)
        if domain:
            found.setdefault(panel.settings, {}).setdefault(domain, panel)
    return found


def task_block(
    comparison: Comparison, domains: Mapping[str, Panel], criteria: Sequence[str] | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """One block of T2, the unpruned model first and then a row per method: numbers, lower and upper ends."""
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
            }
        )

    frame = gather(lambda column: comparison.columns[column])
    low = gather(lambda column: comparison.interval((column,))[0])
    high = gather(lambda column: comparison.interval((column,))[1])
    frame["Criterion"] = [names.method(name) for name in ([] if full is None else ["none"]) + shown]
    ranked = frame.iloc[len(frame) - len(shown) :]
    frame["Avg Rank"] = ranks.average_rank(ranked[list(sources)])
    competing = {column: cells[len(cells) - len(shown) :] for column, cells in sources.items()}
    rank_low, rank_high = _rank_ends(comparison, competing if set(competing) <= set(comparison.parts) else {})
    if len(rank_low):
        low["Avg Rank"], high["Avg Rank"] = pd.Series(rank_low, ranked.index), pd.Series(rank_high, ranked.index)
    return frame, low, high


def benchmark_table(study: Study, comparisons: Iterable[Comparison], *, name: str = "benchmarks") -> Table:
    """T5: every benchmark for every cell, with 95 % intervals."""
    frames, lows, highs = [], [], []
    for comparison in comparisons:
        cells = _sorted(comparison.cells)
        text = pd.DataFrame(
            {
                "Model": comparison.model,
                "Pruned": pruned(comparison.cells)[cells.index],
                "Calibration": cells["calibration"].map(names.calibration),
                "Criterion": cells["method"].map(names.method),
            }
        )
        frames.append(pd.concat([text, comparison.benchmarks.loc[cells.index]], axis=1))
        ends = {str(column): comparison.interval((str(column),)) for column in comparison.benchmarks}
        lows.append(pd.DataFrame({column: low for column, (low, _) in ends.items()}).loc[cells.index])
        highs.append(pd.DataFrame({column: high for column, (_, high) in ends.items()}).loc[cells.index])
    columns = names.in_order((str(c) for frame in lows for c in frame), names.BENCHMARKS)
    lower = {column for comparison in comparisons for column in comparison.lower_is_better}
    frame, low, high = (
        pd.concat(parts, ignore_index=True).rename(columns=names.benchmark) for parts in (frames, lows, highs)
    )
    return Table(
        name=name,
        title="Every benchmark",
        caption=f"{_metrics(study)} {setting(study)}",
        frame=frame[[*_PANEL, *map(names.benchmark, columns)]],
        formats={names.benchmark(column): SCORE for column in columns},
        best={names.benchmark(column): "min" if column in lower else "max" for column in columns},
        blocks=_PANEL[:3],
        low=low,
        high=high,
    )


def _sorted(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells by ratio, gate, seed, calibration set and method, the last two in their usual order."""
    sets = names.calibrations_in_order(cells["calibration"])
    methods = names.methods_in_order(cells["method"])
    places = cells.assign(calibration=cells["calibration"].map(sets.index), method=cells["method"].map(methods.index))
    return cells.loc[places.sort_values(["ratio", "gate", "seed", "calibration", "method"], kind="stable").index]


def _metrics(study: Study) -> str:
    by_metric: dict[str, list[str]] = {}
    for row in records(study.results.drop_duplicates("benchmark")):
        by_metric.setdefault(str(row["metric"]), []).append(names.benchmark(row["benchmark"]))
    return " ".join(f"{metric}: {names.listing(found)}." for metric, found in sorted(by_metric.items()))
