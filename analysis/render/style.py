"""Figures: how they look, and how they become files and parts of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter, ScalarFormatter

from analysis import names

LETTER, SMALL_LETTER = 0.063, 0.047
"""Inches an average letter takes at 7.5 and 5.6 points."""

PAGE = 6.9
"""Width of a paper's text in inches."""
DPI = 200
WIDE = 3
"""Panels side by side up to which a title of several words fits on one line."""

INK, MUTED, RULE, SURFACE = "#15181e", "#667080", "#d4d9e0", "#fdfdfe"
"""The four colours that follow the page's theme: in SVG they become CSS variables."""
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
"""Colours of criteria (after Paul Tol's schemes); every figure also names them, or gives them a marker."""
OTHER = "#5b8c9c"
SHADES = ("#2277bb", "#ee7733", "#117733", "#aa4499", "#15181e", "#b39a25", "#cc6677", "#44aa99")
"""Colours of lines that are no criteria."""
DASHED: Any = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 0.9}
"""The line of what others are measured against: the unpruned model, a uniform allocation."""
GONE: Any = {"facecolor": "none", "edgecolor": "#bb3311", "hatch": "xxxx"}
"""Experts of which nothing is left, or that nothing was seen of."""
MARKERS = "osD^vPX*<>hd"
SEQUENTIAL = "YlGnBu"
"""From light to dark in grey as well."""
DARK = 0.55
"""Where a shade becomes too dark for black letters."""
HATCH = "/////"
"""Within noise."""


@dataclass(frozen=True)
class Figure:
    """A drawing with its file stem, title and caption."""

    name: str
    title: str
    caption: str
    drawing: Drawing

    @cached_property
    def svg(self) -> str:
        """The drawing as the text of an SVG file, drawn once: for the page and for a file."""
        text = io.StringIO()
        with look(), matplotlib.rc_context({"svg.hashsalt": self.name}):
            lay_out(self.drawing)
            self.drawing.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return text.getvalue()


def colour(method: str) -> str:
    """The colour of a method in every figure: its criterion's."""
    return CRITERIA.get(names.parts(method)[0], OTHER)


@contextmanager
def look() -> Iterator[None]:
    """Settings under which figures are drawn and saved."""
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
        "text.hinting": "none",  # at this resolution letters need none, and lie as in vector formats
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.bottom": False,
        "ytick.left": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
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
    """An empty drawing of this size in inches whose parts never overlap."""
    return Drawing(figsize=(width, height), layout="constrained")


def lay_out(drawing: Drawing) -> None:
    """Lay the drawing out once; saving it in another format then keeps the places.

    A drawing without any engine is drawn once per format, one with an engine, even if idle, twice.
    """
    engine = drawing.get_layout_engine()
    if engine is not None:
        engine.execute(drawing)
        drawing.set_layout_engine(None)


# no stamps, so that equal figures are equal files; PNG in two thirds of the time for 9 % more bytes
_SAVING: dict[str, dict[str, Any]] = {
    "png": {"metadata": {"Software": None}, "pil_kwargs": {"compress_level": 3}},
    "pdf": {"metadata": {"CreationDate": None}},
}


def write(figure: Figure, folder: Path, file_format: str = names.FIGURE_FORMATS[0]) -> list[Path]:
    """Write the figure as NAME.svg, or in another of names.FIGURE_FORMATS, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{figure.name}.{file_format}"
    if file_format == "svg":
        path.write_text(figure.svg, encoding="utf-8")
        return [path]
    with look():
        lay_out(figure.drawing)
        figure.drawing.savefig(path, dpi=DPI, **_SAVING[file_format])
    return [path]


def svg_element(figure: Figure) -> str:
    """The figure as an SVG element to put into a page: it scales, and its neutral colours follow the page's theme."""
    box = re.search(r'viewBox="(0 0 ([\d.]+) [\d.]+)"', figure.svg)
    assert box is not None
    start = figure.svg.index(">", figure.svg.index("<svg")) + 1
    content = re.sub(r"<metadata>.*?</metadata>", "", figure.svg[start:], flags=re.DOTALL)
    for fixed, variable in _THEME.items():
        content = content.replace(fixed, variable)
    stem = re.sub(r"\W", "_", figure.name)
    content = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{stem}-", content)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    label = escape(figure.title)
    return f'<svg viewBox="{box[1]}" style="--w:{box[2]}" role="img" aria-label="{label}" {spaces}>{content}'


def bare(axes: Axes) -> None:
    """Leave only the labels of an axes whose content is a grid of its own."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)


def panels(count: int, across: int, height: float, below: float = 0.5, **shared: Any) -> tuple[Drawing, list[Axes]]:
    """An empty drawing of `count` panels in rows of `across` at most, each row `height` inches high, with so many
    inches `below` them for the legend. A single panel is narrower than the page."""
    across = min(across, count)
    down = -(-count // across)
    empty = drawing(PAGE if across > 1 else PAGE * 0.6, height * down + below)
    grid = empty.subplots(down, across, squeeze=False, **shared)
    for axes in grid.flat[count:]:
        axes.remove()
    return empty, list(grid.flat[:count])


def legend(figure: Drawing, handles: Iterable[Artist], most: int = 6) -> None:
    """A legend below the panels, with `most` entries side by side, fewer where their words are long. Rows beyond the
    third make the drawing higher, since panels leave room for three."""
    entries = list(handles)
    longest = max((len(str(entry.get_label())) for entry in entries), default=0)
    width = int(figure.get_figwidth() * 14.5)  # in characters
    columns = max(1, min(most, len(entries), width // (longest + 8)))
    rows = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + 0.16 * max(rows - 3, 0))
    figure.legend(handles=entries, loc="outside lower center", ncols=columns, fontsize=7)


def key(label: str, **look: Any) -> Line2D:
    """A line for the legend."""
    return Line2D([], [], label=label, **look)


def draw(axes: Axes, look: Line2D, x: Any, y: Any) -> None:
    """A line through these points that looks as its entry in the legend does."""
    line = Line2D(np.asarray(x), np.asarray(y))
    line.update_from(look)
    axes.add_line(line)
    axes.autoscale_view()


def cycled(at: int) -> dict[str, Any]:
    """Colour and marker of the line `at` of several that are no criteria."""
    return {"color": SHADES[at % len(SHADES)], "marker": MARKERS[at % len(MARKERS)]}


def depth(layer: int, layers: Sequence[int]) -> str:
    """The colour of one of `layers`: from light to dark with depth."""
    return to_hex(colormaps["viridis_r"](0.1 + 0.85 * layers.index(layer) / max(1, len(layers) - 1)))


def depth_keys(layers: Sequence[int]) -> list[Line2D]:
    """The first and the last of `layers` for the legend."""
    ends = dict.fromkeys((layers[0], layers[-1]))
    return [key(f"layer {layer}", color=depth(layer, layers), marker="o") for layer in ends]


def layer_axis(axes: Axes) -> None:
    """Decoder layers across."""
    axes.set_xlabel("decoder layer")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def percent(*axis: Axis) -> None:
    """Shares in per cent along an axis."""
    for each in axis:
        each.set_major_formatter(PercentFormatter(1, symbol=" %"))


def scientific(*axis: Axis) -> None:
    """Powers of ten along an axis, small and at its end."""
    for each in axis:
        form = ScalarFormatter()
        form.set_powerlimits((-2, 3))
        each.set_major_formatter(form)
        each.get_offset_text().set_fontsize(6.5)


def tokens(count: float, _: object = None) -> str:
    """A number of tokens in a word, as the label of an axis too: 65k, 0.5M."""
    return f"{count / 1e6:.3g}M" if count >= 5e5 else f"{count / 1e3:.3g}k"


def squares(axes: Axes, across: Sequence[str], down: Sequence[str], *, above: bool = True) -> None:
    """Name the columns (above or below) and rows of an axes that is a grid of squares, each one wide and high."""
    axes.set(xlim=(0, len(across)), ylim=(len(down), 0))
    axes.set_xticks(np.arange(len(across)) + 0.5, across)
    axes.set_yticks(np.arange(len(down)) + 0.5, down)
    if above:
        axes.xaxis.tick_top()
    bare(axes)


def square(axes: Axes, x: int, y: int, share: float, words: str, size: float | None = None, below: str = "") -> None:
    """A square, the darker the higher `share` is, with words in its middle and smaller ones `below` them."""
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colormaps[SEQUENTIAL](share), linewidth=0))
    centred: Any = {"ha": "center", "va": "center", "color": "#000000" if share < DARK else "#ffffff"}
    axes.text(x + 0.5, y + (0.36 if below else 0.5), words, fontsize=size, fontweight="bold", **centred)
    if below:
        axes.text(x + 0.5, y + 0.74, below, fontsize=5.8, **centred)


def expert_rows(axes: Axes, values: pd.Series, level: Callable[[Any], Any], named: bool = True) -> None:
    """A row per layer with a square per expert, from the least to the most of `values` (by layer), shaded by `level` of
    those of its layer; experts with nothing are crossed. Layers are `named` at the axis, twelve at most."""
    layers = sorted(values.index.unique())
    for y, layer in enumerate(layers):
        ordered = np.sort(values[values.index == layer].to_numpy(float))
        image = colormaps[SEQUENTIAL](level(ordered))[None]
        none = int((ordered == 0).sum())
        image[0, :none, 3] = 0
        axes.imshow(image, extent=(0, len(ordered), y + 0.94, y + 0.06), aspect="auto", interpolation="nearest")
        if none:
            axes.add_patch(Rectangle((0, y + 0.06), none, 0.88, linewidth=0, **GONE))
    axes.set(xlim=(0, values.groupby(level=0).size().max()), ylim=(len(layers), 0))
    shown = layers[:: -(-len(layers) // 12)] if named else []
    axes.set_yticks([layers.index(layer) + 0.5 for layer in shown], [f"layer {layer}" for layer in shown], fontsize=6.5)
    axes.set_xticks([])
    bare(axes)
