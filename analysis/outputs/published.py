"""Tables that compare measured with published numbers.

The output `NAME.published` compares the numbers of the table NAME.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.settings import removed_share_texts
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import score_setup
from moe_lab.analysis.published.numbers import (
    EVALUATION_SETTINGS,
    INCOMPARABLE,
    TABLES,
    Evaluation,
    Key,
    MeasuredNumber,
    PublishedNumber,
    averaged_benchmarks,
    counterparts,
    published_name,
    split,
    tally,
    verdict,
)
from moe_lab.analysis.registry import REGISTERED, Results, output
from moe_lab.analysis.render.table import SCORE, Table
from moe_lab.analysis.stats.comparison import NORMAL_QUANTILE, Comparison, Target


class Facts:
    """The cells and results of a study, with the calibration, search and evaluations of each
    number."""

    def __init__(self, study: Study) -> None:
        self.study = study
        # the gate is part of the text if cells have several
        texts = removed_share_texts(study.cells.drop(columns="seed"))
        rows = records(study.cells.assign(removed_text=texts))
        self.cells = dict(zip(study.cells.index.astype(int), rows, strict=True))
        """Cell -> row of `Study.cells`."""
        self._results = {
            (int(row["cell"]), str(row["benchmark"])): row for row in records(study.results)
        }
        """(cell, benchmark) -> row of `Study.results`."""
        self._protocols = study.origins.set_index("folder")["protocol"]

    def add_protocol(
        self, scores: pd.DataFrame, cell: int, benchmarks: Iterable[str], caveats: Sequence[str]
    ) -> MeasuredNumber:
        """The measured number of a cell, and how it was measured: the axes, calibration tokens and
        search of the cell, and its evaluations on the benchmarks that contribute to the number.

        scores: `Comparison.displayed_scores`."""
        axes = self.cells[cell]
        tokens_of_sets = {
            self._tokens(calibration, axes["model"])
            for calibration in str(axes["calibration"]).split(names.JOINT)
        }
        tokens = tokens_of_sets.pop() if len(tokens_of_sets) == 1 else None
        evaluations = [
            self._evaluation(cell, benchmark)
            for benchmark in benchmarks
            if (cell, benchmark) in self._results
        ]
        value, low, high = scores.loc[[cell], ["score", "low", "high"]].to_numpy(float)[0]
        search = self._search(cell)
        return MeasuredNumber(value, low, high, axes, tokens, search, evaluations, caveats)

    def _tokens(self, calibration: str, model: str) -> int | None:
        """Positions of a calibration pass: `rows` rows of `length`; None if they are unknown."""
        report = self.study.calibrations.get((model, calibration), {})
        if {"rows", "length"} <= set(report):
            return int(report["rows"]) * int(report["length"])
        return None

    def _search(self, cell: int) -> dict[str, Any]:
        """`MeasuredNumber.search` of a cell."""
        searches = self.study.searches
        if cell not in searches.index:
            return {}
        return {
            "search set": searches.loc[cell, "search_set"],
            "generations": _integer(searches.loc[cell, "generations"]),
        }

    def _evaluation(self, cell: int, benchmark: str) -> Evaluation:
        """The items and settings with which a cell was evaluated on a benchmark."""
        row = self._results[cell, benchmark]
        protocol = self._protocols[row["folder"]]
        settings = {
            **protocol,
            **(protocol.get("parameters") or {}),
            # only the judge's model is compared
            "judge": (protocol.get("judge") or {}).get("model"),
            "metric": row["metric"],
        }
        known_settings = {
            key: _setting_text(settings[key])
            for key in EVALUATION_SETTINGS
            if settings.get(key) is not None
        }
        return Evaluation(benchmark, int(row["n"]), _integer(row["expected"]), known_settings)


def _setting_text(value: Any) -> str:
    """The value as spelled in the CSV files of the papers' protocols: `true`, `2048`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _integer(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def published_key(cell: Mapping[str, Any]) -> Key:
    """The key of the published rows with which a cell is compared: (model, ratio, criterion,
    allocation, recovery, calibration set).

    A small model or calibration set that comes with this project is replaced by the published one
    for which it stands in. If the model's number of experts per token was changed after training,
    the new number is added to the allocation: `uniform top-k 2`.

    cell: row of `Study.cells`.
    """
    trained_model, top_k = names.split_top_k(str(cell["model"]))
    model = published_name("model", trained_model)
    sets = str(cell["calibration"]).split(names.JOINT)
    calibration = names.JOINT.join(published_name("calibration", name) for name in sets)
    ratio = round(float(cell["ratio"]), 6)
    allocation = str(cell["allocation"])
    if top_k is not None:
        allocation = f"top-k {top_k}" if allocation == "none" else f"{allocation} top-k {top_k}"
    return model, ratio, str(cell["criterion"]), allocation, str(cell["recovery"]), calibration


Pairs = Iterator[tuple[PublishedNumber, MeasuredNumber]]
"""Iterator over pairs of a published number and its measured counterpart."""


def _score_pairs(facts: Facts, comparison: Comparison, table: str) -> Pairs:
    """Yield pairs of a published and a measured score. The measured score is the mean over those
    columns and benchmarks of the published mean that were measured."""
    for cell in comparison.cells.index.astype(int):
        published_row = counterparts(table).get(published_key(facts.cells[cell]), ())
        for number in published_row:
            published_target = averaged_benchmarks(number, published_row)
            measured_target = _measured(comparison, published_target)
            if measured_target:
                scores = comparison.displayed_scores(measured_target)
                seeds = len(comparison.plans_by_seed[cell])
                caveats = [f"it is the mean of {seeds} seeds"] if seeds > 1 else []
                caveats += _caveats_on_missing(comparison, published_target)
                benchmarks = comparison.weights(measured_target)
                measured = facts.add_protocol(scores, cell, benchmarks, caveats)
                yield number, measured


def _measured(comparison: Comparison, target: Target) -> Target:
    """The displayed columns and benchmarks of `target` for which the comparison has scores."""
    known = {*comparison.benchmarks_of, *comparison.results}
    return tuple(name for name in target if name in known)


def _caveats_on_missing(comparison: Comparison, target: Target) -> list[str]:
    """At most one caveat, which names the parts of a published average that were not measured."""
    missing = [name for name in target if not _measured(comparison, (name,))]
    for column in filter(comparison.benchmarks_of.__contains__, target):
        published_benchmarks = names.COLUMNS.get(column, ())
        measured_benchmarks = comparison.benchmarks_of[column]
        missing += [name for name in published_benchmarks if name not in measured_benchmarks]
    listed = names.enumeration(map(names.benchmark, missing))
    return [f"measured without {listed}"] if missing else []


_facts = lru_cache(maxsize=2)(Facts)
"""Two, because a printed row can be that of a joint cell of `Results.by_domain`."""


def _register(name: str) -> None:
    """Register the comparison of the table `name` as an output."""

    def make(results: Results) -> Table:
        if REGISTERED[name].by_domain:
            results = results.by_domain
        return published_table(_facts(results.study), results.comparisons, name)

    make.__doc__ = f"Numbers of {name}, compared with those that the papers print."
    output(f"{name}.published", needs="cells whose numbers a paper prints")(make)


for _name in TABLES:
    _register(_name)


POINT = 0.01
"""Largest difference that is not due to sampling between two correct measurements of a score."""


@output(
    "unified.table5.validation",
    needs="cells of unified.table5 with benchmarks, such as those of +experiment=validate",
)
def validation_table(results: Results) -> Table:
    """Measured and printed scores of unified.table5, with a tolerance for their difference.

    The tolerance is two joint standard errors and POINT. The standard error of a printed score is
    that of a share of the benchmark's items.
    """
    rows = []
    facts = _facts(results.study)
    for comparison in results.comparisons:
        for number, measured in _score_pairs(facts, comparison, "unified.table5"):
            items = split(number, number.benchmark).get("items")
            if not items:
                continue
            printed_variance = number.value * (1 - number.value) / int(items)
            measured_error = (measured.high - measured.low) / (2 * NORMAL_QUANTILE)
            tolerance = 2 * math.hypot(measured_error, math.sqrt(printed_variance)) + POINT
            row = _row(number, measured)
            if not math.isnan(row["Deviation"]):
                row["Verdict"] = "within" if abs(row["Deviation"]) <= tolerance else "outside"
            rows.append({**row, "Tolerance": tolerance})
    return Table(
        title="Validation on published weights",
        caption="Tolerance: two joint standard errors and one point.",
        frame=pd.DataFrame(rows),
        formats={**_FORMATS, "Tolerance": SCORE},
    )


_FORMATS = {"Measured": SCORE, "Published": SCORE, "Deviation": "{:+.3f}"}


def published_table(facts: Facts, comparisons: Sequence[Comparison], name: str) -> Table:
    """Compare the study's numbers with the published tables that correspond to the table `name`.

    A measured and a published number are compared if they have the same model, ratio, criterion,
    allocation, recovery, calibration set and benchmark.
    """
    study = facts.study
    pairs = [pair for comparison in comparisons for pair in _score_pairs(facts, comparison, name)]
    rows = [
        {**_row(number, measured), "Measured low": measured.low, "Measured high": measured.high}
        for number, measured in pairs
    ]
    verdicts = [row["Verdict"] for row in rows]
    counts = [f"{tally(verdicts)}."] if rows else []
    return Table(
        title=f"Measured and published: {name}",
        caption="Agrees: the printed number, within its rounding, is in the 95 % interval of the "
        f"measured one. Intervals are over items. "
        f"Deviation: measured minus printed, where the two are comparable. {score_setup(study)}",
        frame=pd.DataFrame(rows),
        formats=_FORMATS,
        footnotes=counts,
    )


def _row(number: PublishedNumber, measured: MeasuredNumber) -> dict[str, Any]:
    """The row of a `published_table` that compares two numbers, column -> value."""
    cell = measured.cell
    verdict_text = verdict(number, measured)
    is_incomparable = verdict_text.startswith(INCOMPARABLE)
    return {
        "Model": cell["model"],
        "Pruned": cell["removed_text"],
        "Calibration": names.calibration(str(cell["calibration"])),
        "Criterion": names.method(str(cell["method"])),
        "Benchmark": names.benchmark(number.benchmark),
        "Source": f"{number.paper}, {number.table}",
        "Measured": measured.value,
        "Published": number.value,
        "Deviation": math.nan if is_incomparable else measured.value - number.value,
        "Verdict": verdict_text,
    }
