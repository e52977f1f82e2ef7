"""`python -m analysis diff A B`: report the differences between two studies, stores or plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import names
from analysis.diff import plans
from analysis.diff.figures import channel_figure, exchange_figure, expert_figure, score_figure, words
from analysis.diff.sides import BETTER, CELL, WORSE, Sides, beside, side
from analysis.diff.tables import kept_table, named, plan_pairs, plan_table, score_table, unmatched
from analysis.load.evaluations import versions
from analysis.load.study import Study
from analysis.render.page import Page, Section, html, write_files
from analysis.render.style import Figure
from analysis.render.table import Table
from moe_lab.errors import UserError
from moe_lab.paths import shortened


@dataclass(frozen=True, eq=False)
class Changes:
    """Result of a comparison of two studies or plans."""

    page: Page
    complete: bool
    """Whether all cells are on both sides, and no result is missing."""
    folder: Path
    """The default output folder."""

    @property
    def outputs(self) -> list[Table | Figure]:
        """All figures and tables, in the order of the page."""
        return [output for chapter in self.page.chapters for output in chapter.outputs]


def _page(
    title: str,
    lead: str,
    findings: Sequence[tuple[str, str]],
    tiles: Sequence[tuple[int, str]],
    chapters: Sequence[Section],
) -> Page:
    footer = f"Made by moe_lab: python -m analysis diff. {lead}"
    return Page(title, "Changes from A to B", lead, findings, tiles, chapters, footer)


PAGE = "diff.html"


def write(changes: Changes, out: Path, figure_format: str = names.FIGURE_FORMATS[0]) -> list[Path]:
    """Write the page, its tables and its figures into `out`."""
    written = write_files(changes.outputs, out, figure_format)
    page = out / PAGE
    page.write_text(html(replace(changes.page, figure_format=figure_format)), encoding="utf-8")
    return [*written, page]


def diff(words: Sequence[str], store: Path) -> Changes:
    """Compare A and B, the two words of the command line: plan.json files, or studies (see `sides.side`).

    Raises UserError unless there are two words, for an unknown name, and for plans of different models.
    """
    if len(words) != 2:
        raise UserError(f"diff compares two studies, stores or plans, {len(words)} given: write diff A B")
    plans = [word for word in words if _is_plan(word)]
    if len(plans) == 1:
        raise UserError(f"diff compares two plans or two studies: {plans[0]} is a plan, the other is none")
    return _of_plans(*map(Path, words)) if plans else _of_studies(beside(*(side(word, store) for word in words)))


def _is_plan(word: str) -> bool:
    path = Path(word)
    return path.suffix == ".json" or (path / plans.FILE).is_file()


def _of_plans(first: Path, second: Path) -> Changes:
    one, other = plans.read(first), plans.read(second)
    table = plan_table(one, other)
    pairs = [("", one, other)]
    figures = [expert_figure(pairs, name="diff.experts"), channel_figure(pairs, name="diff.channels")]
    counts = [(int(table.frame[f"Only in {side}"].sum()), f"experts only in {side}") for side in "AB"]
    page = _page(
        title="Two plans",
        lead=f"A: {first}. B: {second}.",
        findings=[("Kept", sentence) for sentence in _plan_sentences(table)],
        tiles=[*counts, (int(table.frame["In both"].sum()), "experts in both")],
        chapters=[Section("kept", "Kept", "Experts and channels in and out", outputs=_with_rows([*figures, table]))],
    )
    return Changes(page, complete=True, folder=Path("diff"))


def _plan_sentences(table: Table) -> list[str]:
    frame = table.frame
    out, entered, both = (int(frame[column].sum()) for column in ("Only in A", "Only in B", "In both"))
    sentences = [f"{out} experts are only in A, {entered} only in B, {both} in both."]
    if "In both, channels" in frame:
        counts = [int(frame[f"{where}, channels"].sum()) for where in ("Only in A", "Only in B", "In both")]
        sentences.append("{:,} channels are only in A, {:,} only in B, {:,} in both.".format(*counts))
    return sentences


def _of_studies(sides: Sides) -> Changes:
    averages = score_table(sides, benchmarks=False, name="diff.averages")
    benchmarks = score_table(sides, benchmarks=True, name="diff.benchmarks")
    kept, settings = kept_table(sides), setting_table(sides)
    gaps = list(dict.fromkeys(f"{gap.where}: {gap.what}" for gap in (*sides.first.gaps, *sides.second.gaps)))
    page = _page(
        title=f"{sides.first.name} → {sides.second.name}".replace("_", " "),
        lead=f"{named(sides)}.",
        findings=[*_findings(sides, averages, kept), *(("Missing", gap) for gap in gaps)],
        tiles=_tiles(sides, averages, kept, settings),
        chapters=_chapters(sides, averages, benchmarks, kept, settings),
    )
    folder = sides.first.store / "reports" / shortened(f"diff_{sides.first.name}_{sides.second.name}")
    return Changes(page, not gaps and not any(sides.alone), folder)


def _chapters(sides: Sides, averages: Table, benchmarks: Table, kept: Table, settings: Table) -> list[Section]:
    """The chapters on averages, plans, benchmarks and settings; tables without rows are left out."""
    pairs = _named_pairs(sides)
    plans = [
        exchange_figure(pairs, name="diff.exchange"),
        expert_figure(pairs, name="diff.experts"),
        channel_figure(pairs, name="diff.channels"),
    ]
    items: dict[tuple[str, str, str], list[Table | Figure | None]] = {
        ("averages", "Averages", "Averages in A and in B"): [score_figure(averages, name="diff.averages"), averages],
        ("kept", "Kept", "Experts and channels in and out"): [*plans, kept],
        ("benchmarks", "Benchmarks", "All benchmarks"): [benchmarks],
        ("settings", "Settings", "Settings and versions that differ"): [settings],
    }
    cell = "|".join(CELL)
    filters = {averages.name: f"{cell}|Of", benchmarks.name: f"{cell}|Of", kept.name: cell}
    return [Section(*names, outputs=_with_rows(shown), filters=filters) for names, shown in items.items()]


def _named_pairs(sides: Sides) -> list[tuple[str, plans.Layers, plans.Layers]]:
    """Corresponding plans that are different steps, named by the columns in which their cells vary."""
    pairs = list(plan_pairs(sides))
    called = words(pd.DataFrame([text for text, _ in pairs], columns=list(CELL)))
    return [(name, *plans) for name, (_, plans) in zip(called, pairs, strict=True)]


def _with_rows(items: Iterable[Table | Figure | None]) -> list[Table | Figure]:
    """Leave out tables without rows, and None."""
    return [item for item in items if isinstance(item, Figure) or (item is not None and len(item.frame))]


def _tiles(sides: Sides, averages: Table, kept: Table, settings: Table) -> list[tuple[int, str]]:
    verdicts = averages.frame["Verdict"]
    return [
        (len(sides.pairs), "cells on both sides"),
        (sum(map(len, sides.alone)), "on one side only"),
        (int((verdicts == BETTER).sum()), f"averages {BETTER}"),
        (int((verdicts == WORSE).sum()), f"averages {WORSE}"),
        (len(kept.frame.drop_duplicates(list(CELL))), "plans that differ"),
        (len(settings.frame), "settings and versions that differ"),
    ]


def setting_table(sides: Sides) -> Table:
    """Settings and versions in which the two studies differ."""
    first, second = (_settings(study) for study in (sides.first, sides.second))
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    rows = [(key, first.get(key, "not set"), second.get(key, "not set")) for key in keys]
    return Table(
        name="diff.settings",
        title="Settings and versions",
        caption=f"In which these differ: {named(sides)}.",
        frame=pd.DataFrame(rows, columns=["What", "A", "B"]),
        formats={},
    )


def _findings(sides: Sides, averages: Table, kept: Table) -> list[tuple[str, str]]:
    count = len(sides.pairs)
    cells = "One cell is" if count == 1 else f"{count or 'No'} cells are"
    sentences = [("Cells", f"{cells} on both sides.")]
    sentences += [
        ("Cells", f"They are compared across {axis}: {one} in A, {other} in B.")
        for axis, (one, other) in sides.differing.items()
    ]
    plans = len(list(plan_pairs(sides, same=True)))
    if plans:
        changed = len(kept.frame.drop_duplicates(list(CELL)))
        sentences.append(("Kept", f"{changed} of {plans} plans differ."))
    for verdict in (BETTER, WORSE):
        where = averages.frame[averages.frame["Verdict"] == verdict]
        if len(where):
            sentences.append(("Averages", f"In B, {len(where)} of {len(averages.frame)} averages are {verdict}."))
    return [*sentences, *(("Missing", sentence) for sentence in unmatched(sides))]


def _settings(study: Study) -> dict[str, str]:
    flat = dict(_flat(study.document.get("config") or {}))
    libraries = {
        f"version of {library}": "/".join(versions_of) for library, versions_of in versions(study.origins).items()
    }
    commits = "/".join(dict.fromkeys(str(value) for value in study.origins["commit"].dropna()))
    return {**flat, "moe_lab": str(study.document.get("moe_lab", "")), "commit": commits, **libraries}


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
