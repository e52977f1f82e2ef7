"""Degeneration of generated texts, compared with the texts of the unpruned model."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.outputs.captions import run_setup
from moe_lab.analysis.outputs.score_rows import concatenate_numbers, listed_cells, numbers_table
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import SCORE, Table, display_frame
from moe_lab.analysis.stats.cell_scores import Numbers, differences
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.winners import study_of_column

LENGTH = "Characters"
MEASURES = {
    "limit": "Cut",
    "unfinished": "In thought",
    "loop": "Loops",
    "empty": "Empty",
    "natural_end": "Natural end",
    "distinct_4": "Distinct-4",
    "characters": LENGTH,
}
"""Column of `moe_lab.result_files.TextMeasures` -> displayed column of its mean over texts."""
SHARES = ("Cut", "In thought", "Loops", "Empty")
"""Columns with shares of texts that degenerate."""
CAPTION = (
    "Means over texts, with their thoughts; Δ: the difference from the unpruned model, paired by "
    "item, with its 95 % interval unless all items agree. Cut: at the limit of tokens. In thought: "
    "the thought does not end. Loops: the text ends in a block of at most 50 words, or of 50 "
    "characters, that is repeated four times or more. Empty: nothing after the thought. Natural "
    "end: an end token or a stop text, outside a thought. Distinct-4: distinct sequences of four "
    "words, as a share of all. What is the same for all texts is left out."
)


@output(
    "degeneration",
    chapter="benchmarks",
    needs="benchmarks whose answers are generated texts",
)
def degeneration(results: Results) -> list[Item | None]:
    """How often generated texts degenerate, on each benchmark, beside the score."""
    # displayed column -> model -> its measures in place of scores
    measured = {}
    for measure, column in MEASURES.items():
        if column == LENGTH or results.study.samples[measure].nunique() > 1:
            study = study_of_column(results.study, measure, column)
            measured[column] = {entry.model: entry for entry in Results(study).measured}
    rows = concatenate_numbers(
        _block(scored, listed_cells(scored), str(benchmark), measured)
        for scored in results.measured
        if scored.model in measured[LENGTH]
        for benchmark in measured[LENGTH][scored.model].benchmark_scores
    )
    if rows is None:
        return []
    form = dict.fromkeys(("Score", *MEASURES.values()), SCORE)
    table = numbers_table(
        rows,
        list(map(str, rows.frame)),
        {**form, **dict.fromkeys((LENGTH, f"Δ {LENGTH}"), "{:,.1f}")},
        title="Degeneration of generated texts",
        caption=f"{CAPTION} {run_setup(results.study)}",
        optional=list(map(str, rows.frame)),
    )
    return [_figure(table), table]


def _figure(table: Table) -> Figure | None:
    """Shares of degenerate texts, a map per model: the mean over benchmarks and plans."""
    shares = [name for name in SHARES if name in table.frame]
    if not shares:
        return None
    texts = ["Model", "Benchmark", "Pruned", "Calibration", "Criterion"]
    rows = table.frame.melt(texts, shares, "measure", "share").dropna(subset=["share"])
    layers = charts.mean_map(charts.label("measure"), charts.label("Criterion"), "share", "share")
    caption = f"Share of texts, the mean over benchmarks and plans. {CAPTION}"
    size = ({"step": 60}, {"step": 20})
    return Figure(table.title, caption, rows, layers, 4, size, panel="Model")


def _block(
    scored: Comparison,
    cells: pd.DataFrame,
    benchmark: str,
    measured: Mapping[str, Mapping[str, Comparison]],
) -> Numbers:
    """The rows of a benchmark of a model, one for each cell with generated texts. `scored`: the
    model's scores; `cells`: all of the model's cells."""
    text_columns = {"Pruned": "pruned", "Calibration": "calibration", "Criterion": "method"}
    frame = display_frame(cells, text_columns)
    frame.insert(0, "Benchmark", names.benchmark(benchmark))
    frame.insert(0, "Model", scored.model)
    target = (benchmark,)
    frame["Score"], _, _ = scored.displayed_scores(target)
    low = pd.DataFrame(index=frame.index)
    high = low.copy()
    unpruned = scored.unpruned_cell
    pairs = {cell: unpruned for cell in cells.index if unpruned not in (None, cell)}
    for column, comparisons in measured.items():
        comparison = comparisons.get(scored.model)
        if comparison and benchmark in comparison.benchmark_scores:
            frame[column] = comparison.score(target)
            estimates = differences(comparison, target, pairs).reindex(frame.index)
            frame[f"Δ {column}"] = estimates["difference"]
            # equal texts would have an interval of width 0
            ends = estimates.where(estimates["low"] < estimates["high"])
            low[f"Δ {column}"] = ends["low"]
            high[f"Δ {column}"] = ends["high"]
    has_texts = frame[LENGTH].notna()
    return Numbers(frame[has_texts], low[has_texts], high[has_texts])
