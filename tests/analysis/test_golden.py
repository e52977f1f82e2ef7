"""Every table of a small committed store is as it was, and every figure is what a paper and a page can take."""

from __future__ import annotations

import re
from io import StringIO
from itertools import combinations
from pathlib import Path

import golden_store
import numpy as np
import pandas as pd
import pytest
from golden_store import GOLDEN
from matplotlib import colormaps, colors
from matplotlib.text import Text
from PIL import Image

from analysis.load.study import Study
from analysis.registry import Item, outputs
from analysis.render import style
from analysis.render import table as rendering
from analysis.render.table import Table

RENEW = "if the new values are right: python tests/analysis/golden_store.py tables, then look at git diff"
MAPS = ("YlGnBu", "viridis")
"""Colour maps of figures: from dark to light without a break, so that they are read in grey as well."""
WHITE = "#ffffff"
"""What is written on dark squares of heat maps."""
WRITTEN = ("winners", "coverage.fig2", "aimer.fig6")
"""Figures that are written as files here; the report's tests look at the files of a dozen others."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return golden_store.unpack(tmp_path_factory.mktemp("golden") / "store")


@pytest.fixture(scope="module")
def made(study: Study) -> list[Item]:
    return golden_store.everything(study)


def decimals(table: Table, column: str) -> int:
    """Places after the point with which a column is printed; of a share in per cent, of the share."""
    form = table.formats.get(column.removesuffix(" low").removesuffix(" high"), "")
    places = re.search(r"\.(\d)", form)
    return (int(places[1]) if places else 0) + 2 * form.endswith("%}")


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.csv")))
def test_a_table_is_as_it_was(made: list[Item], name: str) -> None:
    table = golden_store.tables(made)[name]
    expected, found = (
        pd.read_csv(StringIO(text), keep_default_na=False, na_values=[""])
        for text in ((GOLDEN / f"{name}.csv").read_text(encoding="utf-8"), rendering.csv(table))
    )
    assert list(found) == list(expected) and len(found) == len(expected), RENEW
    for column in expected:
        if column.removesuffix(" low").removesuffix(" high") in table.formats:
            # the last printed place may be rounded differently on another machine
            allowed = 0.6 * 10.0 ** -decimals(table, column)
            np.testing.assert_allclose(
                found[column].astype(float), expected[column].astype(float), rtol=0, atol=allowed, err_msg=RENEW
            )
        else:
            assert found[column].tolist() == expected[column].tolist() or found[column].equals(expected[column]), RENEW


def test_the_store_or_another_test_has_something_for_every_name(study: Study, made: list[Item]) -> None:
    assert set(golden_store.tables(made)) == {path.stem for path in GOLDEN.glob("*.csv")}, RENEW
    names = {output.name for output in made}
    others = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for name, output in outputs().items():
        assert name in names or f'"{name}' in others or f".{output.make.__name__}(" in others, f"{name} is not tested"
    assert [gap.what for gap in study.gaps] == ["failed: out of memory"]


def of_maps() -> set[str]:
    shades = np.linspace(0, 1, 1024)
    return {colors.to_hex(colormaps[name](shade)) for name in MAPS for shade in shades}


def test_every_figure_fits_a_paper_and_keeps_to_the_palette(made: list[Item], tmp_path: Path) -> None:
    palette = {*style.CRITERIA.values(), style.OTHER, style.INK, style.MUTED, style.RULE, style.SURFACE, WHITE}
    allowed = {shade.lower() for shade in palette} | of_maps()
    for name, figure in golden_store.figures(made).items():
        drawn = figure.svg
        found = {shade.lower() for shade in re.findall(r"#[0-9a-fA-F]{6}\b", drawn)}
        assert found <= allowed, f"{name}: {sorted(found - allowed)}"
        wide, high = (float(inches) for inches in figure.drawing.get_size_inches())
        assert style.PAGE / 2 < wide <= style.PAGE and high > 1.5, name
        if name in WRITTEN:
            [png], [pdf] = (style.write(figure, tmp_path, form) for form in ("png", "pdf"))
            picture = Image.open(png)
            assert picture.size == pytest.approx((wide * style.DPI, high * style.DPI), abs=1), name
            box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", pdf.read_bytes())
            assert box is not None and float(box[1]) == pytest.approx(72 * wide, abs=0.5), name


def test_no_text_of_a_figure_is_cut_off_and_no_title_label_or_legend_covers_another(made: list[Item]) -> None:
    wrong = set()
    for name, figure in golden_store.figures(made).items():
        drawing = figure.drawing
        with style.look():
            drawing.draw_without_rendering()
        titles = [
            part
            for axes in drawing.axes
            if axes.get_visible() and axes.get_title("left")
            for part in axes.get_children()
            if isinstance(part, Text) and part.get_text() == axes.get_title("left")
        ]
        labels = [label for label in drawing.artists if isinstance(label, Text)]  # of ticks and axes
        boxes = [part.get_window_extent() for part in (*titles, *labels, *drawing.texts, *drawing.legends)]
        page = drawing.bbox.padded(2)
        inside = [text.get_window_extent() for axes in drawing.axes if axes.get_visible() for text in axes.texts]
        if any(
            box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1 for box in [*boxes, *inside]
        ):
            wrong.add(f"{name} is cut off")
        if any(one.padded(-1).overlaps(other.padded(-1)) for one, other in combinations(boxes, 2)):
            wrong.add(f"{name} overlaps")
    assert not wrong
