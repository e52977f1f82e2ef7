"""The papers' numbers beside measured ones: tables, and their chapter of the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from analysis import names
from analysis.load.reader import records
from analysis.load.study import Study
from analysis.outputs.captions import setting
from analysis.published import cells
from analysis.published.numbers import AFTER, BEFORE, TABLES, Printed, counterparts
from analysis.published.verdicts import AGREES, BECAUSE, DIFFERS, MISSING, Measured, verdict
from analysis.registry import Results
from analysis.render.page import Section
from analysis.render.table import SCORE, Table
from analysis.stats.comparison import Comparison

SPELLED = {BEFORE: "Memory before, GiB", AFTER: "Memory after, GiB", "Code": "Code Avg", "Math": "Math Avg"}
_VARYING = {"recovery": "Recovery", "gate": "Gate", "seed": "Seed"}
"""Axes that are shown only where the pruned cells of a study differ in them."""


def published_tables(study: Study, comparisons: Sequence[Comparison], wanted: Sequence[str]) -> dict[str, Table]:
    """The tables of `wanted` that have printed counterparts, each beside them: name -> table, without rows where no
    cell of the study has one."""
    return {name: published_table(study, comparisons, of=name) for name in wanted if name in TABLES}


def published_table(study: Study, comparisons: Sequence[Comparison], *, of: str) -> Table:
    """Every number of the study that has a counterpart in the papers' tables that the table `of` corresponds to.

    Rows are exact in model, ratio, criterion, allocation, recovery, calibration set and benchmark. Models and
    calibration sets that ship here find the rows of what they stand for, and the verdict says that they are not it.
    """
    pairs = cells.found(study, comparisons, of)
    rows = [_row(number, measured) for number, measured in pairs]
    return Table(
        name=f"{of}.published",
        title=f"Measured beside published: {of}",
        caption="Agrees: the printed number, as far as its rounding leaves it open, lies in the 95 % interval of the "
        "measured one. Intervals cover which items were asked, not seeds; sizes in GiB may differ by "
        f"{cells.MEMORY_TOLERANCE}. Deviation: measured minus printed, where the two are comparable. "
        f"{setting(study)}",
        frame=pd.DataFrame(rows, columns=_columns(study)),
        formats={"Measured": SCORE, "Published": SCORE, "Deviation": "{:+.3f}"},
        blocks=("Model", "Pruned", "Calibration"),
        low=pd.DataFrame({"Measured": [measured.low for _, measured in pairs]}, dtype=float),
        high=pd.DataFrame({"Measured": [measured.high for _, measured in pairs]}, dtype=float),
        footnotes=(_summary([row["Verdict"] for row in rows]), *_without_counterpart(study, of)),
    )


def _columns(study: Study) -> list[str]:
    pruned = study.cells[study.cells["criterion"] != "none"]
    varying = [word for axis, word in _VARYING.items() if pruned[axis].nunique() > 1]
    text = ("Model", "Pruned", "Calibration", "Criterion", *varying, "Benchmark", "Source")
    return [*text, "Measured", "Published", "Deviation", "Verdict"]


def _row(number: Printed, measured: Measured) -> dict[str, Any]:
    cell, found = measured.cell, verdict(number, measured)
    return {
        "Model": cell["model"],
        "Pruned": names.ratio(float(cell["ratio"])),
        "Calibration": names.calibration(str(cell["calibration"])),
        "Criterion": names.method(str(cell["method"])),
        **{word: str(cell.get(axis, "any")) for axis, word in _VARYING.items()},
        "Benchmark": SPELLED.get(number.benchmark, names.benchmark(number.benchmark)),
        "Source": f"{number.paper}, {number.table}",
        "Measured": measured.value,
        "Published": number.value,
        "Deviation": math.nan if found.startswith(BECAUSE) else measured.value - number.value,
        "Verdict": found,
    }


def _summary(verdicts: Sequence[str]) -> str:
    agree, differ, missing = (sum(word.startswith(kind) for word in verdicts) for kind in (AGREES, DIFFERS, MISSING))
    rest = len(verdicts) - agree - differ - missing
    return f"{agree} agree, {differ} differ, {rest} are not comparable, {missing} are missing."


def _without_counterpart(study: Study, of: str) -> Iterator[str]:
    """A note on the pruned cells that no printed row matches; none for tables that are not about methods."""
    printed = counterparts(of)
    pruned = records(study.cells[study.cells["criterion"] != "none"])
    lacking = [cell for cell in pruned if cells.key_of(cell) not in printed]
    if lacking and any(criterion in names.CRITERIA for _, _, criterion, *_ in printed):
        methods = names.methods_in_order(str(cell["method"]) for cell in lacking)
        yield (
            f"{len(lacking)} of {len(pruned)} pruned cells have no printed row here "
            f"({'; '.join(map(names.method, methods))})."
        )


NAMED = 6
"""Reasons that are spelled out, the most frequent first."""


def published_chapter(results: Results) -> Section:
    """The papers' tables beside the study's, as far as it has counterparts; empty where it has none."""
    all_tables = published_tables(results.study, results.comparisons, list(TABLES)).values()
    tables = [table for table in all_tables if len(table.frame)]
    return Section(
        "published",
        "Published",
        "Comparison with published numbers",
        beside_the_papers(tables),
        tables,
        filters={table.name: "Model|Pruned|Calibration|Criterion|Benchmark" for table in tables},
        folded=True,
    )


def beside_the_papers(tables: Sequence[Table]) -> list[str]:
    """Sentences about tables from `published_tables`; nothing where there is none."""
    verdicts = [str(word) for table in tables for word in table.frame["Verdict"]]
    if not verdicts:
        return []
    kinds = {
        "agree": sum(word.startswith(AGREES) for word in verdicts),
        "differ": sum(word.startswith(DIFFERS) for word in verdicts),
        "cannot be compared": sum(word.startswith(BECAUSE) for word in verdicts),
        "are missing here": sum(word.startswith(MISSING) for word in verdicts),
    }
    counted = names.listing(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    sentences = [f"{len(verdicts):,} printed numbers have a counterpart in this study: {counted}."]
    reasons = Counter(
        reason for word in verdicts if word.startswith(BECAUSE) for reason in word.removeprefix(BECAUSE).split("; ")
    )
    if reasons:
        most = "; ".join(f"{reason} ({count:,} times)" for reason, count in reasons.most_common(NAMED))
        rest = len(reasons) - NAMED
        more = f"; and {rest} more, which the tables spell out" if rest > 0 else ""
        sentences.append(f"What keeps numbers from being compared: {most}{more}.")
    return sentences
