"""Published numbers of the papers with their protocols, and comparison of a measured number with a
published one.

The papers' numbers and protocols are in CSV files; no code here depends on the paper.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from moe_lab.analysis import names

FOLDER = Path(__file__).parent
WILDCARD = "*"
"""Value in protocols.csv and splits.csv that matches every table, model or criterion."""
AVERAGE = "Avg"
RANK = "Avg Rank"
SCORES = (*names.BENCHMARKS, *names.COLUMNS)
"""Benchmarks and displayed columns whose scores an AVERAGE may include."""
PERPLEXITIES = ("wikitext2",)
"""Published perplexities, with the names of the benchmarks that measure them here."""
EVALUATION_SETTINGS = {
    "metric": "metric",
    "harness": "harness",
    "chat": "use of the chat template",
    "shots": "number of examples in the prompt",
    "max_new_tokens": "limit of answers",
    "length": "length of windows",
    "judge": "judge",
}
"""Key of a benchmark's setting that papers may state -> description of the setting."""
NOT_COMPARABLE, TRUNCATED, ROUNDED_TWICE = "not comparable: ", "truncated", "off the 1/277 grid"
"""Prefixes of notes in the CSV files that affect how a published number is compared."""

Key = tuple[str, float, str, str, str, str]
"""Model, ratio (NaN if not stated), criterion, allocation, recovery and calibration set: the row of
a published table."""


@dataclass(frozen=True)
class PublishedNumber:
    """One published number."""

    paper: str
    table: str
    key: Key
    benchmark: str
    """Name of a benchmark or displayed column, one of `names.AVERAGES`, AVERAGE, RANK, or a
    quantity with its unit."""
    text: str
    """The number with the published decimals; percentages are converted to shares."""
    note: str
    """Remark on the number; "" for none."""

    @property
    def value(self) -> float:
        """The number that `text` contains."""
        return float(self.text)

    @property
    def rounding_range(self) -> tuple[float, float]:
        """Lower and upper end of the range of numbers that the paper prints as this number."""
        number = Decimal(self.text)
        unit = Decimal(1).scaleb(int(number.as_tuple().exponent))
        below = above = unit / 2
        if self.note.startswith(TRUNCATED):
            below, above = Decimal(0), unit
        elif self.note.startswith(ROUNDED_TWICE):
            below = above = unit
        return float(number - below), float(number + above)


@cache
def _read(name: str) -> tuple[dict[str, str], ...]:
    """The rows of the file NAME.csv in FOLDER, column -> text."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        return tuple(csv.DictReader(lines))


TABLES: dict[str, list[tuple[str, str]]] = {}
"""Name of a table here -> (paper, table) of every published table that corresponds to it."""
for _row in _read("tables"):
    TABLES.setdefault(_row["name"], []).append((_row["paper"], _row["table"]))
PAPERS = tuple(dict.fromkeys(paper for tables in TABLES.values() for paper, _ in tables))
"""Names of the papers. A paper's name is the stem of its CSV file and the prefix of table names
here; `coverage` is MoE-Slimming."""


@cache
def numbers() -> tuple[PublishedNumber, ...]:
    """All published numbers of the papers."""
    numbers = []
    for row in (row for paper in PAPERS for row in _read(paper)):
        key = (
            row["model"],
            float(row["ratio"] or "nan"),
            row["criterion"],
            row["allocation"],
            row["recovery"],
            row["calibration"],
        )
        numbers.append(
            PublishedNumber(
                row["paper"], row["table"], key, row["benchmark"], row["value"], row["note"]
            )
        )
    return tuple(numbers)


@cache
def counterparts(name: str) -> Mapping[Key, Sequence[PublishedNumber]]:
    """Key -> published numbers with this key in the published tables that correspond to the table
    `name` here."""
    numbers_of_key = defaultdict(list)
    for number in numbers():
        if (number.paper, number.table) in TABLES[name]:
            numbers_of_key[number.key].append(number)
    return dict(numbers_of_key)


def averaged_benchmarks(number: PublishedNumber, row: Sequence[PublishedNumber]) -> tuple[str, ...]:
    """The benchmarks and displayed columns over which a published number is averaged; empty when
    the number is not made of scores (a rank, a size or a time).

    row: all published numbers with the key of `number`.
    """
    if number.benchmark in (*SCORES, *PERPLEXITIES):
        return (number.benchmark,)
    if number.benchmark != AVERAGE:
        return names.AVERAGES.get(number.benchmark, ())
    row_of_table = [
        printed for printed in row if (printed.paper, printed.table) == (number.paper, number.table)
    ]
    return tuple(printed.benchmark for printed in row_of_table if printed.benchmark in SCORES)


def protocol(number: PublishedNumber) -> Mapping[str, str]:
    """The settings of calibration and search with which the paper obtained this number: the row of
    protocols.csv, in which a setting that the paper does not state is "". {} for a paper without
    protocol.

    tokens: positions of the calibration set (rows x length), including gaps between documents.
    search set: calibration set on which allocations were searched.
    """
    return _most_specific_row("protocols", number, criterion=number.key[2])


def split(number: PublishedNumber, benchmark: str) -> Mapping[str, str]:
    """Number of items (key `items`) and EVALUATION_SETTINGS with which the paper of this number
    measured a benchmark: the row of splits.csv, in which what the paper does not state is "". {}
    for a benchmark without row."""
    return _most_specific_row("splits", number, benchmark=benchmark)


def published_name(axis: str, name: str) -> str:
    """Name of the published model or calibration set for which the one called `name` stands in
    here.

    axis: `model` or `calibration`.
    """
    stand_ins = {(row["axis"], row["name"]): row["stands_for"] for row in _read("stand_ins")}
    return stand_ins.get((axis, name), name)


def _most_specific_row(file: str, number: PublishedNumber, **axes: str) -> dict[str, str]:
    """The first row of FILE.csv that matches `number` and `axes` (column -> value); {} when no row
    matches. Files list more specific rows first."""
    axes |= {"paper": number.paper, "table": number.table, "model": number.key[0]}
    for row in _read(file):
        if all(row[axis] in (WILDCARD, value) for axis, value in axes.items()):
            return row
    return {}


AGREES = "agrees"
DIFFERS = "differs"
MISSING = "missing"
INCOMPARABLE = "not comparable because "
"""Verdicts start with AGREES, DIFFERS, MISSING or INCOMPARABLE."""
GATE_CRITERIA = ("seer", "reap", "mone", "mone_freq", "gate_ean", "gate_energy", "camera")
"""Published criteria whose scores depend on the definition of the gate."""
LOWEST_GRADED_SHARE = 0.99
"""Lowest share of graded items with which a benchmark counts as completely graded, because a judge
may fail to grade a few items."""
_MOST_NAMED = 3
"""Largest number of benchmarks that a reason names."""


@dataclass(frozen=True)
class Evaluation:
    """Items and settings with which one benchmark was measured here."""

    benchmark: str
    n: int
    """Number of graded items."""
    items: int | None
    """Number of items of the whole benchmark; None when unknown."""
    settings: Mapping[str, str]
    """Key of EVALUATION_SETTINGS -> value, for known settings."""


@dataclass(frozen=True)
class MeasuredNumber:
    """A number of a study, the ends of its interval, and the protocol of its measurement."""

    value: float
    low: float
    high: float
    cell: Mapping[str, Any]
    """Axes of the cell whose number this is."""
    tokens: int | None
    """Positions of the calibration pass, including gaps between documents; None when the number is
    unknown or differs between joint calibration sets, or when the criterion reads no data."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """`search set` and `generations` of a searched allocation, each None when unknown; {} for an
    allocation that was not searched."""
    evaluations: Sequence[Evaluation] = ()
    caveats: Sequence[str] = ()
    """Reasons why the number is not the same quantity as the published one."""


def verdict(number: PublishedNumber, measured: MeasuredNumber) -> str:
    """Verdict on a published and a measured number.

    They agree if the rounding range of the published number overlaps the interval of the measured
    number.
    """
    if math.isnan(measured.value):
        return MISSING
    all_reasons = list(reasons(number, measured))
    if all_reasons:
        return INCOMPARABLE + "; ".join(all_reasons)
    low, high = number.rounding_range
    text = AGREES if measured.low <= high and low <= measured.high else DIFFERS
    return f"{text} ({number.note})" if number.note else text


def reasons(number: PublishedNumber, measured: MeasuredNumber) -> Iterator[str]:
    """Yield the reasons why the two numbers cannot be compared.

    If the measured model stands in for the published one, this is the last reason, because
    everything else differs with the model.
    """
    if number.note.startswith(NOT_COMPARABLE):
        yield number.note.removeprefix(NOT_COMPARABLE)
    for axis in ("model", "calibration"):
        for value in str(measured.cell[axis]).split(names.JOINT):
            if (printed := published_name(axis, value)) != value:
                yield f"{value} stands in for {printed}"
                if axis == "model":
                    return
    yield from _calibration_differences(number, measured)
    yield from measured.caveats
    yield from _evaluation_differences(number, measured.evaluations)
    if math.isnan(measured.low + measured.high):  # at least one end is NaN
        yield "it has no interval"


def _calibration_differences(number: PublishedNumber, measured: MeasuredNumber) -> Iterator[str]:
    """Yield a text for each setting of calibration and search that the paper states and that
    differs."""
    published_protocol = protocol(number)
    cell = measured.cell
    if cell["criterion"] == "none":
        return
    tokens = published_protocol.get("tokens")
    if cell["calibration"] != "none" and tokens and measured.tokens != int(tokens):
        measured_tokens = (
            "an unknown number of" if measured.tokens is None else f"{measured.tokens:,}"
        )
        yield f"calibrated on {measured_tokens} tokens, published on {int(tokens):,}"
    settings = {"seed": cell["seed"], **measured.search}
    if cell["criterion"] in GATE_CRITERIA:
        settings = {"gate": cell["gate"], **settings}
    for name, value in settings.items():
        published = published_protocol.get(name)
        if published and str(value) != published:
            text = "unknown" if value is None else value
            yield f"{name} {text}, published with {published}"


def _evaluation_differences(
    number: PublishedNumber, evaluations: Sequence[Evaluation]
) -> Iterator[str]:
    """Yield a text for each difference between the evaluations of a measured number and those in
    the paper of `number`. A text lists the benchmarks that differ."""
    # "items" or description of a setting -> a text for each benchmark that differs
    differences: dict[str, list[str]] = {"items": []}
    for evaluation in evaluations:
        benchmark = names.benchmark(evaluation.benchmark)
        published_split = split(number, evaluation.benchmark)
        items = _items_difference(evaluation, published_split.get("items"))
        if items:
            differences["items"].append(f"{benchmark} ({items})")
        for key, description in EVALUATION_SETTINGS.items():
            texts = differences.setdefault(description, [])
            value = evaluation.settings.get(key, "unknown")
            published = published_split.get(key)
            if published and published != value:
                texts.append(f"{benchmark} ({value}, published {published})")
    for description, texts in differences.items():
        if len(texts) > _MOST_NAMED:
            yield f"other {description}: {len(texts)} benchmarks"
        elif texts:
            yield f"other {description}: {', '.join(texts)}"


def _items_difference(evaluation: Evaluation, published: str | None) -> str:
    """Text on the number of items of a benchmark here and in the paper, "" without a difference.
    `95 of 100, published on 200`: 95 of 100 items were graded here, and the paper has 200 items.

    published: number of items in the paper; None or "" if the paper states none.
    """
    # if the number of items here is unknown, the graded items count as all items
    items = evaluation.n if evaluation.items is None else evaluation.items
    all_graded = evaluation.n >= LOWEST_GRADED_SHARE * items
    if all_graded and (not published or int(published) == items):
        return ""
    all_items_text = "" if all_graded else f" of {items:,}"
    comparison = f", published on {int(published):,}" if published else ""
    return f"{evaluation.n:,}{all_items_text}{comparison}"


def tally(verdicts: Sequence[str]) -> str:
    """Text such as `12 agree, 3 differ and 40 cannot be compared`."""
    phrases = {
        AGREES: "agree",
        DIFFERS: "differ",
        INCOMPARABLE: "cannot be compared",
        MISSING: "are missing here",
    }
    counts = {
        phrase: sum(verdict.startswith(start) for verdict in verdicts)
        for start, phrase in phrases.items()
    }
    return names.enumeration(f"{count:,} {phrase}" for phrase, count in counts.items() if count)


def summary(verdicts: Sequence[str]) -> list[str]:
    """A sentence that counts verdicts; [] without verdicts."""
    if not verdicts:
        return []
    count = f"{len(verdicts):,} printed numbers have a counterpart in this study"
    return [f"{count}: {tally(verdicts)}."]
