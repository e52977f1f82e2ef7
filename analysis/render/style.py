"""Style of figures, helpers for drawing them, and their output as files and as parts of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    PercentFormatter,
    ScalarFormatter,
)

from moe_lab.analysis import names

SMALL_LETTER, SMALL_LINE = 0.047, 0.08
"""Average width of a letter and height of a line in inches, at 5.6 points."""

PAGE = 6.9
"""Width of a figure across the page, in inches."""
DPI = 200
INK, MUTED, RULE, SURFACE = "#15181e", "#667080", "#d4d9e0", "#fdfdfe"
"""Colours that follow the page's light or dark theme: in SVG they become CSS variables."""
_THEME = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", SURFACE: "var(--surface)"}

CRITERIA = {
    "none": INK,
    "frequency": "#b39a25",
    "seer": "#cc6677",
    "ean": "#117733",
    "reap": "#2277bb",
    "mone": "#aa4499",
    "mone_freq": "#882255",
    "man": "#ee7733",
    "msan": "#bb3311",
    "gate_ean": "#44aa99",
    "gate_energy": "#66aadd",
    "easy_ep": "#997700",
    "exact_damage": "#4b3fa0",
    "aimer": "#8a8a2b",
    "magnitude": "#7a7a7a",
    "random": "#a9a9a9",
    "heapr": "#d1495b",
    "camera": "#00798c",
    "channel_weight": "#8d6b94",
    "channel_activation": "#1f5fa8",
    "channel_weight_activation": "#5aa9e6",
    "channel_gradient": "#c98a1b",
    "channel_activation_gradient": "#6a994e",
    "snip": "#9c6644",
    "channel_random": "#a0a7ab",
}
"""Colours of criteria (after Paul Tol's schemes)."""
OTHER = "#5b8c9c"
"""Colour of criteria and benchmarks without a colour of their own."""
SHADES = ("#2277bb", "#ee7733", "#117733", "#aa4499", "#15181e", "#b39a25", "#cc6677", "#44aa99")
"""Colours of lines that do not stand for criteria."""
DASHED: Any = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 0.9}
"""Line style of references, such as the unpruned model."""
MARKERS = "osD^vPX*<>hd"
SEQUENTIAL = "YlGnBu"
"""Name of a colour map from light to dark, also when printed in grey."""
HATCH = "/////"
"""Hatching of squares of a winner map whose win is not proved."""


@dataclass(frozen=True)
class Figure:
    """A drawing with its name (the stem of its file), title and caption."""

    name: str
    title: str
    caption: str
    drawing: Drawing

    @cached_property
    def svg(self) -> str:
        """The drawing as SVG text."""
        text = io.StringIO()
        # with a constant hashsalt, the ids in the SVG text are the same in every run
        with look(), matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.drawing.savefig(
                text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
            )
        return text.getvalue()


def colour(method: str) -> str:
    """The colour of the method's criterion."""
    return CRITERIA.get(names.method_parts(method)[0], OTHER)


@contextmanager
def look() -> Iterator[None]:
    """Context with the matplotlib settings for drawing and saving figures."""
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": RULE,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.linewidth": 0.8,
        "text.color": INK,
        # without hinting, letters are placed as in vector formats
        "text.hinting": "none",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.bottom": False,
        "ytick.left": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.major.pad": 4.5,  # the labels of x and y at a common corner do not touch
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "figure.facecolor": SURFACE,
        "savefig.facecolor": SURFACE,
        "pdf.fonttype": 42,
        "svg.fonttype": "path",
    }
    with matplotlib.rc_context(settings):
        yield


def drawing(width: float, height: float) -> Drawing:
    """An empty drawing with this width and height in inches."""
    return Drawing(figsize=(width, height), layout="constrained")


# Files have no time stamps, so that equal figures give equal files. compress_level=3 takes two
# thirds of the time of the default and gives 9 % more bytes.
_SAVE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "png": {"metadata": {"Software": None}, "pil_kwargs": {"compress_level": 3}},
    "pdf": {"metadata": {"CreationDate": None}},
}


def write(figure: Figure, folder: Path, file_format: str) -> list[Path]:
    """Write the figure into `folder` as NAME.FORMAT. Returns the path in a list.

    file_format: one of `names.FIGURE_FORMATS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{figure.name}.{file_format}"
    if file_format == "svg":
        path.write_text(figure.svg, encoding="utf-8")
    else:
        with look():
            figure.drawing.savefig(path, dpi=DPI, **_SAVE_ARGUMENTS[file_format])
    return [path]


def svg_element(figure: Figure) -> str:
    """The figure as an SVG element for a page, in the colours of the page's theme."""
    view_box = re.search(r'viewBox="(?P<box>0 0 (?P<width>[\d.]+) [\d.]+)"', figure.svg)
    assert view_box is not None
    # everything after the opening tag <svg ...>, including </svg>
    start = figure.svg.index(">", figure.svg.index("<svg")) + 1
    content = re.sub(r"<metadata>.*?</metadata>", "", figure.svg[start:], flags=re.DOTALL)
    for colour, css_variable in _THEME.items():
        content = content.replace(colour, css_variable)
    # ids must be unique on a page with several figures
    prefix = re.sub(r"\W", "_", figure.name)
    content = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", content)
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    label = escape(figure.title)
    return (
        f'<svg viewBox="{view_box["box"]}" style="--w:{view_box["width"]}" role="img" '
        f'aria-label="{label}" {namespaces}>{content}'
    )


def label_ticks(
    axis: Axis, labels: Iterable[Any], first: float = 0, max_numbers: int = 12, **properties: Any
) -> None:
    """Label the positions `first`, `first` + 1, ... of an axis, unlike `Axes.set_xticks` without
    changing the axis's limits.

    max_numbers: largest number of labels that are numbers, such as layers; of more, every second,
    third, ... is shown. Labels that are texts, such as names, are all shown.
    properties: tick parameters such as `labelsize` and `labelrotation`.
    """
    labels = list(labels)
    are_texts = any(isinstance(label, str) for label in labels)
    step = 1 if are_texts else max(1, -(-len(labels) // max_numbers))  # rounded up
    texts = list(map(str, labels))
    axis.set_major_locator(FixedLocator([first + number for number in range(0, len(texts), step)]))
    axis.set_major_formatter(FixedFormatter(texts[::step]))
    axis.set_tick_params(**properties)


def legend(figure: Drawing, handles: Iterable[Any], max_columns: int = 6) -> None:
    """Add a legend below the panels. The drawing must have space for three rows of entries.

    max_columns: largest number of entries side by side.
    """
    entries = list(handles)
    label_length = max((len(str(entry.get_label())) for entry in entries), default=0)
    width = int(figure.get_figwidth() * 14.5)  # in characters, 14.5 per inch
    # an entry is 8 characters wider than the label, for the line and the gap
    columns = max(1, min(max_columns, len(entries), width // (label_length + 8)))
    rows = -(-len(entries) // columns)  # rounded up
    figure.set_figheight(figure.get_figheight() + 0.16 * max(rows - 3, 0))
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=columns,
        fontsize=7,
    )


def legend_entry(label: str, **properties: Any) -> Line2D:
    """A legend entry with a line that has these `properties` of Line2D."""
    return Line2D([], [], label=label, **properties)


def draw_line(axes: Axes, entry: Line2D, x: Any, y: Any) -> None:
    """Draw a line in the style of its legend `entry`."""
    line = Line2D(np.asarray(x), np.asarray(y))
    line.update_from(entry)
    axes.add_line(line)
    # None postpones the computation of limits until the figure is drawn. Panels that share an axis
    # would otherwise take quadratic time.
    axes.autoscale(None)  # type: ignore[arg-type]


def legend_entries(
    labels: Iterable[str], colours: Mapping[str, str] | None = None
) -> dict[str, Line2D]:
    """Legend entries with different markers for the lines of a figure, by label.

    colours: label -> colour, OTHER for labels without an entry; without `colours`, lines have the
    colours SHADES.
    """
    entries = {}
    for number, label in enumerate(dict.fromkeys(labels)):
        shade = colours.get(label, OTHER) if colours else SHADES[number % len(SHADES)]
        marker = MARKERS[number % len(MARKERS)]
        entries[label] = legend_entry(
            label, color=shade, marker=marker, markersize=4, linewidth=1.2
        )
    return entries


def format_percent(axis: Axis) -> None:
    """Format the tick labels of an axis as per cent: the share 0.5 becomes 50 %."""
    axis.set_major_formatter(PercentFormatter(1, symbol=" %"))


def format_power(axis: Axis) -> None:
    """Use scientific notation for the tick labels of an axis whose largest label is below 0.1 or at
    least 1000."""
    formatter = ScalarFormatter()
    formatter.set_powerlimits((-2, 3))
    axis.set_major_formatter(formatter)
    axis.get_offset_text().set_fontsize(6.5)


def shade(share: float) -> str:
    """The colour of the colour map SEQUENTIAL at the position `share` (0..1)."""
    return to_hex(colormaps[SEQUENTIAL](share))


def format_tokens(count: float) -> str:
    """Format a number of tokens, such as `65k` or `0.5M`."""
    return f"{count / 1e6:.3g}M" if count >= 5e5 else f"{count / 1e3:.3g}k"
