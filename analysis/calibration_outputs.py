"""What the choice and the size of the calibration set change (HEAPr, Fig. 3; AIMER, Fig. 1; MoE-Slimming, Table 18),
and how channel budgets are rounded to blocks (MoE-Slimming, Tables 8 and 16)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.lines import Line2D

from analysis import names, style
from analysis.block_tables import Block, block_table
from analysis.chosen import MEAN, averaged, mean_target
from analysis.comparison import Comparison
from analysis.frames import groups
from analysis.load import Study
from analysis.style import Figure
from analysis.tables import Table

COMPETING = ["ratio", "method", "gate", "seed"]
"""Cells that agree in these are compared over calibration sets."""
ALIGNED = re.compile(r"coverage aligned \d+( scores)?")
"""Allocations that round channel budgets to blocks, and go by remainders or by scores."""
SMALLEST = re.compile(r"coverage (aligned 128|min \d+)")
"""Allocations that differ in the smallest expert they leave; the first one is USUAL."""
USUAL = "coverage aligned 128"
"""The published one, which others are measured against."""


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


def calibration_table(study: Study, comparisons: Sequence[Comparison], *, name: str) -> Table:
    """One method under every calibration set: a block per ratio and method, differences to the one of most tokens."""
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


def block_size_table(
    study: Study,
    comparisons: Sequence[Comparison],
    *,
    name: str,
    columns: Sequence[str],
    title: str,
    words: re.Pattern[str],
) -> Table:
    """Channel budgets in blocks: the allocations that are called by `words`, where several were run."""
    blocks = []
    for comparison in comparisons:
        cells = comparison.cells
        found = cells[cells["allocation"].map(lambda word: bool(words.fullmatch(str(word))))]
        for key, part in groups(found, ["ratio", "calibration", "gate", "seed", "criterion", "recovery"]):
            if len(part) > 1:
                usual = part.index[part["allocation"] == USUAL]
                labels = {
                    int(str(cell)): str(word)[:1].upper() + str(word)[1:] for cell, word in part["allocation"].items()
                }
                base = int(usual[0]) if len(usual) == 1 else None
                blocks.append(Block(comparison, names.ratio(key["ratio"]), labels, base))
    return block_table(
        study,
        blocks,
        columns=columns,
        name=name,
        title=title,
        caption="Aligned: kept channels of an expert are a multiple of so many; min: experts below so many lose all; "
        f"scores: blocks left over go by score. Difference: {columns[-1]} minus that of {USUAL}, paired.",
    )
