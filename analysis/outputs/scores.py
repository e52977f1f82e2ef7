"""Scores: all benchmarks as a table and as lines, and task-specific calibration (Unified
Expert Pruning, Tables 2 and 5; AIMER, Figs. 3 to 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.outputs.captions import PANEL_COLUMNS, metrics_in_words, score_setup
from analysis.outputs.score_rows import (
    concatenate_numbers,
    criterion_entries,
    listed_cells,
    numbers_table,
    panel_cells,
)
from analysis.registry import Results, output, per_model
from analysis.render import marks, style
from analysis.render.style import Figure
from analysis.render.table import RANK, Table, display_frame
from analysis.stats.cell_scores import Numbers, mean_target, panels_by_domain, scores, task_block
from analysis.stats.comparison import Comparison, Panel, Target

AIMER_METHODS = ("aimer", "magnitude", "random", "frequency", "seer", "ean", "reap")
"""The methods of AIMER's tables."""
MOST_DRAWN_METHODS = len(AIMER_METHODS)


@output(
    "aimer.fig3", chapter="task", needs="three benchmarks", aliases=("aimer.fig4", "aimer.fig5")
)
@per_model()
def benchmark_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """All benchmarks of each method side by side (AIMER, Figs. 3 to 5).

    A panel for each calibration set and ratio with at least three benchmarks, a line per method.
    """
    panels = [panel for panel in comparison.panels if len(drawn_benchmarks(comparison, panel)) >= 3]
    if not panels:
        return None
    frames = []
    for panel in panels:
        cells = panel_cells(comparison, panel)
        cells = cells[cells["method"].isin(["none", *drawn_methods(comparison, panel)])]
        benchmark_scores = comparison.benchmark_scores[list(drawn_benchmarks(comparison, panel))]
        # a row per cell and benchmark
        values = (
            benchmark_scores.rename_axis("cell")
            .reset_index()
            .melt("cell", var_name="benchmark", value_name="y")
        )
        # without cells that have no score; a benchmark that was not run (NaN) interrupts a line
        has_scores = values.groupby("cell")["y"].transform("count") > 0
        frames.append(cells.merge(values[has_scores], on="cell"))
    points = pd.concat(frames)
    benchmarks = names.in_order(points["benchmark"], names.BENCHMARKS)
    points = points.assign(x=points["benchmark"].map(benchmarks.index)).sort_values(
        "x", kind="stable"
    )
    entries = criterion_entries(points)
    labels = list(map(names.benchmark, benchmarks))
    x = marks.Axis(
        ticks=lambda axis: style.label_ticks(axis, labels, labelsize=6.5, labelrotation=90)
    )
    y = marks.Axis("score", limits=marks.SCORES)
    drawing = marks.lines(points, entries, x, y, columns=2, height=2.2)
    style.legend(drawing, entries.values())
    limit = names.count(MOST_DRAWN_METHODS, "method")
    caption = (
        "Scores on each benchmark; dashed: the unpruned model. Each panel has the methods of "
        f"AIMER's tables, then the best of the others by Avg, {limit} at most."
    )
    losses = names.enumeration(map(names.benchmark, comparison.loss_benchmarks))
    if losses:
        caption += f" {losses}: left out, as less is better there."
    return Figure(name, f"Strengths and weaknesses: {comparison.model}", caption, drawing)


def drawn_benchmarks(comparison: Comparison, panel: Panel) -> Target:
    """Benchmarks of a panel in which higher is better, in the order of tables."""
    return mean_target(comparison, list(panel.cells.values()), comparison.score_benchmarks)


def drawn_methods(comparison: Comparison, panel: Panel) -> list[str]:
    """The methods of a panel that are drawn, at most MOST_DRAWN_METHODS.

    First come AIMER_METHODS, then the other methods from the highest Avg to the lowest."""
    average = comparison.score(panel.average_columns(comparison))
    average = average.fillna(-1)  # below all scores: methods without Avg come last
    benchmarks = list(drawn_benchmarks(comparison, panel))
    has_scores = comparison.benchmark_scores[benchmarks].notna().any(axis=1)
    methods = [method for method in panel.cells if has_scores[panel.cells[method]]]
    methods.sort(key=lambda method: -average[panel.cells[method]])
    published_methods = [method for method in AIMER_METHODS if method in methods]
    ordered = dict.fromkeys([*published_methods, *methods])
    return list(ordered)[:MOST_DRAWN_METHODS]


BOTH_TASKS = "a calibration set about code and one about mathematics"


@output("task_specific", chapter="task", filters="*Model|Pruned", needs=BOTH_TASKS)
def task_specific_table(
    results: Results, name: str, criteria: Sequence[str] | None = None
) -> Table | None:
    """All criteria, calibrated on the task on which they are evaluated.

    criteria: keys of the methods to list, None for all methods.
    """
    columns = [*names.CODE_COLUMNS, *names.MATH_COLUMNS]
    best = {**dict.fromkeys(columns, "max"), "Avg Rank": "min"}
    blocks = []
    for comparison in results.comparisons:
        # domains: domain of the calibration set -> panel, for one ratio and gate
        for domains in panels_by_domain(comparison).values():
            if {"code", "math"} <= set(domains):
                block = task_block(comparison, domains, criteria)
                text = {"Model": comparison.model, "Pruned": domains["code"].pruned_text}
                # the index of block.frame has keys of methods
                frame = block.frame.assign(
                    **text, Criterion=list(map(names.method, block.frame.index))
                )
                blocks.append(Numbers(frame, block.low, block.high, best))
    rows = concatenate_numbers(blocks)
    if rows is None:
        return None
    return numbers_table(
        rows,
        ["Model", "Pruned", "Criterion", *columns, "Avg Rank"],
        {"Avg Rank": RANK},
        name=name,
        title="Calibrated on the task",
        caption="Coding columns come from the model pruned with code calibration, mathematics "
        "columns from the one pruned with mathematics calibration; Avg Rank is over these four "
        f"columns. {score_setup(results.study)}",
        blocks=("Model", "Pruned"),
    )


@output(
    "unified.table5",
    chapter="benchmarks",
    filters="Model|Pruned|Calibration|Criterion",
    needs="results",
)
def benchmark_table(results: Results, name: str) -> Table | None:
    """Every benchmark of every model, with 95 % intervals."""
    blocks = []
    for comparison in results.measured:
        cells = listed_cells(comparison)
        text_columns = {
            "Model": "model",
            "Pruned": "pruned",
            "Calibration": "calibration",
            "Criterion": "method",
        }
        targets: dict[str, Target] = {
            str(benchmark): (str(benchmark),) for benchmark in comparison.benchmark_scores
        }
        numbers = scores(comparison, list(cells.index), targets)
        frame = pd.concat([display_frame(cells, text_columns), numbers.frame], axis=1)
        blocks.append(replace(numbers, frame=frame))
    rows = concatenate_numbers(blocks)
    if rows is None:
        return None
    benchmarks = names.in_order(map(str, rows.low), names.BENCHMARKS)
    return numbers_table(
        rows,
        [*PANEL_COLUMNS, "Criterion", *benchmarks],
        formats={},
        name=name,
        title="All benchmarks",
        caption=f"{_metrics(results.study)} {score_setup(results.study)}",
        blocks=PANEL_COLUMNS,
    )


def _metrics(study: Study) -> str:
    """A sentence for each metric with the benchmarks of the metric: `acc: ARC-C and PIQA.`"""
    benchmarks_by_metric: dict[str, list[str]] = {}
    results = study.results.drop_duplicates("benchmark")
    for metric, benchmark in zip(metrics_in_words(results), results["benchmark"], strict=True):
        benchmarks_by_metric.setdefault(metric, []).append(names.benchmark(benchmark))
    return " ".join(
        f"{metric}: {names.enumeration(benchmarks)}."
        for metric, benchmarks in sorted(benchmarks_by_metric.items())
    )


@output("unified.table2", needs=BOTH_TASKS)
def published_task_specific_table(results: Results, name: str) -> Table | None:
    """The criteria of Unified Expert Pruning, calibrated on the task of their evaluation."""
    return task_specific_table(results, name, names.TASK_SPECIFIC)
