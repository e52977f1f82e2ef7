"""Tables and the rows of figures of a small committed store are as they were, and every figure is
drawn."""

import html
import re
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import golden_store
import numpy as np
import pandas as pd
import pytest
import vl_convert
from golden_store import GOLDEN
from pandas.api.types import is_numeric_dtype

from moe_lab.analysis.load.study import Study
from moe_lab.analysis.registry import outputs
from moe_lab.analysis.render import charts
from moe_lab.analysis.render import table as rendering
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.render.vega import VEGA_LITE

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


def difference(name: str, actual_text: str, tolerance: float) -> str | None:
    """The first column of a golden file that differs by more than `tolerance`, relative to the
    largest number of the column; the last printed place may differ on another machine."""
    texts = ((GOLDEN / name).read_text(encoding="utf-8"), actual_text)
    expected, actual = (
        pd.read_csv(StringIO(text), keep_default_na=False, na_values=[""]) for text in texts
    )
    if list(actual) != list(expected) or len(actual) != len(expected):
        return "rows or columns"
    for column in expected:
        first, second = actual[column], expected[column]
        if is_numeric_dtype(first) and is_numeric_dtype(second):
            scale = second.abs().max()
            same = np.allclose(first, second, rtol=0, atol=tolerance * scale, equal_nan=True)
        else:
            same = first.equals(second)
        if not same:
            return str(column)
    return None


def test_tables_and_rows_of_figures_are_as_they_were(items: GoldenItems) -> None:
    texts = {f"{name}.csv": (rendering.csv(table), 1e-3) for name, table in items.tables.items()}
    for name, figure in items.figures.items():
        texts[f"{name}{golden_store.ROWS}"] = (golden_store.figure_text(figure), 1e-3)
    assert set(texts) == {path.name for path in GOLDEN.glob("*.csv")}, RENEW
    assert {
        name: column for name, text in texts.items() if (column := difference(name, *text))
    } == {}, RENEW


def test_every_figure_is_drawn_and_its_text_is_text(items: GoldenItems) -> None:
    """Vega-Lite draws each figure: every panel's title and at least one mark are in its SVG."""
    for name, figure in items.figures.items():
        svg = vl_convert.vegalite_to_svg(charts.document(figure), VEGA_LITE)
        drawn = html.unescape(svg)
        titles = set(figure.rows[figure.panel])
        assert {title for title in titles if title[:20] not in drawn} == set(), name
        assert "mark-" in svg and "NaN" not in re.sub(r"aria-label=\"[^\"]*\"", "", svg), name


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
