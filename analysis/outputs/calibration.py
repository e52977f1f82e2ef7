"""What the choice and the size of the calibration set change (HEAPr, Fig. 3; AIMER, Fig. 1; MoE-Slimming, Table 18),
and how channel budgets are rounded to blocks (MoE-Slimming, Tables 8 and 16)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import names
from analysis.frames import groups
from analysis.load.study import Study
from analysis.outputs.captions import HEAPR, SLIMMING
from analysis.outputs.score_rows import Block, block_table
from analysis.registry import Item, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.results import Results
from analysis.stats.cell_scores import (
    MEAN,
    averaged,
    differences,
    group_targets,
    mean_target,
)
from analysis.stats.comparison import Comparison, Target

COMPETING = ["ratio", "method", "gate", "seed"]
"""Cells that agree in these are compared over calibration sets."""


def tokens(study: Study, model: str) -> dict[str, int]:
    """Calibration set -> valid tokens that the model read of it."""
    found = {}
    for key, report in study.calibrations.items():
        calibration, _, of = key.partition("@")
        if of == model:
            found[calibration] = sum((report.get("valid_tokens") or {}).values())
    return found


def sources(study: Study, model: str) -> dict[str, str]:
    """Calibration set -> what tells its text from others', whatever the number of tokens."""
    found = {}
    for key, report in study.calibrations.items():
        calibration, _, of = key.partition("@")
        if of == model:
            found[calibration] = str(report.get("sha256") or report.get("source") or calibration)
    return found


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
        for key, found in groups(cells, COMPETING) if len(cells) else ():
            if found["calibration"].nunique() > 1:
                ordered = found.assign(read=found["calibration"].map(read)).sort_values("read", kind="stable")
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
    found = cells[(cells["criterion"] != "none") & (cells["calibration"] != "none")]
    order = names.methods_in_order(found["method"])
    places = found.assign(place=found["method"].map(order.index))
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
    for key, found in groups(cells.dropna(subset=["read"]), [*COMPETING, "source"]) if len(cells) else ():
        if found["read"].nunique() > 1:
            longest = found.sort_values("read", kind="stable")
            text = names.calibration(str(longest["calibration"].iloc[-1]))
            lines[f"{names.method(str(key['method']))}, {text}", float(key["ratio"])] = longest
    return lines


ACROSS = 3
"""Panels side by side."""
POINTS = 100
_SHADES = {"MC Avg": "#2277bb", "Code": "#ee7733", "Math": "#117733", "WildBench": "#aa4499", "Avg": style.INK}


def change_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """A panel per text, method and ratio: each average's change from the least tokens to more of the same text."""
    lines = {key: line for key, line in sizes(study, comparison).items() if len(line) > 1}
    if not lines:
        return None
    cells = [int(str(cell)) for line in lines.values() for cell in line.index]
    targets = group_targets(comparison, cells)
    rows = -(-len(lines) // ACROSS)
    with style.look():
        drawing = style.drawing(style.PAGE, 2.0 * rows + 0.6)
        grid = drawing.subplots(rows, min(ACROSS, len(lines)), squeeze=False, sharey=True)
        for axes in grid.flat[len(lines) :]:
            axes.set_visible(False)
        for axes, ((label, ratio), line) in zip(grid.flat, lines.items(), strict=False):
            _draw(axes, comparison, line, targets)
            axes.set_title(f"{label}\n{names.ratio(ratio)} pruned", fontsize=7.5)
        for row in grid:
            row[0].set_ylabel("change (points)")
        handles, shown = grid[0][0].get_legend_handles_labels()
        drawing.legend(handles, shown, loc="outside lower center", ncols=len(shown), fontsize=7)
    caption = (
        "Change of each average, in points, against calibration on the least tokens of the same text, with 95 % "
        "intervals of the paired difference (items resampled)."
    )
    return Figure(name, f"What more calibration text changes: {comparison.model}", caption, drawing)


def _draw(axes: Axes, comparison: Comparison, line: pd.DataFrame, targets: dict[str, Target]) -> None:
    first, *more = (int(str(cell)) for cell in line.index)
    read = [count(int(line["read"][cell])) for cell in more]
    axes.axhline(0, color=style.MUTED, linewidth=0.8)
    for at, (name, target) in enumerate(targets.items()):
        found = POINTS * differences(comparison, target, dict.fromkeys(more, first))
        places = [place + (at - (len(targets) - 1) / 2) * 0.12 for place in range(len(more))]
        axes.vlines(places, found["low"], found["high"], color=_SHADES[name], alpha=0.5)
        axes.plot(places, found["difference"], style.MARKERS[at], color=_SHADES[name], markersize=4, label=name)
    axes.set_xticks(range(len(more)), read)
    axes.set_xlim(-0.6, len(more) - 0.4)
    axes.set_xlabel(f"tokens read, against {count(int(line['read'][first]))}")
    axes.grid(axis="y")


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
    """What more calibration text changes, in points."""
    return [change_figure(results.study, comparison, name=own) for comparison, own in results.per_model(name)]
