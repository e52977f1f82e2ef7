"""The figures about scores: winner map (Unified Expert Pruning Fig. 2), averages with intervals, radar plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.projections.polar import PolarAxes

from analysis import names
from analysis.outputs.score_rows import method_lines
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.cell_scores import mean_target, not_averaged
from analysis.stats.comparison import Comparison, Panel, Target

RADAR_METHODS = ("aimer", "magnitude", "random", "frequency", "seer", "ean", "reap")
"""The methods of AIMER's tables: those of the study are drawn in a radar plot before all others."""
RADAR_LINES = len(RADAR_METHODS)
"""Methods drawn in a radar plot at most."""
RADAR_ACROSS = 2
"""Radar plots side by side: with 16 benchmarks around it, each needs half of the page."""


def averages_figure(comparison: Comparison, *, name: str) -> Figure:
    """Avg of every criterion with its 95 % interval beside the unpruned model: a row of panels per ratio."""
    panels = comparison.panels
    sets = names.calibrations_in_order(panel.calibration for panel in panels)
    groups = list(dict.fromkeys(panel.settings for panel in panels))
    with style.look():
        rows = [max(len(panel.cells) for panel in panels if panel.settings == group) for group in groups]
        heights = [max(0.17 * methods, 0.9) for methods in rows]
        drawing = style.drawing(style.PAGE, sum(heights) + 0.75 * len(groups))
        grid = drawing.subplots(
            len(groups), len(sets), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for row, group in enumerate(groups):
            members = [panel for panel in panels if panel.settings == group]
            order = _order(comparison, members)
            for axes in grid[row]:
                axes.set_visible(False)
            for panel in members:
                axes = grid[row][sets.index(panel.calibration)]
                axes.set_visible(True)
                _averages_axes(axes, comparison, panel, order)
                axes.set_title(f"{names.calibration(panel.calibration)}, {panel.pruned} pruned", fontsize=7.5)
                if panel.calibration != sets[0]:
                    axes.set_yticklabels([])
        drawing.supxlabel("Avg (mean of the displayed columns)", fontsize=8)
    caption = (
        "Points are averages over the displayed columns, bars 95 % intervals (items resampled). The dashed line and "
        "band are the unpruned model. Criteria are sorted by their mean over the panels of a row."
    )
    caption = " ".join([caption, *not_averaged([comparison])])
    return Figure(name, f"How much is kept: {comparison.model}", caption, drawing)


def _order(comparison: Comparison, panels: Sequence[Panel]) -> list[str]:
    """Criteria from the lowest to the highest mean Avg."""
    averages = pd.DataFrame(
        {
            panel.calibration: {name: score[cell] for name, cell in panel.cells.items()}
            for panel in panels
            for score in [comparison.score(panel.averaged(comparison))]
        }
    )
    return [str(name) for name in averages.mean(axis=1).sort_values(na_position="first", kind="stable").index]


def _averages_axes(axes: Axes, comparison: Comparison, panel: Panel, order: Sequence[str]) -> None:
    target = panel.averaged(comparison)
    scores, (low, high) = comparison.score(target), comparison.interval(target)
    if comparison.unpruned is not None:
        full = comparison.unpruned
        axes.axvspan(low[full], high[full], color=style.RULE, alpha=0.5, linewidth=0)
        axes.axvline(scores[full], color=style.INK, linestyle=(0, (4, 2)), linewidth=0.9)
    for y, criterion in enumerate(order):
        cell = panel.cells.get(criterion)
        if cell is None:
            continue
        if np.isnan(scores[cell]):
            beside = axes.get_yaxis_transform()  # x in shares of the width, so that a gap has no score
            axes.text(0.02, y, "gap", transform=beside, fontsize=6.5, color=style.MUTED, va="center")
            continue
        shade = style.colour(criterion)
        axes.plot([low[cell], high[cell]], [y, y], color=shade, linewidth=1.6, solid_capstyle="butt", alpha=0.75)
        axes.plot(scores[cell], y, marker="o", markersize=4, color=shade)
    axes.set_yticks(range(len(order)), [names.method(name) for name in order], fontsize=7)
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)


def radar_figure(comparison: Comparison, *, name: str) -> Figure | None:
    """Benchmarks as spokes; the unpruned model and the methods of a panel as lines. None below 3 benchmarks."""
    panels = [panel for panel in comparison.panels if len(radar_benchmarks(comparison, panel)) >= 3]
    if not panels:
        return None
    lines = method_lines(comparison)
    across = min(RADAR_ACROSS, len(panels))
    down = -(-len(panels) // across)
    with style.look():
        drawing = style.drawing(style.PAGE, 2.45 * down + 0.5)
        drawn: list[str] = []
        for at, panel in enumerate(panels):
            axes = drawing.add_subplot(down, across, at + 1, projection="polar")
            assert isinstance(axes, PolarAxes)
            drawn += _radar_axes(axes, comparison, panel, lines)
        handles = [lines[name] for name in ["none", *names.methods_in_order(drawn)]]
        longest = max(len(str(line.get_label())) for line in handles)
        ncols = max(1, min(6, len(handles), 100 // (longest + 8)))
        drawing.legend(handles=handles, loc="outside lower center", ncols=ncols, fontsize=7)
    most = names.count(RADAR_LINES, "method")
    caption = (
        "Scores on each benchmark from 0 (centre) to 1 (rim); dashed: the unpruned model. Each panel has the methods "
        f"of AIMER's tables, then the best of the others by Avg, {most} at most."
    )
    left = [names.benchmark(str(each)) for each in comparison.benchmarks if each in comparison.lower_is_better]
    if left:
        caption += f" {names.listing(left)}: left out, as less is better there."
    return Figure(name, f"Strengths and weaknesses: {comparison.model}", caption, drawing)


def radar_benchmarks(comparison: Comparison, panel: Panel) -> Target:
    """The benchmarks that the cells of a panel were evaluated on and in which more is better, one family after the
    other as in the papers' tables."""
    ordered = names.in_order(map(str, comparison.benchmarks), names.BENCHMARKS)
    return mean_target(comparison, list(panel.cells.values()), ordered)


def radar_methods(comparison: Comparison, panel: Panel) -> list[str]:
    """The methods of a panel to draw: those of AIMER's tables, then the others from the highest Avg, RADAR_LINES at
    most; methods without any score are left out."""
    average = comparison.score(panel.averaged(comparison))
    run = comparison.benchmarks[list(radar_benchmarks(comparison, panel))].notna().any(axis=1)
    others = [method for method in panel.cells if method not in RADAR_METHODS]
    others.sort(key=lambda method: -average.fillna(-1)[panel.cells[method]])
    first = [method for method in RADAR_METHODS if method in panel.cells]
    return [method for method in [*first, *others] if run[panel.cells[method]]][:RADAR_LINES]


def _radar_axes(axes: PolarAxes, comparison: Comparison, panel: Panel, lines: Mapping[str, Line2D]) -> list[str]:
    benchmarks, methods = list(radar_benchmarks(comparison, panel)), radar_methods(comparison, panel)
    angles = np.linspace(0, 2 * np.pi, len(benchmarks), endpoint=False)
    closed = np.append(angles, angles[0])
    cells = {"none": comparison.unpruned, **{method: panel.cells[method] for method in methods}}
    for method, cell in cells.items():
        if cell is None:
            continue
        values = comparison.benchmarks.loc[cell, benchmarks].to_numpy(float)
        line = copy(lines[method])
        line.set_data(closed, np.append(values, values[0]))
        axes.add_line(line)
    axes.set_theta_offset(np.pi / 2)
    axes.set_theta_direction(-1)
    axes.set_xticks(angles, [names.benchmark(name) for name in benchmarks], fontsize=6.5)
    for angle, text in zip(angles, axes.get_xticklabels(), strict=True):
        side = round(float(np.sin(angle)), 6)
        text.set_horizontalalignment("center" if side == 0 else "left" if side > 0 else "right")
    axes.tick_params(axis="x", pad=-1)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.25, 0.5, 0.75, 1.0], [])
    axes.spines["polar"].set_color(style.RULE)
    axes.set_title(f"{names.calibration(panel.calibration)}, {panel.pruned} pruned", fontsize=7.5, pad=10, loc="center")
    return methods


@output("averages", chapter="kept")
def averages(results: Results, name: str) -> list[Item]:
    """How much of the unpruned model's averages is kept, with intervals."""
    return [averages_figure(comparison, name=own) for comparison, own in results.per_model(name)]


@output("aimer.fig3", chapter="task", needs="three benchmarks", also=("aimer.fig4", "aimer.fig5"))
def radar(results: Results, name: str) -> list[Item | None]:
    """All benchmarks of each method around a circle (AIMER, Figs. 3 to 5)."""
    return [radar_figure(comparison, name=own) for comparison, own in results.per_model(name)]
