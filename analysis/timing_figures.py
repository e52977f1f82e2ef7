"""What models take in memory, and how fast they write by blocks of channels (MoE-Slimming, Figs. 6 and 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis import artefacts, names, style
from analysis.comparison import Comparison
from analysis.frames import groups, records
from analysis.load import Study
from analysis.made import Made, of_model, unless_empty
from analysis.style import Figure
from analysis.timing_tables import DECODE, PEAK, WEIGHTS, conditions, labels, requests, speed_table

DARK = 0.55
"""Where a shade becomes too dark for black letters."""


def memory_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Weights and working memory of every model that was timed, at its largest request."""
    found = _largest(study, comparison)
    if found.empty:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE, 0.24 * len(found) + 1.1)
        axes = drawing.add_subplot()
        places = range(len(found))
        axes.barh(places, found[WEIGHTS], color=style.CRITERIA["reap"], label="weights")
        working = (found[PEAK] - found[WEIGHTS]).fillna(0)
        axes.barh(places, working, left=found[WEIGHTS], color=style.CRITERIA["man"], label="a request beyond them")
        axes.set_yticks(list(places), found["label"], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("MiB")
        axes.grid(axis="x")
        drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    size, length = int(found["batch_size"].iloc[0]), int(found["prompt_length"].iloc[0])
    caption = f"Memory at {size} prompts of {length} tokens. {conditions(study)}"
    return Figure(name, f"Memory of a served model: {comparison.model}", caption, drawing)


def blocks_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Tokens a second by the block that channels are rounded to and the smallest expert, a panel per ratio and
    recovery."""
    timed, rounded = _largest(study, comparison), artefacts.blocks(comparison.cells, study.reader)
    if timed.empty or rounded.empty:
        return None
    found = timed.merge(rounded, on="cell")
    if len(found) < 2:
        return None
    cells = comparison.cells.loc[found["cell"], ["ratio", "recovery"]].reset_index(drop=True)
    panels = list(groups(pd.concat([found, cells], axis=1), ["ratio", "recovery", "device"]))
    with style.look():
        drawing = style.drawing(style.PAGE, 2.4)
        grid = drawing.subplots(1, len(panels), squeeze=False)[0]
        for axes, (key, part) in zip(grid, panels, strict=True):
            _heat(axes, part)
            recovery = names.RECOVERIES.get(key["recovery"], key["recovery"])
            axes.set_title(
                ", ".join(word for word in (f"{names.ratio(key['ratio'])} pruned", recovery) if word), pad=18
            )
    caption = (
        "Tokens written a second (median) by the block a that kept channels of an expert are a multiple of and by the "
        f"fewest channels m that an expert keeps. {conditions(study)}"
    )
    return Figure(name, f"Throughput by blocks of channels: {comparison.model}", caption, drawing)


def _largest(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Of each cell the request of most tokens, with the cell's label; on one device, the first."""
    found = requests(study)
    if found.empty:
        return found
    words = labels(comparison)
    found = found[found["cell"].isin(words)]
    found = found[found["device"] == found["device"].iloc[0]] if len(found) else found
    tokens = found["batch_size"] * found["prompt_length"]
    found = found.loc[tokens.groupby(found["cell"]).idxmax()]
    ratios = comparison.cells["ratio"][found["cell"]]
    spelled = [
        words[cell] if ratio == 0 else f"{words[cell]}, {names.ratio(ratio)}"
        for cell, ratio in zip(found["cell"], ratios, strict=True)
    ]
    return found.assign(label=spelled).reset_index(drop=True)


def _heat(axes: Axes, found: pd.DataFrame) -> None:
    blocks, smallest = (sorted(found[column].unique()) for column in ("block", "smallest"))
    shades = colormaps[style.SEQUENTIAL]
    most = float(found[DECODE].max())
    for row in records(found):
        x, y = blocks.index(row["block"]), smallest.index(row["smallest"])
        share = row[DECODE] / most
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=shades(share), linewidth=0))
        ink = "#000000" if share < DARK else "#ffffff"
        axes.text(x + 0.5, y + 0.5, f"{row[DECODE]:,.0f}", ha="center", va="center", color=ink, fontweight="bold")
    axes.set(xlim=(0, len(blocks)), ylim=(len(smallest), 0))
    axes.set_xticks(np.arange(len(blocks)) + 0.5, [f"a={block}" for block in blocks])
    axes.set_yticks(np.arange(len(smallest)) + 0.5, [f"m={least}" for least in smallest])
    axes.xaxis.tick_top()
    style.bare(axes)


def _speeds(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(speed_table(study, comparisons, name="coverage.table2"))


def _drawn(draw: Callable[..., Figure | None], name: str) -> Callable[[Study, Sequence[Comparison]], Made]:
    def made(study: Study, comparisons: Sequence[Comparison]) -> Made:
        figures = (draw(study, one, name=of_model(comparisons, name, one)) for one in comparisons)
        return [figure for figure in figures if figure]

    return made


OUTPUTS: Mapping[str, Callable[[Study, Sequence[Comparison]], Made]] = {
    "coverage.table2": _speeds,
    "coverage.fig6": _drawn(memory_figure, "coverage.fig6"),
    "coverage.fig10": _drawn(blocks_figure, "coverage.fig10"),
}
"""Name -> what makes its tables and figures; an empty list when nothing was timed."""
