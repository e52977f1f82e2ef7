"""One self-contained page: what was run, what won, how sure that is, what is missing, and where everything is."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis import beside, catalogue, findings, names, render, style
from analysis.catalogue import Material
from analysis.load import Study, load
from analysis.made import Output
from analysis.sections import Section, sections
from analysis.style import Figure
from analysis.tables import Table

PAGE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"


def write(store: Path | str, study: str, out: Path | str) -> Path:
    """Write the report of `study`, its tables and its figures into `out`; returns the page's path."""
    return write_report(load(Path(store), study), Path(out))


def write_report(study: Study, out: Path) -> Path:
    """Write all tables and figures of a loaded study, and the page that shows them, into `out`."""
    material = Material(study)
    made = catalogue.make(catalogue.CATALOGUE, material)
    catalogue.write((output for outputs in made.values() for output in outputs), out)
    page = out / PAGE
    page.write_text(render_page(material, made), encoding="utf-8")
    return page


def render_page(material: Material, made: Mapping[str, Sequence[Output]]) -> str:
    """The page as HTML text that needs nothing beside it."""
    study = material.study
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    chapters = [section for section in _chapters(material, made) if not section.empty]
    return environment.get_template("report.html.j2").render(
        title=findings.capitalised(names.listing(study.name.replace("_", " ").split("+"))),
        kicker=_kicker(study),
        lead=_bound(findings.what_was_run(study)),
        findings=[
            (about, _bound(said)) for about, said in findings.headline(study, material.comparisons, material.winners)
        ],
        tiles=_tiles(study),
        sections=[_context(section) for section in chapters],
        css=_raw("report.css"),
        script=_raw("report.js"),
        footer=f"Made by moe_lab {study.document.get('moe_lab', '')} from {study.name} in {study.store.resolve()}.",
    )


def _chapters(material: Material, made: Mapping[str, Sequence[Output]]) -> list[Section]:
    """All chapters of the page; the comparison with the papers stands before what is missing."""
    own = sections(material, made)
    place = [section.anchor for section in own].index("gaps")
    return [*own[:place], beside.chapter(material), *own[place:]]


def _bound(sentence: str) -> str:
    """The sentence with per cent signs that stay on the line of their number."""
    return sentence.replace(" %", "\u00a0%")


def _raw(file: str) -> Markup:
    return Markup((_TEMPLATES / file).read_text(encoding="utf-8"))


def _kicker(study: Study) -> str:
    moment = datetime.fromtimestamp(float(study.document["created"]), timezone.utc)
    return f"{names.listing(dict.fromkeys(study.cells['model']))} · {moment:%-d %B %Y, %H:%M} UTC"


def _tiles(study: Study) -> list[dict[str, str]]:
    pruned = study.cells[study.cells["criterion"] != "none"]
    values = [
        (len(pruned), "pruned models"),
        (pruned["criterion"].nunique(), "criteria"),
        (len(set(pruned["calibration"]) - {"none"}), "calibration sets"),
        (study.results["benchmark"].nunique(), "benchmarks"),
        (len(study.samples), "graded answers"),
        (len(study.gaps), "gaps"),
    ]
    return [{"value": f"{value:,}", "label": text} for value, text in values]


def _context(section: Section) -> dict[str, Any]:
    """What the template needs of a chapter."""
    return {
        "anchor": section.anchor,
        "short": section.short,
        "title": section.title,
        "text": [_bound(sentence) for sentence in section.text],
        "views": section.views,
        "collapsed": section.anchor == beside.ANCHOR,
        "facts": section.facts,
        "details": section.details,
        "figures": [_figure(output) for output in section.outputs if isinstance(output, Figure)],
        "tables": [
            _table(output, section.filters.get(output.name, ""))
            for output in section.outputs
            if isinstance(output, Table)
        ],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        "svg": Markup(style.svg(figure)),
    }


def _table(table: Table, filters: str) -> dict[str, Any]:
    files = [
        {"name": f"{table.name}.{suffix}", "kind": kind, "data": _data(render.SUFFIXES[suffix](table), media)}
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
        "footnotes": render.footnotes(table),
        "html": Markup(render.html(_without_constant_model(table))),
        "intervals": table.low is not None,
        "open_intervals": len(table.frame.columns) < 15,
        "files": files,
        "filter": filters.lstrip("*"),
        "first": filters.startswith("*"),
    }


def _without_constant_model(table: Table) -> Table:
    """The table without its model column when all rows are about one model, as the page's head says already."""
    if "Model" not in table.frame or table.frame["Model"].nunique() > 1:
        return table
    blocks = [column for column in table.blocks if column != "Model"]
    return replace(table, frame=table.frame.drop(columns="Model"), blocks=blocks)


def _data(text: str, media: str) -> str:
    return f"data:{media};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
