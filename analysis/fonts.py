"""The letters of figures: a smaller DejaVu Sans, since every PDF reads the whole font to embed a few letters."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from fontTools import subset
from matplotlib import font_manager

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
