"""Tables and figures of a small committed store are as they were, and every figure fits a paper and
a page."""

import json
import re
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import golden_store
import numpy as np
import pandas as pd
import pytest
from golden_store import GOLDEN
from matplotlib.axis import Axis
from matplotlib.text import Text

from moe_lab.analysis.load.study import Study
from moe_lab.analysis.registry import outputs
from moe_lab.analysis.render import style
from moe_lab.analysis.render import table as rendering
from moe_lab.analysis.render.style import Figure
from moe_lab.analysis.render.table import Table

pytestmark = pytest.mark.slow

RENEW = (
    "if the new values are right: python tests/analysis/golden_store.py tables, then look at "
    "git diff"
)


class GoldenItems(NamedTuple):
    """Everything that analysis makes of the committed store, by name."""

    tables: dict[str, Table]
    figures: dict[str, Figure]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The committed store, of which no other test has read anything yet."""
    return golden_store.unpack(tmp_path_factory.mktemp("golden") / "store")


@pytest.fixture(scope="module")
def items(study: Study) -> GoldenItems:
    return GoldenItems(*golden_store.tables_and_figures(study))


def decimals(table: Table, column: str) -> int:
    """Places after the point with which a column is printed; of a share in per cent, of the
    share."""
    form = table.formats.get(column.removesuffix(" low").removesuffix(" high"), "")
    match = re.search(r"\.(\d)", form)
    return (int(match[1]) if match else 0) + 2 * form.endswith("%}")


def difference(expected: pd.DataFrame, actual: pd.DataFrame, table: Table) -> str | None:
    """The first column that differs. The last printed place may be rounded differently on another
    machine."""
    if list(actual) != list(expected) or len(actual) != len(expected):
        return "rows or columns"
    for column in expected:
        if column.removesuffix(" low").removesuffix(" high") in table.formats:
            first, second = (frame[column].astype(float) for frame in (actual, expected))
            same = np.allclose(
                first, second, rtol=0, atol=0.6 * 10.0 ** -decimals(table, column), equal_nan=True
            )
        else:
            same = actual[column].equals(expected[column])
        if not same:
            return column
    return None


def alike(actual: Any, expected: Any) -> bool:
    """Whether what is drawn is the same, its numbers but for rounding."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            alike(actual[key], expected[key]) for key in expected
        )
    if not isinstance(expected, list):
        return bool(actual == expected)
    if expected and all(part is None or isinstance(part, float) for part in expected):
        numbers = (np.array(values, float) for values in (actual, expected))
        return len(actual) == len(expected) and np.allclose(
            *numbers, rtol=2e-3, atol=1e-6, equal_nan=True
        )
    return len(actual) == len(expected) and all(map(alike, actual, expected))


def test_tables_are_as_they_were(items: GoldenItems) -> None:
    assert set(items.tables) == {path.stem for path in GOLDEN.glob("*.csv")}, RENEW
    wrong: dict[str, object] = {}
    for name, table in items.tables.items():
        expected, actual = (
            pd.read_csv(StringIO(text), keep_default_na=False, na_values=[""])
            for text in ((GOLDEN / f"{name}.csv").read_text(encoding="utf-8"), rendering.csv(table))
        )
        if differing := difference(expected, actual, table):
            wrong[name] = differing
    assert not wrong, RENEW


def test_figures_are_as_they_were(items: GoldenItems) -> None:
    assert set(items.figures) == {path.stem for path in GOLDEN.glob("*.json")}, RENEW
    wrong: dict[str, object] = {}
    for name, figure in items.figures.items():
        expected_panels = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
        for actual, expected in zip(
            golden_store.panel_contents(figure), expected_panels, strict=True
        ):
            parts = [part for part in expected if not alike(actual[part], expected[part])]
            if parts:
                wrong[f"figure {name}"] = parts
    assert not wrong, RENEW


def test_captions_are_as_they_were(study: Study, items: GoldenItems) -> None:
    made = [*items.tables.values(), *items.figures.values()]
    expected = golden_store.CAPTIONS.read_text(encoding="utf-8").splitlines()
    assert golden_store.captions(made, study.store) == expected, RENEW


def test_every_output_is_in_the_golden_store_or_another_test(
    study: Study, items: GoldenItems
) -> None:
    others = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")
    )
    for name, output in outputs().items():
        # comparisons with papers are made by one function
        name = name.removesuffix(".published")
        golden = name in items.tables or name in items.figures
        assert golden or f'"{name}' in others or f".{output.make.__name__}(" in others, (
            f"{name} is not tested"
        )
    assert [gap.reason for gap in study.gaps] == ["failed: out of memory"]


def test_every_figure_fits_a_paper(items: GoldenItems) -> None:
    for name, figure in items.figures.items():
        width, height = (float(inches) for inches in figure.drawing.get_size_inches())
        assert style.PAGE / 2 < width <= style.PAGE and height > 1.5, name


class TextBoxes(NamedTuple):
    """The page of a figure, and where its texts are: titles, labels and legends, which may not
    overlap, and texts inside the axes."""

    page: Any
    outside: list[Any]
    inside: list[Any]


def text_boxes(drawing: Any) -> TextBoxes:
    visible = [axes for axes in drawing.axes if axes.get_visible()]
    with style.look():  # its fonts give texts their sizes
        drawing.draw_without_rendering()
        titles = [
            part
            for axes in visible
            if axes.get_title("left")
            for part in axes.get_children()
            if isinstance(part, Text) and part.get_text() == axes.get_title("left")
        ]
        labels = [
            label
            for axes in visible
            for axis in (axes.xaxis, axes.yaxis)
            for label in labels_of(axis)
        ]
        legends = [legend for axes in visible if (legend := axes.get_legend())]
        outside = [*titles, *labels, *legends, *drawing.texts, *drawing.legends]
        inside = [text for axes in visible for text in axes.texts]
        return TextBoxes(
            drawing.bbox.padded(2),
            [part.get_window_extent() for part in outside],
            [text.get_window_extent() for text in inside],
        )


def labels_of(axis: Axis) -> list[Text]:
    """The texts of an axis: its label, the labels of visible ticks, and the power of ten."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    labels = [
        label
        for tick in ticks
        for label in (tick.label1, tick.label2)
        if low <= tick.get_loc() <= high
    ]
    texts = [axis.label, axis.get_offset_text(), *labels]
    return [text for text in texts if text.get_visible() and text.get_text()]


def is_within(box: Any, page: Any) -> bool:
    return bool(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1)


def test_no_text_of_a_figure_is_cut_off_or_covers_another(study: Study) -> None:
    # drawn anew: other tests ask for ticks outside of `look`, which keep the size they then get
    _, figures = golden_store.tables_and_figures(study)
    wrong = set()
    for name, figure in figures.items():
        boxes = text_boxes(figure.drawing)
        if not all(is_within(box, boxes.page) for box in [*boxes.outside, *boxes.inside]):
            wrong.add(f"{name} is cut off")
        pairs = combinations(boxes.outside, 2)
        if any(first.padded(-1).overlaps(second.padded(-1)) for first, second in pairs):
            wrong.add(f"{name} overlaps")
    assert not wrong
