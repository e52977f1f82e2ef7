"""Print the page of reproduction: `python docs/reproduction_page.py > docs/reproduction.md`."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from moe_lab import compose, criteria
from moe_lab.analysis import names
from moe_lab.analysis.load.study import allocation_text
from moe_lab.analysis.outputs.published import published_key
from moe_lab.analysis.published import numbers as published
from moe_lab.analysis.published.numbers import NOT_COMPARABLE, Key, PublishedNumber
from moe_lab.config import BenchmarkConfig
from moe_lab.grid import Cell
from moe_lab.study.record import cell_columns

ROOT = Path(__file__).parents[1]
SWEEPS = ROOT / "sweeps"
VALIDATION = ROOT / "docs" / "validation.csv"
"""Numbers of VALIDATED that were measured on published weights, one row each."""
VALIDATED = "unified.table5"
PAPERS = {
    "unified": "Unified Expert Pruning",
    "evoesap": "EvoESAP",
    "heapr": "HEAPr",
    "aimer": "AIMER",
    "coverage": "MoE-Slimming",
}
HEAD = """# Reproduction

Every table and figure of the five papers: where it is in the paper, the output and the sweep that
make it here, and how many of its printed numbers a sweep has a cell for. A sweep computes them
where its models, texts and GPUs are; **measured** counts the numbers that were computed on
published weights so far: {measured} of {printed:,}.

Protocols are what the papers state, or the code that they released; a sweep's settings are read
from the sweep itself. `NAME.published` of the analysis compares measured with printed numbers, for
example `python -m analysis unified.table1.published`.

This page is printed by `python docs/reproduction_page.py`.

## Validation

`moe-lab run +experiment=validate` evaluates frequency, REAP, MAN and random plans of three seeds on
OLMoE-1B-7B, a quarter of the experts removed, on eight multiple-choice tasks. `dry_run=true` prints
the memory it needs. If it is interrupted, the same command goes on. Then

    moe-lab report unified.table5.validation store=store study=validate

writes tables/unified.table5.validation.csv: each score beside the printed one, with a tolerance of
two joint standard errors and one point. The rows belong into docs/validation.csv.

{validated}

## What is not done, and why

{not_followed}

Forms of text and code that differ and are both here:
[variants of papers](allocations.md#variants-of-papers).

"""
NOT_VALIDATED = "On 30 November 2026 nobody had run it yet, so there is no row."
NO_SWEEP = "no sweep has this row"
"""Reason for a printed row that no cell of the table's sweeps has."""
OTHER_QUANTITY = "a size, time or rank, which outputs show and nothing compares"
"""Reason for a printed number that is not a score."""


@dataclass
class Sweep:
    """The cells and benchmarks of a sweep."""

    name: str
    cells: list[Cell] = field(default_factory=list)
    benchmarks: dict[str, BenchmarkConfig] = field(default_factory=dict)
    results: dict[Key, set[str]] = field(default_factory=dict)
    """Key of a printed row -> names of the benchmarks that the cell is evaluated on."""


@cache
def sweep(name: str) -> Sweep:
    """Compose a sweep. `name`: file in sweeps/ without its suffix."""
    loaded = Sweep(name)
    with compose.hydra_context(SWEEPS):
        _, requests = compose.compose([], name)
    for cells, benchmarks in requests:
        reports = {report for benchmark in benchmarks for report in benchmark.reports}
        loaded.cells += cells
        loaded.benchmarks |= {benchmark.name: benchmark for benchmark in benchmarks}
        for cell in cells:
            for key in (key_of(cell), unpruned_key(cell)):
                loaded.results.setdefault(key, set()).update(reports)
    return loaded


def key_of(cell: Cell) -> Key:
    """The key of the printed row with which a cell is compared."""
    columns = cell_columns(cell)
    if not criteria.reads_text(cell.criterion.name) and cell.allocation.name == "uniform":
        columns["calibration"] = "none"
    return _key({**columns, "allocation": allocation_text(columns)}, cell)


def unpruned_key(cell: Cell) -> Key:
    """The key of the printed row of the cell's model without pruning."""
    columns = dict.fromkeys(("criterion", "allocation", "recovery", "calibration"), "none")
    return _key({**columns, "ratio": 0.0}, cell)


def _key(columns: Mapping[str, object], cell: Cell) -> Key:
    top_k = "" if cell.model.top_k is None else f"_top{cell.model.top_k}"
    return published_key({**columns, "model": f"{cell.model.name}{top_k}"})


def page() -> str:
    """The page in Markdown."""
    items = _rows(ROOT / "analysis" / "published" / "items.csv")
    measured = _rows(VALIDATION)
    parts = [
        HEAD.format(
            measured=len(measured),
            printed=len(published.numbers()),
            validated=_whole_table(measured) or NOT_VALIDATED,
            not_followed=_whole_table(_rows(ROOT / "analysis" / "published" / "not_followed.csv")),
        )
    ]
    for paper, title in PAPERS.items():
        of_paper = [item for item in items if item["paper"] == paper]
        sweeps = dict.fromkeys(name for item in of_paper for name in item["sweeps"].split())
        parts += [
            f"## {title}\n",
            _protocols(paper),
            _items(of_paper, measured),
            _reasons(paper, of_paper),
            f"### Sweeps of {title}\n",
            _sweeps(map(sweep, sweeps)),
        ]
    return "\n".join(parts)


def _whole_table(rows: Sequence[Mapping[str, str]]) -> str:
    """All columns of a csv file as a table; "" if it has no rows."""
    return _table(list(rows[0]), [row.values() for row in rows]) if rows else ""


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _protocols(paper: str) -> str:
    """The settings of calibration and search that the paper states, and where."""
    settings = ("tokens", "gate", "seed", "search set", "generations")
    columns = ("table", "model", "criterion", *settings)
    rows = [
        [*(row[column] or "not stated" for column in columns), row["place"]]
        for row in _rows(ROOT / "analysis" / "published" / "protocols.csv")
        if row["paper"] == paper
    ]
    return _table([*columns, "stated in"], rows)


def _items(items: Sequence[Mapping[str, str]], measured: Sequence[Mapping[str, str]]) -> str:
    """A row for each table and figure of a paper."""
    rows = []
    for item in items:
        numbers = printed_numbers(item)
        computable = sum(not reason(number, item) for number in numbers)
        done = len(measured) if item["output"] == VALIDATED else 0
        rows.append(
            (
                item["item"],
                item["place"],
                f"`{item['output']}`" if item["output"] else "",
                ", ".join(f"`{name}`" for name in item["sweeps"].split()),
                len(numbers),
                computable,
                done,
                item["note"],
            )
        )
    head = ("published", "place", "output", "sweep", "printed", "computable", "measured", "remark")
    return _table(head, rows)


@cache
def numbers_of(paper: str, tables: str) -> tuple[PublishedNumber, ...]:
    """The printed numbers of tables of a paper's CSV file, whose names are separated by `; `."""
    return tuple(
        number
        for number in published.numbers()
        if number.paper == paper and number.table in tables.split("; ")
    )


def printed_numbers(item: Mapping[str, str]) -> tuple[PublishedNumber, ...]:
    """The printed numbers of a published table."""
    return numbers_of(item["paper"], item["printed"])


def reason(number: PublishedNumber, item: Mapping[str, str]) -> str:
    """Why the sweeps of a published table have no counterpart of a printed number; "" if they
    have."""
    quoted = quoted_methods()
    model, ratio, criterion, allocation, recovery, calibration = number.key
    for method in (criterion, recovery):
        if method in quoted:
            return f"{method}: {quoted[method]}"
    if number.note.startswith(NOT_COMPARABLE):
        return number.note.removeprefix(NOT_COMPARABLE)
    row = [printed for printed in printed_numbers(item) if printed.key == number.key]
    columns = published.averaged_benchmarks(number, row)
    if not columns:
        return OTHER_QUANTITY
    needed = {name for column in columns for name in names.COLUMNS.get(column, (column,))}
    has_row = False
    for name in item["sweeps"].split():
        # text -> the benchmarks of the cell that is calibrated on it
        reports_of_text = {
            key[-1]: reports
            for key, reports in sweep(name).results.items()
            if key[:-1] == (model, ratio, criterion, allocation, recovery)
        }
        texts = set(calibration.split(names.JOINT))
        # the paper does not say on which text, or joins the rows of several
        if calibration in ("na", "matched"):
            texts = set(reports_of_text)
        if texts and texts <= reports_of_text.keys():
            has_row = True
            if all(needed <= reports_of_text[text] for text in texts):
                return ""
    if has_row:
        return f"not among the sweep's benchmarks: {names.enumeration(sorted(needed))}"
    return NO_SWEEP


@cache
def quoted_methods() -> Mapping[str, str]:
    """Method that a paper quotes -> why there is no sweep of it."""
    rows = _rows(ROOT / "analysis" / "published" / "quoted.csv")
    return {row["method"]: row["reason"] for row in rows}


def _reasons(paper: str, items: Sequence[Mapping[str, str]]) -> str:
    """The reasons why printed numbers are not computable, with their counts."""
    counts: Counter[tuple[str, str]] = Counter()
    for item in items:
        for number in printed_numbers(item):
            if text := reason(number, item):
                counts[text, item["item"]] += 1
    if not counts:
        return ""
    by_reason: dict[str, list[str]] = {}
    for (text, item_name), count in counts.items():
        by_reason.setdefault(text, []).append(f"{item_name}: {count}")
    rows = [(text, ", ".join(places)) for text, places in by_reason.items()]
    return _table(("not computable because", "numbers"), rows)


def _sweeps(sweeps: Iterable[Sweep]) -> str:
    """A row for each sweep, with its settings."""
    head = ("sweep", "models", "ratios", "gates", "seeds", "texts and tokens", "benchmarks")
    return _table(head, map(_sweep_row, sweeps))


def _sweep_row(loaded: Sweep) -> Iterator[str]:
    cells = loaded.cells
    yield f"`{loaded.name}`"
    yield _distinct(cell.model.name for cell in cells)
    yield _distinct(f"{cell.ratio:g}" for cell in cells)
    yield _distinct(cell.gate for cell in cells)
    yield _distinct(cell.seed for cell in cells)
    yield _distinct(f"{cell.calibration.name} {cell.calibration.tokens:,}" for cell in cells)
    by_protocol: dict[str, list[str]] = {}
    for benchmark in loaded.benchmarks.values():
        protocol = f"{benchmark.harness}, {benchmark.shots} shots"
        by_protocol.setdefault(protocol, []).append(benchmark.name)
    texts = [f"{protocol}: {', '.join(rows)}" for protocol, rows in by_protocol.items()]
    yield "; ".join(texts) or "none"


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


if __name__ == "__main__":
    print(page(), end="")
