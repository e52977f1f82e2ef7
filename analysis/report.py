"""One self-contained page: what was run, what won, how sure that is, what is missing, and where everything is."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis import catalogue, findings, names, render, style
from analysis.catalogue import Material, Output
from analysis.load import Study, load
from analysis.quantized import four_bits
from analysis.remarks import versions
from analysis.style import Figure
from analysis.tables import Table
from analysis.views import winner_views

PAGE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """A chapter of the page."""

    anchor: str
    short: str
    title: str
    text: Sequence[str] = ()
    outputs: Sequence[Output] = ()
    views: Sequence[Mapping[str, Any]] = ()
    facts: Sequence[tuple[str, str]] = ()
    details: Sequence[tuple[str, str]] = ()
    filters: Mapping[str, str] = field(default_factory=dict)
    """Table name -> columns to filter by, the first block shown at first when it starts with a star."""

    @property
    def empty(self) -> bool:
        return not (self.text or self.outputs or self.views or self.facts)

    def context(self) -> dict[str, Any]:
        """What the template needs."""
        return {
            "anchor": self.anchor,
            "short": self.short,
            "title": self.title,
            "text": [_bound(sentence) for sentence in self.text],
            "views": self.views,
            "facts": self.facts,
            "details": self.details,
            "figures": [_figure(output) for output in self.outputs if isinstance(output, Figure)],
            "tables": [
                _table(output, self.filters.get(output.name, ""))
                for output in self.outputs
                if isinstance(output, Table)
            ],
        }


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
    sections = [section for section in _sections(material, made) if not section.empty]
    return environment.get_template("report.html.j2").render(
        title=findings.capitalised(study.name.replace("_", " ")),
        kicker=_kicker(study),
        lead=_bound(findings.what_was_run(study)),
        findings=[
            (about, _bound(said)) for about, said in findings.headline(study, material.comparisons, material.winners)
        ],
        tiles=_tiles(study),
        sections=[section.context() for section in sections],
        css=_raw("report.css"),
        script=_raw("report.js"),
        footer=f"Made by moe_lab {study.document.get('moe_lab', '')} from {study.name} in {study.store.resolve()}.",
    )


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


def _sections(material: Material, made: Mapping[str, Sequence[Output]]) -> list[Section]:
    study = material.study
    effect = [sentence for comparison in material.comparisons for sentence in findings.calibration_effect(comparison)]
    bits = [sentence for comparison in material.comparisons for sentence in four_bits(study, comparison)]
    maps = winner_views(material)
    return [
        Section(
            "winners",
            "Winners",
            "Which criterion won where",
            _MAP_TEXT if maps else (),
            made["winners"][1:],
            views=maps,
            filters={"winners": "*Model|Pruned|Calibration"},
        ),
        Section("kept", "What is kept", "How much is kept, and how sure that is", _KEPT_TEXT, made["averages"]),
        Section(
            "cost",
            "Cost",
            "What accuracy costs: parameters, FLOPs and storage",
            outputs=made["pareto"],
            filters={"pareto": "Model|Pruned|Removes"},
        ),
        Section(
            "claims",
            "Claims",
            "What the papers claim, asked of this study",
            _CLAIM_TEXT if made["claims"] else (),
            made["claims"],
        ),
        Section(
            "channels",
            "Channels",
            "Which channels, and how many of each expert",
            outputs=[output for name in _CHANNELS for output in made[name]],
            filters={"heapr.table1": "*Model|Pruned", "heapr.table2": "Model|Pruned"},
        ),
        Section("bits", "Bits", "Fewer bits", bits, [*made["quantized.fig8"], *made["quantized.table11"]]),
        Section(
            "weights",
            "Weights",
            "What scores from weights alone achieve",
            outputs=[*made["aimer.table2"], *made["aimer.fig2"]],
            filters={"aimer.table2": "Model|Pruned"},
        ),
        Section(
            "ranks",
            "Ranks",
            "Scores and ranks",
            outputs=made["ranks"],
            filters={"ranks": "*Model|Pruned|Calibration"},
        ),
        Section(
            "search",
            "Search",
            "Where to prune: searched against uniform",
            outputs=[
                *made["evoesap.table1"],
                *made["evoesap.fig1"],
                *made["evoesap.fig3"],
                *made["evoesap.search"],
            ],
            filters={"evoesap.table1": "Model|Pruned|Calibration|Criterion"},
        ),
        Section(
            "task",
            "By task",
            "What calibration on the task changes",
            effect,
            [*made["task_specific"], *made["radar"]],
            filters={"task_specific": "*Model|Pruned"},
        ),
        Section(
            "benchmarks",
            "Benchmarks",
            "Every benchmark",
            outputs=made["unified.table5"],
            filters={"unified.table5": "Model|Pruned|Calibration|Criterion"},
        ),
        Section(
            "overlap",
            "Overlap",
            "Do calibration sets agree on which experts matter?",
            findings.overlap_finding(material.overlaps),
            [*made["unified.fig4"][:1], *_several_models(study, made["unified.fig5"]), *made["unified.fig3"][:1]],
        ),
        Section(
            "coverage",
            "Coverage",
            "Did calibration reach every expert?",
            findings.coverage_finding(study),
            made["coverage"],
        ),
        Section("memory", "Memory", "Loading memory", outputs=made["unified.table3"]),
        Section("gaps", "Gaps", "What is missing", [findings.completeness(study), *study.notes], made["gaps"]),
        Section(
            "provenance",
            "Provenance",
            "How this came about, and where it is",
            outputs=made["artefacts"],
            facts=_facts(study),
            details=_details(study),
            filters={"artefacts": "Model|Pruned|Calibration|Criterion"},
        ),
    ]


_MAP_TEXT = (
    "Rows are benchmarks or groups of them, columns are calibration sets. A filled cell names the criterion with the "
    "best score. It is hatched when its lead over some other criterion could be chance: every pair of criteria "
    "answered the same questions, so their answers are compared question by question, and the 5 % level is corrected "
    "for looking at many cells.",
)
_CHANNELS = (
    "heapr.fig2",
    "heapr.table1",
    "heapr.table2",
    "coverage.fig",
    "coverage.table6",
    "coverage.table7",
    "coverage.table13",
)
_CLAIM_TEXT = (
    "Each claim is a difference between pairs of plans that answered the same questions. It holds here when the whole "
    "95 % interval is above 0, does not hold when it is below, and is undecided when it contains 0.",
)
_KEPT_TEXT = (
    "A criterion is better than another only as far as the bars allow: where bars of the unpruned model and of a "
    "pruned one overlap widely, pruning cost nothing that these benchmarks can show.",
)


def _several_models(study: Study, outputs: Sequence[Output]) -> Sequence[Output]:
    return outputs if study.family["model"].nunique() > 1 else ()


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


def _facts(study: Study) -> list[tuple[str, str]]:
    seconds = pd.to_numeric(study.origins["seconds"], errors="coerce").sum()
    facts = [
        ("Study", study.name),
        ("Store", str(study.store.resolve())),
        ("moe_lab", _several(study, "moe_lab") or str(study.document.get("moe_lab", ""))),
        ("Commit", _several(study, "commit")),
        ("Computed on", "; ".join(part for part in (_several(study, "host"), _several(study, "machine")) if part)),
        ("Python", _several(study, "python")),
        ("Libraries", ", ".join(f"{name} {' / '.join(found)}" for name, found in versions(study.origins).items())),
        ("Time of all evaluations", f"{seconds / 60:,.1f} minutes of one process" if seconds else ""),
        *(
            (f"Calibration {key.replace('@', ' of ')}", _calibration(report))
            for key, report in study.calibrations.items()
        ),
    ]
    return [(key, value) for key, value in facts if value]


def _several(study: Study, column: str) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in study.origins[column].dropna()))


def _calibration(report: Mapping[str, Any]) -> str:
    tokens = ", ".join(f"{count:,} tokens of {source}" for source, count in (report.get("valid_tokens") or {}).items())
    rows = f"{report['rows']:,} rows of {report['length']:,}" if "rows" in report and "length" in report else ""
    start = str(report.get("first_row", ""))[:160]
    return "; ".join(part for part in (tokens, rows, f"begins “{start}…”" if start else "") if part)


def _details(study: Study) -> list[tuple[str, str]]:
    config = study.document.get("config")
    return [("Configuration of the study", json.dumps(config, indent=2))] if config else []
