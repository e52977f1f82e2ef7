"""Render one self-contained HTML page of text, figures and tables."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis import names
from analysis.render import style
from analysis.render import table as tables
from analysis.render.style import Figure
from analysis.render.table import Table

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
    filters: Mapping[str, str] = field(default_factory=dict)
    """Table name -> columns by which the page filters the table, separated by |. With a leading
    star, the page first shows only the first block."""
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
    kicker: str
    """Short line above the title."""
    lead: str
    """Introductory paragraph below the title."""
    tiles: Sequence[tuple[int, str]]
    """Pairs of a number and its label."""
    sections: Sequence[Section]
    footer: str
    figure_format: str = names.FIGURE_FORMATS[0]
    """Format of the files in figures/, to which the page links."""


def html(page: Page) -> str:
    """Render the page as self-contained HTML."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=page.title,
        kicker=page.kicker,
        lead=_bind_percent_signs(page.lead),
        tiles=[{"value": f"{value:,}", "label": label} for value, label in page.tiles],
        sections=[_section_variables(section) for section in page.sections if not section.empty],
        css=_read_raw("page.css"),
        script=_read_raw("page.js"),
        footer=page.footer,
        figure_format=page.figure_format,
    )


def _bind_percent_signs(sentence: str) -> str:
    """The sentence with a non-breaking space before each per cent sign."""
    return sentence.replace(" %", "\u00a0%")


def _read_raw(file: str) -> Markup:
    """The content of a file in the folder of templates, to be inserted without escaping."""
    return Markup((_TEMPLATES / file).read_text(encoding="utf-8"))


def _section_variables(section: Section) -> dict[str, Any]:
    """Variables of the page's template for one chapter."""
    return {
        "anchor": section.anchor,
        "short": section.short,
        "title": section.title,
        "text": [_bind_percent_signs(sentence) for sentence in section.text],
        "collapsed": section.folded,
        "facts": section.facts,
        "details": section.details,
        "figures": [
            _figure_variables(output) for output in section.outputs if isinstance(output, Figure)
        ],
        "tables": [
            _table_variables(output, section.filters.get(output.name, ""))
            for output in section.outputs
            if isinstance(output, Table)
        ],
    }


def _figure_variables(figure: Figure) -> dict[str, Any]:
    """Variables of the page's template for one figure."""
    return {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        "svg": Markup(style.svg_element(figure)),
    }


def _table_variables(table: Table, filters: str) -> dict[str, Any]:
    """Variables of the page's template for one table.

    filters: the value of `Section.filters` for this table.
    """
    files = [
        {
            "name": f"{table.name}.{suffix}",
            "kind": kind,
            "data": _data_url(table.texts[suffix], media),
        }
        for suffix, kind, media in (
            ("csv", "CSV", "text/csv"),
            ("md", "Markdown", "text/markdown"),
            ("tex", "LaTeX", "text/x-tex"),
        )
    ]
    return {
        "name": f"table-{table.name}",
        "rows": len(table.frame),
        "title": table.title,
        "caption": table.caption,
        "footnotes": tables.footnotes(table),
        "html": Markup(_table_html(table)),
        "intervals": table.low is not None,
        # whether intervals are shown at first; wide tables have no room for them
        "open_intervals": len(table.frame.columns) < 15,
        "files": files,
        "filter": filters.lstrip("*"),
        "first": filters.startswith("*"),
    }


def _table_html(table: Table) -> str:
    """The table as HTML. The column "Model" of a single model is left out, because the top of the
    page names the model."""
    if "Model" not in table.frame or table.frame["Model"].nunique() > 1:
        return table.texts["html"]
    blocks = [column for column in table.blocks if column != "Model"]
    return tables.html(replace(table, frame=table.frame.drop(columns="Model"), blocks=blocks))


def _data_url(text: str, media: str) -> str:
    return f"data:{media};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def write_files(
    items: Iterable[Table | Figure], out: Path, figure_format: str = names.FIGURE_FORMATS[0]
) -> list[Path]:
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
