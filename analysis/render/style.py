"""The letters of figures: a smaller DejaVu Sans, since every PDF reads the whole font to embed a few letters."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from fontTools import subset
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from analysis import names

WHOLE, SMALL = "DejaVu Sans", "DejaVu Sans of these figures"
WEIGHTS = (400, 700)
LETTERS = ((0x20, 0x7F), (0xA0, 0x180), (0x391, 0x3CA), (0x2010, 0x2040), (0x2190, 0x2194), (0x2200, 0x2270))
"""Latin, Greek, punctuation, arrows, signs of mathematics, which figures are written in: embedding reads no more than
that. The rest comes from the whole font."""


@cache
def family() -> tuple[str, ...]:
    """Names of fonts for `font.family`, the first that has a letter gives it; the copy is made once per process."""
    folder = Path(_folder().name)
    for weight in WEIGHTS:
        whole = font_manager.findfont(font_manager.FontProperties(family=WHOLE, weight=weight))
        copy = folder / f"{weight}.ttf"
        _reduce(Path(whole), copy)
        font_manager.fontManager.ttflist.append(
            font_manager.FontEntry(fname=str(copy), name=SMALL, weight=weight, stretch="normal", size="scalable")
        )
    return SMALL, WHOLE


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the copies lie until the process ends."""
    return tempfile.TemporaryDirectory(prefix="moe_lab_fonts_")


def _reduce(whole: Path, copy: Path) -> None:
    """Only LETTERS, with kerning, without what turns letters into others."""
    options = subset.Options(layout_features=["kern"], glyph_names=False, drop_tables=["FFTM", "PfEd", "TeX "])
    font = subset.load_font(str(whole), options)
    keeps = subset.Subsetter(options)
    keeps.populate(unicodes=[letter for first, end in LETTERS for letter in range(first, end)])
    keeps.subset(font)
    subset.save_font(font, str(copy), options)


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


def colour(method: str) -> str:
    """The colour of a method in every figure: its criterion's."""
    return CRITERIA.get(names.parts(method)[0], OTHER)


@contextmanager
def look() -> Iterator[None]:
    """Settings under which figures are drawn and saved."""
    settings: Any = {
        "font.family": list(family()),
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


def settle(made: Drawing) -> None:
    """Lay the drawing out once; saving it in several formats then keeps the places.

    A drawing without any engine is drawn once per format, one with an engine, even if idle, twice.
    """
    engine = made.get_layout_engine()
    if engine is not None:
        engine.execute(made)
        made.set_layout_engine(None)


_FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"metadata": {"Software": None}, "pil_kwargs": {"compress_level": 3}},
    ".pdf": {"metadata": {"CreationDate": None}},
}
"""How each is saved: no stamps, so that equal figures are equal files; PNG in two thirds of the time for 9 % more."""


def write(figure: Figure, folder: Path) -> list[Path]:
    """Write the figure as NAME.png and NAME.pdf into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{figure.name}.{suffix}" for suffix in ("png", "pdf")]
    with look():
        settle(figure.drawing)
        for path in paths:
            figure.drawing.savefig(path, dpi=DPI, **_FORMATS[path.suffix])
    return paths


def svg(figure: Figure) -> str:
    """The figure as an SVG element to put into a page: it scales, and its neutral colours follow the page's theme."""
    buffer = io.StringIO()
    with look(), matplotlib.rc_context({"svg.hashsalt": figure.name}):
        settle(figure.drawing)
        figure.drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    made = buffer.getvalue()
    box = re.search(r'viewBox="(0 0 ([\d.]+) [\d.]+)"', made)
    assert box is not None
    start = made.index(">", made.index("<svg")) + 1
    made = re.sub(r"<metadata>.*?</metadata>", "", made[start:], flags=re.DOTALL)
    for fixed, variable in _THEME.items():
        made = made.replace(fixed, variable)
    stem = re.sub(r"\W", "_", figure.name)
    made = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{stem}-", made)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return (
        f'<svg viewBox="{box[1]}" style="--w:{box[2]}" role="img" aria-label="{escape(figure.title)}" {spaces}>{made}'
    )


def bare(axes: Axes) -> None:
    """Leave only the labels of an axes whose content is a grid of its own."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
