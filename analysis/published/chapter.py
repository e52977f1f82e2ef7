"""What the page says of the papers' numbers beside a study's: how many agree, and why others cannot be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from analysis import names
from analysis.published.numbers import TABLES
from analysis.published.tables import published_tables
from analysis.published.verdicts import AGREES, BECAUSE, DIFFERS, MISSING
from analysis.render.page import Section
from analysis.render.table import Table
from analysis.results import Results

NAMED = 6
"""Reasons that are spelled out, the most frequent first."""


def published_chapter(results: Results) -> Section:
    """The papers' tables beside the study's, as far as it has counterparts; empty where it has none."""
    made = published_tables(results.study, results.comparisons, list(TABLES)).values()
    tables = [table for table in made if len(table.frame)]
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
    said = [f"{len(verdicts):,} printed numbers have a counterpart in this study: {counted}."]
    reasons = Counter(
        reason for word in verdicts if word.startswith(BECAUSE) for reason in word.removeprefix(BECAUSE).split("; ")
    )
    if reasons:
        most = "; ".join(f"{reason} ({count:,} times)" for reason, count in reasons.most_common(NAMED))
        rest = len(reasons) - NAMED
        more = f"; and {rest} more, which the tables spell out" if rest > 0 else ""
        said.append(f"What keeps numbers from being compared: {most}{more}.")
    return said
