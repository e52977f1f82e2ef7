"""The papers' tables of scores: averages and ranks (T1), calibrated on the task (T2), every benchmark (T5)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import names
from analysis.load.reader import records
from analysis.load.settings import pruned
from analysis.load.study import Study
from analysis.outputs.captions import setting
from analysis.outputs.score_rows import PANEL
from analysis.registry import Results, output
from analysis.render.table import RANK, SCORE, Table
from analysis.stats.rank_blocks import by_domain, task_block

BOTH_TASKS = "a calibration set about code and one about mathematics"


@output("task_specific", chapter="task", filters="*Model|Pruned", needs=BOTH_TASKS)
def task_specific_table(results: Results, name: str, criteria: Sequence[str] | None = None) -> Table:
    """All criteria, calibrated on the task that they are evaluated on.

    Coding columns of the model pruned with code calibration beside mathematics columns of the one pruned with
    mathematics calibration; Avg Rank over the four. Empty when one of the two calibration sets was not run.
    """
    study, comparisons = results.study, results.comparisons
    rows, low, high = [], [], []
    for comparison in comparisons:
        for domains in by_domain(comparison).values():
            if {"code", "math"} <= set(domains):
                block = task_block(comparison, domains, criteria)
                methods = [names.method(method) for method in block[0].index]
                labels = {"Model": comparison.model, "Pruned": domains["code"].pruned, "Criterion": methods}
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


@output("unified.table5", chapter="benchmarks", filters="Model|Pruned|Calibration|Criterion", needs="results")
def benchmark_table(results: Results, name: str) -> Table | None:
    """Every benchmark of every model, with 95 % intervals."""
    study, comparisons = results.study, results.measured
    if not comparisons:
        return None
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
        title="All benchmarks",
        caption=f"{_metrics(study)} {setting(study)}",
        frame=frame[[*PANEL, "Criterion", *map(names.benchmark, columns)]],
        formats={names.benchmark(column): SCORE for column in columns},
        best={names.benchmark(column): "min" if column in lower else "max" for column in columns},
        blocks=PANEL,
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


@output("unified.table2", needs=BOTH_TASKS)
def published_task_specific(results: Results, name: str) -> Table:
    """The criteria of Unified Expert Pruning, calibrated on the task that they are evaluated on."""
    return task_specific_table(results, name, names.TASK_SPECIFIC)
