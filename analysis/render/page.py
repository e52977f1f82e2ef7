"""The page of a report: one HTML file with its charts and tables, and files beside it with the data
of long ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    facts: Sequence[tuple[str, str]] = ()
    """Pairs of a label and a text."""
    details: Sequence[tuple[str, str]] = ()
    """Pairs of a title and a long text."""

    @property
    def is_empty(self) -> bool:
        """Whether the chapter has nothing to show."""
        return not (self.text or self.items or self.facts)


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
    chapters: Sequence[Chapter]
    """Chapters, which are folded until they are opened."""
    menus: Mapping[str, Sequence[str]]
    """Menu of `charts.MENUS` -> its values; they filter all figures and tables with this column."""
    hidden: Sequence[str]
    """Sentences of captions that the page gives once, in its last chapter, and not below every
    figure and table."""
    footer: str
    figure_format: str
    """Format of the files in figures/, to which the page links."""


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
    environment.filters |= {"bind": _bind_percent_signs, "caption": _caption}
    files = {
        name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    }
    shown = [*page.first, *(item for chapter in page.chapters for item in chapter.items)]
    scripts = _write_data(shown, path.parent / DATA)
    settings = {"menus": page.menus, "colours": _THEME}
    text = environment.get_template("page.html.j2").render(
        page=page, css=files["page.css"], code=files["page.js"], library=library, scripts=scripts,
        settings=_script_json(settings), footnotes=table.footnotes,
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


_THEME = {
    charts.INK: "var(--ink)",
    charts.MUTED: "var(--muted)",
    charts.RULE: "var(--rule)",
    charts.SURFACE: "transparent",
}
"""Colour of figures -> the page's colour, which follows its theme."""


def identifier(item: Table | Figure) -> str:
    """The item's id on the page: a table and a figure can have the same name."""
    return f"table-{item.name}" if isinstance(item, Table) else item.name


def _write_data(items: Iterable[Table | Figure], folder: Path) -> str:
    """Write the data of long items into `folder`; returns the script with that of the others."""
    inline = []
    for old in folder.glob("*.js"):
        old.unlink()
    for item in items:
        content = table.content(item) if isinstance(item, Table) else charts.document(item)
        script = f"addItem({json.dumps(identifier(item))}, {_script_json(content)});\n"
        if len(script) <= LONG:
            inline.append(script)
        else:
            folder.mkdir(exist_ok=True)
            (folder / f"{identifier(item)}.js").write_text(script, encoding="utf-8")
    return "".join(inline)


def _script_json(value: Any) -> str:
    """JSON that is safe inside an HTML script."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _bind_percent_signs(sentence: str) -> str:
    """The sentence with a non-breaking space before each per cent sign."""
    return sentence.replace(" %", "\u00a0%")


def _caption(text: str, hidden: Sequence[str]) -> str:
    """A caption without the sentences that the page gives once."""
    for sentence in hidden:
        text = text.replace(f"Based on {sentence}", "").replace(sentence, "")
    return text.strip()
