"""Published numbers of the papers, how they were measured, and whether a measured number agrees
with one.

The papers' numbers and protocols are in CSV files; no code here depends on the paper.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from analysis import names

FOLDER = Path(__file__).parent
ANY = "*"
"""Stands for every table, model or criterion in protocols.csv and splits.csv."""
AVERAGE = "Avg"
RANK = "Avg Rank"
BEFORE = "loading_memory_before_gb"
AFTER = "loading_memory_after_gb"
GROUPS = {"Code": names.CODE_COLUMNS, "Math": names.MATH_COLUMNS}
"""Printed averages of displayed columns, besides AVERAGE."""
SCORES = (*names.BENCHMARKS, *names.COLUMNS)
"""Benchmarks and displayed columns that may be part of an AVERAGE."""
PERPLEXITIES = ("wikitext2",)
"""Published perplexities that are measured here under the same names."""
ASKED = {
    "metric": "metric",
    "harness": "harness",
    "chat": "use of the chat template",
    "shots": "number of examples in the prompt",
    "max_new_tokens": "limit of answers",
    "length": "length of windows",
    "judge": "judge",
}
"""Setting of a benchmark that papers may state -> its description."""
NOT_COMPARABLE, TRUNCATED, ROUNDED_TWICE = "not comparable: ", "truncated", "off the 1/277 grid"
"""Prefixes of notes that affect how a published number can be compared."""

Key = tuple[str, float, str, str, str, str]
"""Model, ratio, criterion, allocation, recovery and calibration set: the row of a published
table."""


@dataclass(frozen=True)
class Printed:
    """One published number."""

    paper: str
    table: str
    key: Key
    benchmark: str
    """Result name, displayed column, one of GROUPS, AVERAGE, RANK, or a quantity with its unit."""
    text: str
    """The number with the published decimals, percentages as shares."""
    note: str

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def ends(self) -> tuple[float, float]:
        """The range in which the number may have been before it was rounded: lower and upper
        end."""
        number = Decimal(self.text)
        unit = Decimal(1).scaleb(int(number.as_tuple().exponent))
        below = unit / 2
        above = unit / 2
        if self.note.startswith(TRUNCATED):
            below = Decimal(0)
            above = unit
        elif self.note.startswith(ROUNDED_TWICE):
            below = unit
            above = unit
        return float(number - below), float(number + above)


@dataclass(frozen=True)
class Protocol:
    """Calibration and search settings of a paper; None when it does not state them."""

    tokens: int | None
    """Positions of the calibration set (rows x length), including gaps between documents."""
    gate: str | None
    seed: int | None
    search: str | None
    """Calibration set on which allocations were searched."""
    generations: int | None


@dataclass(frozen=True)
class Split:
    """How a benchmark was measured, by a paper or here, as far as it is known."""

    items: int | None
    """Items of the whole benchmark."""
    settings: Mapping[str, str]
    """The known settings among ASKED."""


@cache
def _read(name: str) -> tuple[dict[str, str], ...]:
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        return tuple(csv.DictReader(lines))


def _tables() -> dict[str, tuple[tuple[str, str], ...]]:
    pairs: dict[str, list[tuple[str, str]]] = {}
    for row in _read("tables"):
        pairs.setdefault(row["name"], []).append((row["paper"], row["table"]))
    return {name: tuple(printed) for name, printed in pairs.items()}


TABLES = _tables()
"""Name of a table here -> the published tables (paper, table) with counterparts of its numbers."""
PAPERS = tuple(dict.fromkeys(paper for printed in TABLES.values() for paper, _ in printed))
"""Papers: the names of their CSV files, and prefixes of their tables' names here; `coverage` is
MoE-Slimming."""


@cache
def numbers() -> tuple[Printed, ...]:
    """All published numbers of the five papers."""
    rows = (row for paper in PAPERS for row in _read(paper))
    return tuple(
        Printed(row["paper"], row["table"], _key(row), row["benchmark"], row["value"], row["note"])
        for row in rows
    )


def _key(row: Mapping[str, str]) -> Key:
    ratio = float(row["ratio"] or "nan")
    return (
        row["model"],
        ratio,
        row["criterion"],
        row["allocation"],
        row["recovery"],
        row["calibration"],
    )


@cache
def counterparts(name: str) -> Mapping[Key, tuple[Printed, ...]]:
    """Row -> its published numbers, from the published tables that correspond to the table `name`
    here."""
    by_key: dict[Key, tuple[Printed, ...]] = {}
    for number in numbers():
        if (number.paper, number.table) in TABLES[name]:
            by_key[number.key] = (*by_key.get(number.key, ()), number)
    return by_key


def target(number: Printed, row: Sequence[Printed]) -> tuple[str, ...]:
    """The displayed columns and benchmarks whose mean the number is; empty when the paper does not
    publish them.

    An AVERAGE is the mean of all scores in its row of the same table.
    """
    if number.benchmark in (*SCORES, *PERPLEXITIES):
        return (number.benchmark,)
    if number.benchmark != AVERAGE:
        return GROUPS.get(number.benchmark, ())
    row_of_table = [
        printed for printed in row if (printed.paper, printed.table) == (number.paper, number.table)
    ]
    return tuple(printed.benchmark for printed in row_of_table if printed.benchmark in SCORES)


def protocol(number: Printed) -> Protocol:
    """Calibration and search settings of the models behind this number."""
    row = _most_specific("protocols", number, criterion=number.key[2])
    tokens, seed, generations = (
        int(row[word]) if row.get(word) else None for word in ("tokens", "seed", "generations")
    )
    return Protocol(tokens, row.get("gate") or None, seed, row.get("search") or None, generations)


def split(number: Printed, benchmark: str) -> Split:
    """How this number's paper measured a benchmark."""
    row = _most_specific("splits", number, benchmark=benchmark)
    items = int(row["items"]) if row.get("items") else None
    return Split(items, {word: row[word] for word in ASKED if row.get(word)})


def stands_for(axis: str, name: str) -> str:
    """Name in the papers' tables that a shipped model or calibration set stands in for; other names
    are unchanged."""
    stand_ins = {(row["axis"], row["name"]): row["stands_for"] for row in _read("stand_ins")}
    return stand_ins.get((axis, name), name)


def _most_specific(file: str, number: Printed, **axes: str) -> dict[str, str]:
    """The first row of a file that applies to the number; {} for none. Files list more specific
    rows first."""
    axes |= {"paper": number.paper, "table": number.table, "model": number.key[0]}
    for row in _read(file):
        if all(row[axis] in (ANY, value) for axis, value in axes.items()):
            return row
    return {}


AGREES = "agrees"
DIFFERS = "differs"
MISSING = "missing"
BECAUSE = "not comparable because "
READS_GATES = ("seer", "reap", "mone", "mone_freq", "gate_ean", "gate_energy", "camera")
"""Published criteria whose scores depend on the definition of the gate."""
UNGRADED = 0.99
"""Least share of graded items: a judge may fail to grade a few."""
_SEARCH = ("search set", "generations")
_LISTED = 3
"""Largest number of benchmarks that a reason lists by name; more are counted."""


@dataclass(frozen=True)
class Evaluation:
    """How one benchmark was measured here."""

    benchmark: str
    n: int
    """Number of graded items."""
    split: Split


@dataclass(frozen=True)
class Measured:
    """A number of a study with the ends of its interval, and how it was measured."""

    value: float
    low: float
    high: float
    cell: Mapping[str, Any]
    """Axes of its cell."""
    tokens: int | None
    """Positions of the calibration pass, including gaps; None when unknown, or when no data was
    read."""
    search: tuple[str | None, int | None] | None = None
    """For a searched allocation, its search set and generations, each None when unknown."""
    evaluations: Sequence[Evaluation] = ()
    lacking: Sequence[str] = ()
    """Reasons why it is not the same quantity as the published one."""


def verdict(number: Printed, measured: Measured) -> str:
    """Compare: `agrees`, `differs`, `missing`, or `not comparable because` with all reasons.

    The numbers agree when the rounding range of the published number overlaps the interval of the
    measured one.
    """
    if math.isnan(measured.value):
        return MISSING
    differences = list(reasons(number, measured))
    if differences:
        return BECAUSE + "; ".join(differences)
    low, high = number.ends
    result = AGREES if measured.low <= high and low <= measured.high else DIFFERS
    return f"{result} ({number.note})" if number.note else result


def reasons(number: Printed, measured: Measured) -> Iterator[str]:
    """Yield the reasons why the two numbers cannot be compared; nothing when they can.

    For another model no further reasons are given, as everything else differs with it.
    """
    if number.note.startswith(NOT_COMPARABLE):
        yield number.note.removeprefix(NOT_COMPARABLE)
    for axis in ("model", "calibration"):
        value = str(measured.cell[axis])
        if (printed := stands_for(axis, value)) != value:
            yield f"{value} stands in for {printed}"
            if axis == "model":
                return
    yield from _calibrated(number, measured)
    yield from measured.lacking
    yield from _evaluated(number, measured.evaluations)
    if math.isnan(measured.low + measured.high):
        yield "it has no interval"


def _calibrated(number: Printed, measured: Measured) -> Iterator[str]:
    paper = protocol(number)
    cell = measured.cell
    if cell["criterion"] == "none":
        return
    if (
        cell["calibration"] != "none"
        and paper.tokens is not None
        and measured.tokens != paper.tokens
    ):
        measured_tokens = (
            "an unknown number of" if measured.tokens is None else f"{measured.tokens:,}"
        )
        yield f"calibrated on {measured_tokens} tokens, published on {paper.tokens:,}"
    if cell["criterion"] in READS_GATES and paper.gate not in (None, cell["gate"]):
        yield f"gate {cell['gate']}, published with {paper.gate}"
    if paper.seed not in (None, cell["seed"]):
        yield f"seed {cell['seed']}, published with {paper.seed}"
    if measured.search is not None:
        for kind, measured_value, theirs in zip(
            _SEARCH, measured.search, (paper.search, paper.generations), strict=True
        ):
            if theirs is not None and measured_value != theirs:
                yield (
                    f"{kind} {'unknown' if measured_value is None else measured_value}, published "
                    f"with {theirs}"
                )


def _evaluated(number: Printed, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    differing: dict[str, list[str]] = {}
    for evaluation in evaluations:
        paper = split(number, evaluation.benchmark)
        details = {"items": _items(evaluation, paper.items)}
        for word, kind in ASKED.items():
            value = evaluation.split.settings.get(word, "unknown")
            printed = paper.settings.get(word)
            details[kind] = "" if printed in (None, value) else f"{value}, published {printed}"
        for kind, detail in details.items():
            differing.setdefault(kind, []).extend(
                [f"{names.benchmark(evaluation.benchmark)} ({detail})"] if detail else []
            )
    for kind, benchmarks in differing.items():
        if benchmarks:
            many = len(benchmarks) > _LISTED
            yield (
                f"other {kind}: "
                f"{f'{len(benchmarks)} benchmarks' if many else ', '.join(benchmarks)}"
            )


def _items(evaluation: Evaluation, printed: int | None) -> str:
    whole = evaluation.n if evaluation.split.items is None else evaluation.split.items
    graded = evaluation.n >= UNGRADED * whole
    if graded and printed in (None, whole):
        return ""
    of = "" if graded else f" of {whole:,}"
    published = "" if printed is None else f", published on {printed:,}"
    return f"{evaluation.n:,}{of}{published}"
