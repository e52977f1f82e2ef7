"""The numbers that the papers print, how they were measured, and whether a measured number agrees with one.

What the papers say is in CSV files; nothing here depends on which paper it is.
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
"""Stands for every table or model in the files about how numbers were measured."""
AVERAGE, RANK = "Avg", "Avg Rank"
BEFORE, AFTER = "loading_memory_before_gb", "loading_memory_after_gb"
GROUPS = {"Code": names.CODE_COLUMNS, "Math": names.MATH_COLUMNS}
"""Printed averages of displayed columns, besides AVERAGE."""
SCORES = (*names.BENCHMARKS, *names.COLUMNS)
"""What an AVERAGE is taken over."""
PERPLEXITIES = ("wikitext2",)
"""Printed perplexities that are measured here too, under these names."""
ASKED = {
    "metric": "metric",
    "harness": "harness",
    "chat": "use of the chat template",
    "shots": "number of examples in the prompt",
    "max_new_tokens": "limit of answers",
    "length": "length of windows",
    "judge": "judge",
}
"""What a paper may say about how a benchmark was asked and graded, in words."""
NOT_COMPARABLE, TRUNCATED, ROUNDED_TWICE = "not comparable: ", "truncated", "off the 1/277 grid"
"""How the notes begin that change what a printed number can be compared with."""

Key = tuple[str, float, str, str, str, str]
"""Model, ratio, criterion, allocation, recovery and calibration set: the row of a printed table."""


@dataclass(frozen=True)
class Printed:
    """One printed number."""

    paper: str
    table: str
    key: Key
    benchmark: str
    """Result name, displayed column, one of GROUPS, AVERAGE, RANK, or a quantity with its unit."""
    text: str
    """The number with the decimals that were printed, percentages as shares."""
    note: str

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def ends(self) -> tuple[float, float]:
        """What the number may have been before it was printed: from, to."""
        number = Decimal(self.text)
        unit = Decimal(1).scaleb(int(number.as_tuple().exponent))
        below, above = unit / 2, unit / 2
        if self.note.startswith(TRUNCATED):
            below, above = Decimal(0), unit
        elif self.note.startswith(ROUNDED_TWICE):
            below, above = unit, unit
        return float(number - below), float(number + above)


@dataclass(frozen=True)
class Protocol:
    """How a paper calibrated and searched; None where it does not say."""

    tokens: int | None
    """Slots, gaps between documents counted."""
    gate: str | None
    seed: int | None
    search: str | None
    """The set that searched allocations were searched on."""
    generations: int | None


@dataclass(frozen=True)
class Split:
    """How a benchmark was measured, by a paper or here; what is not said lacks."""

    items: int | None
    """Of the whole benchmark."""
    asked: Mapping[str, str]
    """Of ASKED, what is said."""


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
"""Name of a table here -> (paper, table) that print counterparts of its numbers."""
PAPERS = tuple(dict.fromkeys(paper for printed in TABLES.values() for paper, _ in printed))
"""One file for each paper, and the first word of the names of its tables here; `coverage` is MoE-Slimming."""


@cache
def numbers() -> tuple[Printed, ...]:
    """Every printed number of the five papers."""
    rows = (row for paper in PAPERS for row in _read(paper))
    return tuple(
        Printed(row["paper"], row["table"], _key(row), row["benchmark"], row["value"], row["note"]) for row in rows
    )


def _key(row: Mapping[str, str]) -> Key:
    ratio = float(row["ratio"] or "nan")
    return row["model"], ratio, row["criterion"], row["allocation"], row["recovery"], row["calibration"]


@cache
def counterparts(name: str) -> Mapping[Key, tuple[Printed, ...]]:
    """Row -> its printed numbers, of the papers' tables that print counterparts of the table `name` here."""
    by_key: dict[Key, tuple[Printed, ...]] = {}
    for number in numbers():
        if (number.paper, number.table) in TABLES[name]:
            by_key[number.key] = (*by_key.get(number.key, ()), number)
    return by_key


def target(number: Printed, row: Sequence[Printed]) -> tuple[str, ...]:
    """The displayed columns and benchmarks whose mean the number is; empty where the paper does not print them.

    AVERAGE is that of all scores in its row of the same table.
    """
    if number.benchmark in (*SCORES, *PERPLEXITIES):
        return (number.benchmark,)
    if number.benchmark != AVERAGE:
        return GROUPS.get(number.benchmark, ())
    beside = [other for other in row if (other.paper, other.table) == (number.paper, number.table)]
    return tuple(other.benchmark for other in beside if other.benchmark in SCORES)


def protocol(number: Printed) -> Protocol:
    """How the models of this number were calibrated and searched."""
    row = _most_specific("protocols", number)
    tokens, seed, generations = (
        int(row[word]) if row.get(word) else None for word in ("tokens", "seed", "generations")
    )
    return Protocol(tokens, row.get("gate") or None, seed, row.get("search") or None, generations)


def split(number: Printed, benchmark: str) -> Split:
    """How the paper of this number measured a benchmark."""
    row = _most_specific("splits", number, benchmark=benchmark)
    items = int(row["items"]) if row.get("items") else None
    return Split(items, {word: row[word] for word in ASKED if row.get(word)})


def stands_for(axis: str, name: str) -> str:
    """What a model or calibration set that ships here stands for in the papers' tables; others stand for themselves."""
    stand_ins = {(row["axis"], row["name"]): row["stands_for"] for row in _read("stand_ins")}
    return stand_ins.get((axis, name), name)


def _most_specific(file: str, number: Printed, **more: str) -> dict[str, str]:
    """The first row of a file that holds for the number; files list what holds for fewer first. Empty for none."""
    wanted = {"paper": number.paper, "table": number.table, "model": number.key[0], **more}
    return next((row for row in _read(file) if all(row[key] in (ANY, value) for key, value in wanted.items())), {})


AGREES, DIFFERS, MISSING = "agrees", "differs", "missing"
BECAUSE = "not comparable because "
READS_GATES = ("seer", "reap", "mone", "mone_freq", "gate_ean", "gate_energy", "camera")
"""Printed criteria whose scores depend on what the gate is taken to be."""
UNGRADED = 0.99
"""Share of the items that must have been graded: a judge may be silent about a few."""
_SEARCH = ("search set", "generations")
_LISTED = 3
"""Benchmarks that a reason lists by name; of more it says how many."""


@dataclass(frozen=True)
class Evaluation:
    """How one benchmark was measured here."""

    benchmark: str
    n: int
    """Items that were graded."""
    split: Split


@dataclass(frozen=True)
class Measured:
    """A number of a study with the ends of its interval, and what it rests on."""

    value: float
    low: float
    high: float
    cell: Mapping[str, Any]
    """Axes of its cell."""
    tokens: int | None
    """Slots of the calibration pass, gaps counted; None where the store does not say, or no data was read."""
    search: tuple[str | None, int | None] | None = None
    """Of a searched allocation: the set it was searched on and the generations, None where the store does not say."""
    evaluations: Sequence[Evaluation] = ()
    lacking: Sequence[str] = ()
    """Why it is not the quantity that is printed, in words."""


def verdict(number: Printed, measured: Measured) -> str:
    """`agrees`, `differs`, `missing`, or `not comparable because` and every reason.

    It agrees when the printed number, as far as its rounding leaves it open, lies in the interval of the measured one.
    """
    if math.isnan(measured.value):
        return MISSING
    differences = list(reasons(number, measured))
    if differences:
        return BECAUSE + "; ".join(differences)
    low, high = number.ends
    word = AGREES if measured.low <= high and low <= measured.high else DIFFERS
    return f"{word} ({number.note})" if number.note else word


def reasons(number: Printed, measured: Measured) -> Iterator[str]:
    """Why the two numbers cannot be compared, one part of a sentence each; nothing when they can.

    That it is another model is said alone: nothing else about it could be alike.
    """
    if number.note.startswith(NOT_COMPARABLE):
        yield number.note.removeprefix(NOT_COMPARABLE)
    for axis in ("model", "calibration"):
        own = str(measured.cell[axis])
        if (printed := stands_for(axis, own)) != own:
            yield f"{own} stands in for {printed}"
            if axis == "model":
                return
    yield from _calibrated(number, measured)
    yield from measured.lacking
    yield from _evaluated(number, measured.evaluations)
    if math.isnan(measured.low + measured.high):
        yield "it has no interval"


def _calibrated(number: Printed, measured: Measured) -> Iterator[str]:
    paper, cell = protocol(number), measured.cell
    if cell["criterion"] == "none":
        return
    if cell["calibration"] != "none" and paper.tokens is not None and measured.tokens != paper.tokens:
        measured_tokens = "an unknown number of" if measured.tokens is None else f"{measured.tokens:,}"
        yield f"calibrated on {measured_tokens} tokens, published on {paper.tokens:,}"
    if cell["criterion"] in READS_GATES and paper.gate not in (None, cell["gate"]):
        yield f"gate {cell['gate']}, published with {paper.gate}"
    if paper.seed not in (None, cell["seed"]):
        yield f"seed {cell['seed']}, published with {paper.seed}"
    if measured.search is not None:
        for kind, own, theirs in zip(_SEARCH, measured.search, (paper.search, paper.generations), strict=True):
            if theirs is not None and own != theirs:
                yield f"{kind} {'unknown' if own is None else own}, published with {theirs}"


def _evaluated(number: Printed, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    differing: dict[str, list[str]] = {}
    for here in evaluations:
        paper = split(number, here.benchmark)
        details = {"items": _items(here, paper.items)}
        for word, kind in ASKED.items():
            own, printed = here.split.asked.get(word, "unknown"), paper.asked.get(word)
            details[kind] = "" if printed in (None, own) else f"{own}, published {printed}"
        for kind, detail in details.items():
            differing.setdefault(kind, []).extend([f"{names.benchmark(here.benchmark)} ({detail})"] if detail else [])
    for kind, benchmarks in differing.items():
        if benchmarks:
            many = len(benchmarks) > _LISTED
            yield f"other {kind}: {f'{len(benchmarks)} benchmarks' if many else ', '.join(benchmarks)}"


def _items(evaluation: Evaluation, printed: int | None) -> str:
    whole = evaluation.n if evaluation.split.items is None else evaluation.split.items
    graded = evaluation.n >= UNGRADED * whole
    if graded and printed in (None, whole):
        return ""
    of = "" if graded else f" of {whole:,}"
    published = "" if printed is None else f", published on {printed:,}"
    return f"{evaluation.n:,}{of}{published}"
