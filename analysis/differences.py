"""`python -m analysis diff A B`: what changed between two studies, stores or plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import plan_changes
from analysis.difference_tables import (
    BETTER,
    CELL,
    WORSE,
    kept_table,
    named,
    plan_pairs,
    plan_table,
    score_table,
    unmatched,
)
from analysis.load import Study
from analysis.remarks import versions
from analysis.sides import Sides, beside, side
from analysis.tables import Table
from moe_lab.errors import UserError


@dataclass(frozen=True, eq=False)
class Changes:
    """What a comparison of two sides gives."""

    tables: list[Table]
    sentences: list[str]
    complete: bool
    """Whether everything stands on both sides, and nothing is missing from the results."""
    folder: Path
    """Where it is written by default."""


def diff(words: Sequence[str], store: Path) -> Changes:
    """What changed from A to B, the two words of the command line: plan.json files, or studies (see `sides.side`).

    UserError for another number of words, a name nobody knows, and plans of different models.
    """
    if len(words) != 2:
        raise UserError(f"diff compares two studies, stores or plans, {len(words)} given: write diff A B")
    plans = [word for word in words if _is_plan(word)]
    if len(plans) == 1:
        raise UserError(f"diff compares two plans or two studies: {plans[0]} is a plan, the other is none")
    if plans:
        table = plan_table(*(plan_changes.read(Path(word)) for word in words))
        return Changes([table], _plan_sentences(table), True, Path("diff"))
    return _of_studies(beside(*(side(word, store) for word in words)))


def _is_plan(word: str) -> bool:
    path = Path(word)
    return path.suffix == ".json" or (path / plan_changes.FILE).is_file()


def _plan_sentences(table: Table) -> list[str]:
    frame = table.frame
    out, entered, both = (int(frame[column].sum()) for column in ("Only in A", "Only in B", "In both"))
    said = [f"{out} experts are only in A, {entered} only in B, {both} in both."]
    if "In both, channels" in frame:
        counts = [int(frame[f"{where}, channels"].sum()) for where in ("Only in A", "Only in B", "In both")]
        said.append("{:,} channels are only in A, {:,} only in B, {:,} in both.".format(*counts))
    return said


def _of_studies(sides: Sides) -> Changes:
    kept = kept_table(sides)
    averages = score_table(sides, benchmarks=False, name="diff.averages")
    made = [setting_table(sides), kept, averages, score_table(sides, benchmarks=True, name="diff.benchmarks")]
    gaps = [*sides.first.gaps, *sides.second.gaps]
    return Changes(
        tables=[table for table in made if len(table.frame)],
        sentences=[*_sentences(sides, averages, kept), *dict.fromkeys(f"{gap.where}: {gap.what}" for gap in gaps)],
        complete=not gaps and not any(sides.alone),
        folder=sides.first.store / "reports" / f"diff_{sides.first.name}_{sides.second.name}",
    )


def setting_table(sides: Sides, *, name: str = "diff.settings") -> Table:
    """Settings and versions in which the two studies differ."""
    first, second = (_settings(study) for study in (sides.first, sides.second))
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    rows = [(key, first.get(key, "not set"), second.get(key, "not set")) for key in keys]
    return Table(
        name=name,
        title="Settings and versions",
        caption=f"In which these differ: {named(sides)}.",
        frame=pd.DataFrame(rows, columns=["What", "A", "B"]),
        formats={},
    )


def _sentences(sides: Sides, averages: Table, kept: Table) -> list[str]:
    count = len(sides.pairs)
    stand = "One cell stands" if count == 1 else f"{count or 'No'} cells stand"
    said = [f"{stand} on both sides."]
    said += [f"They are compared across {axis}: {one} in A, {other} in B." for axis, (one, other) in sides.told.items()]
    plans = len(list(plan_pairs(sides, same=True)))
    if plans:
        said.append(f"{len(kept.frame.drop_duplicates(list(CELL)))} of {plans} plans keep something else.")
    for verdict in (BETTER, WORSE):
        where = averages.frame[averages.frame["Verdict"] == verdict]
        if len(where):
            said.append(f"In B, {len(where)} of {len(averages.frame)} averages are {verdict}.")
    return [*said, *unmatched(sides)]


def _settings(study: Study) -> dict[str, str]:
    flat = dict(_flat(study.document.get("config") or {}))
    libraries = {f"version of {library}": "/".join(found) for library, found in versions(study.origins).items()}
    commits = "/".join(dict.fromkeys(str(value) for value in study.origins["commit"].dropna()))
    return {**flat, "moe_lab": str(study.document.get("moe_lab", "")), "commit": commits, **libraries}


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
