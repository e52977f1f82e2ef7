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
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import HEAPR, SLIMMING
from analysis.outputs.score_rows import Block, score_table
from analysis.registry import Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.cell_scores import MEAN, averaged, differences, mean_target
from analysis.stats.comparison import Comparison

COMPETING = ["ratio", "method", "gate"]
"""Cells with equal values in these columns are compared across calibration sets."""


def reports(study: Study, model: str) -> dict[str, Mapping[str, Any]]:
    """Calibration set -> report of the model's pass over it."""
    by_set = {}
    for key, report in study.calibrations.items():
        calibration, _, model_of_pass = key.partition("@")
        if model_of_pass == model:
            by_set[calibration] = report
    return by_set


def tokens(study: Study, model: str) -> dict[str, int]:
    """Calibration set -> number of its valid tokens in the model's pass."""
    by_set = reports(study, model)
    return {
        name: sum((report.get("valid_tokens") or {}).values()) for name, report in by_set.items()
    }


def sources(study: Study, model: str) -> dict[str, str]:
    """Calibration set -> identifier of its text, which is equal for sets that read different
    numbers of tokens of one text."""
    by_set = reports(study, model)
    return {
        name: str(report.get("sha256") or report.get("source") or name)
        for name, report in by_set.items()
    }


def text_cells(comparison: Comparison) -> pd.DataFrame:
    """Pruned cells that read a calibration set, sorted by ratio and method."""
    cells = comparison.cells
    cells = cells[(cells["criterion"] != "none") & (cells["calibration"] != "none")]
    order = names.methods_in_order(cells["method"])
    ordered = cells.assign(position=cells["method"].map(order.index))
    return ordered.sort_values(["ratio", "position"], kind="stable").drop(columns="position")


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
    """Each method with several calibration sets: a block per ratio and method, with differences to
    the set with most tokens."""
    read = tokens(results.study, comparison.model)
    for key, rows in groups(text_cells(comparison), COMPETING):
        if rows["calibration"].nunique() > 1:
            labels = {}
            ordered = rows.assign(read=rows["calibration"].map(read)).sort_values(
                "read", kind="stable"
            )
            for cell, calibration in ordered["calibration"].items():
                count = f", {read[calibration]:,} tokens" if calibration in read else ""
                labels[int(str(cell))] = f"{names.calibration(calibration)}{count}"
            pruned = f"{comparison.removed(key['ratio'])}, {names.method(str(key['method']))}"
            yield Block(comparison, pruned, labels, list(labels)[-1])


def sizes(study: Study, comparison: Comparison) -> dict[tuple[str, float], pd.DataFrame]:
    """(label, ratio) -> cells of one text and method that read different numbers of tokens, sorted
    by this number (column read)."""
    read = tokens(study, comparison.model)
    source = sources(study, comparison.model)
    cells = text_cells(comparison)
    cells = cells.assign(
        read=cells["calibration"].map(read), source=cells["calibration"].map(source)
    )
    lines = {}
    for key, rows in groups(cells.dropna(subset=["read"]), [*COMPETING, "source"]):
        if rows["read"].nunique() > 1:
            line = rows.sort_values("read", kind="stable")
            text = names.calibration(str(line["calibration"].iloc[-1]))
            label = f"{names.method(str(key['method']))}, {text}"
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

    A panel per ratio, a line per text and method. None when no text was read with two numbers of
    tokens.
    """
    lines = sizes(results.study, comparison)
    cells = [int(str(cell)) for line in lines.values() for cell in line.index]
    target = mean_target(comparison, cells, names.HEAPR)
    if not target:
        return None
    score, low, high = comparison.displayed(target)
    ratios = sorted({ratio for _, ratio in lines})
    drawing = style.drawing(style.PAGE, 2.9)
    grid = drawing.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
    keys: dict[str, Line2D] = {}
    for (label, ratio), line in lines.items():
        axes = grid[ratios.index(ratio)]
        shade = style.colour(line["method"].iloc[0])
        marker = style.MARKERS[len(keys) % len(style.MARKERS)]
        key = keys.setdefault(label, style.key(label, color=shade, marker=marker, markersize=4))
        axes.vlines(line["read"], low[line.index], high[line.index], color=shade, alpha=0.5)
        style.draw(axes, key, line["read"], score[line.index])
    for axes, ratio in zip(grid, ratios, strict=True):
        axes.set_xscale("log", base=2)
        read = sorted({int(tokens) for line in lines.values() for tokens in line["read"]})
        style.ticks(axes.xaxis, read, map(style.tokens, read))
        axes.set(xlabel="calibration tokens read", title=f"{comparison.removed(ratio)} pruned")
        axes.grid()
    grid[0].set_ylabel("mean of HEAPr's benchmarks")
    style.legend(drawing, keys.values(), most=3)
    caption = (
        f"{averaged(target, names.HEAPR)} after calibration on more and more of the same text, "
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
    """Change of each benchmark's score with more tokens of one text, relative to the cell that read
    the fewest tokens.

    Columns: label (text and method), ratio, benchmark, read (tokens), and difference, low and high
    in points. Benchmarks in which less is better are left out: they are not scores."""
    rows = []
    for (label, ratio), line in sizes(study, comparison).items():
        first, *larger = (int(str(cell)) for cell in line.index)
        more_is_better = [
            str(name) for name in comparison.benchmarks if name not in comparison.lower_is_better
        ]
        ordered = names.in_order(more_is_better, names.BENCHMARKS)
        for benchmark in mean_target(comparison, [first, *larger], ordered):
            points = POINTS * differences(comparison, (benchmark,), dict.fromkeys(larger, first))
            key = {"label": label, "ratio": ratio, "benchmark": benchmark}
            unchanged = {"difference": 0.0, "low": 0.0, "high": 0.0}
            rows.append({**key, "read": line["read"][first], **unchanged})
            for cell, change in zip(larger, records(points[list(unchanged)]), strict=True):
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

    A panel per text, method and ratio: each benchmark's change from the fewest tokens to more
    tokens of the same text.
    """
    points = changes(results.study, comparison)
    if points.empty:
        return None
    points["significant"] = (points["low"] > 0) | (points["high"] < 0)
    panels = list(groups(points, ["label", "ratio"]))
    drawing, grid = style.panels(len(panels), 2, 2.6, below=0.9, sharey=True)
    keys: dict[str, Line2D] = {}
    for axes, (key, points_of_panel) in zip(grid, panels, strict=True):
        keys |= _draw_changes(axes, points_of_panel)
        axes.set_title(f"{key['label']}, {comparison.removed(key['ratio'])} pruned", fontsize=7.5)
    for axes in grid[::2]:
        axes.set_ylabel("change of the score (points)")
    style.legend(drawing, [keys[benchmark] for benchmark in names.in_order(keys, names.BENCHMARKS)])
    by_text = points.groupby(["label", "ratio"])["read"]
    least = " / ".join(style.tokens(read) for read in by_text.min().unique())
    larger = points[points["read"] > by_text.transform("min")]
    filled = larger.groupby(["label", "ratio", "benchmark"])["significant"].any()
    caption = (
        "Change of each benchmark's score, in points, against calibration on the least tokens "
        f"({least}) of the same text. Filled markers: the 95 % interval of the paired difference, "
        "not corrected for the number of benchmarks, excludes zero; with one seed it is over "
        f"items, for these plans. {filled.sum()} of {len(filled)} lines have a filled marker."
    )
    return Figure(name, f"Effect of more calibration text: {comparison.model}", caption, drawing)


def _draw_changes(axes: Axes, points: pd.DataFrame) -> dict[str, Line2D]:
    """Draw one panel of points as in `changes`, with a column significant; returns benchmark -> its
    entry in the legend.

    Lines of one family of benchmarks have its colour, and differ in marker and dashes."""
    families = {
        benchmark: family
        for column, family in _FAMILIES.items()
        for benchmark in names.COLUMNS[column]
    }
    keys: dict[str, Line2D] = {}
    drawn: Counter[str] = Counter()
    axes.axhline(0, color=style.MUTED, linewidth=0.8)
    for key, line in groups(points, ["benchmark"]):
        benchmark = str(key["benchmark"])
        family = families.get(benchmark, "")
        number = drawn[family]
        drawn[family] += 1
        shade = _SHADES.get(family, style.OTHER)
        marker = style.MARKERS[number % len(style.MARKERS)]
        look: Any = {
            "color": shade,
            "linestyle": ("-", "--", ":")[number // len(style.MARKERS) % 3],
            "linewidth": 1.0,
        }
        axes.plot(line["read"], line["difference"], **look)
        for significant, face in ((False, style.SURFACE), (True, shade)):
            marked = line[line["significant"] == significant]
            mark: Any = {
                "color": shade,
                "markerfacecolor": face,
                "markersize": 3.8,
                "markeredgewidth": 0.9,
            }
            axes.plot(marked["read"], marked["difference"], marker, **mark)
        keys[benchmark] = style.key(
            names.benchmark(benchmark), marker=marker, markersize=3.8, **look
        )
    read = sorted(points["read"].unique())
    style.ticks(axes.xaxis, read, map(style.tokens, read))
    axes.set_xlabel("calibration tokens read")
    axes.grid(axis="y")
    return keys
