"""Scores: all benchmarks, and task-specific calibration (Unified Expert Pruning, Tables 2 and 5;
AIMER, Figs. 3 to 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import PANEL_COLUMNS, metrics_in_words, score_setup
from moe_lab.analysis.outputs.score_rows import (
    concatenate_numbers,
    listed_cells,
    numbers_table,
)
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render.table import RANK, Table, display_frame
from moe_lab.analysis.stats.cell_scores import Numbers, panels_by_domain, scores, task_block
from moe_lab.analysis.stats.comparison import Target

BOTH_TASKS = "a calibration set about code and one about mathematics"


@output("task_specific", chapter="task", needs=BOTH_TASKS)
def task_specific_table(results: Results, criteria: Sequence[str] | None = None) -> Table | None:
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
        title="Calibrated on the task",
        caption="Coding columns come from the model pruned with code calibration, mathematics "
        "columns from the one pruned with mathematics calibration; Avg Rank is over these four "
        f"columns. {score_setup(results.study)}",
    )


@output(
    "unified.table5",
    chapter="benchmarks",
    needs="results",
    aliases=("aimer.fig3", "aimer.fig4", "aimer.fig5"),
)
def benchmark_table(results: Results) -> Table | None:
    """Every benchmark of every model, with 95 % intervals (also AIMER's Figs. 3 to 5)."""
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
        title="All benchmarks",
        caption=f"{_metrics(results.study)} {score_setup(results.study)}",
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
def published_task_specific_table(results: Results) -> Table | None:
    """The criteria of Unified Expert Pruning, calibrated on the task of their evaluation."""
    return task_specific_table(results, names.TASK_SPECIFIC)
