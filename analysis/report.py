"""The report of a study: one page with its tables, figures, missing results and provenance."""

from __future__ import annotations

import errno
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from analysis import names
from analysis.load.evaluations import versions
from analysis.load.reader import groups
from analysis.load.settings import removed_noun
from analysis.load.study import Study, load
from analysis.names import capitalised, count
from analysis.published.tables import published_chapter
from analysis.registry import Item, Results, find, outputs
from analysis.render.page import Page, Section, html, write_files
from analysis.stats.ranking import headlines, ranking_text
from moe_lab import progress
from moe_lab.errors import DISK_FULL

T = TypeVar("T")
UNWRITABLE = (*DISK_FULL, errno.EROFS, errno.EACCES)
"""Error numbers raised when the output folder cannot be written."""
FAILED = "failed"
"""Folder beside the tables and figures with a traceback, NAME.log, for each output that could not
be made."""


class Publisher:
    """Writer of a study's outputs into `out`, with figures in `figure_format`; keeps a list of what
    failed."""

    def __init__(
        self, results: Results, out: Path, figure_format: str = names.FIGURE_FORMATS[0]
    ) -> None:
        self.results = results
        self.out = out
        self.figure_format = figure_format
        self.attempted: dict[str, str | None] = {}
        """Name -> the traceback of its error, or None when it succeeded."""

    def attempt(self, name: str, make: Callable[[], T]) -> T | None:
        """Call `make` and return its result; None, with a gap, when it raises. A full or read-only
        disk is raised, because it concerns all outputs."""
        self.attempted.setdefault(name, None)
        try:
            return make()
        except Exception as error:  # a bug in one output must not prevent the others
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            self.attempted[name] = traceback.format_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.results.study.reader.gap(
                f"could not be made ({reason}), traceback in {FAILED}/{name}.log", name
            )
            return None

    @property
    def failed(self) -> list[str]:
        """Names of the outputs that could not be made."""
        return [name for name, error in self.attempted.items() if error]

    def publish(self, requested: Iterable[str]) -> tuple[dict[str, list[Item]], list[Path]]:
        """Make the named outputs and write their files.

        The list of gaps is made last, because making the others can add gaps. Returns name -> the
        written tables and figures, and all files."""
        made: dict[str, list[Item]] = {}
        written: list[Path] = []
        names = dict.fromkeys(find(name).name for name in requested)
        for name in sorted(names, key=lambda name: name == GAPS):
            made[name] = []
            for item in self.attempt(name, partial(find(name).items, self.results)) or []:
                files = (
                    self.attempt(
                        item.name, partial(write_files, [item], self.out, self.figure_format)
                    )
                    or []
                )
                made[name] += [item] if files else []
                written += files
            if len(names) > 1:  # not only the gaps
                progress.update(len(made), len(names), "tables and figures")
        return made, written

    def log_failures(self) -> None:
        """Write OUT/failed/NAME.log for every failed output, and remove old logs of those that
        succeeded this time."""
        for name, error in self.attempted.items():
            log = self.out / FAILED / f"{name}.log"
            if error is None:
                log.unlink(missing_ok=True)
            else:
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text(error, encoding="utf-8")


PAGE = "report.html"
SUMMARY = "summary.txt"
"""The rankings and remarks as text, which a run prints when it ends."""
GAPS = "gaps"
"""The output that lists missing results; made last."""
PUBLISHED = "published"
"""The chapter that compares the study with the papers."""
Made = Mapping[str, Sequence[Item]]
"""Output -> its tables and figures that were written."""


def write(store: Path | str, study: str, out: Path | str) -> Path:
    """Write the report of `study`, its tables and its figures into `out`; returns the page's
    path."""
    return write_report(Publisher(Results(load(Path(store), study)), Path(out)))


def write_report(publisher: Publisher) -> Path:
    """Write all tables and figures of a study, and the page that shows them; returns the page's
    path.

    An output that cannot be made is a gap on the page, with its traceback in OUT/failed.
    """
    made, _ = publisher.publish(name for name in outputs() if name != GAPS)
    page = publisher.out / PAGE
    page.write_text(html(_page(publisher, made)), encoding="utf-8")
    text = publisher.attempt(SUMMARY, lambda: ranking_text(publisher.results.rankings))
    summary = "\n\n".join(filter(None, [text, "\n".join(publisher.results.study.notes)]))
    page.with_name(SUMMARY).unlink(missing_ok=True)
    if summary:
        page.with_name(SUMMARY).write_text(f"{summary}\n", encoding="utf-8")
    publisher.log_failures()
    return page


def _page(publisher: Publisher, made: Made) -> Page:
    study = publisher.results.study
    chapters = _sections(publisher, made)
    return Page(
        title=names.capitalised(names.listing(study.name.replace("_", " ").split("+"))),
        kicker=_kicker(study),
        lead=what_was_run(study),
        tiles=_tiles(study),
        chapters=chapters,
        footer=(
            f"Made by moe_lab {study.document.get('moe_lab', '')} from {study.name} in "
            f"{study.store.resolve()}."
        ),
        figure_format=publisher.figure_format,
    )


def _sections(publisher: Publisher, made: Made) -> list[Section]:
    """All sections of the page: chapters, comparison with the papers, missing results,
    provenance."""
    results = publisher.results
    study = results.study
    sections = [_section(chapter, results, made) for chapter in CHAPTERS]
    published = publisher.attempt(PUBLISHED, partial(published_chapter, study, results.comparisons))
    missing, _ = publisher.publish([GAPS])
    text = [completeness(study), *study.notes, *_nothing(made)]
    gaps = Section(GAPS, "Gaps", "Missing results", text, missing[GAPS])
    return [*sections, *([published] if published else []), gaps, _provenance(study, made)]


def _nothing(made: Made) -> list[str]:
    """A sentence that names the outputs of the page that this study has nothing for; none if there
    is no such."""
    silent = [name for name, items in made.items() if not items and find(name).chapter]
    sentence = (
        f"This study has nothing for {names.listing(silent)} (`python -m analysis NAME` says what "
        "each needs)."
    )
    return [sentence] if silent else []


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
    """A chapter of the page: shows the outputs registered with its anchor."""

    anchor: str
    short: str
    title: str
    note: str = ""
    """How to read its tables and figures."""


def _section(chapter: Chapter, results: Results, made: Made) -> Section:
    section = _shown(chapter.anchor, results.study, made)
    text = [chapter.note] if chapter.note and section.outputs else []
    if chapter.anchor == "ranking" and section.outputs:
        text = [*headlines(results.rankings), *text]
    return replace(section, short=chapter.short, title=chapter.title, text=text)


def _shown(anchor: str, study: Study, made: Made) -> Section:
    """The section `anchor` with its tables and figures and their filter columns."""
    items: list[Item] = []
    filters: dict[str, str] = {}
    for name, output in outputs().items():
        if output.chapter == anchor:
            shown = output.shown(study, made[name])
            items += shown
            filters |= {item.name: output.filters for item in shown}
    return Section(anchor, outputs=items, filters=filters)


def _provenance(study: Study, made: Made) -> Section:
    section = _shown("provenance", study, made)
    return replace(
        section,
        short="Provenance",
        title="Provenance and files",
        facts=_facts(study),
        details=_details(study),
    )


RANKING = (
    "Plans of a method that differ in the seed alone are one row, with an interval over seeds and "
    "items together."
)
MAP = (
    "Rows are benchmarks or groups of them, columns are calibration sets. Each cell names the "
    "criterion that leads. It is hatched unless its lead over every other criterion is significant "
    "over seeds and items, at the 5 % level, with Holm's correction over the cells of a map; with "
    "one seed nothing is tested. The map by the loss on right answers (lower is better) sees "
    "smaller differences, because a loss is finer than right or wrong."
)
CLAIMS = (
    "Each claim is a difference between pairs of plans that answered the same questions. It is "
    "undecided where the 95 % interval contains 0, or p is not below 0.05 after Holm's correction "
    "over all rows."
)
CHAPTERS = (
    Chapter("ranking", "Ranking", "Ranking by average", RANKING),
    Chapter("winners", "Winners", "Leading criterion by task and calibration set", MAP),
    Chapter("cost", "Cost", "Accuracy versus parameters, FLOPs, storage and time"),
    Chapter("claims", "Claims", "The papers' claims, tested on this study", CLAIMS),
    Chapter("channels", "Channels", "Channel criteria and channel budgets"),
    Chapter("recovery", "Recovery", "Recovery: quantisation and fine-tuning"),
    Chapter("weights", "Weights", "Criteria that read weights alone"),
    Chapter("ranks", "Ranks", "Scores and ranks"),
    Chapter("search", "Search", "Searched allocations versus uniform"),
    Chapter("task", "By task", "Task-specific calibration"),
    Chapter("benchmarks", "Benchmarks", "All benchmarks"),
    Chapter("overlap", "Overlap", "Overlap of pruned experts across calibration sets"),
    Chapter("coverage", "Coverage", "Tokens per expert in calibration"),
    Chapter("inside", "Internals", "Hidden states and routing of pruned models"),
    Chapter("attribution", "Attribution", "Attributions by layer and channel"),
    Chapter("criteria", "Criteria", "Criteria: definitions, inputs and cost"),
    Chapter("memory", "Memory", "Architectures and loading memory"),
)
"""Chapters in the order of the page; published numbers, missing results and provenance follow."""


def _facts(study: Study) -> list[tuple[str, str]]:
    seconds = pd.to_numeric(study.origins["seconds"], errors="coerce").sum()
    facts = [
        ("Study", study.name),
        ("Store", str(study.store.resolve())),
        ("moe_lab", _several(study, "moe_lab") or str(study.document.get("moe_lab", ""))),
        ("Commit", _several(study, "commit")),
        (
            "Computed on",
            "; ".join(
                part for part in (_several(study, "host"), _several(study, "machine")) if part
            ),
        ),
        ("Python", _several(study, "python")),
        (
            "Libraries",
            ", ".join(
                f"{name} {' / '.join(library_versions)}"
                for name, library_versions in versions(study.origins).items()
            ),
        ),
        (
            "Time of all evaluations",
            f"{seconds / 60:,.1f} minutes of one process" if seconds else "",
        ),
        *(
            (f"Calibration {key.replace('@', ' of ')}", _calibration(report))
            for key, report in study.calibrations.items()
        ),
    ]
    return [(key, value) for key, value in facts if value]


def _several(study: Study, column: str) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in study.origins[column].dropna()))


def _calibration(report: Mapping[str, Any]) -> str:
    tokens = ", ".join(
        f"{count:,} tokens of {source}"
        for source, count in (report.get("valid_tokens") or {}).items()
    )
    rows = (
        f"{report['rows']:,} rows of {report['length']:,}"
        if "rows" in report and "length" in report
        else ""
    )
    start = str(report.get("first_row", ""))[:160]
    return "; ".join(part for part in (tokens, rows, f"begins “{start}…”" if start else "") if part)


def _details(study: Study) -> list[tuple[str, str]]:
    config = study.document.get("config")
    return [("Configuration of the study", json.dumps(config, indent=2))] if config else []


def what_was_run(study: Study) -> str:
    """Describe the models, criteria, allocations, calibration sets, ratios, recoveries, benchmarks
    and items in two or three sentences."""
    pruned = study.cells[study.cells["criterion"] != "none"]
    sizes = sorted(study.results["n"].unique())
    items = (
        f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g} to {sizes[-1]:g}" if sizes else "no"
    )
    kind = "pruned model" if (pruned["ratio"] > 0).all() else "model"
    models = names.listing(dict.fromkeys(study.cells["model"]))
    benchmarks = count(study.results["benchmark"].nunique(), "benchmark")
    return capitalised(
        f"{_who_chose(pruned)} chose which {removed_noun(pruned)} of {models} to remove "
        f"({_how_much(pruned)}).{_stored(pruned)} That gave {count(len(pruned), kind)}, each "
        f"evaluated like the unpruned one on {benchmarks} of {items} items."
    )


def _who_chose(pruned: pd.DataFrame) -> str:
    criteria = count(pruned["criterion"].nunique(), "criterion", "criteria")
    allocations = pruned["allocation"].nunique()
    return f"{criteria} and {count(allocations, 'allocation')}" if allocations > 1 else criteria


LISTED = 6
"""Most ratios that are listed."""


def _how_much(pruned: pd.DataFrame) -> str:
    """Ratios, whether of each layer or in all, and the calibration sets."""
    ordered = pruned[pruned["ratio"] > 0].sort_values("ratio", kind="stable")
    ratios_in_words = list(dict.fromkeys(ordered["removed_words"]))
    few = names.listing(ratios_in_words) or "none"
    ratios = (
        few
        if len(ratios_in_words) <= LISTED
        else f"{len(ratios_in_words)} ratios from {ratios_in_words[0]} to {ratios_in_words[-1]}"
    )
    scope = "of each layer" if set(pruned["allocation"]) == {"uniform"} else "in all"
    return f"{ratios} {scope}{_by_data(pruned)}"


def _by_data(pruned: pd.DataFrame) -> str:
    """The calibration sets, listed by model when they differ between models."""
    models: dict[str, list[str]] = {}
    for key, cells in groups(pruned[pruned["calibration"] != "none"], ["model"]):
        sets = names.calibrations_in_order(cells["calibration"])
        models.setdefault(names.listing(names.calibration(s).lower() for s in sets), []).append(
            key["model"]
        )
    sets_of_models = (
        f"{sets} calibration{f' of {names.listing(of)}' if len(models) > 1 else ''}"
        for sets, of in models.items()
    )
    return f", with {names.listing(sets_of_models)}" if models else ""


def _stored(pruned: pd.DataFrame) -> str:
    """A sentence on recoveries (quantisation, fine-tuning) of the pruned models; "" when there are
    none."""
    recoveries = names.in_order(pruned["recovery"], names.RECOVERIES)
    spelled = (
        names.RECOVERIES.get(recovery, recovery).replace(", ", " + ") for recovery in recoveries
    )
    phrases = [f"with {recovery}" if recovery else "as they are" for recovery in spelled]
    return (
        "" if recoveries == ["none"] else f" Pruned models were evaluated {names.listing(phrases)}."
    )


def completeness(study: Study) -> str:
    """A sentence that says whether results are missing."""
    if not study.gaps:
        return "Nothing is missing: every result that was asked for is here."
    return capitalised(
        f"{count(len(study.gaps), 'gap')}: some results are missing and are shown as gaps, never "
        "as zero."
    )
