"""Effects of the choice and size of the calibration set (HEAPr, Fig. 3; AIMER, Fig. 1;
MoE-Slimming, Table 18)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.axis import Axis

from analysis import names
from analysis.load import settings
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import HEAPR, SLIMMING
from analysis.outputs.score_rows import Block, criterion_looks, score_table, sorted_in_order
from analysis.registry import Results, output, per_model
from analysis.render import marks, style
from analysis.render.style import Figure
from analysis.stats.cell_scores import MEAN, differences, mean_target, mean_text
from analysis.stats.comparison import Comparison

EQUAL_COLUMNS = ["ratio", "method", "gate"]
"""Cells with equal values in these columns are compared across calibration sets."""


def pass_reports(study: Study, model: str) -> dict[str, Mapping[str, Any]]:
    """Calibration set -> report of the model's pass over this set."""
    report_of_set = {}
    for key, report in study.calibrations.items():
        calibration, _, pass_model = key.partition("@")  # a key is calibration@model
        if pass_model == model:
            report_of_set[calibration] = report
    return report_of_set


def token_counts(study: Study, model: str) -> dict[str, int]:
    """Calibration set -> number of valid tokens that the model's pass read of this set."""
    return {  # a report has a number for each source of the set
        name: sum((report.get("valid_tokens") or {}).values())
        for name, report in pass_reports(study, model).items()
    }


def text_identifiers(study: Study, model: str) -> dict[str, str]:
    """Calibration set -> identifier of its text. Sets that read different numbers of tokens of one
    text have equal identifiers."""
    return {
        name: str(report.get("sha256") or report.get("source") or name)
        for name, report in pass_reports(study, model).items()
    }


def calibrated_cells(comparison: Comparison) -> pd.DataFrame:
    """Pruned cells with a calibration set, sorted by ratio and method."""
    cells = comparison.cells
    cells = cells[(cells["criterion"] != "none") & (cells["calibration"] != "none")]
    order = names.methods_in_order(cells["method"])
    return sorted_in_order(cells, "method", order, "ratio")


@score_table(
    "coverage.table18",
    "Calibration sets: texts, and numbers of tokens",
    (*names.ABLATION, MEAN),
    "A block per ratio and method; rows name the calibration set and the tokens read of it. "
    "Difference: Mean minus that of the set of most tokens, the last row, paired.",
    chapter="task",
    filters="*Model|Pruned",
    needs=f"one criterion on several calibration sets, and {SLIMMING}",
)
def calibration_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Each method with several calibration sets, a block per ratio and method."""
    counts = token_counts(results.study, comparison.model)
    for key, rows in groups(calibrated_cells(comparison), EQUAL_COLUMNS):
        if rows["calibration"].nunique() > 1:
            labels = {}
            ordered_cells = rows.assign(tokens=rows["calibration"].map(counts)).sort_values(
                "tokens", kind="stable"
            )
            for cell, calibration in ordered_cells["calibration"].items():
                suffix = f", {counts[calibration]:,} tokens" if calibration in counts else ""
                # through str, because pandas' types allow any label in an index
                labels[int(str(cell))] = f"{names.calibration(calibration)}{suffix}"
            pruned = f"{comparison.removed_text(key['ratio'])}, {names.method(str(key['method']))}"
            yield Block(comparison, pruned, labels, base=list(labels)[-1])


def lines_by_tokens(study: Study, comparison: Comparison) -> dict[tuple[str, float], pd.DataFrame]:
    """(label, ratio) -> cells with equal method, gate and text, sorted by tokens. These cells have
    at least two numbers of tokens.

    Added columns: "read" (number of calibration tokens that were read) and "source" (identifier of
    the text)."""
    counts = token_counts(study, comparison.model)
    source_of_set = text_identifiers(study, comparison.model)
    cells = calibrated_cells(comparison)
    cells = cells.assign(
        read=cells["calibration"].map(counts), source=cells["calibration"].map(source_of_set)
    )
    # "" if the model has one gate; without seeds, as these cells have no column "seed"
    gate_texts = settings.gate_and_seed(cells)
    lines = {}
    for key, rows in groups(cells.dropna(subset=["read"]), [*EQUAL_COLUMNS, "source"]):
        if rows["read"].nunique() > 1:
            line = rows.sort_values("read", kind="stable")
            # the set with most tokens names the text
            text = names.calibration(str(line["calibration"].iloc[-1]))
            label = f"{names.method(str(key['method']))}, {text}"
            label = settings.comma_joined(label, gate_texts[line.index[0]])
            lines[label, float(key["ratio"])] = line
    return lines


def _token_axis(counts: Iterable[int]) -> marks.Axis:
    """The axis of numbers of calibration tokens, with a tick at each of `counts`."""

    def set_ticks(axis: Axis) -> None:
        axis.axes.set_xscale("log", base=2)
        axis.minorticks_off()
        positions = sorted(set(counts))
        axis.set_ticks(positions, labels=[style.format_tokens(count) for count in positions])

    return marks.Axis("calibration tokens read", set_ticks)


@output(
    "heapr.fig3",
    chapter="task",
    needs=f"calibration sets that read different numbers of tokens of one text, and {HEAPR}",
)
@per_model()
def size_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Scores against the number of calibration tokens.

    A panel per ratio, a line per text and method."""
    lines = [
        line.assign(label=label, panel=f"{comparison.removed_text(ratio)} pruned")
        for (label, ratio), line in lines_by_tokens(results.study, comparison).items()
    ]
    cells = pd.concat(lines) if lines else comparison.cells[:0]
    target = mean_target(comparison, list(cells.index), names.HEAPR)
    if not target:
        return None
    score, low, high = comparison.displayed_scores(target)
    rows = cells.sort_values("ratio", kind="stable").assign(
        x=cells["read"], y=score, low=low, high=high
    )
    looks = criterion_looks(cells)
    y = marks.Axis("mean of HEAPr's benchmarks")
    drawing = marks.over(rows, looks, _token_axis(cells["read"]), y, sharey=True)
    style.legend(drawing, looks.values(), most=3)
    caption = (
        f"{mean_text(target, names.HEAPR)} after calibration on more and more of the same text, "
        "with 95 % intervals. Lines are texts and methods; points of one line answered the same "
        "items."
    )
    return Figure(
        name, f"How much calibration text is enough: {comparison.model}", caption, drawing
    )


POINTS = 100
"""Points of a score of 1."""


def changes(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Change of each benchmark's score with more calibration text: the score of each cell of
    `lines_by_tokens` minus the score of the cell with the fewest tokens in its line.

    Columns: "label" (method and text), "ratio", "benchmark", "read" (number of tokens), and
    "difference", "low" and "high" (95 %) in points."""
    rows = []
    for (label, ratio), line in lines_by_tokens(study, comparison).items():
        # through str, because pandas' types allow any label in an index
        base_cell, *other_cells = (int(str(cell)) for cell in line.index)
        benchmarks = [
            str(name)
            for name in comparison.benchmark_scores
            if name not in comparison.lower_is_better
        ]
        benchmarks = names.in_order(benchmarks, names.BENCHMARKS)
        # each benchmark on which at least one cell of the line was evaluated
        for benchmark in mean_target(comparison, [base_cell, *other_cells], benchmarks):
            base_of_cell = dict.fromkeys(other_cells, base_cell)
            points = POINTS * differences(comparison, (benchmark,), base_of_cell)
            key = {"label": label, "ratio": ratio, "benchmark": benchmark}
            no_change = {"difference": 0.0, "low": 0.0, "high": 0.0}
            rows.append({**key, "read": line["read"][base_cell], **no_change})
            for cell, change in zip(other_cells, records(points[list(no_change)]), strict=True):
                rows.append({**key, "read": line["read"][cell], **change})
    return pd.DataFrame(
        rows, columns=["label", "ratio", "benchmark", "read", "difference", "low", "high"]
    )


@output(
    "aimer.fig1",
    chapter="task",
    needs="calibration sets that read different numbers of tokens of one text",
)
@per_model()
def change_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Effect of more calibration text in each benchmark, in points (AIMER, Fig. 1).

    A panel per text, method and ratio, a line per benchmark."""
    points = changes(results.study, comparison)
    if points.empty:
        return None
    points["panel"] = [
        f"{label}, {comparison.removed_text(ratio)} pruned"
        for label, ratio in zip(points["label"], points["ratio"], strict=True)
    ]
    points["is_open"] = (points["low"] <= 0) & (points["high"] >= 0)
    # the benchmarks of a displayed column have one colour
    colours = {
        names.benchmark(benchmark): style.SHADES[number]
        for number, column in enumerate(names.COLUMNS.values())
        for benchmark in column
    }
    benchmarks = names.in_order(points["benchmark"], names.BENCHMARKS)
    looks = style.line_looks(map(names.benchmark, benchmarks), colours)
    drawing = marks.over(
        # without intervals, which would hide the lines
        points[["panel", "is_open"]].assign(
            label=points["benchmark"].map(names.benchmark), x=points["read"], y=points["difference"]
        ),
        looks,
        _token_axis(points["read"]),
        marks.Axis("change of the score (points)"),
        columns=2,
        height=2.6,
        sharey=True,
    )
    style.legend(drawing, looks.values())
    tokens_by_panel = points.groupby(["label", "ratio"])["read"]
    least_tokens = " / ".join(
        style.format_tokens(count) for count in tokens_by_panel.min().unique()
    )
    rows_with_more_tokens = points[points["read"] > tokens_by_panel.transform("min")]
    is_line_open = rows_with_more_tokens.groupby(["label", "ratio", "benchmark"])["is_open"].all()
    caption = (
        "Change of each benchmark's score, in points, against calibration on the least tokens "
        f"({least_tokens}) of the same text. Filled markers: the 95 % interval of the paired "
        "difference, not corrected for the number of benchmarks, excludes zero; with one seed it "
        f"is over items, for these plans. {(~is_line_open).sum()} of {len(is_line_open)} "
        "lines have a filled marker."
    )
    return Figure(name, f"Effect of more calibration text: {comparison.model}", caption, drawing)
