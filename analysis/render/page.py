"""The page of a report: one HTML file with its charts and tables, and files beside it with the data
of long ones."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moe_lab.analysis.render import charts, table
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Table

_TEMPLATES = Path(__file__).parent / "templates"
LONG = 60_000
"""Data of a table or figure with more characters than this is in a file beside the page, which is
loaded when it is shown. It is a script, because a page opened from a file may not fetch others."""
DATA = "data"
"""Folder of these files, beside the page."""


@dataclass(frozen=True)
class Chapter:
    """A chapter of the page: text, figures, tables and facts, each optional."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    items: Sequence[Table | Figure] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Label -> text."""


@dataclass(frozen=True)
class Page:
    """Contents of a page from top to bottom; empty chapters are left out."""

    title: str
    verdict: str
    """The sentence at the top."""
    lead: str
    """What was studied."""
    first: Sequence[Figure]
    """Figures that are always shown: the first on the first screen, the others below it."""
    plans: Mapping[str, Any]
    """The numbers behind the differences between plans, see `differences.page_plans`."""
    answers: Mapping[str, str]
    """See `differences.page_answers`."""
    chapters: Sequence[Chapter]
    """Chapters, which are folded until they are opened."""
    menus: Mapping[str, Sequence[str]]
    """Menu of `charts.MENUS` -> its values; they filter all figures and tables with this column."""
    hidden: Sequence[str]
    """Sentences of captions that the page gives once, in its last chapter, and not below every
    figure and table."""
    footer: str


def write(page: Page, path: Path, library: str) -> None:
    """Write the page to `path`, and the data of its long figures and tables beside it.

    library: the JavaScript of Vega, see `vega.library`.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bind": _bind_percent_signs,
        "caption": _caption,
        "columns": table.printed_columns,
        "id": identifier,
    }
    scripts = _write_data(page, path.parent / DATA)
    text = environment.get_template("page.html.j2").render(
        page=page, library=library, scripts=scripts, theme=_THEME, footnotes=table.footnotes
    )
    path.write_text(text, encoding="utf-8")


_THEME = {
    charts.INK: "var(--ink)",
    charts.MUTED: "var(--muted)",
    charts.RULE: "var(--rule)",
}
"""Colour of figures -> the page's colour, which follows its theme."""


def identifier(item: Table | Figure) -> str:
    """The item's id on the page: a table and a figure can have the same name."""
    return f"table-{item.name}" if isinstance(item, Table) else item.name


def packed(document: Mapping[str, Any]) -> str:
    """A document as JSON, compressed by gzip, in base64. Frames have a list of columns, index, and
    data, a list of rows."""
    # without a time, so that equal documents are equal files
    return b64encode(gzip.compress(_json(document).encode(), mtime=0)).decode()


def _json(document: Mapping[str, Any]) -> str:
    """A document as JSON, see `packed`."""
    entries = []
    for name, value in document.items():
        if isinstance(value, pd.DataFrame):
            text = value.to_json(orient="split")
        else:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        entries.append(f'"{name}":{text}')
    return "{" + ",".join(entries) + "}"


def _write_data(page: Page, folder: Path) -> str:
    """Write the data of long items, of plans and of answers into `folder`; returns the script with
    that of the other items."""
    files = {f"answers-{number}": text for number, text in enumerate(page.answers.values())}
    files["plans"] = packed(page.plans)
    inline = []
    for item in [*page.first, *(item for chapter in page.chapters for item in chapter.items)]:
        content = table.content(item) if isinstance(item, Table) else charts.document(item)
        text = _script_json(content)
        if len(text) <= LONG:
            inline.append(f'contents["{identifier(item)}"] = {text};\n')
        else:
            files[identifier(item)] = packed(content)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.js"):
        old.unlink()
    for name, text in files.items():
        (folder / f"{name}.js").write_text(f'packed["{name}"] = "{text}";\n')
    return "".join(inline)


def _script_json(document: Mapping[str, Any]) -> str:
    """JSON that is safe inside an HTML script."""
    return _json(document).replace("</", "<\\/")


def _bind_percent_signs(sentence: str) -> str:
    """The sentence with a non-breaking space before each per cent sign."""
    return sentence.replace(" %", "\u00a0%")


def _caption(text: str, hidden: Sequence[str]) -> str:
    """A caption without the sentences that the page gives once."""
    for sentence in hidden:
        text = text.replace(f"Based on {sentence}", "").replace(sentence, "")
    return text.strip()
