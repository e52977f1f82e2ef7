"""The report of a study: what was run, what won, how sure that is, what is missing, and where everything is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import findings, names
from analysis.load.evaluations import versions
from analysis.load.study import Study, load
from analysis.outputs.convergence import finding as convergence_finding
from analysis.outputs.recovery import recovery_findings
from analysis.outputs.winners import winner_views
from analysis.publish import Publisher
from analysis.published.tables import published_chapter
from analysis.registry import Item, Results, outputs
from analysis.render.page import Page, Section, html

PAGE = "report.html"
GAPS = "gaps"
"""The table of what is missing, made last."""
Made = Mapping[str, Sequence[Item]]
"""Output -> its tables and figures that were written."""


def write(store: Path | str, study: str, out: Path | str) -> Path:
    """Write the report of `study`, its tables and its figures into `out`; returns the page's path."""
    return write_report(Publisher(Results(load(Path(store), study)), Path(out)))


def write_report(publisher: Publisher) -> Path:
    """Write all tables and figures of a study, and the page that shows them; returns the page's path.

    What cannot be made is a gap on the page; its traceback is in OUT/failed.
    """
    items_by_name, _ = publisher.publish(name for name in outputs() if name != GAPS)
    page = publisher.out / PAGE
    page.write_text(html(_page(publisher, items_by_name)), encoding="utf-8")
    publisher.log_failures()
    return page


def _page(publisher: Publisher, items_by_name: Made) -> Page:
    study = publisher.results.study
    headline = publisher.attempt("text.headline", lambda: findings.headline(publisher.results))
    chapters = _sections(publisher, items_by_name)
    return Page(
        title=names.capitalised(names.listing(study.name.replace("_", " ").split("+"))),
        kicker=_kicker(study),
        lead=findings.what_was_run(study),
        findings=headline or [],
        tiles=_tiles(study),
        chapters=chapters,
        footer=f"Made by moe_lab {study.document.get('moe_lab', '')} from {study.name} in {study.store.resolve()}.",
        figure_format=publisher.figure_format,
    )


def _sections(publisher: Publisher, items_by_name: Made) -> list[Section]:
    """All sections of the page; the comparison with the papers and what is missing stand before how it came about."""
    study = publisher.results.study
    sections = [_section(chapter, publisher, items_by_name) for chapter in CHAPTERS]
    published = publisher.attempt("text.published", lambda: [published_chapter(publisher.results)]) or []
    missing, _ = publisher.publish([GAPS])
    text = [findings.completeness(study), *study.notes]
    gaps = Section(GAPS, "Gaps", "Missing results", text, missing[GAPS])
    return [*sections, *published, gaps, _provenance(study, items_by_name)]


def _kicker(study: Study) -> str:
    moment = datetime.fromtimestamp(float(study.document["created"]), UTC)
    return f"{names.listing(dict.fromkeys(study.cells['model']))} · {moment:%-d %B %Y, %H:%M} UTC"


def _tiles(study: Study) -> list[tuple[int, str]]:
    pruned = study.cells[study.cells["criterion"] != "none"]
    return [
        (len(pruned), "pruned models"),
        (pruned["criterion"].nunique(), "criteria"),
        (len(set(pruned["calibration"]) - {"none"}), "calibration sets"),
        (study.results["benchmark"].nunique(), "benchmarks"),
        (len(study.samples), "graded answers"),
        (len(study.gaps), "gaps"),
    ]


@dataclass(frozen=True)
class Chapter:
    """A chapter of the page. It shows the outputs that are registered with its anchor."""

    anchor: str
    short: str
    title: str
    text: Callable[[Results, Made], Iterable[str]] = lambda results, made: ()
    """Its sentences."""
    views: Callable[[Results], Sequence[Mapping[str, Any]]] = lambda results: ()
    """Its interactive maps."""


def _section(chapter: Chapter, publisher: Publisher, items_by_name: Made) -> Section:
    """The chapter with what it shows. Sentences that cannot be made are gaps, as outputs are."""
    results, name = publisher.results, f"text.{chapter.anchor}"
    text = publisher.attempt(name, lambda: list(chapter.text(results, items_by_name))) or []
    views = publisher.attempt(f"{name}.views", lambda: chapter.views(results)) or ()
    return _shown(chapter.anchor, results.study, items_by_name)(chapter.short, chapter.title, text, views=views)


def _shown(anchor: str, study: Study, items_by_name: Made) -> Callable[..., Section]:
    """The section `anchor` with the tables and figures that it shows; lacks its titles and sentences."""
    items: list[Item] = []
    filters: dict[str, str] = {}
    for name, output in outputs().items():
        if output.chapter == anchor:
            shown = output.shown(study, items_by_name[name])
            items += shown
            filters |= {item.name: output.filters for item in shown}
    return partial(Section, anchor, outputs=items, filters=filters)


def _provenance(study: Study, items_by_name: Made) -> Section:
    section = _shown("provenance", study, items_by_name)
    title = "Provenance and files"
    return section("Provenance", title, facts=_facts(study), details=_details(study))


def _map_text(results: Results, items_by_name: Made) -> list[str]:
    return [MAP] if len(results.winners) else []


def _claim_text(results: Results, items_by_name: Made) -> list[str]:
    return [CLAIMS] if items_by_name["claims"] else []


def _recovery_text(results: Results, items_by_name: Made) -> list[str]:
    return [line for one in results.comparisons for line in recovery_findings(results.study, one)]


def _task_text(results: Results, items_by_name: Made) -> list[str]:
    return [line for one in results.comparisons for line in findings.calibration_effect(one)]


def _coverage_text(results: Results, items_by_name: Made) -> list[str]:
    return [*findings.coverage_finding(results.study), *convergence_finding(results.study)]


MAP = (
    "Rows are benchmarks or groups of them, columns are calibration sets. A filled cell names the criterion with the "
    "best score. It is hatched when its lead over some other criterion could be chance: every pair of criteria "
    "answered the same questions, so their answers are compared question by question, and the 5 % level is corrected "
    "for looking at many cells. The same map by the loss on right answers, where lower is better, tells more criteria "
    "apart with the same questions: right or wrong says only which side of a line an answer is on."
)
CLAIMS = (
    "Each claim is a difference between pairs of plans that answered the same questions. It holds here when the whole "
    "95 % interval is above 0, does not hold when it is below, and is undecided when it contains 0."
)
KEPT = (
    "A criterion is better than another only as far as the bars allow: where bars of the unpruned model and of a "
    "pruned one overlap widely, pruning cost nothing that these benchmarks can show."
)
CHAPTERS = (
    Chapter("winners", "Winners", "Best criterion by task and calibration set", _map_text, winner_views),
    Chapter("kept", "Averages", "Averages with 95 % confidence intervals", lambda results, made: [KEPT]),
    Chapter("cost", "Cost", "Accuracy versus parameters, FLOPs, storage and time"),
    Chapter("claims", "Claims", "The papers' claims, tested on this study", _claim_text),
    Chapter("channels", "Channels", "Channel criteria and channel budgets"),
    Chapter("recovery", "Recovery", "Recovery: quantisation and fine-tuning", _recovery_text),
    Chapter("weights", "Weights", "Criteria that read weights alone"),
    Chapter("ranks", "Ranks", "Scores and ranks"),
    Chapter("search", "Search", "Searched allocations versus uniform"),
    Chapter("task", "By task", "Task-specific calibration", _task_text),
    Chapter("benchmarks", "Benchmarks", "All benchmarks"),
    Chapter(
        "overlap",
        "Overlap",
        "Overlap of pruned experts across calibration sets",
        lambda results, made: findings.overlap_finding(results.overlaps),
    ),
    Chapter("coverage", "Coverage", "Tokens per expert in calibration", _coverage_text),
    Chapter("inside", "Internals", "Hidden states and routing of pruned models"),
    Chapter("attribution", "Attribution", "Attributions by layer and channel"),
    Chapter("criteria", "Criteria", "Criteria: definitions, inputs and cost"),
    Chapter("memory", "Memory", "Architectures and loading memory"),
)
"""In the order of the page; the comparison with the papers, what is missing and how it came about follow."""


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
