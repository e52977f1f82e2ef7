"""Average ranks of criteria (Unified Expert Pruning, Table 1), by scores and by losses, and
critical differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from analysis import names
from analysis.outputs.captions import LOSSES, PANEL_COLUMNS, score_setup
from analysis.outputs.score_rows import concatenate_numbers, numbers_table
from analysis.registry import Results, output
from analysis.render.table import RANK, Table
from analysis.stats.cell_scores import mean_definitions, notes_on_average, rank_block
from analysis.stats.comparison import Comparison, mean_quantities
from analysis.stats.rank_tests import BENCHMARKS, COLUMNS, rank_tests
from analysis.stats.uncertainty import LEVEL
from analysis.stats.winners import CAPTION


@output("ranks", chapter="ranks", filters="*Model|Pruned|Calibration")
def rank_table(results: Results, name: str, criteria: Sequence[str] | None = None) -> Table | None:
    """Scores, averages and ranks of all criteria.

    A block per model, ratio and calibration set, with a row for the unpruned model and for each
    method.

    criteria: keys of the methods that have rows, None for all methods.
    """
    comparisons = results.comparisons
    if not comparisons:
        return None
    return _table_of_panels(
        comparisons,
        criteria,
        name=name,
        title="Scores, average and average rank",
        caption=f"{mean_definitions(comparisons)} Pruned models are ranked by values rounded to "
        f"three decimals; ties share the mean of their ranks. {score_setup(results.study)}",
        footnotes=[*_notes_on_partial_columns(comparisons), *notes_on_average(comparisons)],
    )


@output("ranks.loss", chapter="ranks", filters="*Model|Pruned|Calibration", needs=LOSSES)
def loss_table(results: Results, name: str) -> Table | None:
    """Losses on right answers, their mean and ranks, for each model, ratio and calibration set."""
    study = results.by_answer_loss.study
    comparisons = results.by_answer_loss.comparisons
    if not comparisons:
        return None
    return _table_of_panels(
        comparisons,
        name=name,
        title="Loss on right answers, mean and average rank",
        caption=f"{CAPTION} {mean_definitions(comparisons)} The lowest loss of the pruned models "
        f"has rank 1. {score_setup(study)}",
    )


def _table_of_panels(
    comparisons: Sequence[Comparison], criteria: Sequence[str] | None = None, **fields: Any
) -> Table | None:
    """A table with a `rank_block` for each panel of each comparison; None without rows.

    criteria: keys of the methods that have rows, None for all methods; fields: further fields of
    `Table`."""
    blocks = [
        rank_block(comparison, panel, criteria)
        for comparison in comparisons
        for panel in comparison.panels
    ]
    rows = concatenate_numbers(blocks)
    if rows is None:
        return None
    text_columns = [*PANEL_COLUMNS, "Criterion"]
    averages = [*(name for name in mean_quantities(comparisons) if name in rows.frame), "Avg Rank"]
    other_columns = (*text_columns, *averages)
    score_columns = [str(column) for column in rows.frame if column not in other_columns]
    columns = [*text_columns, *score_columns, *averages]
    return numbers_table(rows, columns, {"Avg Rank": RANK}, blocks=PANEL_COLUMNS, **fields)


def _notes_on_partial_columns(comparisons: Iterable[Comparison]) -> list[str]:
    """A sentence for each displayed column of which only some benchmarks were run. A column has
    several sentences if its models lack different benchmarks."""
    # displayed column -> the column's benchmarks that were run -> models. The key () stands for
    # all benchmarks of the column.
    models_of_column: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for comparison in comparisons:
        for column, benchmarks in comparison.benchmarks_of.items():
            is_partial = len(benchmarks) < len(names.COLUMNS.get(column, ()))
            key = benchmarks if is_partial else ()
            models_of_column.setdefault(column, {}).setdefault(key, []).append(comparison.model)
    sentences = []
    for column, models_by_benchmarks in models_of_column.items():
        published_benchmarks = names.COLUMNS.get(column, ())
        for benchmarks, models in models_by_benchmarks.items():
            if benchmarks:
                for_models = (
                    f" for {names.enumeration(models)}" if len(models_by_benchmarks) > 1 else ""
                )
                clause_on_gaps = names.not_run(
                    name for name in published_benchmarks if name not in benchmarks
                )
                sentences.append(
                    f"{column} is the mean of {len(benchmarks)} of its {len(published_benchmarks)} "
                    f"benchmarks{for_models}: {clause_on_gaps}."
                )
    return sentences


@output(
    "ranks.cd",
    chapter="ranks",
    filters="*Model|Pruned|Calibration|Over",
    needs="three criteria with several seeds, three columns",
)
def rank_test_table(results: Results, name: str) -> Table:
    """Average ranks of methods with their critical difference, over columns and over benchmarks.

    A row per rank test and method.
    """
    rows = []
    exclusions = []  # texts that name the methods that are left out of tests
    for comparison in results.comparisons:
        for block_kind in (COLUMNS, BENCHMARKS):
            for test in rank_tests(comparison, block_kind):
                calibration = names.calibration(test.panel.calibration)
                pruned_text = test.panel.pruned_text
                for (method, rank), p in zip(test.ranks.items(), test.p_to_best, strict=True):
                    differs_from_best = "best"  # the best method has no p
                    if pd.notna(p):
                        differs_from_best = "yes" if p < LEVEL else "no"
                    texts = (
                        comparison.model,
                        pruned_text,
                        calibration,
                        f"{test.blocks} {test.block_kind}, {test.seeds} seeds",
                        names.method(str(method)),
                    )
                    rows.append((*texts, differs_from_best, rank, p, test.critical_difference))
                # the test over columns adds no exclusions: a method that lacks a column also lacks
                # a benchmark of the column
                if block_kind == BENCHMARKS:
                    exclusions += [
                        f"{names.method(method)} ({calibration}, {pruned_text})"
                        for method in test.incomplete_methods
                    ]
    text_columns = ["Model", "Pruned", "Calibration", "Over", "Criterion", "Differs from the best"]
    formats = {"Avg Rank": RANK, "p to the best": "{:.4f}", "CD": RANK}
    return Table(
        name=name,
        title="Critical differences of average ranks",
        caption="Average ranks over columns or benchmarks (those that grade the same answers twice "
        "count once) and seeds. Methods whose ranks are further apart than CD differ at the "
        f"{LEVEL:.0%} level. Seeds and columns are random effects; CD and p to the best are "
        "simultaneous for all pairs of one block (studentised range). "
        f"{score_setup(results.study)}",
        frame=pd.DataFrame(rows, columns=[*text_columns, *formats]),
        formats=formats,
        best={"Avg Rank": "min"},
        blocks=("Model", "Pruned", "Calibration", "Over"),
        optional=("p to the best",),
        footnotes=[f"Left out for a gap: {names.enumeration(dict.fromkeys(exclusions))}."]
        if exclusions
        else [],
    )


@output("unified.table1")
def published_ranks(results: Results, name: str) -> Table | None:
    """Scores, averages and ranks of the criteria that Unified Expert Pruning ranks."""
    methods = set(results.study.cells["method"]) & set(names.RANKED)
    return rank_table(results, name, names.RANKED) if methods else None
