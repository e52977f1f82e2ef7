"""Average ranks of criteria (Unified Expert Pruning, Table 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.outputs.captions import PANEL_COLUMNS, score_setup
from moe_lab.analysis.outputs.score_rows import concatenate_numbers, numbers_table
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render.table import RANK, Table
from moe_lab.analysis.stats.cell_scores import mean_definitions, notes_on_average, rank_block
from moe_lab.analysis.stats.comparison import Comparison, mean_quantities


@output("ranks", chapter="ranks")
def rank_table(results: Results, criteria: Sequence[str] | None = None) -> Table | None:
    """Scores, averages and ranks of all criteria.

    A block per model, ratio and calibration set, with a row for the unpruned model and for each
    method.

    criteria: keys of the methods that have rows, None for all methods.
    """
    comparisons = results.comparisons
    rows = concatenate_numbers(
        rank_block(comparison, panel, criteria)
        for comparison in comparisons
        for panel in comparison.panels
    )
    if rows is None:
        return None
    text_columns = [*PANEL_COLUMNS, "Criterion"]
    averages = [*(name for name in mean_quantities(comparisons) if name in rows.frame), "Avg Rank"]
    other_columns = (*text_columns, *averages)
    score_columns = [str(column) for column in rows.frame if column not in other_columns]
    proved = {
        (win["model"], win["pruned"], names.calibration(win["calibration"]), win["column"]): (
            names.method(win["winners"][0])
        )
        for win in records(results.winners)
        if win["proved"]
    }
    blocks = [tuple(block) for block in rows.frame[PANEL_COLUMNS].to_numpy()]
    bold = {
        column: [
            proved.get((*block, column)) == method
            for block, method in zip(blocks, rows.frame["Criterion"], strict=True)
        ]
        for column in score_columns
    }
    return numbers_table(
        rows,
        [*text_columns, *score_columns, *averages],
        {"Avg Rank": RANK},
        bold=pd.DataFrame(bold),
        title="Scores, average and average rank",
        caption=f"{mean_definitions(comparisons)} Pruned models are ranked by values rounded to "
        f"three decimals; ties share the mean of their ranks. {score_setup(results.study)}",
        footnotes=[*_notes_on_partial_columns(comparisons), *notes_on_average(comparisons)],
    )


def _notes_on_partial_columns(comparisons: Iterable[Comparison]) -> list[str]:
    """A sentence for each displayed column of which only some benchmarks were run, with the models
    for which it holds."""
    models_of_note: dict[str, list[str]] = {}
    for comparison in comparisons:
        for column, benchmarks in comparison.benchmarks_of.items():
            count = len(names.COLUMNS.get(column, ()))
            if len(benchmarks) < count:
                listed = names.enumeration(map(names.benchmark, benchmarks))
                shares = f"{len(benchmarks)} of its {count} benchmarks ({listed})"
                note = f"{column} is the mean of {shares}"
                models_of_note.setdefault(note, []).append(comparison.model)
    return [f"{note} for {names.enumeration(models)}." for note, models in models_of_note.items()]


@output("unified.table1")
def published_ranks(results: Results) -> Table | None:
    """Scores, averages and ranks of the criteria that Unified Expert Pruning ranks."""
    methods = set(results.study.cells["method"]) & set(names.RANKED)
    return rank_table(results, names.RANKED) if methods else None
