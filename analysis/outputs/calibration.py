"""Effects of the choice and size of the calibration set (HEAPr, Fig. 3; AIMER, Fig. 1;
MoE-Slimming, Table 18)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import names
from analysis.load import settings
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import HEAPR, SLIMMING
from analysis.outputs.score_rows import Block, score_table, sorted_in_order
from analysis.registry import Results, output, per_model
from analysis.render import style
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


@output(
    "coverage.table18",
    chapter="task",
    filters="*Model|Pruned",
    needs=f"one criterion on several calibration sets, and {SLIMMING}",
)
@score_table(
    "Calibration sets: texts, and numbers of tokens",
    (*names.ABLATION, MEAN),
    "A block per ratio and method; rows name the calibration set and the tokens read of it. "
    "Difference: Mean minus that of the set of most tokens, the last row, paired.",
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


@output(
    "heapr.fig3",
    chapter="task",
    needs=f"calibration sets that read different numbers of tokens of one text, and {HEAPR}",
)
@per_model()
def size_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Scores against the number of calibration tokens.

    A panel per ratio, a line per text and method."""
    lines = lines_by_tokens(results.study, comparison)
    # through str, because pandas' types allow any label in an index
    cells = [int(str(cell)) for line in lines.values() for cell in line.index]
    target = mean_target(comparison, cells, names.HEAPR)
    if not target:
        return None
    score, low, high = comparison.displayed_scores(target)
    ratios = sorted({ratio for _, ratio in lines})
    drawing = style.drawing(style.PAGE, 2.9)
    grid = drawing.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
    keys: dict[str, Line2D] = {}
    for (label, ratio), line in lines.items():
        axes = grid[ratios.index(ratio)]
        shade = style.colour(line["method"].iloc[0])
        marker = style.MARKERS[len(keys) % len(style.MARKERS)]
        # lines with the same label share a legend entry
        key = keys.setdefault(
            label, style.legend_entry(label, color=shade, marker=marker, markersize=4)
        )
        axes.vlines(line["read"], low[line.index], high[line.index], color=shade, alpha=0.5)
        style.draw_line(axes, key, line["read"], score[line.index])
    for axes, ratio in zip(grid, ratios, strict=True):
        axes.set_xscale("log", base=2)
        counts = sorted({int(count) for line in lines.values() for count in line["read"]})
        style.label_ticks(axes.xaxis, counts, map(style.format_tokens, counts))
        axes.set(xlabel="calibration tokens read", title=f"{comparison.removed_text(ratio)} pruned")
        axes.grid()
    grid[0].set_ylabel("mean of HEAPr's benchmarks")
    style.legend(drawing, keys.values(), most=3)
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
_SHADES = {
    "Code": "#ee7733",
    "WildBench": "#aa4499",
    "Math": "#117733",
    "Multiple choice": "#2277bb",
}
"""Family of benchmarks -> colour of its lines."""
_FAMILIES = {
    "Eval+": "Code", "LiveCode": "Code", "WildBench": "WildBench", "GSM8K": "Math",
    "MATH-500": "Math", "MC Avg": "Multiple choice",
}  # fmt: skip
"""Displayed column -> the family of its benchmarks."""


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
    points["significant"] = (points["low"] > 0) | (points["high"] < 0)
    panels = list(groups(points, ["label", "ratio"]))
    drawing, grid = style.panels(len(panels), 2, 2.6, below=0.9, sharey=True)
    keys: dict[str, Line2D] = {}
    for axes, (key, panel_points) in zip(grid, panels, strict=True):
        keys |= _draw_changes(axes, panel_points)
        axes.set_title(
            f"{key['label']}, {comparison.removed_text(key['ratio'])} pruned", fontsize=7.5
        )
    for axes in grid[::2]:  # the left column
        axes.set_ylabel("change of the score (points)")
    style.legend(drawing, [keys[benchmark] for benchmark in names.in_order(keys, names.BENCHMARKS)])
    tokens_by_panel = points.groupby(["label", "ratio"])["read"]
    least_tokens = " / ".join(
        style.format_tokens(count) for count in tokens_by_panel.min().unique()
    )
    rows_with_more_tokens = points[points["read"] > tokens_by_panel.transform("min")]
    has_filled_marker = rows_with_more_tokens.groupby(["label", "ratio", "benchmark"])[
        "significant"
    ].any()
    caption = (
        "Change of each benchmark's score, in points, against calibration on the least tokens "
        f"({least_tokens}) of the same text. Filled markers: the 95 % interval of the paired "
        "difference, not corrected for the number of benchmarks, excludes zero; with one seed it "
        f"is over items, for these plans. {has_filled_marker.sum()} of {len(has_filled_marker)} "
        "lines have a filled marker."
    )
    return Figure(name, f"Effect of more calibration text: {comparison.model}", caption, drawing)


def _draw_changes(axes: Axes, points: pd.DataFrame) -> dict[str, Line2D]:
    """Draw one panel, with a line per benchmark. Returns benchmark -> legend entry of its line.

    points: the panel's rows of `changes`, with the boolean column "significant"."""
    family_of_benchmark = {
        benchmark: family
        for column, family in _FAMILIES.items()
        for benchmark in names.COLUMNS[column]
    }
    keys: dict[str, Line2D] = {}
    line_counts: Counter[str] = Counter()
    axes.axhline(0, color=style.MUTED, linewidth=0.8)
    for key, line in groups(points, ["benchmark"]):
        benchmark = str(key["benchmark"])
        family = family_of_benchmark.get(benchmark, "")
        index_in_family = line_counts[family]
        line_counts[family] += 1
        shade = _SHADES.get(family, style.OTHER)
        marker = style.MARKERS[index_in_family % len(style.MARKERS)]
        # after all markers are used once, the family's next lines have other dashes
        line_style: Any = {
            "color": shade,
            "linestyle": ("-", "--", ":")[index_in_family // len(style.MARKERS) % 3],
            "linewidth": 1.0,
        }
        axes.plot(line["read"], line["difference"], **line_style)
        for is_significant, fill_colour in ((False, style.SURFACE), (True, shade)):
            rows = line[line["significant"] == is_significant]
            marker_style: Any = {
                "color": shade,
                "markerfacecolor": fill_colour,
                "markersize": 3.8,
                "markeredgewidth": 0.9,
            }
            axes.plot(rows["read"], rows["difference"], marker, **marker_style)
        keys[benchmark] = style.legend_entry(
            names.benchmark(benchmark), marker=marker, markersize=3.8, **line_style
        )
    counts = sorted(points["read"].unique())
    style.label_ticks(axes.xaxis, counts, map(style.format_tokens, counts))
    axes.set_xlabel("calibration tokens read")
    axes.grid(axis="y")
    return keys
