"""Effects of the choice and size of the calibration set (HEAPr, Fig. 3; AIMER, Fig. 1;
MoE-Slimming, Table 18)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import settings
from moe_lab.analysis.load.reader import groups, stacked
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import HEAPR, SLIMMING
from moe_lab.analysis.outputs.score_rows import Block, criterion_colours, score_table, sort_cells
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.stats.cell_scores import MEAN, differences, mean_target, mean_text
from moe_lab.analysis.stats.comparison import Comparison

EQUAL_COLUMNS = ["ratio", "method", "gate"]
"""Cells with equal values in these columns are compared across calibration sets."""


def calibrated_cells(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Pruned cells with a calibration set, sorted by ratio, method and number of tokens.

    Added columns: "read" (number of valid tokens that the model's pass read of the set; NaN if it
    is unknown) and "source" (identifier of the text: sets that read different numbers of tokens of
    one text have equal identifiers)."""
    reads: dict[str, int] = {}
    sources: dict[str, str] = {}
    for key, report in study.calibrations.items():
        calibration, _, model = key.partition("@")  # a key is calibration@model
        if model == comparison.model:
            # a report has a number of tokens for each source of the set
            reads[calibration] = sum((report.get("valid_tokens") or {}).values())
            source = report.get("sha256") or calibration
            sources[calibration] = str(source)
    cells = comparison.pruned_cells
    cells = cells[cells["calibration"] != "none"]
    calibrations = cells["calibration"]
    cells = cells.assign(read=calibrations.map(reads), source=calibrations.map(sources))
    return sort_cells(cells, "ratio", "method", "read")


@score_table(
    "coverage.table18",
    "Calibration sets: texts, and numbers of tokens",
    (*names.ABLATION, MEAN),
    "A block per ratio and method; rows name the calibration set and the tokens read of it. "
    "Difference: Mean minus that of the set of most tokens, the last row, paired.",
    chapter="task",
    needs=f"one criterion on several calibration sets, and {SLIMMING}",
)
def calibration_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Each method with several calibration sets, a block per ratio and method."""
    for key, rows in groups(calibrated_cells(results.study, comparison), EQUAL_COLUMNS):
        if rows["calibration"].nunique() > 1:
            suffixes = rows["read"].map(", {:,.0f} tokens".format, na_action="ignore").fillna("")
            labels = rows["calibration"].map(names.calibration) + suffixes
            cells = rows.index.astype(int)
            pruned = f"{comparison.removed_text(key['ratio'])}, {names.method(str(key['method']))}"
            yield Block(comparison, pruned, dict(zip(cells, labels, strict=True)), base=cells[-1])


def lines_by_tokens(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Those of `calibrated_cells` for which there is another number of tokens with equal ratio,
    method, gate and text.

    Added columns: "label" (of the method and text) and "panel" (removed share)."""
    cells = calibrated_cells(study, comparison).dropna(subset=["read"])
    by_line = cells.groupby([*EQUAL_COLUMNS, "source"], sort=False)
    # the set with most tokens names the text
    texts = by_line["calibration"].transform("last").map(names.calibration)
    # "" if the model has one gate; without seeds, as these cells have no column "seed"
    gates = settings.gate_and_seed(cells)
    labels = map(names.comma_joined, cells["method"].map(names.method), texts, gates)
    lines = cells.assign(label=list(labels), panel=cells["removed_text"] + " pruned")
    return lines[by_line["read"].transform("nunique") > 1]


def _token_axis(counts: Iterable[int]) -> dict[str, Any]:
    """The axis of numbers of calibration tokens, with a tick at each of `counts`."""
    axis = {"values": sorted(set(counts)), "format": ".3s"}
    scale = {"type": "log", "base": 2}
    return charts.number("read", "calibration tokens read", axis=axis, scale=scale)


@output(
    "heapr.fig3",
    chapter="task",
    needs=f"calibration sets that read different numbers of tokens of one text, and {HEAPR}",
)
@per_model
def size_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Scores against the number of calibration tokens.

    A panel per ratio, a line per text and method."""
    cells = lines_by_tokens(results.study, comparison)
    target = mean_target(comparison, list(cells.index), names.HEAPR)
    if not target:
        return None
    score, low, high = comparison.displayed_scores(target)
    rows = cells.assign(y=score, low=low, high=high)
    rows = rows[["panel", "label", "method", "read", "y", "low", "high"]]
    y = charts.number("y", "mean of HEAPr's benchmarks", scale={"zero": False})
    layers = charts.lines(rows, _token_axis(rows["read"]), y, criterion_colours(rows))
    caption = (
        f"{mean_text(target, names.HEAPR)} after calibration on more and more of the same text, "
        "with 95 % intervals. Lines are texts and methods; points of one line answered the same "
        "items."
    )
    title = "How much calibration text is enough"
    return Figure(title, caption, rows, layers)


POINTS = 100
"""Points of a score of 1."""


def changes(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Change of each benchmark's score with more calibration text: the score of each cell of
    `lines_by_tokens` minus the score of the cell with the fewest tokens in its line.

    Columns: "panel" (method, text and removed share), "benchmark", "read" (number of tokens), and
    "difference", "low" and "high" (95 %) in points."""
    frames = []
    for key, line in groups(lines_by_tokens(study, comparison), ["label", "panel"]):
        base_cell, *other_cells = line.index.astype(int)
        # each benchmark on which at least one cell of the line was evaluated
        for benchmark in mean_target(
            comparison, [base_cell, *other_cells], comparison.score_benchmarks
        ):
            base_of_cell = dict.fromkeys(other_cells, base_cell)
            points = POINTS * differences(comparison, (benchmark,), base_of_cell)
            points.loc[base_cell] = 0.0
            panel = f"{key['label']}, {key['panel']}"
            frames.append(line[["read"]].join(points).assign(panel=panel, benchmark=benchmark))
    return stacked(frames, ["panel", "benchmark", "read", "difference", "low", "high"])


@output(
    "aimer.fig1",
    chapter="task",
    needs="calibration sets that read different numbers of tokens of one text",
)
@per_model
def change_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Effect of more calibration text in each benchmark, in points (AIMER, Fig. 1).

    A panel per text, method and ratio, a line per benchmark."""
    points = changes(results.study, comparison)
    if points.empty:
        return None
    # also without an interval (NaN)
    points["is_open"] = ~((points["low"] > 0) | (points["high"] < 0))
    # the benchmarks of a displayed column have one colour
    colour_of_label = {
        names.benchmark(benchmark): charts.SHADES[number]
        for number, column in enumerate(names.COLUMNS.values())
        for benchmark in column
    }
    benchmarks = names.in_order(points["benchmark"], names.BENCHMARKS)
    shown = charts.colours(map(names.benchmark, benchmarks), colour_of_label)
    # without intervals, which would hide the lines
    rows = points[["panel", "read", "difference", "is_open"]].assign(
        label=points["benchmark"].map(names.benchmark)
    )
    y = charts.number("difference", "change of the score (points)")
    layers = [
        charts.reference("y", 0),
        *charts.lines(rows, _token_axis(rows["read"]), y, shown),
    ]
    caption = (
        "Change of each benchmark's score, in points, against calibration on the least tokens of "
        "the same text. Filled markers: the 95 % interval of the paired "
        "difference, not corrected for the number of benchmarks, excludes zero; with one seed it "
        "is over items, for these plans."
    )
    title = "Effect of more calibration text"
    return Figure(title, caption, rows, layers)
