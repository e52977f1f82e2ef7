"""Marks of figures: lines, maps, intervals, and bars with a line. Each draws a data frame
of at least one row, with one panel for each value of the column "panel"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill, wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis as MatplotlibAxis
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from pandas.api.types import is_numeric_dtype

from moe_lab.analysis.render import style
from moe_lab.analysis.render.style import INK, MUTED, PAGE, SURFACE, Figure

WIDE = 3
"""Largest number of panels side by side that leaves room for a title of several words."""
LEGEND = 0.5
"""Height of the space for the legend, in inches."""
TITLE = 0.5
"""Height of the space for the title and the labels of a row of panels, in inches."""


@dataclass(frozen=True)
class Axis:
    """What the panels of a figure show along x or y."""

    label: str = ""
    ticks: Callable[[MatplotlibAxis], None] | None = None
    """Function that sets positions and format of the ticks."""
    limits: tuple[float, float] | None = None


LAYERS = Axis(
    "decoder layer", lambda axis: axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
)
SCORES = (0, 1.02)
"""Limits of an axis with scores or shares."""


def panels(
    titles: Iterable[str],
    x: Axis,
    y: Axis,
    *,
    columns: int = WIDE,
    height: float | Sequence[float] = 2.1,
    **options: Any,
) -> tuple[Drawing, dict[Any, Axes]]:
    """(drawing, title -> panel): a drawing with an empty panel for each of the different `titles`,
    at least one.

    - columns: largest number of panels in a row
    - height: height of each row of panels in inches, or a list with the height of each
    - options: arguments of `subplots`
    """
    titles = list(dict.fromkeys(titles))
    is_narrow = len(titles) == 1 and columns > 1
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)  # rounded up
    heights = [height] * rows if isinstance(height, int | float) else list(height)
    drawing = style.drawing(PAGE * (0.6 if is_narrow else 1), sum(heights) + LEGEND)
    grid = drawing.subplots(rows, columns, squeeze=False, height_ratios=heights, **options)
    for axes in grid.flat[len(titles) :]:
        axes.remove()
    letters = int(drawing.get_figwidth() / columns * 12)  # in a line of a title
    panel_of_title = dict(zip(titles, grid.flat[: len(titles)], strict=True))
    for number, (title, axes) in enumerate(panel_of_title.items()):
        axes.set_title(fill(title, letters), fontsize=7.5)
        axes.set_xlabel(x.label if number + columns >= len(titles) else "")
        axes.set_ylabel(y.label if number % columns == 0 else "")
        for axis, declared in ((axes.xaxis, x), (axes.yaxis, y)):
            if declared.ticks is not None:
                declared.ticks(axis)
        if x.limits is not None:
            axes.set_xlim(x.limits)
        if y.limits is not None:
            axes.set_ylim(y.limits)
    return drawing, panel_of_title


def lines(
    rows: pd.DataFrame, entries: Mapping[Any, Line2D], x: Axis, y: Axis, **layout: Any
) -> Drawing:
    """Lines with markers over a number.

    rows: columns "panel", "label" (a key of `entries`), "x", "y", and optional columns: "line"
    (value that differs between lines of one label), "low" and "high" (interval of a point), and
    "is_open" (whether the marker is not filled). NaN in "x" or "y" interrupts a line.
    entries: label -> legend entry with the style of its lines; layout: arguments of `panels`.
    """
    drawing, panel_of_title = panels(rows["panel"], x, y, **layout)
    for axes in panel_of_title.values():
        axes.grid()
    keys = [column for column in ("panel", "label", "line") if column in rows]
    for (title, label, *_), line in rows.groupby(keys, sort=False):
        axes = panel_of_title[title]
        entry = entries[label]
        shade = entry.get_color()
        if "low" in line:
            axes.vlines(line["x"], line["low"], line["high"], color=shade, linewidth=1.2, alpha=0.5)
        style.draw_line(axes, entry, line["x"], line["y"])
        if "is_open" in line:
            hollow = style.legend_entry("", color=shade, marker=entry.get_marker(), linestyle="")
            hollow.set(markersize=entry.get_markersize(), markerfacecolor=SURFACE)
            points = line[line["is_open"].astype(bool)]
            style.draw_line(axes, hollow, points["x"], points["y"])
    return drawing


def heat_map(
    rows: pd.DataFrame, x: str = "", y: str = "", *, columns: int = 2, height: float = 0.36
) -> Drawing:
    """Maps of labelled squares. Texts that do not fit into their squares are left out.

    rows: columns "panel", "x" and "y" (labels of the square's column and row: numbers, which are
    sorted, or texts in the order of their first squares), "colour" ("none" for a square without
    colour), "text" and, optionally, "is_hatched".
    x, y: labels of the axes; height: of a square, in inches.
    """
    by_panel = rows.groupby("panel", sort=False)
    panel_height = height * by_panel["y"].nunique().max() + TITLE
    drawing, panel_of_title = panels(
        rows["panel"], Axis(x), Axis(y), columns=columns, height=panel_height
    )
    width = drawing.get_figwidth() / min(columns, len(panel_of_title))
    for title, squares in by_panel:
        draw_squares(panel_of_title[title], squares, width, height)
    return drawing


def draw_squares(axes: Axes, squares: pd.DataFrame, width: float, height: float = 0.36) -> None:
    """Draw one map.

    squares: rows of `heat_map`; width: of the panel with its labels, in inches; height: of a
    square."""
    column_labels, row_labels = (
        sorted(labels.unique()) if is_numeric_dtype(labels) else list(labels.unique())
        for labels in (squares["x"], squares["y"])
    )
    letters = int((width - 1) / len(column_labels) / style.SMALL_LETTER)
    line_count = int(height / style.SMALL_LINE)
    for square in squares.to_dict("records"):
        x, y = column_labels.index(square["x"]), row_labels.index(square["y"])
        patch = Rectangle((x + 0.01, y + 0.02), 0.98, 0.96, facecolor=square["colour"])
        patch.set(edgecolor=MUTED, linewidth=0)
        if square.get("is_hatched"):
            patch.set_hatch(style.HATCH)
        axes.add_patch(patch)
        if text := _fitted(square["text"], letters, line_count):
            properties: Any = {"ha": "center", "va": "center", "color": _ink(square["colour"])}
            axes.text(x + 0.5, y + 0.5, text, fontsize=5.6, linespacing=1, **properties)
    axes.set(xlim=(0, len(column_labels)), ylim=(len(row_labels), 0))
    style.label_ticks(axes.xaxis, column_labels, 0.5, labeltop=True, labelbottom=False)
    style.label_ticks(axes.yaxis, row_labels, 0.5)
    axes.spines[:].set_visible(False)


def _fitted(text: str, letters: int, line_count: int) -> str:
    """`text` in at most `line_count` lines of `letters` letters, broken between words; "" if it
    does not fit, or if lines are shorter than 4 letters."""
    if letters < 4:
        return ""
    lines = wrap(text, letters, break_long_words=False, break_on_hyphens=False)
    fits = len(lines) <= line_count and all(len(line) <= letters for line in lines)
    return "\n".join(lines) if fits else ""


def relative_shades(rows: pd.DataFrame, by: str | list[str], column: str) -> pd.Series:
    """The colour of each number in `column`: from light for the least to dark for the greatest of
    the rows with equal values in `by`; "none" for NaN."""
    shares = shares_of_range(rows, by, column).fillna(0.5)
    return shares.map(style.shade).where(rows[column].notna(), "none")


def shares_of_range(rows: pd.DataFrame, by: str | list[str], column: str) -> pd.Series:
    """The numbers in `column`, scaled from 0 for the least to 1 for the greatest of the rows with
    equal values in `by`; NaN if all of them are equal."""
    values = rows.groupby(by)[column]
    low, high = values.transform("min"), values.transform("max")
    return (rows[column] - low) / (high - low)


def _ink(colour: Any) -> str:
    """The colour of a text on a square; that of the page if the square is transparent."""
    *rgb, alpha = to_rgba(colour)
    if alpha < 1:
        return INK
    return "#000000" if np.dot(rgb, (0.3, 0.59, 0.11)) > 0.5 else "#ffffff"


def intervals(rows: pd.DataFrame, x: Axis, **layout: Any) -> Drawing:
    """Points with intervals, one below the other.

    rows: columns "panel", "label", "x", "low", "high", "colour" and "is_open" (whether the point is
    not filled); layout: arguments of `panels`.
    """
    by_panel = rows.groupby("panel", sort=False)
    heights = [max(0.155 * count, 0.3) + TITLE for count in by_panel.size()]
    drawing, panel_of_title = panels(rows["panel"], x, Axis(), columns=1, height=heights, **layout)
    for title, points in by_panel:
        axes = panel_of_title[title]
        y = np.arange(len(points))
        axes.hlines(
            y, points["low"], points["high"], color=points["colour"], linewidth=1.5, alpha=0.7
        )
        face = points["colour"].mask(points["is_open"].astype(bool), SURFACE)
        edge = points["colour"].tolist()
        axes.scatter(points["x"], y, s=16, c=face.tolist(), edgecolors=edge, zorder=2)
        style.label_ticks(axes.yaxis, points["label"], labelsize=6.5)
        axes.set_ylim(len(points) - 0.4, -0.6)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
    return drawing


FEWEST_LAYERS = 3
"""Fewest layers over which lines are drawn: a line of two points says less than its numbers."""


def layer_figure(
    name: str,
    title: str,
    caption: str,
    rows: pd.DataFrame,
    y: Axis,
    entries: Mapping[Any, Line2D] | None = None,
) -> Figure | None:
    """Lines over the layers of a model; None with fewer than FEWEST_LAYERS layers.

    rows: the column "layer", and those of `lines` but for "x"; entries: see `lines`.
    """
    if rows["layer"].nunique() < FEWEST_LAYERS:
        return None
    entries = entries or style.legend_entries(rows["label"])
    rows = rows.assign(x=rows["layer"]).sort_values("layer", kind="stable")
    drawing = lines(rows, entries, LAYERS, y, height=1.9, sharey="row")
    style.legend(drawing, entries.values())
    return Figure(name, title, caption, drawing)


BAR_COLOURS = "#2277bb", "#ee7733"
"""Colours of positive and of negative bars."""


def bars_and_line(axes: Axes, rows: pd.DataFrame, line_label: str = "") -> None:
    """Draw bars, and a line or points with error bars with an axis of their own on the right.

    rows: columns "bar" and "line" (heights) and, for points, "std" (half the length of their error
    bars).
    """
    x = np.arange(len(rows))
    axes.bar(x, rows["bar"], width=0.75, color=np.where(rows["bar"] < 0, *BAR_COLOURS[::-1]))
    axes.axhline(0, color=style.RULE, linewidth=0.8)
    right = axes.twinx()
    properties: Any = {"color": INK, "marker": ".", "markersize": 3, "elinewidth": 0.6}
    width = 0 if "std" in rows else 0.9  # points with error bars are not joined
    right.errorbar(x, rows["line"], rows.get("std"), linewidth=width, **properties)
    right.set_ylabel(line_label, fontsize=7)
    right.spines["right"].set_visible(True)
    for panel in (axes, right):
        style.format_power(panel.yaxis)
