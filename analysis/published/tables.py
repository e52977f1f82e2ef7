"""Tables that compare measured with published numbers, and their chapter of the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd

from analysis import names
from analysis.load.reader import records
from analysis.load.study import Study
from analysis.outputs.captions import setting
from analysis.published.numbers import (
    AFTER,
    AGREES,
    ASKED,
    BECAUSE,
    BEFORE,
    DIFFERS,
    MISSING,
    RANK,
    TABLES,
    Evaluation,
    Key,
    Measured,
    Printed,
    Split,
    counterparts,
    stands_for,
    target,
    verdict,
)
from analysis.render.page import Section
from analysis.render.table import SCORE, Table
from analysis.stats import cell_scores
from analysis.stats.cell_scores import Numbers
from analysis.stats.comparison import Comparison

Number = tuple[float, float, float]
"""A value and the ends of its interval."""
MEMORY_TOLERANCE = 0.01
"""Largest difference in GiB between a size computed from a configuration and a published one that
agrees."""
MATCHED = "matched"
"""Calibration set of a published row whose columns come from models calibrated on different
sets."""
_TASK_COLUMNS = (*names.CODE_COLUMNS, *names.MATH_COLUMNS)
_GIB = 2**30


class Facts:
    """How a study measured its numbers, read from its store; None for what is unknown."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.cells = dict(zip(study.cells.index.astype(int), records(study.cells), strict=True))
        self._results = {
            (int(row["cell"]), str(row["benchmark"])): row for row in records(study.results)
        }
        self._generations = dict(
            zip(study.searches["cell"], study.searches["generations"], strict=True)
        )
        self._document = cache(self._read_document)

    def _read_document(self, name: str, file: str) -> Mapping[str, Any]:
        reader = self.study.reader
        return reader.json(reader.folder(name), file) or {}

    def measured(
        self, value: Number, sources: Mapping[str, int], lacking: Sequence[str]
    ) -> Measured:
        """A measured number with its protocol; sources: benchmark -> the cell evaluated on it."""
        cell = next(iter(sources.values()))
        axes = self.cells[cell]
        report = self.study.calibrations.get(f"{axes['calibration']}@{axes['model']}", {})
        slots = (
            int(report["rows"]) * int(report["length"])
            if {"rows", "length"} <= set(report)
            else None
        )
        evaluations = [
            self._evaluation(own, name)
            for name, own in sources.items()
            if (own, name) in self._results
        ]
        return Measured(*value, axes, slots, self._search(cell), evaluations, lacking)

    def _search(self, cell: int) -> tuple[str | None, int | None] | None:
        """Search set and generations of the cell's allocation; None when it was not searched."""
        if cell not in self._generations:
            return None
        plan = self._document(str(self.cells[cell]["plan_folder"]), "plan.json")
        return (plan.get("provenance") or {}).get("search"), _whole(self._generations[cell])

    def _evaluation(self, cell: int, benchmark: str) -> Evaluation:
        row = self._results[cell, benchmark]
        protocol = self._document(str(row["folder"]), "result.json").get("protocol") or {}
        judge = (protocol.get("judge") or {}).get("model")
        settings = {
            **protocol,
            **(protocol.get("parameters") or {}),
            "judge": judge,
            "metric": row["metric"],
        }
        protocol_settings = {
            key: _word(settings[key]) for key in ASKED if settings.get(key) is not None
        }
        return Evaluation(
            benchmark, int(row["n"]), Split(_whole(row["expected"]), protocol_settings)
        )


def _word(value: Any) -> str:
    """Spell a setting as in the published files: true, 2048, openai/gpt-oss-120b."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def key_of(cell: Mapping[str, Any]) -> Key:
    """The key of the published row that corresponds to a cell; the papers may not have such a
    row."""
    trained, top_k = names.routed(str(cell["model"]))
    model = stands_for("model", trained)
    calibration = stands_for("calibration", str(cell["calibration"]))
    ratio = round(float(cell["ratio"]), 6)
    allocation = str(cell["allocation"])
    if top_k is not None:
        allocation = f"{'' if allocation == 'none' else allocation} top-k {top_k}".strip()
    return model, ratio, str(cell["criterion"]), allocation, str(cell["recovery"]), calibration


Found = Iterator[tuple[Printed, Measured]]


def _scores(facts: Facts, comparison: Comparison, of: str) -> Found:
    """Pairs of published and measured scores: benchmarks, displayed columns and their averages."""
    for cell in comparison.cells.index.astype(int):
        row = counterparts(of).get(key_of(facts.cells[cell]), ())
        for number in row:
            published_target = target(number, row)
            measured_target = _run(comparison, published_target)
            if measured_target:
                value, low, high = (float(part[cell]) for part in comparison.shown(measured_target))
                sources = dict.fromkeys(comparison.weights(measured_target), cell)
                several = len(comparison.seeds[cell])
                lacking = [f"it is the mean of {several} seeds"] if several > 1 else []
                yield (
                    number,
                    facts.measured(
                        (value, low, high),
                        sources,
                        [*lacking, *_lacking(comparison, published_target)],
                    ),
                )


def _run(comparison: Comparison, columns: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        name
        for name in columns
        if name in comparison.benchmarks_of or name in comparison.benchmarks
    )


def _lacking(comparison: Comparison, published_target: Sequence[str]) -> list[str]:
    """A one-item list with the reason "measured without" some benchmarks of the published average,
    or []."""
    measured_target = _run(comparison, published_target)
    parts = {
        column: names.COLUMNS.get(column, ())
        for column in measured_target
        if column in comparison.benchmarks_of
    }
    benchmarks = [
        name
        for column, benchmarks_of_column in parts.items()
        for name in benchmarks_of_column
        if name not in comparison.benchmarks_of[column]
    ]
    missing = [*(name for name in published_target if name not in measured_target), *benchmarks]
    return [f"measured without {names.listing(map(names.benchmark, missing))}"] if missing else []


def _ranks(facts: Facts, comparison: Comparison, of: str) -> Found:
    """Pairs of published and measured average ranks, which are computed for all methods of a block
    together."""
    printed = {
        key: number
        for key, row in counterparts(of).items()
        for number in row
        if number.benchmark == RANK
    }
    for matched in {key[-1] == MATCHED for key in printed}:
        numbers = {
            key: number for key, number in printed.items() if (key[-1] == MATCHED) == matched
        }
        ranked = list(dict.fromkeys(criterion for _, _, criterion, *_ in numbers))
        blocks = _task_ranks(comparison, ranked) if matched else _panel_ranks(comparison, ranked)
        every = _TASK_COLUMNS if matched else tuple(names.COLUMNS)
        for block in blocks:
            for cells, value in block:
                key = key_of(facts.cells[next(iter(cells.values()))])
                number = numbers.get((*key[:5], MATCHED) if matched else key)
                if number is None:
                    continue
                columns = list(cells)
                sources = {
                    name: cell
                    for column, cell in cells.items()
                    for name in comparison.weights((column,))
                }
                lacking = [
                    *_otherwise_ranked(number, numbers, len(block), columns, every),
                    *_lacking(comparison, columns),
                ]
                yield number, facts.measured(value, sources, lacking)


def _otherwise_ranked(
    number: Printed,
    numbers: Iterable[Key],
    methods: int,
    columns: Sequence[str],
    every: Sequence[str],
) -> Iterator[str]:
    """Reasons when a rank is among other methods, or over other columns, than the published one."""
    model, ratio, *_, calibration = number.key
    printed = sum((key[0], key[1], key[-1]) == (model, ratio, calibration) for key in numbers)
    if methods != printed:
        yield f"ranked among {methods}, published among {printed}"
    if set(columns) != set(every):
        yield f"ranked over {len(columns)} columns, published over {len(every)}"


Ranked = list[tuple[dict[str, int], Number]]
"""Rows of a block: column -> the cell from which its score comes, and the average rank."""


def _panel_ranks(comparison: Comparison, ranked: Sequence[str]) -> Iterator[Ranked]:
    for panel in comparison.panels:
        cells = [cell for name, cell in panel.cells.items() if name in ranked]
        if cells:
            block = cell_scores.rank_block(comparison, panel, ranked)
            columns = panel.columns(comparison)
            yield [(dict.fromkeys(columns, cell), _rank(block, cell)) for cell in cells]


def _task_ranks(comparison: Comparison, ranked: Sequence[str]) -> Iterator[Ranked]:
    for domains in cell_scores.by_domain(comparison).values():
        if {"code", "math"} <= set(domains):
            block = cell_scores.task_block(comparison, domains, ranked)
            code = domains["code"].cells
            math = domains["math"].cells
            yield [
                (
                    {
                        **dict.fromkeys(names.CODE_COLUMNS, code[name]),
                        **dict.fromkeys(names.MATH_COLUMNS, math[name]),
                    },
                    _rank(block, name),
                )
                for name in block.frame.index
                if name in ranked
            ]


def _rank(block: Numbers, row: int | str) -> Number:
    parts = (block.frame, block.low, block.high)
    value, low, high = (
        float(part[RANK].get(row, math.nan)) if RANK in part else math.nan for part in parts
    )
    return value, low, high


def _memory(study: Study, of: str) -> Found:
    """Pairs of published and computed loading memory, the latter exact from configurations and
    plans."""
    printed = [
        number
        for row in counterparts(of).values()
        for number in row
        if number.benchmark in (BEFORE, AFTER)
    ]
    for row in records(study.memory) if printed else ():
        for number in printed:
            model, ratio, _, allocation, *_ = number.key
            if (stands_for("model", row["model"]), row["ratio"], row["allocation"]) == (
                model,
                ratio,
                allocation,
            ):
                value = row["bytes" if number.benchmark == BEFORE else "bytes_after"] / _GIB
                cell = {**row, "criterion": "none", "calibration": "none", "method": "any"}
                yield (
                    number,
                    Measured(value, value - MEMORY_TOLERANCE, value + MEMORY_TOLERANCE, cell, None),
                )


SPELLED = {
    BEFORE: "Memory before, GiB",
    AFTER: "Memory after, GiB",
    "Code": "Code Avg",
    "Math": "Math Avg",
}
_VARYING = {"recovery": "Recovery", "gate": "Gate"}
"""Axes that are shown only when the pruned cells of a study differ in them."""


def published_tables(
    study: Study, comparisons: Sequence[Comparison], requested: Sequence[str]
) -> dict[str, Table]:
    """Name -> `published_table`, for those names in `wanted` that have published counterparts.

    A table has no rows when no cell of the study has a counterpart."""
    facts = Facts(study)
    return {
        name: published_table(facts, comparisons, of=name) for name in requested if name in TABLES
    }


def published_table(facts: Facts, comparisons: Sequence[Comparison], *, of: str) -> Table:
    """Compare the study's numbers with the published tables that correspond to the table `of`.

    Rows match in model, ratio, criterion, allocation, recovery, calibration set and benchmark.
    Shipped models and calibration sets match the rows of those that they stand in for, and the
    verdict says so.
    """
    study = facts.study
    pairs = [pair for comparison in comparisons for pair in _scores(facts, comparison, of)]
    pairs += [pair for comparison in comparisons for pair in _ranks(facts, comparison, of)]
    pairs += _memory(study, of)
    rows = [_row(number, measured) for number, measured in pairs]
    verdicts = [row["Verdict"] for row in rows]
    return Table(
        name=f"{of}.published",
        title=f"Measured and published: {of}",
        caption="Agrees: the printed number, within its rounding, is in the 95 % interval of the "
        f"measured one. Intervals are over items; sizes in GiB may differ by {MEMORY_TOLERANCE}. "
        f"Deviation: measured minus printed, where the two are comparable. {setting(study)}",
        frame=pd.DataFrame(rows, columns=_columns(study)),
        formats={"Measured": SCORE, "Published": SCORE, "Deviation": "{:+.3f}"},
        blocks=("Model", "Pruned", "Calibration"),
        low=pd.DataFrame({"Measured": [measured.low for _, measured in pairs]}, dtype=float),
        high=pd.DataFrame({"Measured": [measured.high for _, measured in pairs]}, dtype=float),
        footnotes=(*([f"{_counted(verdicts)}."] if rows else []), *_without_counterpart(study, of)),
    )


def _columns(study: Study) -> list[str]:
    pruned = study.cells[study.cells["criterion"] != "none"]
    varying = [label for axis, label in _VARYING.items() if pruned[axis].nunique() > 1]
    text = ("Model", "Pruned", "Calibration", "Criterion", *varying, "Benchmark", "Source")
    return [*text, "Measured", "Published", "Deviation", "Verdict"]


def _row(number: Printed, measured: Measured) -> dict[str, Any]:
    cell = measured.cell
    result = verdict(number, measured)
    return {
        "Model": cell["model"],
        "Pruned": cell["removed_words"],
        "Calibration": names.calibration(str(cell["calibration"])),
        "Criterion": names.method(str(cell["method"])),
        **{label: str(cell.get(axis, "any")) for axis, label in _VARYING.items()},
        "Benchmark": SPELLED.get(number.benchmark, names.benchmark(number.benchmark)),
        "Source": f"{number.paper}, {number.table}",
        "Measured": measured.value,
        "Published": number.value,
        "Deviation": math.nan if result.startswith(BECAUSE) else measured.value - number.value,
        "Verdict": result,
    }


def _counted(verdicts: Sequence[str]) -> str:
    """`12 agree, 3 differ and 40 cannot be compared`."""
    kinds = {
        AGREES: "agree",
        DIFFERS: "differ",
        BECAUSE: "cannot be compared",
        MISSING: "are missing here",
    }
    counts = {
        phrase: sum(verdict.startswith(kind) for verdict in verdicts)
        for kind, phrase in kinds.items()
    }
    return names.listing(f"{count:,} {phrase}" for phrase, count in counts.items() if count)


def _without_counterpart(study: Study, of: str) -> Iterator[str]:
    """A note on the pruned cells without a published row; none for tables that are not about
    methods."""
    printed = counterparts(of)
    pruned = records(study.cells[study.cells["criterion"] != "none"])
    unmatched = [cell for cell in pruned if key_of(cell) not in printed]
    if unmatched and any(criterion in names.CRITERIA for _, _, criterion, *_ in printed):
        methods = names.methods_in_order(str(cell["method"]) for cell in unmatched)
        yield (
            f"{len(unmatched)} of {len(pruned)} pruned cells have no printed row here "
            f"({'; '.join(map(names.method, methods))})."
        )


NAMED = 6
"""Largest number of reasons that the report lists, the most frequent first."""


def published_chapter(study: Study, comparisons: Sequence[Comparison]) -> Section:
    """The report's chapter that compares the study with the papers; empty without counterparts."""
    all_tables = published_tables(study, comparisons, list(TABLES)).values()
    tables = [table for table in all_tables if len(table.frame)]
    return Section(
        "published",
        "Published",
        "Comparison with published numbers",
        published_summary(tables),
        tables,
        filters={table.name: "Model|Pruned|Calibration|Criterion|Benchmark" for table in tables},
        folded=True,
    )


def published_summary(tables: Sequence[Table]) -> list[str]:
    """Sentences that summarize tables from `published_tables`; none without rows."""
    verdicts = [str(verdict) for table in tables for verdict in table.frame["Verdict"]]
    if not verdicts:
        return []
    sentences = [
        f"{len(verdicts):,} printed numbers have a counterpart in this study: {_counted(verdicts)}."
    ]
    reasons = Counter(
        reason
        for verdict in verdicts
        if verdict.startswith(BECAUSE)
        for reason in verdict.removeprefix(BECAUSE).split("; ")
    )
    if reasons:
        most = "; ".join(
            f"{reason} ({count:,} times)" for reason, count in reasons.most_common(NAMED)
        )
        rest = len(reasons) - NAMED
        more = f"; and {rest} more, which the tables spell out" if rest > 0 else ""
        sentences.append(f"Reasons why numbers cannot be compared: {most}{more}.")
    return sentences
