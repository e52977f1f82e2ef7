"""Scores, averages and ranks (Unified Expert Pruning, Tables 1, 2 and 5; AIMER, Figs. 3 to 5), and
degeneration of generated texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pandas as pd
from scipy.special import stdtrit

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import metrics_in_words, run_setup, score_setup
from moe_lab.analysis.outputs.score_rows import (
    concatenate_numbers,
    listed_cells,
    numbers_table,
    without_columns,
)
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import (
    CELL_COLUMNS,
    RANK,
    SCORE,
    Table,
    display_frame,
    printed_columns,
)
from moe_lab.analysis.stats.cell_scores import (
    Numbers,
    column_targets,
    mean_definitions,
    notes_on_average,
    rank_block,
    scores,
)
from moe_lab.analysis.stats.comparison import Comparison, mean_quantities
from moe_lab.analysis.stats.uncertainty import CONFIDENCE


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
    text_columns = list(CELL_COLUMNS)
    averages = [*(name for name in mean_quantities(comparisons) if name in rows.frame), "Avg Rank"]
    other_columns = (*text_columns, *averages)
    score_columns = [name for name in printed_columns(rows.frame) if name not in other_columns]
    proved_wins = {
        (
            win["model"],
            win["pruned"],
            names.calibration(win["calibration"]),
            names.method(win["winners"][0]),
            names.benchmark(win["column"]),
        )
        for win in records(results.winners)
        if win["proved"]
    }
    texts = [tuple(row) for row in rows.frame[text_columns].to_numpy()]
    bold = {column: [(*text, column) in proved_wins for text in texts] for column in score_columns}
    return numbers_table(
        rows,
        {"Avg Rank": RANK},
        last=(*score_columns, *averages),
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


BOTH_TASKS = "a calibration set about code and one about mathematics"


@output("task_specific", chapter="task", needs=BOTH_TASKS)
def task_specific_table(results: Results, criteria: Sequence[str] | None = None) -> Table | None:
    """All criteria, calibrated on the task on which they are evaluated.

    criteria: keys of the methods to list, None for all methods.
    """
    columns = (*names.CODE_COLUMNS, *names.MATH_COLUMNS)
    blocks = []
    for comparison in results.by_domain.comparisons:
        for panel in comparison.panels:
            sets = panel.calibration.split(names.JOINT)
            if {"code", "math"} <= set(map(names.domain, sets)):
                task_columns = tuple(column for column in columns if column in panel.columns)
                task_panel = replace(panel, columns=task_columns)
                blocks.append(rank_block(comparison, task_panel, criteria))
    rows = concatenate_numbers(blocks)
    if rows is None:
        return None
    shown = [*CELL_COLUMNS, *columns, "Avg Rank"]
    others = [column for column in printed_columns(rows.frame) if column not in shown]
    return numbers_table(
        replace(rows, frame=without_columns(rows.frame, others)),
        {"Avg Rank": RANK},
        last=(*columns, "Avg Rank"),
        title="Calibrated on the task",
        caption="Coding columns come from the model pruned with code calibration, mathematics "
        "columns from the one pruned with mathematics calibration; Avg Rank is over these "
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
    evaluated = {str(name) for comparison in results.measured for name in comparison.results}
    benchmarks = names.in_order(evaluated, names.BENCHMARKS)
    blocks = []
    for comparison in results.measured:
        cells = listed_cells(comparison)
        targets = column_targets(comparison, list(cells.index), benchmarks)
        blocks.append(scores(comparison, display_frame(cells, CELL_COLUMNS), targets))
    rows = concatenate_numbers(blocks)
    if rows is None:
        return None
    return numbers_table(
        rows,
        last=map(names.benchmark, benchmarks),
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
    "item, with its 95 % interval over items, for one seed, unless all agree. Cut: at the limit of "
    "tokens. In thought: the thought does not end. Loops: the text ends in a block of at most 50 "
    "words, or of 50 characters, that is repeated four times or more. Empty: nothing after the "
    "thought. Natural "
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
    texts = results.study.samples.dropna(subset=["characters"]).rename(columns=MEASURES)
    columns = [name for name in MEASURES.values() if name == LENGTH or texts[name].nunique() > 1]
    rows = concatenate_numbers(
        block for comparison in results.measured for block in _blocks(comparison, texts, columns)
    )
    if rows is None:
        return []
    formats = dict.fromkeys(("Score", *MEASURES.values()), SCORE)
    table = numbers_table(
        rows,
        {**formats, **dict.fromkeys((LENGTH, f"Δ {LENGTH}"), "{:,.1f}")},
        last=[name for column in columns for name in (column, f"Δ {column}")],
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


def _blocks(
    comparison: Comparison, texts: pd.DataFrame, columns: Sequence[str]
) -> Iterator[Numbers]:
    """Yield the rows of each benchmark of a model, one for each cell with generated texts.

    texts: rows of `Study.samples`; columns: their measures."""
    cells = listed_cells(comparison)
    # cells of several seeds have the means over their plans
    cell_of_text = texts["cell"].map(comparison.representatives).dropna()
    texts = texts.loc[cell_of_text.index]
    items = texts.groupby(["benchmark", cell_of_text, "item"])[list(columns)].mean()
    is_unpruned = items.index.get_level_values("cell") == comparison.unpruned_cell
    unpruned = items[is_unpruned].droplevel("cell")
    pruned = items[~is_unpruned]
    differences = pruned - unpruned.reindex(pruned.droplevel("cell").index).to_numpy()
    by_cell = differences.groupby(["benchmark", "cell"])
    mean, error, count = by_cell.mean(), by_cell.sem(), by_cell.count()
    # equal texts would have an interval of width 0
    half_width = stdtrit(count - 1, (1 + CONFIDENCE) / 2) * error.where(error > 0)
    # an interval over items leaves out what another seed changes
    has_seeds = [len(comparison.plans_by_seed[cell]) > 1 for _, cell in half_width.index]
    half_width.loc[has_seeds] = float("nan")
    parts = [mean, (mean - half_width).add_suffix(" low"), (mean + half_width).add_suffix(" high")]
    means = items.groupby(["benchmark", "cell"]).mean()
    numbers = means.join([part.add_prefix("Δ ") for part in parts])
    with_texts = numbers.index.get_level_values("benchmark")
    for benchmark in comparison.results.columns.intersection(with_texts):
        frame = display_frame(cells, CELL_COLUMNS)
        frame.insert(1, "Benchmark", names.benchmark(benchmark))
        frame["Score"] = comparison.displayed_scores((benchmark,))["score"]
        yield Numbers(frame.join(numbers.loc[benchmark], how="inner"))
