"""What the choice and the size of the calibration set change (HEAPr, Fig. 3; AIMER, Fig. 1; MoE-Slimming, Table 18),
and how channel budgets are rounded to blocks (MoE-Slimming, Tables 8 and 16)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import names
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import HEAPR, SLIMMING
from analysis.outputs.score_rows import Block, block_table
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats.cell_scores import MEAN, averaged, differences, mean_target
from analysis.stats.comparison import Comparison

COMPETING = ["ratio", "method", "gate", "seed"]
"""Cells that agree in these are compared over calibration sets."""


def tokens(study: Study, model: str) -> dict[str, int]:
    """Calibration set -> valid tokens that the model read of it."""
    counts = {}
    for key, report in study.calibrations.items():
        calibration, _, of = key.partition("@")
        if of == model:
            counts[calibration] = sum((report.get("valid_tokens") or {}).values())
    return counts


def sources(study: Study, model: str) -> dict[str, str]:
    """Calibration set -> what tells its text from others', whatever the number of tokens."""
    by_set = {}
    for key, report in study.calibrations.items():
        calibration, _, of = key.partition("@")
        if of == model:
            by_set[calibration] = str(report.get("sha256") or report.get("source") or calibration)
    return by_set


@output(
    "coverage.table18",
    chapter="task",
    filters="*Model|Pruned",
    needs=f"one criterion on several calibration sets, and {SLIMMING}",
)
def calibration_table(results: Results, name: str) -> Table:
    """One method under every calibration set: a block per ratio and method, differences to the one of most tokens."""
    study, comparisons = results.study, results.comparisons
    blocks = []
    for comparison in comparisons:
        read = tokens(study, comparison.model)
        cells = _reading(comparison)
        for key, rows in groups(cells, COMPETING):
            if rows["calibration"].nunique() > 1:
                ordered = rows.assign(read=rows["calibration"].map(read)).sort_values("read", kind="stable")
                labels = {int(str(cell)): _label(str(word), read) for cell, word in ordered["calibration"].items()}
                pruned = f"{names.ratio(key['ratio'])}, {names.method(str(key['method']))}"
                blocks.append(Block(comparison, pruned, labels, list(labels)[-1]))
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        name=name,
        title="Calibration sets: which text, and how much of it",
        caption="A block per ratio and method; rows name the calibration set and the tokens read of it. Difference: "
        "Mean minus that of the set of most tokens, the last row, paired.",
    )


def _label(calibration: str, read: Mapping[str, int]) -> str:
    count = f", {read[calibration]:,} tokens" if calibration in read else ""
    return f"{names.calibration(calibration)}{count}"


def _reading(comparison: Comparison) -> pd.DataFrame:
    """Pruned cells that read a text, by ratio and method."""
    cells = comparison.cells
    reading = cells[(cells["criterion"] != "none") & (cells["calibration"] != "none")]
    order = names.methods_in_order(reading["method"])
    places = reading.assign(place=reading["method"].map(order.index))
    return places.sort_values(["ratio", "place"], kind="stable").drop(columns="place")


def size_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Avg against the tokens read: a panel per ratio, a line per text and method. None where no text was read in two
    sizes."""
    lines = sizes(study, comparison)
    if not lines:
        return None
    ratios = sorted({float(line["ratio"].iloc[0]) for line in lines.values()})
    cells = [int(str(cell)) for line in lines.values() for cell in line.index]
    target = mean_target(comparison, cells, names.HEAPR)
    if not target:
        return None
    score, (low, high) = comparison.score(target), comparison.interval(target)
    with style.look():
        drawing = style.drawing(style.PAGE, 2.9)
        grid = drawing.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
        handles: dict[str, Line2D] = {}
        for (label, _), line in lines.items():
            axes = grid[ratios.index(float(line["ratio"].iloc[0]))]
            marker = handles[label].get_marker() if label in handles else style.MARKERS[len(handles) % 12]
            look = Line2D([], [], color=style.colour(line["method"].iloc[0]), marker=marker, markersize=4, label=label)
            handles.setdefault(label, look)
            axes.vlines(line["read"], low[line.index], high[line.index], color=look.get_color(), alpha=0.5)
            axes.plot(
                line["read"], score[line.index], color=look.get_color(), marker=marker, markersize=4, linewidth=1.2
            )
        for axes, ratio in zip(grid, ratios, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({int(read) for line in lines.values() for read in line["read"]}))
            axes.xaxis.set_major_formatter(lambda value, _: count(value))
            axes.set(xlabel="calibration tokens read", title=f"{names.ratio(ratio)} pruned")
            axes.grid()
        grid[0].set_ylabel("mean of HEAPr's benchmarks")
        drawing.legend(handles=list(handles.values()), loc="outside lower center", ncols=3, fontsize=7)
    caption = (
        f"{averaged(target, names.HEAPR)} after calibration on more and more of the same text, with 95 % intervals "
        "(items resampled). Lines are texts and methods; points of one line answered the same items."
    )
    return Figure(name, f"How much calibration text is enough: {comparison.model}", caption, drawing)


def count(tokens: float) -> str:
    """A number of tokens in a word: 65k, 0.5M."""
    return f"{tokens / 1e6:.3g}M" if tokens >= 5e5 else f"{tokens / 1e3:.3g}k"


def sizes(study: Study, comparison: Comparison) -> dict[tuple[str, float], pd.DataFrame]:
    """(Label, ratio) -> cells of one text and method that differ in the tokens read, with `read`, the least first."""
    read, source = tokens(study, comparison.model), sources(study, comparison.model)
    cells = _reading(comparison)
    cells = cells.assign(read=cells["calibration"].map(read), source=cells["calibration"].map(source))
    lines = {}
    for key, rows in groups(cells.dropna(subset=["read"]), [*COMPETING, "source"]):
        if rows["read"].nunique() > 1:
            longest = rows.sort_values("read", kind="stable")
            text = names.calibration(str(longest["calibration"].iloc[-1]))
            lines[f"{names.method(str(key['method']))}, {text}", float(key["ratio"])] = longest
    return lines


ACROSS = 2
"""Panels side by side."""
POINTS = 100
_SHADES = {"Code": "#ee7733", "WildBench": "#aa4499", "Math": "#117733", "Multiple choice": "#2277bb"}
"""Family of benchmarks -> the colour of its lines."""
_FAMILIES = {
    "Eval+": "Code", "LiveCode": "Code", "WildBench": "WildBench", "GSM8K": "Math", "MATH-500": "Math",
    "MC Avg": "Multiple choice",
}  # fmt: skip
"""Displayed column -> the family of its benchmarks."""


def changes(study: Study, comparison: Comparison) -> pd.DataFrame:
    """What more tokens of one text change, benchmark by benchmark: label (of the text and method), ratio, benchmark,
    read (tokens), and difference, low and high in points, against the cell that read the least of that text. Less is
    better in some benchmarks: they are left out, since they have no points."""
    rows = []
    for (label, ratio), line in sizes(study, comparison).items():
        first, *more = (int(str(cell)) for cell in line.index)
        ordered = names.in_order(map(str, comparison.benchmarks), names.BENCHMARKS)
        for benchmark in mean_target(comparison, [first, *more], ordered):
            points = POINTS * differences(comparison, (benchmark,), dict.fromkeys(more, first))
            about = {"label": label, "ratio": ratio, "benchmark": benchmark}
            rows.append({**about, "read": line["read"][first], "difference": 0.0, "low": 0.0, "high": 0.0})
            for cell, change in zip(more, records(points[["difference", "low", "high"]]), strict=True):
                rows.append({**about, "read": line["read"][cell], **change})
    return pd.DataFrame(rows, columns=["label", "ratio", "benchmark", "read", "difference", "low", "high"])


def change_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """A panel per text, method and ratio: each benchmark's change from the least tokens to more of the same text."""
    moved = changes(study, comparison)
    if moved.empty:
        return None
    panels = list(groups(moved, ["label", "ratio"]))
    across = min(ACROSS, len(panels))
    rows = -(-len(panels) // across)
    with style.look():
        drawing = style.drawing(style.PAGE, 2.6 * rows + 0.9)
        grid = drawing.subplots(rows, across, squeeze=False, sharey=True)
        handles: dict[str, Line2D] = {}
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (key, panel) in zip(grid.flat, panels, strict=False):
            handles |= _changes_axes(axes, panel)
            axes.set_title(f"{key['label']}, {names.ratio(key['ratio'])} pruned", fontsize=7.5)
        for row in grid:
            row[0].set_ylabel("change of the score (points)")
        ordered = [handles[name] for name in names.in_order(handles, names.BENCHMARKS)]
        drawing.legend(handles=ordered, loc="outside lower center", ncols=min(6, len(ordered)), fontsize=6.5)
    least = " / ".join(count(int(read)) for read in moved.groupby(["label", "ratio"])["read"].min().unique())
    more = moved[moved["read"] > moved.groupby(["label", "ratio"])["read"].transform("min")]
    beyond = _beyond(more).groupby([more["label"], more["ratio"], more["benchmark"]]).any()
    caption = (
        f"Change of each benchmark's score, in points, against calibration on the least tokens ({least}) of the same "
        "text. Filled markers: the 95 % interval of the paired difference (items resampled, not corrected for the "
        f"number of benchmarks) is beyond zero; that is so at some number of tokens in {beyond.sum()} of {len(beyond)} "
        "lines."
    )
    return Figure(name, f"Effect of more calibration text: {comparison.model}", caption, drawing)


def _beyond(moved: pd.DataFrame) -> pd.Series:
    return (moved["low"] > 0) | (moved["high"] < 0)


def _changes_axes(axes: Axes, panel: pd.DataFrame) -> dict[str, Line2D]:
    """Benchmark -> a line for the legend."""
    families = {benchmark: family for column, family in _FAMILIES.items() for benchmark in names.COLUMNS[column]}
    handles: dict[str, Line2D] = {}
    met: dict[str, int] = {}
    axes.axhline(0, color=style.MUTED, linewidth=0.8)
    for key, line in groups(panel, ["benchmark"]):
        benchmark = str(key["benchmark"])
        family = families.get(benchmark, "")
        place = met.get(family, 0)
        met[family] = place + 1
        shade = _SHADES.get(family, style.OTHER)
        look: Any = {"color": shade, "linestyle": ("-", "--", ":")[place // len(style.MARKERS) % 3], "linewidth": 1.0}
        marker = style.MARKERS[place % len(style.MARKERS)]
        axes.plot(line["read"], line["difference"], **look)
        for beyond, face in ((False, style.SURFACE), (True, shade)):
            points = line[_beyond(line) == beyond]
            axes.plot(
                points["read"], points["difference"], marker, color=shade, markerfacecolor=face, markersize=3.8,
                markeredgewidth=0.9,
            )  # fmt: skip
        handles[benchmark] = Line2D([], [], marker=marker, markersize=3.8, label=names.benchmark(benchmark), **look)
    read = sorted(panel["read"].unique())
    axes.set_xticks(read, [count(int(tokens)) for tokens in read])
    axes.set_xlabel("calibration tokens read")
    axes.grid(axis="y")
    return handles


@output(
    "heapr.fig3",
    chapter="task",
    needs=f"calibration sets that read different numbers of tokens of one text, and {HEAPR}",
)
def calibration_sizes(results: Results, name: str) -> list[Item | None]:
    """Scores against the tokens that the calibration set reads."""
    return [size_figure(results.study, comparison, name=own) for comparison, own in results.per_model(name)]


@output("aimer.fig1", chapter="task", needs="calibration sets that read different numbers of tokens of one text")
def calibration_size_changes(results: Results, name: str) -> list[Item | None]:
    """Effect of more calibration text in each benchmark, in points (AIMER, Fig. 1)."""
    return [change_figure(results.study, comparison, name=own) for comparison, own in results.per_model(name)]
