"""Layout of figures: panels in a grid, as large as the texts around them leave room for.

This stands in for matplotlib's constrained layout and ticks, which took half of the time of a
report: constrained layout measures every label several times, and a tick is five artists. Here the
widest label of an axis is measured once, labels are plain texts, and the grid lines of an axis are
one artist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

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
"""Inches around a drawing, and between the texts of neighbouring panels."""
LEAST = 0.06
"""Inches around a panel at least: half the height of a label that stands at its corner."""
TICK_PAD, LABEL_PAD, TITLE_PAD = 0.05, 0.045, 0.08
"""Inches between a panel and the labels of its ticks, between those and the label of the axis, and
below a title."""

Side = Literal["left", "bottom", "right", "top"]
_ALIGNED: dict[Side, dict[str, Any]] = {
    "left": {"ha": "right", "va": "center"},
    "right": {"ha": "left", "va": "center"},
    "bottom": {"ha": "center", "va": "top"},
    "top": {"ha": "center", "va": "bottom"},
}
"""How a text on that side of a panel is aligned to its place."""
_LOOKS = {"fontsize": "labelsize", "rotation": "rotation"}
"""Parameter of a text -> that of the labels of ticks, where it was set."""
_OUTWARDS: dict[Side, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "bottom": (0, -1),
    "top": (0, 1),
}
Measure = Callable[[Artist], tuple[float, float]]
"""Width and height of an artist in inches."""


class Panels(LayoutEngine):
    """Layout engine that draws ticks, labels and grids, and places panels, titles, legends and
    texts, once.

    Panels come from one grid (`subplots`), and what stands inside them is not looked at. Legends
    and texts of the figure stand below the panels. matplotlib draws no axis afterwards: ticks are
    at the places and with the words of the axes' locators and formatters, without marks."""

    _adjust_compatible = False
    _colorbar_gridspec = False

    def __init__(self) -> None:
        super().__init__()
        self._done = False

    def execute(self, fig: Figure) -> None:
        """Place everything in the figure; a second call does nothing."""
        if self._done:
            return
        self._done = True
        renderer: Any = FigureCanvasAgg(fig).get_renderer()

        def measure(artist: Artist) -> tuple[float, float]:
            box = artist.get_window_extent(renderer)
            return box.width / fig.dpi, box.height / fig.dpi

        panels = [_Panel(fig, axes, measure) for axes in fig.axes if axes.get_visible()]
        _place(fig, panels, _below(fig, measure))


class _Panel:
    """A panel whose ticks, labels and title are drawn, and the room that they need around it."""

    def __init__(self, figure: Figure, axes: Axes, measure: Measure) -> None:
        self.figure = figure
        self.axes = axes
        self.measure = measure
        spot = axes.get_subplotspec()
        assert spot is not None, "panels come from a grid"
        self.spot: SubplotSpec = spot
        self.room: dict[Side, float] = dict.fromkeys(_OUTWARDS, LEAST)
        self.ends: list[tuple[float, float]] = []
        """Labels of the x axis that may reach beyond the panel: place as a share of its width, half
        their inches."""
        if isinstance(axes, PolarAxes):
            self._spokes(axes)
        else:
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_visible():
                    self._axis(axis)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_visible(False)
        self._title()
        legend = axes.get_legend()
        if legend is not None:  # beside the panel, or in it
            reach = legend.get_bbox_to_anchor().x0 - axes.bbox.x1
            self._need("right", reach / figure.dpi + measure(legend)[0] if reach > 0 else 0)

    def overhang(self, width: float) -> tuple[float, float]:
        """Inches by which labels of the x axis reach beyond a panel of this width, on the left and
        on the right."""
        left = max((half - share * width for share, half in self.ends), default=0.0)
        right = max((half - (1 - share) * width for share, half in self.ends), default=0.0)
        return left, right

    def _need(self, side: Side, inches: float) -> None:
        self.room[side] = max(self.room[side], inches)

    def _text(
        self, words: str, place: tuple[float, float], transform: Transform, side: Side, **look: Any
    ) -> Text:
        """Add a text to the figure: those of the axes are what its maker drew."""
        text = Text(*place, words, transform=transform, **{**_ALIGNED[side], **look})
        self.figure.add_artist(text)
        return text

    def _moved(self, transform: Transform, right: float, up: float) -> Transform:
        return transform + ScaledTranslation(right, up, self.figure.dpi_scale_trans)

    def _beside(self, transform: Transform, side: Side, inches: float) -> Transform:
        right, up = _OUTWARDS[side]
        return self._moved(transform, inches * right, inches * up)

    def _grid(self, lines: Sequence[Any], transform: Transform) -> None:
        look = {
            "color": matplotlib.rcParams["grid.color"],
            "linewidth": matplotlib.rcParams["grid.linewidth"],
        }
        self.axes.add_artist(LineCollection(lines, transform=transform, zorder=0.5, **look))

    def _axis(self, axis: Axis) -> None:
        """Draw the grid lines, ticks and label of an axis."""
        across = isinstance(axis, XAxis)
        params = axis.get_tick_params()
        along = self.axes.get_xaxis_transform() if across else self.axes.get_yaxis_transform()
        ticks = _ticks(axis)
        if params["gridOn"]:
            self._grid(
                [[_at(across, place, end) for end in (0, 1)] for place, _, _ in ticks], along
            )
        sides: tuple[Side, Side] = ("bottom", "top") if across else ("left", "right")
        labelled = [side for side in sides if params[f"label{side}"]]
        if labelled and any(words for _, _, words in ticks):
            side = labelled[0]
            look = {key: params[name] for key, name in _LOOKS.items() if name in params}
            beside = self._beside(along, side, TICK_PAD)
            end = sides.index(side)
            texts = [
                self._text(words, _at(across, place, end), beside, side, **look)
                for place, _, words in ticks
                if words
            ]
            self._need(side, TICK_PAD + max(self.measure(text)[across] for text in _largest(texts)))
            if across:
                shares = [share for _, share, words in ticks if words]
                self.ends = [(shares[at], self.measure(texts[at])[0] / 2) for at in (0, -1)]
            self._power(axis, side)
        self._label(axis)

    def _power(self, axis: Axis, side: Side) -> None:
        """Write the power of ten of an axis above a y axis, or below the right end of an x axis."""
        words = axis.get_major_formatter().get_offset()
        look = {"fontsize": axis.get_offset_text().get_fontsize()}
        if not words:
            return
        if isinstance(axis, XAxis):
            below = self._beside(self.axes.transAxes, "bottom", self.room["bottom"])
            text = self._text(words, (1, 0), below, "bottom", ha="right", **look)
            self.room["bottom"] += self.measure(text)[1]
        else:
            above = self._beside(self.axes.transAxes, "top", TICK_PAD)
            text = self._text(words, (float(side == "right"), 1), above, "top", ha=side, **look)
            self._need("top", TICK_PAD + self.measure(text)[1])

    def _label(self, axis: Axis) -> None:
        words = axis.label.get_text()
        side = axis.get_label_position()
        across = isinstance(axis, XAxis)
        if words:
            away = self.room[side] + LABEL_PAD
            look = {"fontsize": axis.label.get_fontsize(), "rotation": 0 if across else 90}
            place = _at(across, 0.5, float(side in ("right", "top")))
            text = self._text(
                words, place, self._beside(self.axes.transAxes, side, away), side, **look
            )
            self.room[side] = away + self.measure(text)[across]

    def _title(self) -> None:
        """Move the title above all else at the top of the panel."""
        words = self.axes.get_title("left")
        for title in self.axes.get_children():
            if (
                words
                and isinstance(title, Text)
                and title.get_text() == words
                and title not in self.axes.texts
            ):
                above = TITLE_PAD if self.room["top"] <= LEAST else self.room["top"] + LABEL_PAD
                title.set_transform(self._beside(self.axes.transAxes, "top", above))
                self.room["top"] = above + self.measure(title)[1]

    def _spokes(self, axes: PolarAxes) -> None:
        """Draw rings and spokes of a polar panel, and the labels of its spokes around it."""
        angles = list(axes.xaxis.get_majorticklocs())
        rim = axes.get_ylim()[1]
        circle = np.linspace(0, 2 * np.pi, 90)
        rings = [
            np.stack([circle, np.full_like(circle, radius)], axis=1) for radius in axes.get_yticks()
        ]
        self._grid([*rings, *([(angle, 0), (angle, rim)] for angle in angles)], axes.transData)
        texts = []
        for angle, words in zip(
            angles, axes.xaxis.get_major_formatter().format_ticks(angles), strict=True
        ):
            turned = axes.get_theta_offset() + axes.get_theta_direction() * angle
            right = round(float(np.cos(turned)), 6)
            up = round(float(np.sin(turned)), 6)
            side: Side = (
                "right" if right > 0 else "left" if right < 0 else "top" if up > 0 else "bottom"
            )
            beside = self._moved(axes.transData, TICK_PAD * right, TICK_PAD * up)
            size = axes.xaxis.get_tick_params().get("labelsize")
            texts.append(self._text(words, (angle, rim), beside, side, fontsize=size))
        wide, high = map(max, *(self.measure(text) for text in _largest(texts)))
        self.room |= {"left": TICK_PAD + wide, "right": TICK_PAD + wide}
        self.room |= {"bottom": TICK_PAD + high, "top": TICK_PAD + high}


def _at(across: bool, along: float, end: float) -> tuple[float, float]:
    return (along, end) if across else (end, along)


def _ticks(axis: Axis) -> list[tuple[float, float, str]]:
    """Ticks within the limits of an axis: place, place as a share of the axis from the left or
    below, and label."""
    places = list(axis.get_majorticklocs())
    scale = axis.get_transform().transform
    low, high = scale(np.asarray(axis.get_view_interval(), float))
    shares = (scale(np.asarray(places, float)) - low) / (high - low)
    shares = 1 - shares if axis.get_inverted() else shares
    ticks = zip(places, shares, axis.get_major_formatter().format_ticks(places), strict=True)
    return [
        (float(place), float(share), words)
        for place, share, words in ticks
        if -1e-3 <= share <= 1 + 1e-3
    ]


def _largest(texts: Sequence[Text]) -> list[Text]:
    """The text with the widest line and that with the most lines."""
    lines = [text.get_text().split("\n") for text in texts]
    widest = max(range(len(texts)), key=lambda at: max(map(_breadth, lines[at])))
    highest = max(range(len(texts)), key=lambda at: len(lines[at]))
    return [texts[widest], texts[highest]]


def _breadth(words: str) -> float:
    """About the width of a line of text; unit: small letters."""
    return sum(
        1.3 if letter.isupper() or letter in "mw%" else 0.6 if letter in "ijlt.,:()" else 1
        for letter in words
    )


def _below(figure: Figure, measure: Measure) -> float:
    """Place legends and texts of the figure below its panels; returns the inches that they take,
    from the bottom."""
    height = EDGE
    for legend in figure.legends:
        legend.set_bbox_to_anchor((0.5, height / figure.get_figheight()), figure.transFigure)
        height += measure(legend)[1] + GAP / 2
    for text in figure.texts:
        text.set(y=height / figure.get_figheight(), va="bottom")
        height += measure(text)[1] + GAP / 2
    return height + GAP / 2


def _place(figure: Figure, panels: Sequence[_Panel], below: float) -> None:
    """Give panels of a row the same upper and lower ends, and those of a column the same left and
    right ends."""
    width, height = figure.get_size_inches()
    grid = panels[0].spot.get_gridspec()
    left, right = np.zeros((2, grid.ncols))
    top, bottom = np.zeros((2, grid.nrows))
    for panel in panels:
        columns = panel.spot.colspan
        rows = panel.spot.rowspan
        left[columns.start] = max(left[columns.start], panel.room["left"])
        right[columns.stop - 1] = max(right[columns.stop - 1], panel.room["right"])
        top[rows.start] = max(top[rows.start], panel.room["top"])
        bottom[rows.stop - 1] = max(bottom[rows.stop - 1], panel.room["bottom"])
    _, widths = _divided(width - 2 * EDGE, left, right, grid.get_width_ratios())
    for panel in panels:
        first = panel.spot.colspan.start
        last = panel.spot.colspan.stop - 1
        beyond = panel.overhang(widths[first : last + 1].sum())
        left[first], right[last] = max(left[first], beyond[0]), max(right[last], beyond[1])
    starts, widths = _divided(width - 2 * EDGE, left, right, grid.get_width_ratios())
    uppers, heights = _divided(height - EDGE - below, top, bottom, grid.get_height_ratios())
    for panel in panels:
        first = panel.spot.colspan.start
        last = panel.spot.colspan.stop - 1
        upper = panel.spot.rowspan.start
        lower = panel.spot.rowspan.stop - 1
        x = np.array([starts[first], starts[last] + widths[last]]) + EDGE
        y = height - EDGE - np.array([uppers[lower] + heights[lower], uppers[upper]])
        panel.axes.set_position(Bbox(np.stack([x / width, y / height], axis=1)))


def _divided(
    total: float, before: np.ndarray, after: np.ndarray, ratios: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of panels side by side, in proportion to `ratios`, that fill `total`
    inches with what stands before and after each."""
    free = total - before.sum() - after.sum() - GAP * (len(before) - 1)
    assert free > 0, "texts leave no room for the panels"
    lengths = free * np.asarray(ratios, float) / np.sum(ratios)
    ends = np.cumsum(before + lengths + after + GAP)
    return ends - GAP - after - lengths, lengths
