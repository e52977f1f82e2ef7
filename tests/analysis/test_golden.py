"""Tables and figures of a small committed store are as they were, and every figure fits a paper and
a page."""

import json
import re
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import golden_store
import numpy as np
import pandas as pd
import pytest
from golden_store import GOLDEN
from matplotlib.text import Text
from PIL import Image

from analysis.load.study import Study
from analysis.registry import outputs
from analysis.render import style
from analysis.render import table as rendering
from analysis.render.style import Figure
from analysis.render.table import Table

pytestmark = pytest.mark.slow

RENEW = (
    "if the new values are right: python tests/analysis/golden_store.py tables, then look at "
    "git diff"
)

Made = tuple[dict[str, Table], dict[str, Figure]]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The committed store, of which no other test has read anything yet."""
    return golden_store.unpack(tmp_path_factory.mktemp("golden") / "store")


@pytest.fixture(scope="module")
def made(study: Study) -> Made:
    return golden_store.everything(study)


def decimals(table: Table, column: str) -> int:
    """Places after the point with which a column is printed; of a share in per cent, of the
    share."""
    form = table.formats.get(column.removesuffix(" low").removesuffix(" high"), "")
    places = re.search(r"\.(\d)", form)
    return (int(places[1]) if places else 0) + 2 * form.endswith("%}")


def difference(expected: pd.DataFrame, found: pd.DataFrame, table: Table) -> str | None:
    """The first column that differs. The last printed place may be rounded differently on another
    machine."""
    if list(found) != list(expected) or len(found) != len(expected):
        return "rows or columns"
    for column in expected:
        if column.removesuffix(" low").removesuffix(" high") in table.formats:
            one, other = (frame[column].astype(float) for frame in (found, expected))
            same = np.allclose(
                one, other, rtol=0, atol=0.6 * 10.0 ** -decimals(table, column), equal_nan=True
            )
        else:
            same = found[column].equals(expected[column])
        if not same:
            return column
    return None


def alike(found: Any, expected: Any) -> bool:
    """Whether what is drawn is the same, its numbers but for rounding."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            alike(found[key], expected[key]) for key in expected
        )
    if not isinstance(expected, list):
        return bool(found == expected)
    if expected and all(part is None or isinstance(part, float) for part in expected):
        numbers = (np.array(each, float) for each in (found, expected))
        return len(found) == len(expected) and np.allclose(
            *numbers, rtol=2e-3, atol=1e-6, equal_nan=True
        )
    return len(found) == len(expected) and all(map(alike, found, expected))


def test_tables_and_figures_are_as_they_were(made: Made) -> None:
    assert set(made[0]) == {path.stem for path in GOLDEN.glob("*.csv")}, RENEW
    assert set(made[1]) == {path.stem for path in GOLDEN.glob("*.json")}, RENEW
    wrong: dict[str, object] = {}
    for name, table in made[0].items():
        expected, found = (
            pd.read_csv(StringIO(text), keep_default_na=False, na_values=[""])
            for text in ((GOLDEN / f"{name}.csv").read_text(encoding="utf-8"), rendering.csv(table))
        )
        if differing := difference(expected, found, table):
            wrong[name] = differing
    for name, figure in made[1].items():
        panels = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
        both = zip(golden_store.drawn(figure), panels, strict=True)
        if parts := [
            part for one, other in both for part in other if not alike(one[part], other[part])
        ]:
            wrong[f"figure {name}"] = parts
    assert not wrong, RENEW


def test_the_store_or_another_test_has_something_for_every_name(study: Study, made: Made) -> None:
    others = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")
    )
    for name, output in outputs().items():
        golden = name in made[0] or name in made[1]
        assert golden or f'"{name}' in others or f".{output.make.__name__}(" in others, (
            f"{name} is not tested"
        )
    assert [gap.reason for gap in study.gaps] == ["failed: out of memory"]


def test_every_caption_says_what_it_rests_on(made: Made) -> None:
    tables = made[0]
    others = {"coverage.table2", *(name for name in tables if name.endswith(".published"))}
    scored = [
        table for name, table in tables.items() if table.low is not None and name not in others
    ]
    assert {"ranks", "winners", "unified.table5", "pareto", "heapr.table1"} <= {
        table.name for table in scored
    }
    for table in scored:
        metric = "metric answer_loss" if table.name.endswith(".loss") else "metrics acc and pass@1"
        seeds = "seed 42 (Random: seeds 1, 2 and 3)"
        for words in (
            "12 items",
            metric,
            seeds,
            "gate=model",
            "lm_eval 0.0-synthetic",
            "torch 0.0-synthetic",
        ):
            assert words in table.caption, (table.name, words)
    for table in (tables["unified.fig4"], tables["unified.fig3"], tables["tokens_per_expert"]):
        assert "seed 42; gate=model" in table.caption and "65,000" in table.caption, table.name


def test_every_figure_fits_a_paper_no_text_is_cut_off_and_none_covers_another(
    made: Made, tmp_path: Path
) -> None:
    """Titles, labels and legends."""
    wrong = set()
    for name, figure in made[1].items():
        drawing = figure.drawing
        wide, high = (float(inches) for inches in drawing.get_size_inches())
        assert style.PAGE / 2 < wide <= style.PAGE and high > 1.5, name
        # files of others are looked at by the report's tests
        if name in ("winners", "coverage.fig2", "aimer.fig6"):
            [png], [pdf] = (style.write(figure, tmp_path, form) for form in ("png", "pdf"))
            picture = Image.open(png)
            assert picture.size == pytest.approx((wide * style.DPI, high * style.DPI), abs=1), name
            box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", pdf.read_bytes())
            assert box is not None and float(box[1]) == pytest.approx(72 * wide, abs=0.5), name
        with style.look():
            drawing.draw_without_rendering()
        titles = [
            part
            for axes in drawing.axes
            if axes.get_visible() and axes.get_title("left")
            for part in axes.get_children()
            if isinstance(part, Text) and part.get_text() == axes.get_title("left")
        ]
        # of ticks and axes
        labels = [label for label in drawing.artists if isinstance(label, Text)]
        boxes = [
            part.get_window_extent()
            for part in (*titles, *labels, *drawing.texts, *drawing.legends)
        ]
        page = drawing.bbox.padded(2)
        inside = [
            text.get_window_extent()
            for axes in drawing.axes
            if axes.get_visible()
            for text in axes.texts
        ]
        if any(
            box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1
            for box in [*boxes, *inside]
        ):
            wrong.add(f"{name} is cut off")
        if any(one.padded(-1).overlaps(other.padded(-1)) for one, other in combinations(boxes, 2)):
            wrong.add(f"{name} overlaps")
    assert not wrong
