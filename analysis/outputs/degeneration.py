"""Degeneration of generated texts, compared with the texts of the unpruned model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pandas as pd

from analysis import names
from analysis.load.settings import removed_share_texts
from analysis.outputs.captions import PANEL_COLUMNS, run_setup
from analysis.outputs.score_rows import concatenate_numbers, numbers_table
from analysis.outputs.scores import sort_cells
from analysis.registry import Results, output
from analysis.render.table import SCORE, Table, display_frame
from analysis.stats.cell_scores import Numbers, differences
from analysis.stats.comparison import Comparison
from analysis.stats.winners import study_of_column

MEASURES = {
    "limit": "Cut",
    "unfinished": "In thought",
    "loop": "Loops",
    "empty": "Empty",
    "natural_end": "Natural end",
    "distinct_4": "Distinct-4",
    "characters": "Characters",
}
"""Column of `moe_lab.results.TextMeasures` -> displayed column of its mean over texts."""
DIFFERENCES = {column: f"Δ {column}" for column in MEASURES.values()}
"""Displayed column -> displayed column of its difference from the unpruned model."""
LENGTH = MEASURES["characters"]
CAPTION = (
    "Means over texts, with their thoughts; Δ: the difference from the unpruned model, paired by "
    "item, with its 95 % interval unless all items agree. Cut: at the limit of tokens. In thought: "
    "the thought does not end. Loops: the text ends in a block of at most 50 words, or of 50 "
    "characters, that is repeated four times or more. Empty: nothing after the thought. Natural "
    "end: an end token or a stop text, outside a thought. Distinct-4: distinct sequences of four "
    "words, as a share of all."
)


@output(
    "degeneration",
    chapter="benchmarks",
    filters="Model|Benchmark|Pruned|Calibration|Criterion",
    needs="benchmarks whose answers are generated texts",
)
def degeneration_table(results: Results, name: str) -> Table | None:
    """How often generated texts degenerate, on each benchmark, beside the score."""
    studies = {
        column: Results(study_of_column(results.study, measure, column))
        for measure, column in MEASURES.items()
    }
    rows = concatenate_numbers(
        block
        for scored in results.measured
        for block in _blocks(
            scored,
            {
                column: comparison
                for column, study in studies.items()
                for comparison in study.measured
                if comparison.model == scored.model
            },
        )
    )
    if rows is None:
        return None
    form = dict.fromkeys(("Score", *MEASURES.values()), SCORE)
    length_form = dict.fromkeys((LENGTH, DIFFERENCES[LENGTH]), "{:,.1f}")
    columns = ["Model", "Benchmark", *PANEL_COLUMNS[1:], "Criterion", *form, *DIFFERENCES.values()]
    return numbers_table(
        # all texts of a study may be too short for a measure
        replace(rows, frame=rows.frame.reindex(columns=columns)),
        columns,
        {**form, **length_form},
        name=name,
        title="Degeneration of generated texts",
        caption=f"{CAPTION} {run_setup(results.study)}",
        blocks=("Model", "Benchmark"),
        optional=[*MEASURES.values(), *DIFFERENCES.values()],
    )


def _blocks(scored: Comparison, measured: Mapping[str, Comparison]) -> Iterator[Numbers]:
    """Yield the rows of each benchmark of a model: a row per cell with generated texts. `scored`:
    the model's scores. `measured`: displayed column -> the measures in place of scores."""
    cells = sort_cells(scored.cells.assign(pruned=removed_share_texts(scored.cells)))
    text_columns = {"Pruned": "pruned", "Calibration": "calibration", "Criterion": "method"}
    text = display_frame(cells, text_columns).assign(Model=scored.model)
    unpruned = scored.unpruned_cell
    for benchmark in map(str, measured[LENGTH].benchmark_scores if LENGTH in measured else ()):
        target = (benchmark,)
        score, _, _ = scored.displayed_scores(target)
        frame = text.assign(Benchmark=names.benchmark(benchmark), Score=score)
        low = pd.DataFrame(index=frame.index)
        high = low.copy()
        for column, comparison in measured.items():
            if benchmark in comparison.benchmark_scores:
                frame[column] = comparison.score(target)
                pairs = {cell: unpruned for cell in cells.index if unpruned not in (None, cell)}
                estimates = differences(comparison, target, pairs).reindex(frame.index)
                delta = DIFFERENCES[column]
                frame[delta] = estimates["difference"]
                # equal texts would have an interval of width 0
                ends = estimates[["low", "high"]].where(estimates["low"] < estimates["high"])
                low[delta] = ends["low"]
                high[delta] = ends["high"]
        has_texts = frame[LENGTH].notna()
        yield Numbers(frame[has_texts], low[has_texts], high[has_texts])
