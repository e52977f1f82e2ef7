"""Average ranks of criteria (Unified Expert Pruning, Table 1), by scores and by losses, and
critical differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis import names
from analysis.outputs.captions import LOSSES, PANEL, setting
from analysis.outputs.score_rows import numbers_table, stacked
from analysis.registry import Item, Results, output, per_model
from analysis.render import style
from analysis.render.style import LETTER, Figure
from analysis.render.table import RANK, Table
from analysis.stats import ranks
from analysis.stats.cell_scores import means_in_words, not_averaged, rank_block
from analysis.stats.comparison import Comparison, means
from analysis.stats.rank_tests import BENCHMARKS, COLUMNS, RankTest, rank_tests
from analysis.stats.uncertainty import LEVEL
from analysis.stats.winners import CAPTION


@output("ranks", chapter="ranks", filters="*Model|Pruned|Calibration")
def rank_table(results: Results, name: str, criteria: Sequence[str] | None = None) -> Table | None:
    """Scores, averages and ranks of all criteria.

    One block per model, ratio and calibration set: displayed columns, Avg (with 95 % intervals) and
    Avg Rank of the unpruned model and every criterion. Average ranks are among the criteria shown,
    the unpruned model excluded.
    """
    comparisons = results.comparisons
    if not comparisons:
        return None
    return _table(
        comparisons,
        criteria,
        name=name,
        title="Scores, average and average rank",
        caption=f"{means_in_words(comparisons)} Pruned models are ranked by values rounded to "
        "three decimals; ties "
        f"share the mean of their ranks. {setting(results.study)}",
        footnotes=[*_partial_columns(comparisons), *not_averaged(comparisons)],
    )


@output("ranks.loss", chapter="ranks", filters="*Model|Pruned|Calibration", needs=LOSSES)
def loss_table(results: Results, name: str) -> Table | None:
    """Losses on right answers, their mean and ranks, for each model, ratio and calibration set."""
    study = results.by_answer_loss.study
    comparisons = results.by_answer_loss.comparisons
    if not comparisons:
        return None
    return _table(
        comparisons,
        name=name,
        title="Loss on right answers, mean and average rank",
        caption=f"{CAPTION} {means_in_words(comparisons)} The lowest loss of the pruned models has "
        f"rank 1. {setting(study)}",
    )


def _table(
    comparisons: Sequence[Comparison], criteria: Sequence[str] | None = None, **about: Any
) -> Table | None:
    """Make a table with a block for each panel: displayed columns, then their mean and average
    ranks."""
    blocks = [
        rank_block(comparison, panel, criteria)
        for comparison in comparisons
        for panel in comparison.panels
    ]
    rows = stacked(blocks)
    if rows is None:
        return None
    text = [*PANEL, "Criterion"]
    last = [*(name for name in means(comparisons) if name in rows.frame), "Avg Rank"]
    shown = [str(column) for column in rows.frame if column not in (*text, *last)]
    return numbers_table(rows, [*text, *shown, *last], {"Avg Rank": RANK}, blocks=PANEL, **about)


def _partial_columns(comparisons: Iterable[Comparison]) -> list[str]:
    """A sentence for every column that lacks benchmarks; one per group of models when models
    differ."""
    models_by_run: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for comparison in comparisons:
        for column in comparison.benchmarks_of:
            run = (
                comparison.benchmarks_of[column]
                if column in ranks.partial(comparison.benchmarks_of)
                else ()
            )
            models_by_run.setdefault(column, {}).setdefault(run, []).append(comparison.model)
    sentences = []
    for column, by_run in models_by_run.items():
        benchmarks = names.COLUMNS.get(column, ())
        for run, models in by_run.items():
            if run:
                of = f" for {names.listing(models)}" if len(by_run) > 1 else ""
                missing = names.not_run(name for name in benchmarks if name not in run)
                sentences.append(
                    f"{column} is the mean of {len(run)} of its {len(benchmarks)} benchmarks{of}: "
                    f"{missing}."
                )
    return sentences


_ROW = 0.165
"""Inches between the names of consecutive methods."""
_SHORT = 15
"""Longest name, in letters, for which two diagrams are drawn side by side."""


def rank_figure(comparison: Comparison, over: str, name: str) -> Figure | None:
    """Draw a critical-difference diagram for each panel in which methods differ. None when there is
    none."""
    tests = [test for test in rank_tests(comparison, over) if test.significant]
    if not tests:
        return None
    longest = max(len(names.method(str(key))) for test in tests for key in test.ranks.index)
    across = 2 if longest <= _SHORT and len(tests) > 1 else 1
    down = -(-len(tests) // across)
    rows = max(-(-len(test.ranks) // 2) + len(test.cliques()) for test in tests)
    drawing = style.drawing(style.PAGE, down * (rows * _ROW + 0.75))
    for at, test in enumerate(tests):
        _diagram(drawing.add_subplot(down, across, at + 1), test, style.PAGE / across)
    blocks = "displayed columns" if over == COLUMNS else "benchmarks"
    caption = (
        f"Average ranks of methods with several seeds over the {blocks} and seeds, 1 is best. "
        "Methods joined by a bar "
        "do not differ significantly: they are closer than the critical difference (CD, "
        f"{LEVEL:.0%}; seeds and "
        f"{blocks} are random effects). Only panels with a difference are drawn. Methods with a "
        "gap are left out."
    )
    return Figure(
        name, f"Critical differences of ranks, over {blocks}: {comparison.model}", caption, drawing
    )


def _diagram(axes: Axes, test: RankTest, inches: float) -> None:
    """Draw a test; `inches`: the width of the panel, which has room for the names on both sides of
    the axis."""
    count = len(test.ranks)
    cliques = test.cliques()
    half = -(-count // 2)
    depth = len(cliques) + 0.6
    texts = [f"{names.method(str(key))}  {rank:.2f}" for key, rank in test.ranks.items()]
    sides = [max(map(len, side)) * LETTER + 0.2 for side in (texts[:half], texts[half:])]
    ranks_per_inch = (count - 1) / (inches - sum(sides))
    left, right = (side * ranks_per_inch for side in sides)
    axes.set(xlim=(1 - left, count + right), ylim=(depth + half + 0.2, -2.4))
    axes.hlines(0, 1, count, color=style.MUTED, linewidth=0.9)
    # numbers of two digits are 0.2 inches apart
    step = max(1, round(count / 7), math.ceil(0.2 * ranks_per_inch))
    axes.vlines(range(1, count + 1, step), -0.25, 0, color=style.MUTED, linewidth=0.8)
    for tick in range(1, count + 1, step):
        axes.text(tick, -0.35, str(tick), ha="center", va="bottom", fontsize=6.5)
    length = min(test.difference, count - 1)
    axes.plot(
        [1, 1 + length], [-1.55, -1.55], color=style.INK, linewidth=1.6, solid_capstyle="butt"
    )
    beyond = " (longer than the axis)" if test.difference > length else ""
    axes.text(1, -1.7, f"CD = {test.difference:.2f}{beyond}", va="bottom", fontsize=6.5)
    for level, (first, last) in enumerate(cliques):
        left = test.ranks.iloc[first] - 0.06 * step
        right = test.ranks.iloc[last] + 0.06 * step
        axes.add_patch(
            Rectangle((left, level + 0.55), right - left, 0.3, color=style.INK, linewidth=0)
        )
    reach = 0.12 * ranks_per_inch
    for position, (key, rank) in enumerate(test.ranks.items()):
        left = position < half
        y = depth + (position if left else count - 1 - position) + 0.5
        x = 1 - reach if left else count + reach
        shade = style.colour(str(key))
        axes.plot([rank, rank, x], [0, y, y], color=shade, linewidth=1.0, solid_joinstyle="miter")
        axes.plot(rank, 0, marker="o", markersize=3.2, color=shade)
        parts = (names.method(str(key)), f"{rank:.2f}")
        text = "  ".join(parts if left else parts[::-1])
        axes.text(
            x + (-reach if left else reach) / 2,
            y,
            text,
            ha="right" if left else "left",
            va="center",
            fontsize=7,
        )
    axes.set_title(
        f"{names.calibration(test.panel.calibration)}, {test.panel.pruned} pruned", fontsize=7.5
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_visible(False)
    style.bare(axes)


def rank_test_table(results: Results, name: str) -> Table:
    """Critical differences as numbers, over columns and over benchmarks: a row per method."""
    rows = []
    incomplete = []
    for comparison in results.comparisons:
        for over in (COLUMNS, BENCHMARKS):
            for test in rank_tests(comparison, over):
                calibration = names.calibration(test.panel.calibration)
                removed = test.panel.pruned
                for (key, rank), p in zip(test.ranks.items(), test.p_to_best, strict=True):
                    differs = "best"
                    if pd.notna(p):
                        differs = "yes" if p < LEVEL else "no"
                    text = (
                        comparison.model,
                        removed,
                        calibration,
                        f"{test.blocks} {test.over}, {test.seeds} seeds",
                        names.method(str(key)),
                    )
                    rows.append((*text, differs, rank, p, test.difference))
                if over == BENCHMARKS:
                    incomplete += [
                        f"{names.method(key)} ({calibration}, {removed})" for key in test.incomplete
                    ]
    text_columns = ["Model", "Pruned", "Calibration", "Over", "Criterion", "Differs from the best"]
    numbers = {"Avg Rank": RANK, "p to the best": "{:.4f}", "CD": RANK}
    return Table(
        name=name,
        title="Critical differences of average ranks",
        caption="Average ranks over columns or benchmarks (those that grade the same answers "
        "twice count once) and "
        f"seeds. Methods whose ranks are further apart than CD differ at the {LEVEL:.0%} level. "
        "Seeds and columns are "
        "random effects; CD and p to the best are simultaneous for all pairs of one block "
        "(studentised range). "
        f"{setting(results.study)}",
        frame=pd.DataFrame(rows, columns=[*text_columns, *numbers]),
        formats=numbers,
        best={"Avg Rank": "min"},
        blocks=("Model", "Pruned", "Calibration", "Over"),
        optional=("p to the best",),
        footnotes=[f"Left out for a gap: {names.listing(dict.fromkeys(incomplete))}."]
        if incomplete
        else [],
    )


@output("unified.table1")
def published_ranks(results: Results, name: str) -> Table | None:
    """Scores, averages and ranks of the criteria that Unified Expert Pruning ranks."""
    run = set(results.study.cells["method"]) & set(names.RANKED)
    return rank_table(results, name, names.RANKED) if run else None


@per_model()
def rank_figures(results: Results, comparison: Comparison, name: str) -> list[Figure | None]:
    """Critical differences over displayed columns, and over benchmarks."""
    ends = {COLUMNS: "", BENCHMARKS: ".benchmarks"}
    return [rank_figure(comparison, over, f"{name}{end}") for over, end in ends.items()]


@output(
    "ranks.cd",
    chapter="ranks",
    filters="*Model|Pruned|Calibration|Over",
    needs="three criteria with several seeds, three columns",
)
def rank_differences(results: Results, name: str) -> list[Item]:
    """Average ranks with their critical difference: diagrams over columns and over benchmarks, and
    a table."""
    return [*rank_figures(results, name), rank_test_table(results, name)]
