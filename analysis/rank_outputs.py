"""Average ranks with their critical difference: the diagram and the table."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis import names, style
from analysis.comparison import Comparison
from analysis.load import Study
from analysis.rank_tests import BENCHMARKS, COLUMNS, LEVEL, RankTest, rank_tests
from analysis.style import Figure
from analysis.tables import RANK, Table, setting

_ROW = 0.165
"""Inches between the names of two methods."""
_SHORT = 15
"""Letters of a name up to which two diagrams stand side by side."""


def rank_figure(comparison: Comparison, over: str, *, name: str) -> Figure | None:
    """A critical-difference diagram per panel. None where no panel has enough methods and blocks."""
    tests = rank_tests(comparison, over)
    if not tests:
        return None
    longest = max(len(names.method(str(key))) for test in tests for key in test.ranks.index)
    across = 2 if longest <= _SHORT and len(tests) > 1 else 1
    down = -(-len(tests) // across)
    rows = max(-(-len(test.ranks) // 2) + len(test.cliques()) for test in tests)
    with style.look():
        drawing = style.drawing(style.PAGE, down * (rows * _ROW + 0.75))
        for at, test in enumerate(tests):
            _diagram(drawing.add_subplot(down, across, at + 1), test, margin=(0.42 if across == 2 else 0.3))
    blocks = "displayed columns" if over == COLUMNS else "benchmarks"
    caption = (
        f"Average ranks over the {blocks}, 1 is best. Methods joined by a bar are not told from each other: they are "
        f"closer than the critical difference (CD, Nemenyi, {LEVEL:.0%}), or Friedman's test finds no difference at "
        "all, and the bar then joins everything. Methods with a gap have no average rank and are left out."
    )
    return Figure(name, f"Which ranks differ, over {blocks}: {comparison.model}", caption, drawing)


def _diagram(axes: Axes, test: RankTest, margin: float) -> None:
    count, cliques = len(test.ranks), test.cliques()
    half = -(-count // 2)
    depth = len(cliques) + 0.6
    axes.set(xlim=(1 - margin * (count - 1), count + margin * (count - 1)), ylim=(depth + half + 0.2, -2.4))
    axes.hlines(0, 1, count, color=style.MUTED, linewidth=0.9)
    step = max(1, round(count / 7))
    for tick in range(1, count + 1, step):
        axes.vlines(tick, -0.25, 0, color=style.MUTED, linewidth=0.8)
        axes.text(tick, -0.35, str(tick), ha="center", va="bottom", fontsize=6.5)
    _measure(axes, test)
    for level, (first, last) in enumerate(cliques):
        left, right = test.ranks.iloc[first] - 0.06 * step, test.ranks.iloc[last] + 0.06 * step
        axes.add_patch(Rectangle((left, level + 0.55), right - left, 0.3, color=style.INK, linewidth=0))
    reach = 0.04 * (count - 1)
    for place, (key, rank) in enumerate(test.ranks.items()):
        left = place < half
        y = depth + (place if left else count - 1 - place) + 0.5
        x = 1 - reach if left else count + reach
        shade = style.colour(str(key))
        axes.plot([rank, rank, x], [0, y, y], color=shade, linewidth=1.0, solid_joinstyle="miter")
        axes.plot(rank, 0, marker="o", markersize=3.2, color=shade)
        words = (names.method(str(key)), f"{rank:.2f}")
        text = "  ".join(words if left else words[::-1])
        axes.text(x + (-reach if left else reach) / 2, y, text, ha="right" if left else "left", va="center", fontsize=7)
    axes.set_title(_title(test), fontsize=7.5)
    axes.set_xticks([])
    axes.set_yticks([])
    style.bare(axes)


def _measure(axes: Axes, test: RankTest) -> None:
    """The length of the critical difference, above the axis; cut where it is longer than the axis."""
    length = min(test.difference, len(test.ranks) - 1)
    axes.plot([1, 1 + length], [-1.55, -1.55], color=style.INK, linewidth=1.6, solid_capstyle="butt")
    beyond = " (longer than the axis)" if test.difference > length else ""
    axes.text(1, -1.7, f"CD = {test.difference:.2f}{beyond}", va="bottom", fontsize=6.5)


def _title(test: RankTest) -> str:
    panel = test.panel
    p = "all tie" if pd.isna(test.p) else f"Friedman p {'< 0.001' if test.p < 0.001 else f'= {test.p:.3f}'}"
    return f"{names.calibration(panel.calibration)}, {panel.pruned} pruned: {p}"


def rank_test_table(study: Study, comparisons: Sequence[Comparison], *, name: str) -> Table:
    """The same as numbers, over columns and over benchmarks: a row per method."""
    rows = [
        _row(comparison.model, test, str(key), rank, p)
        for comparison in comparisons
        for over in (COLUMNS, BENCHMARKS)
        for test in rank_tests(comparison, over)
        for (key, rank), p in zip(test.ranks.items(), test.p_to_best(), strict=True)
    ]
    text = ["Model", "Pruned", "Calibration", "Over", "Criterion", "Told from the best"]
    numbers = {"Avg Rank": RANK, "p to the best": "{:.4f}", "CD": RANK, "Friedman χ²": RANK, "Friedman p": "{:.4f}"}
    return Table(
        name=name,
        title="Which average ranks differ",
        caption="Friedman's test over columns or benchmarks (those that grade the same answers twice count once), then "
        f"Nemenyi's: average ranks further apart than CD differ at the {LEVEL:.0%} level. p to the best: Nemenyi's, "
        f"which corrects for looking at all pairs of one block. {setting(study)}",
        frame=pd.DataFrame(rows, columns=[*text, *numbers]),
        formats=numbers,
        best={"Avg Rank": "min"},
        blocks=("Model", "Pruned", "Calibration", "Over"),
        optional=("p to the best", "Friedman χ²", "Friedman p"),
        footnotes=_left_out(comparisons),
    )


def _row(model: str, test: RankTest, key: str, rank: float, p: float) -> dict[str, object]:
    best = pd.isna(p)
    return {
        "Model": model,
        "Pruned": test.panel.pruned,
        "Calibration": names.calibration(test.panel.calibration),
        "Over": f"{test.blocks} {test.over}",
        "Criterion": names.method(key),
        "Told from the best": "best" if best else "yes" if test.told and p < LEVEL else "no",
        "Avg Rank": rank,
        "p to the best": p,
        "CD": test.difference,
        "Friedman χ²": test.statistic,
        "Friedman p": test.p,
    }


def _left_out(comparisons: Sequence[Comparison]) -> list[str]:
    found = [
        f"{names.method(key)} ({names.calibration(test.panel.calibration)}, {test.panel.pruned})"
        for comparison in comparisons
        for test in rank_tests(comparison, BENCHMARKS)
        for key in test.incomplete
    ]
    return [f"Left out for a gap: {names.listing(dict.fromkeys(found))}."] if found else []
