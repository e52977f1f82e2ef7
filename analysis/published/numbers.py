"""The numbers that the papers print, and how they were measured: facts from CSV, in this project's own words."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

from analysis import names

FOLDER = Path(__file__).parent
PAPERS = ("unified", "evoesap", "heapr", "aimer", "coverage")
"""One file for each paper, and the first word of the names of its tables here; `coverage` is MoE-Slimming."""
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
ASKED = ("harness", "chat", "shots", "max_new_tokens", "length", "judge")
"""What a paper may say about how a benchmark was asked and graded."""
NOT_COMPARABLE, TRUNCATED, ROUNDED_TWICE = "not comparable: ", "truncated", "off the 1/277 grid"
"""How the notes begin that change what a printed number can be compared with."""

TABLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "unified.table1": (("unified", "1"),),
    "unified.table2": (("unified", "2"),),
    "unified.table3": (("unified", "3"), ("evoesap", "3")),
    "unified.table5": (("unified", "5"),),
    "evoesap.table1": (("evoesap", "1"), ("evoesap", "2")),
    **{f"evoesap.table{number}": (("evoesap", f"{number}"),) for number in range(3, 11)},
    "heapr.table1": (("heapr", "1"), ("heapr", "readme")),
    "heapr.table2": (("heapr", "2"),),
    "aimer.table2": (("aimer", "text"),),
    "coverage.table3": tuple(("coverage", f"reply {table}") for table in ("3", "5", "quantised")),
    "coverage.table6": (("coverage", "6"), ("coverage", "reply 10")),
    "coverage.table7": (("coverage", "reply 7"),),
    "coverage.table13": (("coverage", "13"),),
    "coverage.table8": (("coverage", "reply 8"),),
    "coverage.table9": (("coverage", "9"), ("coverage", "reply 9")),
    "coverage.table11": (("coverage", "reply 11"), ("coverage", "reply 14")),
    "coverage.table16": (("coverage", "reply 16"),),
}
"""Name of a table here -> the papers' tables that print counterparts of its numbers."""

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
    """The set that searched allocations were searched on, and for how many generations."""
    generations: int | None


@dataclass(frozen=True)
class Split:
    """How a paper measured a benchmark; None where it does not say."""

    items: int | None
    metric: str | None
    asked: Mapping[str, str]
    """Of ASKED, what the paper says, in words."""


@cache
def numbers() -> tuple[Printed, ...]:
    """Every printed number of the five papers."""
    return tuple(_printed(row) for name in PAPERS for row in _read(name))


def _printed(row: Mapping[str, str]) -> Printed:
    ratio = float(row["ratio"] or "nan")
    key = (row["model"], ratio, row["criterion"], row["allocation"], row["recovery"], row["calibration"])
    return Printed(row["paper"], row["table"], key, row["benchmark"], row["value"], row["note"])


@cache
def counterparts(name: str) -> Mapping[Key, tuple[Printed, ...]]:
    """Row -> its printed numbers, of the papers' tables that print counterparts of the table `name` here."""
    by_key: dict[Key, list[Printed]] = {}
    for number in numbers():
        if (number.paper, number.table) in TABLES[name]:
            by_key.setdefault(number.key, []).append(number)
    return {key: tuple(row) for key, row in by_key.items()}


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
    row = _most_specific("protocols", number) or {}
    tokens, seed, generations = (_whole(row.get(word)) for word in ("tokens", "seed", "generations"))
    return Protocol(tokens, row.get("gate") or None, seed, row.get("search") or None, generations)


def _whole(text: str | None) -> int | None:
    return int(text) if text else None


def split(number: Printed, benchmark: str) -> Split:
    """How the paper of this number measured a benchmark."""
    row = _most_specific("splits", number, benchmark=benchmark) or {}
    asked = {word: row[word] for word in ASKED if row.get(word)}
    return Split(_whole(row.get("items")), row.get("metric") or None, asked)


def stands_for(axis: str, name: str) -> str:
    """What a model or calibration set that ships here stands for in the papers' tables; others stand for themselves."""
    stand_ins = {(row["axis"], row["name"]): row["stands_for"] for row in _read("stand_ins")}
    return stand_ins.get((axis, name), name)


def _most_specific(file: str, number: Printed, **more: str) -> dict[str, str] | None:
    """The first row of a file that holds for the number; files list what holds for fewer first."""
    wanted = {"paper": number.paper, "table": number.table, "model": number.key[0], **more}
    return next((row for row in _read(file) if all(row[key] in (ANY, value) for key, value in wanted.items())), None)


@cache
def _read(name: str) -> tuple[dict[str, str], ...]:
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        return tuple(csv.DictReader(lines))
