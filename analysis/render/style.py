"""Figures: how they look, and how they become files and parts of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

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
MARKERS = "osD^vPX*<>hd"
SEQUENTIAL = "YlGnBu"
"""From light to dark in grey as well."""
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
