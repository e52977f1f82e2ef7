"""What more calibration text changes, in points, against the least of it (AIMER, Fig. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from analysis import names, style
from analysis.calibration_outputs import count, sizes
from analysis.chosen import differences, group_targets
from analysis.comparison import Comparison, Target
from analysis.load import Study
from analysis.made import Made, of_model
from analysis.style import Figure

ACROSS = 3
"""Panels side by side."""
POINTS = 100
_SHADES = {"MC Avg": "#2277bb", "Code": "#ee7733", "Math": "#117733", "WildBench": "#aa4499", "Avg": style.INK}


def change_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """A panel per text, method and ratio: each average's change from the least tokens to more of the same text."""
    lines = {key: line for key, line in sizes(study, comparison).items() if len(line) > 1}
    if not lines:
        return None
    cells = [int(str(cell)) for line in lines.values() for cell in line.index]
    targets = group_targets(comparison, cells)
    rows = -(-len(lines) // ACROSS)
    with style.look():
        drawing = style.drawing(style.PAGE, 2.0 * rows + 0.6)
        grid = drawing.subplots(rows, min(ACROSS, len(lines)), squeeze=False, sharey=True)
        for axes in grid.flat[len(lines) :]:
            axes.set_visible(False)
        for axes, ((label, ratio), line) in zip(grid.flat, lines.items(), strict=False):
            _draw(axes, comparison, line, targets)
            axes.set_title(f"{label}\n{names.ratio(ratio)} pruned", fontsize=7.5)
        for row in grid:
            row[0].set_ylabel("change (points)")
        handles, shown = grid[0][0].get_legend_handles_labels()
        drawing.legend(handles, shown, loc="outside lower center", ncols=len(shown), fontsize=7)
    caption = (
        "Change of each average, in points, against calibration on the least tokens of the same text, with 95 % "
        "intervals of the paired difference (items resampled)."
    )
    return Figure(name, f"What more calibration text changes: {comparison.model}", caption, drawing)


def _draw(axes: Axes, comparison: Comparison, line: pd.DataFrame, targets: dict[str, Target]) -> None:
    first, *more = (int(str(cell)) for cell in line.index)
    read = [count(int(line["read"][cell])) for cell in more]
    axes.axhline(0, color=style.MUTED, linewidth=0.8)
    for at, (name, target) in enumerate(targets.items()):
        found = POINTS * differences(comparison, target, dict.fromkeys(more, first))
        places = [place + (at - (len(targets) - 1) / 2) * 0.12 for place in range(len(more))]
        axes.vlines(places, found["low"], found["high"], color=_SHADES[name], alpha=0.5)
        axes.plot(places, found["difference"], style.MARKERS[at], color=_SHADES[name], markersize=4, label=name)
    axes.set_xticks(range(len(more)), read)
    axes.set_xlim(-0.6, len(more) - 0.4)
    axes.set_xlabel(f"tokens read, against {count(int(line['read'][first]))}")
    axes.grid(axis="y")


def changes(study: Study, comparisons: Sequence[Comparison]) -> Made:
    """The figure of every model."""
    drawn = (change_figure(study, one, name=of_model(comparisons, "aimer.fig1", one)) for one in comparisons)
    return [figure for figure in drawn if figure]
