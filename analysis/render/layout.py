"""Layout of figures: panels in a grid, as large as the texts around them allow.

This module replaces matplotlib's constrained layout and ticks, which took half of a report's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.layout_engine import LayoutEngine
from matplotlib.projections.polar import PolarAxes
from matplotlib.text import Text
from matplotlib.transforms import Bbox, ScaledTranslation, Transform

EDGE, GAP = 0.04, 0.08
"""Inches between a drawing's edge and its content, and between the texts of neighbouring panels."""
SMALLEST_MARGIN = 0.06
"""Smallest margin around a panel in inches, enough for half of a tick label at the panel's
corner."""
TICK_PAD, LABEL_PAD, TITLE_PAD = 0.05, 0.045, 0.08
"""Inches between a panel and its tick labels, between tick labels and the label of the axis, and
below a title."""

Side = Literal["left", "bottom", "right", "top"]
_ALIGNMENT: dict[Side, dict[str, Any]] = {
    "left": {"ha": "right", "va": "center"},
    "right": {"ha": "left", "va": "center"},
    "bottom": {"ha": "center", "va": "top"},
    "top": {"ha": "center", "va": "bottom"},
}
"""Side of a panel -> alignment of a text on this side."""
_TEXT_PARAMETERS = {"fontsize": "labelsize", "rotation": "rotation"}
"""Parameter of a text -> the corresponding parameter of an axis' ticks."""
_OUTWARDS: dict[Side, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "bottom": (0, -1),
    "top": (0, 1),
}
"""Side of a panel -> direction (right, up) away from the panel."""
Measure = Callable[[Artist], tuple[float, float]]
"""Function that returns (width, height) of an artist in inches."""


class Panels(LayoutEngine):
    """Layout engine that draws ticks, labels and grids, and positions panels, titles, legends and
    texts.

    Panels must come from one grid (`subplots`). Legends and texts of the figure go below
    the panels.
    """

    _adjust_compatible = False
    _colorbar_gridspec = False

    def __init__(self) -> None:
        super().__init__()
        self._done = False

    def execute(self, fig: Figure) -> None:
        """Lay out the figure; a second call does nothing."""
        if self._done:
            return
        self._done = True
        renderer: Any = FigureCanvasAgg(fig).get_renderer()

        def measure(artist: Artist) -> tuple[float, float]:
            box = artist.get_window_extent(renderer)
            return box.width / fig.dpi, box.height / fig.dpi

        panels = [_Panel(fig, axes, measure) for axes in fig.axes if axes.get_visible()]
        height_below = _position_below(fig, measure)
        _position_panels(fig, panels, height_below)


class _Panel:
    """A panel. Making it draws its ticks, labels and title, and measures the room that these
    need."""

    def __init__(self, figure: Figure, axes: Axes, measure: Measure) -> None:
        self.figure = figure
        self.axes = axes
        self.measure = measure
        grid_cell = axes.get_subplotspec()
        assert grid_cell is not None, "panels come from a grid"
        self.grid_cell: SubplotSpec = grid_cell
        self.room: dict[Side, float] = dict.fromkeys(_OUTWARDS, SMALLEST_MARGIN)
        """Side -> inches that texts on this side of the panel need."""
        self.end_labels: list[tuple[float, float]] = []
        """For the first and the last tick label of the x axis: (position as a share of the panel's
        width, half the label's width in inches)."""
        if isinstance(axes, PolarAxes):
            self._draw_polar(axes)
        else:
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_visible():
                    self._draw_axis(axis)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_visible(False)  # otherwise matplotlib would draw ticks and labels too
        self._move_title()
        legend = axes.get_legend()
        if legend is not None:
            pixels = legend.get_bbox_to_anchor().x0 - axes.bbox.x1
            if pixels > 0:  # the legend is to the right of the panel
                self._reserve("right", pixels / figure.dpi + measure(legend)[0])

    def overhang(self, width: float) -> tuple[float, float]:
        """(left, right): inches by which tick labels of the x axis reach beyond the left and the
        right end of a panel that is `width` inches wide; negative if all labels end inside."""
        # a label is centred on its tick
        left = max(
            (half_label - share * width for share, half_label in self.end_labels), default=0.0
        )
        right = max(
            (half_label - (1 - share) * width for share, half_label in self.end_labels),
            default=0.0,
        )
        return left, right

    def _reserve(self, side: Side, inches: float) -> None:
        self.room[side] = max(self.room[side], inches)

    def _add_text(
        self,
        content: str,
        position: tuple[float, float],
        transform: Transform,
        side: Side,
        **look: Any,
    ) -> Text:
        """Add a text on a side of the panel. The text is added to the figure, because texts of the
        axes count as content of the panel."""
        text = Text(*position, content, transform=transform, **{**_ALIGNMENT[side], **look})
        self.figure.add_artist(text)
        return text

    def _shift(self, transform: Transform, right: float, up: float) -> Transform:
        """`transform`, followed by a shift in inches."""
        return transform + ScaledTranslation(right, up, self.figure.dpi_scale_trans)

    def _shift_outwards(self, transform: Transform, side: Side, inches: float) -> Transform:
        """`transform`, followed by a shift of `inches` away from the panel."""
        right, up = _OUTWARDS[side]
        return self._shift(transform, inches * right, inches * up)

    def _draw_grid(self, lines: Sequence[Any], transform: Transform) -> None:
        """Draw grid lines: sequences of points (x, y) in the coordinates of `transform`."""
        # zorder 0.5: below the data, as matplotlib's own grid lines
        look = {
            "color": matplotlib.rcParams["grid.color"],
            "linewidth": matplotlib.rcParams["grid.linewidth"],
        }
        self.axes.add_artist(LineCollection(lines, transform=transform, zorder=0.5, **look))

    def _draw_axis(self, axis: Axis) -> None:
        """Draw the grid lines, tick labels, power of ten and label of an axis."""
        is_x = isinstance(axis, XAxis)
        parameters = axis.get_tick_params()
        # coordinates: data along the axis, shares of the panel (0 to 1) across the axis
        along_axis = self.axes.get_xaxis_transform() if is_x else self.axes.get_yaxis_transform()
        ticks = _ticks(axis)
        if parameters["gridOn"]:
            lines = [
                [_point(is_x, tick.position, 0), _point(is_x, tick.position, 1)] for tick in ticks
            ]
            self._draw_grid(lines, along_axis)
        sides: tuple[Side, Side] = ("bottom", "top") if is_x else ("left", "right")
        labelled_sides = [side for side in sides if parameters[f"label{side}"]]
        labelled_ticks = [tick for tick in ticks if tick.label]
        if labelled_sides and labelled_ticks:
            side = labelled_sides[0]
            look = {
                text_parameter: parameters[tick_parameter]
                for text_parameter, tick_parameter in _TEXT_PARAMETERS.items()
                if tick_parameter in parameters
            }
            transform = self._shift_outwards(along_axis, side, TICK_PAD)
            across = sides.index(side)  # 0: left or lower side of the panel, 1: right or upper side
            texts = [
                self._add_text(
                    tick.label, _point(is_x, tick.position, across), transform, side, **look
                )
                for tick in labelled_ticks
            ]
            # [is_x]: the height for an x axis, the width for a y axis
            self._reserve(
                side, TICK_PAD + max(self.measure(text)[is_x] for text in _largest_texts(texts))
            )
            if is_x:
                self.end_labels = [
                    (labelled_ticks[index].share, self.measure(texts[index])[0] / 2)
                    for index in (0, -1)
                ]
            self._draw_power(axis, side)
        self._draw_label(axis)

    def _draw_power(self, axis: Axis, side: Side) -> None:
        """Write the power of ten by which the tick labels on `side` are divided: above a y axis, or
        below the right end of an x axis."""
        power = axis.get_major_formatter().get_offset()
        if not power:
            return
        look = {"fontsize": axis.get_offset_text().get_fontsize()}
        if isinstance(axis, XAxis):
            below = self._shift_outwards(self.axes.transAxes, "bottom", self.room["bottom"])
            text = self._add_text(power, (1, 0), below, "bottom", ha="right", **look)
            self.room["bottom"] += self.measure(text)[1]
        else:
            above = self._shift_outwards(self.axes.transAxes, "top", TICK_PAD)
            text = self._add_text(power, (float(side == "right"), 1), above, "top", ha=side, **look)
            self._reserve("top", TICK_PAD + self.measure(text)[1])

    def _draw_label(self, axis: Axis) -> None:
        """Write the label of an axis outside its tick labels."""
        label = axis.label.get_text()
        side = axis.get_label_position()
        is_x = isinstance(axis, XAxis)
        if label:
            distance = self.room[side] + LABEL_PAD
            look = {"fontsize": axis.label.get_fontsize(), "rotation": 0 if is_x else 90}
            # across the axis, 0 is the left or lower side of the panel
            position = _point(is_x, 0.5, float(side in ("right", "top")))
            transform = self._shift_outwards(self.axes.transAxes, side, distance)
            text = self._add_text(label, position, transform, side, **look)
            # [is_x]: the height for an x axis, the width for a y axis
            self.room[side] = distance + self.measure(text)[is_x]

    def _move_title(self) -> None:
        """Move the title above all other texts at the top of the panel."""
        # `get_title` returns only a string. The title itself is a Text among the children of the
        # axes.
        content = self.axes.get_title("left")
        for title in self.axes.get_children():
            if (
                content
                and isinstance(title, Text)
                and title.get_text() == content
                and title not in self.axes.texts
            ):
                # the room is still SMALLEST_MARGIN if there is no other text at the top
                distance = (
                    TITLE_PAD
                    if self.room["top"] <= SMALLEST_MARGIN
                    else self.room["top"] + LABEL_PAD
                )
                title.set_transform(self._shift_outwards(self.axes.transAxes, "top", distance))
                self.room["top"] = distance + self.measure(title)[1]

    def _draw_polar(self, axes: PolarAxes) -> None:
        """Draw the rings and spokes of a polar panel, and the spokes' labels around the panel."""
        angles = list(axes.xaxis.get_majorticklocs())
        rim = axes.get_ylim()[1]
        circle = np.linspace(0, 2 * np.pi, 90)
        rings = [
            np.stack([circle, np.full_like(circle, radius)], axis=1) for radius in axes.get_yticks()
        ]
        spokes = [[(angle, 0), (angle, rim)] for angle in angles]
        self._draw_grid([*rings, *spokes], axes.transData)
        texts = []
        labels = axes.xaxis.get_major_formatter().format_ticks(angles)
        for angle, label in zip(angles, labels, strict=True):
            # angle on the page, anticlockwise from the right
            page_angle = axes.get_theta_offset() + axes.get_theta_direction() * angle
            # rounded, so that a label straight above or below has right == 0
            right = round(float(np.cos(page_angle)), 6)
            up = round(float(np.sin(page_angle)), 6)
            side: Side = "top" if up > 0 else "bottom"
            if right:
                side = "right" if right > 0 else "left"
            transform = self._shift(axes.transData, TICK_PAD * right, TICK_PAD * up)
            size = axes.xaxis.get_tick_params().get("labelsize")
            texts.append(self._add_text(label, (angle, rim), transform, side, fontsize=size))
        width, height = map(max, *(self.measure(text) for text in _largest_texts(texts)))
        self.room |= {"left": TICK_PAD + width, "right": TICK_PAD + width}
        self.room |= {"bottom": TICK_PAD + height, "top": TICK_PAD + height}


def _point(is_x: bool, along: float, across: float) -> tuple[float, float]:
    """(x, y) of a point with coordinates along and across the x axis (`is_x`) or the y axis."""
    return (along, across) if is_x else (across, along)


class _Tick(NamedTuple):
    position: float
    """Position in data coordinates."""
    share: float
    """Position as a share of the axis's length, from its left or lower end."""
    label: str


def _ticks(axis: Axis) -> list[_Tick]:
    """The ticks within the limits of an axis."""
    positions = list(axis.get_majorticklocs())
    scale = axis.get_transform().transform  # such as the logarithm
    low, high = scale(np.asarray(axis.get_view_interval(), float))
    shares = (scale(np.asarray(positions, float)) - low) / (high - low)
    shares = 1 - shares if axis.get_inverted() else shares
    labels = axis.get_major_formatter().format_ticks(positions)
    return [
        _Tick(float(position), float(share), label)
        for position, share, label in zip(positions, shares, labels, strict=True)
        if -1e-3 <= share <= 1 + 1e-3  # up to rounding
    ]


def _largest_texts(texts: Sequence[Text]) -> list[Text]:
    """The text with the widest line, and the text with the most lines. Only these two are
    measured, because measuring is slow."""
    widest_text = max(texts, key=lambda text: max(map(_line_width, text.get_text().split("\n"))))
    highest_text = max(texts, key=lambda text: text.get_text().count("\n"))
    return [widest_text, highest_text]


def _line_width(line: str) -> float:
    """Approximate width of a line of text, in widths of an average small letter."""
    return sum(
        1.3 if letter.isupper() or letter in "mw%" else 0.6 if letter in "ijlt.,:()" else 1
        for letter in line
    )


def _position_below(figure: Figure, measure: Measure) -> float:
    """Stack the legends and texts of the figure below the panels. Returns the height of the stack
    in inches."""
    height = EDGE
    for legend in figure.legends:
        legend.set_bbox_to_anchor((0.5, height / figure.get_figheight()), figure.transFigure)
        height += measure(legend)[1] + GAP / 2
    for text in figure.texts:
        text.set(y=height / figure.get_figheight(), va="bottom")
        height += measure(text)[1] + GAP / 2
    return height + GAP / 2


def _position_panels(figure: Figure, panels: Sequence[_Panel], height_below: float) -> None:
    """Set the positions of panels.

    height_below: inches that legends and texts below the panels take.
    """
    width, height = figure.get_size_inches()
    grid = panels[0].grid_cell.get_gridspec()
    # inches that texts need: left and right of each column of the grid, above and below each row
    left, right = np.zeros((2, grid.ncols))
    top, bottom = np.zeros((2, grid.nrows))
    for panel in panels:
        columns = panel.grid_cell.colspan
        rows = panel.grid_cell.rowspan
        left[columns.start] = max(left[columns.start], panel.room["left"])
        right[columns.stop - 1] = max(right[columns.stop - 1], panel.room["right"])
        top[rows.start] = max(top[rows.start], panel.room["top"])
        bottom[rows.stop - 1] = max(bottom[rows.stop - 1], panel.room["bottom"])
    # a first division, because overhangs depend on the panels' widths
    _, widths = _divide(width - 2 * EDGE, left, right, grid.get_width_ratios())
    for panel in panels:
        first = panel.grid_cell.colspan.start
        last = panel.grid_cell.colspan.stop - 1
        left_overhang, right_overhang = panel.overhang(widths[first : last + 1].sum())
        left[first] = max(left[first], left_overhang)
        right[last] = max(right[last], right_overhang)
    # uppers: upper ends of the rows, in inches down from the upper margin
    starts, widths = _divide(width - 2 * EDGE, left, right, grid.get_width_ratios())
    uppers, heights = _divide(height - EDGE - height_below, top, bottom, grid.get_height_ratios())
    for panel in panels:
        first = panel.grid_cell.colspan.start
        last = panel.grid_cell.colspan.stop - 1
        upper = panel.grid_cell.rowspan.start
        lower = panel.grid_cell.rowspan.stop - 1
        # inches from the figure's lower left corner
        x = np.array([starts[first], starts[last] + widths[last]]) + EDGE
        y = height - EDGE - np.array([uppers[lower] + heights[lower], uppers[upper]])
        panel.axes.set_position(Bbox(np.stack([x / width, y / height], axis=1)))


def _divide(
    total: float, room_before: np.ndarray, room_after: np.ndarray, ratios: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Divide `total` inches among the panels of a row or a column, their texts and the gaps.
    Returns (starts, lengths) of the panels in inches from the left or upper end.

    - room_before: inches of the texts to the left of or above each panel
    - room_after: inches of the texts to the right of or below each panel
    """
    free = total - room_before.sum() - room_after.sum() - GAP * (len(room_before) - 1)
    assert free > 0, "texts leave no room for the panels"
    lengths = free * np.asarray(ratios, float) / np.sum(ratios)
    gap_ends = np.cumsum(room_before + lengths + room_after + GAP)
    return gap_ends - GAP - room_after - lengths, lengths
