"""Render one self-contained HTML page of text, figures and tables."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moe_lab.analysis.render import style
from moe_lab.analysis.render import table as tables
from moe_lab.analysis.render.style import Figure
from moe_lab.analysis.render.table import Table

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """A chapter of the page."""

    anchor: str
    short: str = ""
    """Short title, for the page's list of contents."""
    title: str = ""
    text: Sequence[str] = ()
    outputs: Sequence[Table | Figure] = ()
    facts: Sequence[tuple[str, str]] = ()
    """Pairs of a label and a text."""
    details: Sequence[tuple[str, str]] = ()
    """Pairs of a title and a long text, which is collapsed until clicked."""
    folded: bool = False
    """Whether the tables are collapsed until clicked."""

    @property
    def empty(self) -> bool:
        """Whether the chapter has neither text nor outputs nor facts."""
        return not (self.text or self.outputs or self.facts)


@dataclass(frozen=True)
class Page:
    """Contents of a page from top to bottom; empty chapters are left out."""

    title: str
    lead: str
    """Introductory paragraph below the title."""
    sections: Sequence[Section]
    footer: str
    figure_format: str
    """Format of the files in figures/, to which the page links."""


def html(page: Page) -> str:
    """Render the page as self-contained HTML."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    filters = (
        _bind_percent_signs,
        _data_url,
        _table_html,
        first_block,
        style.svg_element,
        tables.footnotes,
    )
    environment.filters |= {function.__name__.lstrip("_"): function for function in filters}
    return environment.get_template("page.html.j2").render(
        page=page, css=_read_raw("page.css"), script=_read_raw("page.js")
    )


def _bind_percent_signs(sentence: str) -> str:
    """The sentence with a non-breaking space before each per cent sign."""
    return sentence.replace(" %", "\u00a0%")


def _read_raw(file: str) -> Markup:
    """The content of a file in the folder of templates, to be inserted without escaping."""
    return Markup((_TEMPLATES / file).read_text(encoding="utf-8"))


def _table_html(table: Table) -> str:
    """The table as HTML. The column "Model" of a single model is left out, because the top of the
    page names the model."""
    if "Model" not in table.frame or table.frame["Model"].nunique() > 1:
        return tables.html(table)
    blocks = [column for column in table.blocks if column != "Model"]
    return tables.html(replace(table, frame=table.frame.drop(columns="Model"), blocks=blocks))


LONG = 20
"""Most rows of a table that the page shows at first; of longer tables, it shows the first block."""


def first_block(table: Table) -> str:
    """The columns of a long table in which the page first shows the value of the first row,
    separated by |; "" if the page shows all rows, because the first block is a single row."""
    keys = table.frame[list(table.blocks)]
    is_in_block = (keys == keys.iloc[0]).all(axis=1)
    return "|".join(table.blocks) if len(keys) > LONG and is_in_block.sum() > 1 else ""


def _data_url(text: str, media: str) -> str:
    return f"data:{media};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def write_files(items: Iterable[Table | Figure], out: Path, figure_format: str) -> list[Path]:
    """Write tables into `out`/tables and figures into `out`/figures. Returns the paths of the
    files.

    figure_format: one of `names.FIGURE_FORMATS`.
    """
    paths: list[Path] = []
    for item in items:
        if isinstance(item, Figure):
            paths += style.write(item, out / "figures", figure_format)
        else:
            paths += tables.write(item, out / "tables")
    return paths
