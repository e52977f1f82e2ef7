"""The papers' numbers beside measured ones: tables, and their chapter of the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
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
    counterparts,
    stands_for,
    target,
    verdict,
)
from analysis.render.page import Section
from analysis.render.table import SCORE, Table
from analysis.stats import rank_blocks
from analysis.stats.comparison import Comparison


class Facts:
    """Looks things up in a study, each file once. None stands for what the store does not say."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._documents: dict[tuple[str, str], Mapping[str, Any]] = {}

    def axes(self, cell: int) -> Mapping[str, Any]:
        """The axes of a cell and the folders of its steps."""
        return self._cells[cell]

    def tokens(self, cell: Mapping[str, Any]) -> int | None:
        """Slots of the calibration pass of a cell, gaps between documents counted."""
        report = self.study.calibrations.get(f"{cell['calibration']}@{cell['model']}", {})
        return int(report["rows"]) * int(report["length"]) if {"rows", "length"} <= set(report) else None

    def search(self, cell: int) -> tuple[str | None, int | None] | None:
        """On what and for how many generations the cell's allocation was searched; None for one that was not."""
        if cell not in self._generations:
            return None
        plan = self._document(str(self.study.cells.loc[cell, "plan_folder"]), "plan.json")
        return (plan.get("provenance") or {}).get("search"), self._generations[cell]

    def evaluation(self, cell: int, benchmark: str) -> Evaluation | None:
        """How a benchmark was measured for a cell; None when it was not."""
        row = self._results.get((cell, benchmark))
        if row is None:
            return None
        protocol = self._document(str(row["folder"]), "result.json").get("protocol") or {}
        settings = {
            **protocol,
            **(protocol.get("parameters") or {}),
            "judge": (protocol.get("judge") or {}).get("model"),
        }
        return Evaluation(
            benchmark=benchmark,
            n=int(row["n"]),
            expected=_whole(row["expected"]),
            metric=str(row["metric"]),
            asked={word: _word(settings[word]) for word in ASKED if settings.get(word) is not None},
        )

    @cached_property
    def _cells(self) -> dict[int, dict[str, Any]]:
        return dict(zip(self.study.cells.index.astype(int), records(self.study.cells), strict=True))

    @cached_property
    def _results(self) -> dict[tuple[int, str], dict[str, Any]]:
        return {(int(row["cell"]), str(row["benchmark"])): row for row in records(self.study.results)}

    @cached_property
    def _generations(self) -> dict[int, int | None]:
        return {int(row["cell"]): _whole(row["generations"]) for row in records(self.study.searches)}

    def _document(self, name: str, file: str) -> Mapping[str, Any]:
        if (name, file) not in self._documents:
            folder = self.study.reader.folder(name)
            self._documents[name, file] = (self.study.reader.json(folder, file) if folder else None) or {}
        return self._documents[name, file]


def _word(value: Any) -> str:
    """As the published files write it: true, 2048, openai/gpt-oss-120b."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


Found = tuple[Printed, Measured]
Number = tuple[float, float, float]
"""A value and the ends of its interval."""
MEMORY_TOLERANCE = 0.01
"""GiB by which a size computed from a configuration may differ from a printed one."""
MATCHED = "matched"
"""Calibration set of a printed row whose columns come from models calibrated on different sets."""
_TASK_COLUMNS = (*names.CODE_COLUMNS, *names.MATH_COLUMNS)
_GIB = 2**30


def found(study: Study, comparisons: Sequence[Comparison], of: str) -> list[Found]:
    """Numbers of the study with their counterparts in the papers' tables that the table `of` corresponds to."""
    facts = Facts(study)
    return [*_scores(facts, comparisons, of), *_ranks(facts, comparisons, of), *_memory(study, of)]


def key_of(cell: Mapping[str, Any]) -> Key:
    """The row of the papers' tables that a cell corresponds to, if they have it."""
    trained, top_k = names.routed(str(cell["model"]))
    model, calibration = stands_for("model", trained), stands_for("calibration", str(cell["calibration"]))
    ratio, allocation = round(float(cell["ratio"]), 6), str(cell["allocation"])
    if top_k is not None:
        allocation = f"{'' if allocation == 'none' else allocation} top-k {top_k}".strip()
    return model, ratio, str(cell["criterion"]), allocation, str(cell["recovery"]), calibration


def _scores(facts: Facts, comparisons: Iterable[Comparison], of: str) -> Iterator[Found]:
    """Benchmarks, displayed columns and their averages."""
    printed = counterparts(of)
    for comparison in comparisons:
        for cell, axes in zip(comparison.cells.index.astype(int), records(comparison.cells), strict=True):
            row = printed.get(key_of(axes), ())
            for number in row:
                wanted = target(number, row)
                here = _run(comparison, wanted)
                if here:
                    ends = [float(end[cell]) for end in comparison.interval(here)]
                    value = (float(comparison.score(here)[cell]), ends[0], ends[1])
                    sources = dict.fromkeys(comparison.weights(here), cell)
                    yield number, _measured(facts, value, sources, _lacking(comparison, wanted))


def _run(comparison: Comparison, wanted: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in wanted if name in comparison.parts or name in comparison.benchmarks)


def _lacking(comparison: Comparison, wanted: Sequence[str]) -> list[str]:
    """What a printed average has and the measured one has not."""
    here = _run(comparison, wanted)
    parts = {column: names.COLUMNS.get(column, ()) for column in here if column in comparison.parts}
    benchmarks = [name for column, every in parts.items() for name in every if name not in comparison.parts[column]]
    missing = [*(name for name in wanted if name not in here), *benchmarks]
    return [f"measured without {names.listing(map(names.benchmark, missing))}"] if missing else []


def _ranks(facts: Facts, comparisons: Iterable[Comparison], of: str) -> Iterator[Found]:
    """Average ranks, which the tables of scores compute for all methods of a block at once."""
    printed = {key: number for key, row in counterparts(of).items() for number in row if number.benchmark == RANK}
    if not printed:
        return
    for comparison in comparisons:
        blocks = _task_ranks(comparison) if of == "unified.table2" else _panel_ranks(comparison)
        for block, columns in blocks:
            for cells, value in block:
                key = key_of(facts.axes(cells[columns[0]]))
                number = printed.get(key) or printed.get((*key[:5], MATCHED))
                if number is None:
                    continue
                sources = {name: cells[column] for column in columns for name in comparison.weights((column,))}
                every = sum(1 for other in printed if (other[:2], other[5]) == (number.key[:2], number.key[5]))
                among = [f"ranked among {len(block)}, published among {every}"] if len(block) != every else []
                lacking = [*among, *_other_columns(columns, of), *_lacking(comparison, columns)]
                yield number, _measured(facts, value, sources, lacking)


Ranked = tuple[list[tuple[dict[str, int], Number]], tuple[str, ...]]
"""Rows of a block (column -> the cell its score comes from, and the average rank), and the columns."""


def _panel_ranks(comparison: Comparison) -> Iterator[Ranked]:
    for panel in comparison.panels:
        columns = panel.columns(comparison)
        ranked = [cell for name, cell in panel.cells.items() if name in names.RANKED]
        if ranked:
            parts = rank_blocks.rank_block(comparison, panel, names.RANKED)
            yield [(dict.fromkeys(columns, cell), _rank(parts, cell)) for cell in ranked], columns


def _task_ranks(comparison: Comparison) -> Iterator[Ranked]:
    for domains in rank_blocks.by_domain(comparison).values():
        if {"code", "math"} <= set(domains):
            sides = {column: domains["code"].cells for column in names.CODE_COLUMNS}
            sides |= {column: domains["math"].cells for column in names.MATH_COLUMNS}
            parts = rank_blocks.task_block(comparison, domains, names.TASK_SPECIFIC)
            rows = {names.method(name): name for name in names.TASK_SPECIFIC}
            methods = [(place, rows[word]) for place, word in parts[0]["Criterion"].items() if word in rows]
            yield (
                [({c: side[name] for c, side in sides.items()}, _rank(parts, place)) for place, name in methods],
                _TASK_COLUMNS,
            )


def _rank(parts: Sequence[Any], row: Any) -> Number:
    value, low, high = (float(part[RANK].get(row)) if RANK in part else float("nan") for part in parts)
    return value, low, high


def _other_columns(columns: Sequence[str], of: str) -> list[str]:
    """That ranks were taken over other columns than the printed ones."""
    every = _TASK_COLUMNS if of == "unified.table2" else tuple(names.COLUMNS)
    if set(columns) == set(every):
        return []
    return [f"ranked over {len(columns)} columns, published over {len(every)}"]


def _measured(facts: Facts, value: Number, sources: Mapping[str, int], lacking: Sequence[str]) -> Measured:
    """A number that rests on benchmarks, each evaluated for a cell."""
    cell = next(iter(sources.values()))
    axes = facts.axes(cell)
    evaluations = [facts.evaluation(each, name) for name, each in sources.items()]
    return Measured(
        *value,
        cell=axes,
        tokens=facts.tokens(axes),
        search=facts.search(cell),
        evaluations=[evaluation for evaluation in evaluations if evaluation],
        lacking=lacking,
    )


def _memory(study: Study, of: str) -> Iterator[Found]:
    """Loading memory, exact from configurations and plans."""
    printed = [number for row in counterparts(of).values() for number in row if number.benchmark in (BEFORE, AFTER)]
    if not printed:
        return
    for row in records(study.memory):
        for number in printed:
            model, ratio, _, allocation, *_ = number.key
            if (stands_for("model", row["model"]), row["ratio"], row["allocation"]) == (model, ratio, allocation):
                value = row["bytes" if number.benchmark == BEFORE else "bytes_after"] / _GIB
                cell = {**row, "criterion": "none", "calibration": "none", "method": "any"}
                yield number, Measured(value, value - MEMORY_TOLERANCE, value + MEMORY_TOLERANCE, cell, None)


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
    pairs = found(study, comparisons, of)
    rows = [_row(number, measured) for number, measured in pairs]
    return Table(
        name=f"{of}.published",
        title=f"Measured beside published: {of}",
        caption="Agrees: the printed number, as far as its rounding leaves it open, lies in the 95 % interval of the "
        "measured one. Intervals cover which items were asked, not seeds; sizes in GiB may differ by "
        f"{MEMORY_TOLERANCE}. Deviation: measured minus printed, where the two are comparable. "
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
    lacking = [cell for cell in pruned if key_of(cell) not in printed]
    if lacking and any(criterion in names.CRITERIA for _, _, criterion, *_ in printed):
        methods = names.methods_in_order(str(cell["method"]) for cell in lacking)
        yield (
            f"{len(lacking)} of {len(pruned)} pruned cells have no printed row here "
            f"({'; '.join(map(names.method, methods))})."
        )


NAMED = 6
"""Reasons that are spelled out, the most frequent first."""


def published_chapter(study: Study, comparisons: Sequence[Comparison]) -> Section:
    """The papers' tables beside the study's, as far as it has counterparts; empty where it has none."""
    all_tables = published_tables(study, comparisons, list(TABLES)).values()
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
