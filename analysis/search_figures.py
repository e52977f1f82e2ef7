"""EvoESAP's figures: how densely layers are kept (001 Figs. 1 and 3), and how fitness rises with the generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import names, style
from analysis.frames import groups, records
from analysis.load import Study
from analysis.search_tables import is_searched
from analysis.style import Figure

_DASHED: Any = (0, (4, 2))
_UNIFORM: Any = {"color": style.INK, "linestyle": _DASHED, "linewidth": 0.9}


def densities(study: Study, model: str) -> pd.DataFrame:
    """Share of the experts each layer keeps: one row per cell of whole experts and layer, with the cell's axes."""
    cells = study.cells[(study.cells["model"] == model) & (study.cells["granularity"] == "expert")]
    kept = study.kept[study.kept["cell"].isin(cells.index)]
    found = kept.groupby(["cell", "layer"], as_index=False)["share"].mean()
    axes = ["criterion", "allocation", "ratio", "calibration", "recovery", "seed"]
    return pd.DataFrame(found.join(cells[axes], on="cell"))


def allocations_figure(found: pd.DataFrame, *, model: str, name: str) -> Figure | None:
    """001 Fig. 1: uniform, global by frequency and searched allocations of one criterion, a panel per ratio.

    The criterion is the one that was used with most allocations. None where none was used with two.
    """
    compared = found.groupby(["criterion", "ratio", "calibration"])["allocation"].transform("nunique") > 1
    found = found[compared]
    if found.empty:
        return None
    per_criterion = found.groupby("criterion")["allocation"].nunique()
    most = names.in_order(per_criterion.index[per_criterion == per_criterion.max()], names.CRITERIA)
    criterion = "reap" if "reap" in most else most[0]
    shown = found[found["criterion"] == criterion]
    lines = names.in_order(shown["allocation"], ["uniform", "global by frequency", "global"])
    styles = {word: _allocation_line(word, place) for place, word in enumerate(lines)}
    drawing = _panels(shown, "allocation", styles)
    caption = f"Share of the experts each layer keeps when {names.criterion(criterion)} chooses which. {_SAME}"
    return Figure(name, f"Density schedules: {model}", caption, drawing)


_SAME = "All schedules of a panel remove the same number of experts."


def criteria_figure(found: pd.DataFrame, *, model: str, name: str) -> Figure | None:
    """001 Fig. 3: the searched densities of every criterion, a panel per ratio. None without a search."""
    shown = found[found["allocation"].map(is_searched)]
    if shown.empty:
        return None
    lines = names.in_order(shown["criterion"], names.CRITERIA)
    styles = {criterion: _criterion_line(criterion, place) for place, criterion in enumerate(lines)}
    drawing = _panels(shown, "criterion", styles)
    caption = f"Share of the experts each layer keeps under the searched allocation of each criterion. {_SAME}"
    return Figure(name, f"Searched densities: {model}", caption, drawing)


def _panels(shown: pd.DataFrame, by: str, styles: Mapping[str, Line2D]) -> Drawing:
    """A panel per ratio and calibration set with a line per value of `by`, and the uniform density if it is none."""
    panels = list(groups(shown.sort_values("ratio", kind="stable"), ["ratio", "calibration"]))
    several = shown["calibration"].nunique() > 1
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    with style.look():
        drawing = style.drawing(style.PAGE * (1 if across > 1 else 0.6), 2.0 * down + 0.5)
        grid = drawing.subplots(down, across, sharey="row", squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (key, cells) in zip(grid.flat, panels, strict=False):
            _density_axes(axes, cells, by, styles)
            data = f", {names.calibration(key['calibration'])}" if several else ""
            axes.set_title(f"{names.ratio(key['ratio'])} pruned{data}", fontsize=8)
        for row in grid:
            row[0].set_ylabel("experts kept")
        uniform = [] if "uniform" in styles else [Line2D([], [], label="uniform", **_UNIFORM)]
        handles = [*styles.values(), *uniform]
        drawing.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=7)
    return drawing


def _density_axes(axes: Axes, cells: pd.DataFrame, by: str, styles: Mapping[str, Line2D]) -> None:
    layers = sorted(cells["layer"].unique())
    if "uniform" not in styles:
        axes.axhline(cells["share"].mean(), **_UNIFORM)
    for value, line in styles.items():
        for _, cell in groups(cells[cells[by] == value].sort_values("layer"), ["cell"]):
            axes.plot(
                [layers.index(layer) for layer in cell["layer"]],
                cell["share"],
                color=line.get_color(),
                linestyle=line.get_linestyle(),
                linewidth=1.3,
                marker=line.get_marker(),
                markersize=3.8,
                markerfacecolor=line.get_markerfacecolor(),
            )
    step = max(1, len(layers) // 8)
    axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_xlabel("layer")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:.4g} %"))
    axes.grid(axis="y")


def _allocation_line(word: str, place: int) -> Line2D:
    shades = [style.INK, "#ee7733", "#2277bb", "#117733", "#aa4499", "#7a7a7a"]
    return _line(names.allocated(word), shades[place % len(shades)], "sD^ov"[place % 5], _DASHED if not place else "-")


def _criterion_line(criterion: str, place: int) -> Line2D:
    return _line(names.criterion(criterion), style.colour(criterion), style.MARKERS[place % len(style.MARKERS)], "-")


def _line(label: str, shade: str, marker: str, pattern: Any) -> Line2D:
    return Line2D([], [], color=shade, marker=marker, markersize=3.8, linestyle=pattern, linewidth=1.3, label=label)


def history_figure(study: Study, model: str, *, name: str) -> Figure | None:
    """Best and mean fitness by generation, a panel per ratio and criterion; None without a search of this model."""
    cells = study.cells[study.cells["model"] == model]
    searches = study.searches[study.searches["cell"].isin(cells.index)]
    if searches.empty:
        return None
    about = cells.loc[searches["cell"]]
    rows = list(groups(about.sort_values("ratio", kind="stable"), ["ratio", "calibration"]))
    columns = names.in_order(about["criterion"], names.CRITERIA)
    with style.look():
        width = style.PAGE if len(columns) > 2 else style.PAGE * 0.7
        drawing = style.drawing(width, 1.6 * len(rows) + 0.6)
        grid = drawing.subplots(len(rows), len(columns), sharex=True, sharey="row", squeeze=False)
        for row, (key, found) in zip(grid, rows, strict=True):
            for axes, criterion in zip(row, columns, strict=True):
                chosen = found.index[found["criterion"] == criterion]
                _history_axes(axes, study, [int(cell) for cell in chosen])
                axes.set_title(f"{names.criterion(criterion)}, {names.ratio(key['ratio'])}", fontsize=7.5)
            row[0].set_ylabel("fitness")
        for axes in grid[-1]:
            axes.set_xlabel("generation")
        handles = [_line("best so far", _BEST, "o", "-"), _line("mean of the evaluated", _MEAN, "s", "-")]
        uniform = Line2D([], [], label="uniform", **_UNIFORM)
        drawing.legend(handles=[*handles, uniform], loc="outside lower center", ncols=3, fontsize=7)
    caption = (
        "Fitness, higher is better: the best schedule found until a generation, the mean of the schedules evaluated in "
        "it, and the uniform schedule."
    )
    return Figure(name, f"Searches by generation: {model}", caption, drawing)


_BEST, _MEAN = "#2277bb", "#ee7733"


def _history_axes(axes: Axes, study: Study, cells: Sequence[int]) -> None:
    for cell in cells:
        history = study.history[(study.history["cell"] == cell) & study.history["fitness"].notna()]
        by_generation = history.groupby("generation")["fitness"].agg(["max", "mean"])
        for values, shade, marker in (
            (np.maximum.accumulate(by_generation["max"].to_numpy(float)), _BEST, "o"),
            (by_generation["mean"].to_numpy(float), _MEAN, "s"),
        ):
            axes.plot(by_generation.index, values, color=shade, marker=marker, markersize=3, linewidth=1.2)
        for row in records(study.searches[study.searches["cell"] == cell]):
            if not pd.isna(row["uniform_fitness"]):
                axes.axhline(row["uniform_fitness"], **_UNIFORM)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(axis="y")
