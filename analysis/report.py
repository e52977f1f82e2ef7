"""The report of a study: what was run, what won, how sure that is, what is missing, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from analysis import catalogue, findings, names
from analysis.catalogue import Material
from analysis.load.study import Study, load
from analysis.made import Output
from analysis.published import chapter
from analysis.render.page import Page, Section, html
from analysis.sections import gaps, sections

PAGE = "report.html"
GAPS = "gaps"
"""The table of what is missing, made last."""


def write(store: Path | str, study: str, out: Path | str) -> Path:
    """Write the report of `study`, its tables and its figures into `out`; returns the page's path."""
    return write_report(load(Path(store), study), Path(out))


def write_report(study: Study, out: Path) -> Path:
    """Write all tables and figures of a loaded study, and the page that shows them, into `out`.

    What cannot be made is a gap on the page; its traceback is in OUT/failed.
    """
    material = Material(study)
    made, _ = catalogue.publish([name for name in catalogue.CATALOGUE if name != GAPS], material, out)
    page = out / PAGE
    page.write_text(html(_page(material, made, out)), encoding="utf-8")
    catalogue.log_failures(material, out)
    return page


def _page(material: Material, made: Mapping[str, Sequence[Output]], out: Path) -> Page:
    study = material.study
    headline = material.attempt(
        "text.headline",
        lambda: findings.headline(study, material.comparisons, material.winners, material.decided_pairs),
    )
    chapters = _chapters(material, made, out)
    return Page(
        title=findings.capitalised(names.listing(study.name.replace("_", " ").split("+"))),
        kicker=_kicker(study),
        lead=findings.what_was_run(study),
        findings=headline or [],
        tiles=_tiles(study),
        chapters=chapters,
        footer=f"Made by moe_lab {study.document.get('moe_lab', '')} from {study.name} in {study.store.resolve()}.",
    )


def _chapters(material: Material, made: Mapping[str, Sequence[Output]], out: Path) -> list[Section]:
    """All chapters of the page; the comparison with the papers and what is missing stand before how it came about."""
    *own, provenance = sections(material, made)
    published = material.attempt("text.published", lambda: [chapter.chapter(material)]) or []
    missing, _ = catalogue.publish([GAPS], material, out)
    return [*own, *published, gaps(material.study, missing[GAPS]), provenance]


def _kicker(study: Study) -> str:
    moment = datetime.fromtimestamp(float(study.document["created"]), timezone.utc)
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
