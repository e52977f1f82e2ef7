"""Style of figures, helpers for drawing them, and their output as files and as parts of a page."""

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
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    MaxNLocator,
    PercentFormatter,
    ScalarFormatter,
)

from analysis import names
from analysis.render.layout import Panels

LETTER, SMALL_LETTER = 0.063, 0.047
"""Average width of a letter in inches at 7.5 and at 5.6 points."""

PAGE = 6.9
"""Width of a figure across the page, in inches."""
DPI = 200
WIDE = 3
"""Largest number of panels side by side for which a title of several words fits on one line."""

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
"""Colours of criteria (after Paul Tol's schemes); every figure also names them, or gives them a
marker."""
OTHER = "#5b8c9c"
SHADES = ("#2277bb", "#ee7733", "#117733", "#aa4499", "#15181e", "#b39a25", "#cc6677", "#44aa99")
"""Colours of lines that are not criteria."""
DASHED: Any = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 0.9}
"""Line style of references: the unpruned model, a uniform allocation."""
GONE: Any = {"facecolor": "none", "edgecolor": "#bb3311", "hatch": "xxxx"}
"""Patch style of experts without tokens."""
MARKERS = "osD^vPX*<>hd"
SEQUENTIAL = "YlGnBu"
"""Colour map that also goes from light to dark when printed in grey."""
DARK = 0.55
"""Share above which a shade of SEQUENTIAL is too dark for black letters."""
HATCH = "/////"
"""Hatching of wins that are not proved."""


@dataclass(frozen=True)
class Figure:
    """A drawing with its file stem, title and caption."""

    name: str
    title: str
    caption: str
    drawing: Drawing

    @cached_property
    def svg(self) -> str:
        """The drawing as SVG text; cached, as the page and a file both use it."""
        text = io.StringIO()
        with look(), matplotlib.rc_context({"svg.hashsalt": self.name}):
            lay_out(self.drawing)
            self.drawing.savefig(
                text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
            )
        return text.getvalue()


def colour(method: str) -> str:
    """The colour of a method in every figure, which is that of its criterion."""
    return CRITERIA.get(names.parts(method)[0], OTHER)


@contextmanager
def look() -> Iterator[None]:
    """Context with the matplotlib settings for drawing and saving figures."""
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titley": 1.0,  # not looked for at every drawing: the layout places titles
        "axes.edgecolor": RULE,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.linewidth": 0.8,
        "text.color": INK,
        # not needed at this resolution; letters are placed as in vector formats
        "text.hinting": "none",
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
    """An empty drawing of this size in inches, whose panels are placed so that parts do not
    overlap."""
    return Drawing(figsize=(width, height), layout=Panels())


def lay_out(drawing: Drawing) -> None:
    """Lay out the drawing once and remove its layout engine; files in all formats then have the
    same layout.

    Without an engine a drawing is drawn once per format; with one, even if it has nothing to do,
    twice.
    """
    engine = drawing.get_layout_engine()
    if engine is not None:
        engine.execute(drawing)
        drawing.set_layout_engine(None)


# no time stamps, so that equal figures are equal files; compress_level=3: two thirds of the time
# for 9 % more bytes
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
    """The figure as an SVG element for a page; it scales, and its neutral colours follow the page's
    theme."""
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
    return (
        f'<svg viewBox="{box[1]}" style="--w:{box[2]}" role="img" aria-label="{label}" '
        f"{spaces}>{content}"
    )


def bare(axes: Axes) -> None:
    """Remove spines but keep labels, for axes that contain a grid of squares."""
    for side in axes.spines.values():
        side.set_visible(False)


def ticks(axis: Axis, places: Iterable[float], labels: Iterable[str], **look: Any) -> None:
    """Label these places of an axis; `look`: as `labelsize`, `labelrotation`. Limits stay as they
    are.

    Axes.set_xticks makes five artists per tick, of which `analysis.render.layout` draws none."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_major_formatter(FixedFormatter(list(labels)))
    axis.set_tick_params(**look)


def panels(
    count: int, across: int, height: float, below: float = 0.5, **shared: Any
) -> tuple[Drawing, list[Axes]]:
    """An empty drawing of `count` panels, at most `across` in a row.

    Rows are `height` inches high; `below` is the height in inches for the legend. A single panel
    per row is narrower than the page."""
    across = min(across, count)
    down = -(-count // across)
    empty = drawing(PAGE if across > 1 else PAGE * 0.6, height * down + below)
    grid = empty.subplots(down, across, squeeze=False, **shared)
    for axes in grid.flat[count:]:
        axes.remove()
    return empty, list(grid.flat[:count])


def legend(figure: Drawing, handles: Iterable[Artist], most: int = 6, title: str = "") -> None:
    """Add a legend below the panels, with at most `most` entries side by side, fewer when their
    texts are long.

    Panels leave room for three rows of entries, the title counted; more rows make the drawing
    higher."""
    entries = list(handles)
    longest = max((len(str(entry.get_label())) for entry in entries), default=0)
    width = int(figure.get_figwidth() * 14.5)  # in characters
    columns = max(1, min(most, len(entries), width // (longest + 8)))
    rows = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + 0.16 * max(rows - 3, 0))
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=columns,
        fontsize=7,
        title=title or None,
        title_fontsize=7,
    )


def key(label: str, **look: Any) -> Line2D:
    """A legend entry: a line with this label and style."""
    return Line2D([], [], label=label, **look)


def draw(axes: Axes, look: Line2D, x: Any, y: Any) -> None:
    """Draw a line through these points in the style of its legend entry `look`."""
    line = Line2D(np.asarray(x), np.asarray(y))
    line.update_from(look)
    axes.add_line(line)
    axes.autoscale(None)  # type: ignore[arg-type] # when drawn: at once, panels that share an axis take quadratic time


def cycled(at: int) -> dict[str, Any]:
    """Colour and marker of the line number `at` among lines that are not criteria."""
    return {"color": SHADES[at % len(SHADES)], "marker": MARKERS[at % len(MARKERS)]}


def depth(layer: int, layers: Sequence[int]) -> str:
    """The colour of one of `layers`, from light to dark with depth."""
    return to_hex(
        colormaps["viridis_r"](0.1 + 0.85 * layers.index(layer) / max(1, len(layers) - 1))
    )


def depth_keys(layers: Sequence[int]) -> list[Line2D]:
    """Legend entries of the first and the last of `layers`."""
    ends = dict.fromkeys((layers[0], layers[-1]))
    return [key(f"layer {layer}", color=depth(layer, layers), marker="o") for layer in ends]


def layer_axis(axes: Axes) -> None:
    """Label the x axis as decoder layers, with integer ticks."""
    axes.set_xlabel("decoder layer")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def percent(*axis: Axis) -> None:
    """Format the ticks of an axis as per cent."""
    for each in axis:
        each.set_major_formatter(PercentFormatter(1, symbol=" %"))


def scientific(*axis: Axis) -> None:
    """Format an axis with a power of ten, in small letters at its end."""
    for each in axis:
        form = ScalarFormatter()
        form.set_powerlimits((-2, 3))
        each.set_major_formatter(form)
        each.get_offset_text().set_fontsize(6.5)


def tokens(count: float) -> str:
    """Short form of a number of tokens, such as 65k or 0.5M."""
    return f"{count / 1e6:.3g}M" if count >= 5e5 else f"{count / 1e3:.3g}k"


def squares(axes: Axes, across: Sequence[str], down: Sequence[str], *, above: bool = True) -> None:
    """Label the columns (above or below) and rows of an axes that contains a grid of unit
    squares."""
    axes.set(xlim=(0, len(across)), ylim=(len(down), 0))
    ticks(axes.xaxis, np.arange(len(across)) + 0.5, across, labeltop=above, labelbottom=not above)
    ticks(axes.yaxis, np.arange(len(down)) + 0.5, down)
    bare(axes)


def square(
    axes: Axes, x: int, y: int, share: float, words: str, size: float | None = None, below: str = ""
) -> None:
    """Draw a unit square, darker for a higher `share`, with words in its middle and smaller ones
    `below` them."""
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colormaps[SEQUENTIAL](share), linewidth=0))
    centred: Any = {
        "ha": "center",
        "va": "center",
        "color": "#000000" if share < DARK else "#ffffff",
    }
    axes.text(
        x + 0.5, y + (0.36 if below else 0.5), words, fontsize=size, fontweight="bold", **centred
    )
    if below:
        axes.text(x + 0.5, y + 0.74, below, fontsize=5.8, **centred)


def expert_rows(axes: Axes, values: pd.Series, level: Callable[[Any], Any]) -> None:
    """Draw a row per layer with a square per expert, sorted by `values` (indexed by layer).

    Squares are shaded by `level` of the layer's values; experts with value 0 are crossed. At most
    twelve layers are labelled on the axis."""
    layers = sorted(values.index.unique())
    for y, layer in enumerate(layers):
        ordered = np.sort(values[values.index == layer].to_numpy(float))
        image = colormaps[SEQUENTIAL](level(ordered))[None]
        none = int((ordered == 0).sum())
        image[0, :none, 3] = 0
        axes.imshow(
            image,
            extent=(0, len(ordered), y + 0.94, y + 0.06),
            aspect="auto",
            interpolation="nearest",
        )
        if none:
            axes.add_patch(Rectangle((0, y + 0.06), none, 0.88, linewidth=0, **GONE))
    axes.set(xlim=(0, values.groupby(level=0).size().max()), ylim=(len(layers), 0))
    shown = layers[:: -(-len(layers) // 12)]
    places = [layers.index(layer) + 0.5 for layer in shown]
    ticks(axes.yaxis, places, [f"layer {layer}" for layer in shown], labelsize=6.5)
    ticks(axes.xaxis, [], [])
    bare(axes)
