"""How fast models read and write, and what memory they take (MoE-Slimming, Table 2): medians over requests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis import names
from analysis.load import plans, settings
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import MEBIBYTE, TIMED, reading
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats.comparison import Comparison

PREFILL, DECODE, FIRST, EACH = "Prefill (tokens/s)", "Decode (tokens/s)", "First token (ms)", "Per token (ms)"
WEIGHTS, PEAK = "Weights (MiB)", "Peak memory (MiB)"
SPEEDS: Mapping[str, str] = {PREFILL: "{:,.1f}", DECODE: "{:,.1f}", FIRST: "{:,.2f}", EACH: "{:,.2f}"}
REQUEST = ["cell", "device", "batch_size", "prompt_length", "new_tokens"]
QUARTILES = {" low": 0.25, "": 0.5, " high": 0.75}
_TEXT = ["Model", "Pruned", "Criterion", "Device", "Prompts", "Tokens each"]


def requests(study: Study) -> pd.DataFrame:
    """A row per cell and sort of request: REQUEST, SPEEDS at their medians and, with ` low` and ` high` behind, their
    quartiles, WEIGHTS, PEAK."""
    rows = []
    for key, found in groups(study.timings, REQUEST) if len(study.timings) else ():
        speeds = _speeds(found)
        measured = {f"{name}{end}": speeds[name].quantile(at) for name in SPEEDS for end, at in QUARTILES.items()}
        weights = float(found["weight_bytes"].iloc[0])
        peak = weights + float(found["working_bytes"].iloc[0])
        rows.append({**key, **measured, WEIGHTS: weights / MEBIBYTE, PEAK: peak / MEBIBYTE})
    columns = [*REQUEST, *(f"{name}{end}" for name in SPEEDS for end in QUARTILES), WEIGHTS, PEAK]
    return pd.DataFrame(rows, columns=columns)


def _speeds(timings: pd.DataFrame) -> pd.DataFrame:
    """SPEEDS of each request."""
    read, written = timings["batch_size"] * timings["prompt_length"], timings["batch_size"] * timings["new_tokens"]
    return pd.DataFrame(
        {
            PREFILL: read / timings["prefill_seconds"],
            DECODE: written / timings["decode_seconds"],
            FIRST: 1000 * timings["prefill_seconds"],
            EACH: 1000 * timings["decode_seconds"] / timings["new_tokens"],
        }
    )


def labels(comparison: Comparison) -> dict[int, str]:
    """Cell -> what it is called among the cells of its model."""
    return {int(str(cell)): str(word) for cell, word in settings.method_labels(comparison.cells).items()}


@output("coverage.table2", chapter="cost", filters="Model|Pruned", needs=TIMED)
def speed_table(results: Results, name: str) -> Table:
    """MoE-Slimming's Table 2: throughput, latency and memory of every model that was timed."""
    study, comparisons = results.study, results.pruned
    timings = requests(study)
    rows, low, high = [], [], []
    for comparison in comparisons:
        words = labels(comparison)
        for row in records(timings[timings["cell"].isin(words)]) if len(timings) else []:
            ratio = float(comparison.cells.loc[row["cell"], "ratio"])
            places = [comparison.model, names.ratio(ratio), words[row["cell"]], row["device"]]
            texts = [*places, str(row["batch_size"]), str(row["prompt_length"])]
            rows.append(
                {**dict(zip(_TEXT, texts, strict=True)), **{word: row[word] for word in (*SPEEDS, WEIGHTS, PEAK)}}
            )
            low.append({word: row[f"{word} low"] for word in SPEEDS})
            high.append({word: row[f"{word} high"] for word in SPEEDS})
    sizes = {WEIGHTS: "{:,.2f}", PEAK: "{:,.1f}"}
    return Table(
        name=name,
        title="How fast models read and write, and what memory they take",
        caption=f"Medians, with the quartiles as ends. {conditions(study)} {reading(study)}",
        frame=pd.DataFrame(rows, columns=[*_TEXT, *SPEEDS, *sizes]),
        formats={**SPEEDS, **sizes},
        best={PREFILL: "max", DECODE: "max", FIRST: "min", EACH: "min"},
        blocks=("Model", "Device", "Prompts", "Tokens each"),
        low=pd.DataFrame(low) if rows else None,
        high=pd.DataFrame(high) if rows else None,
        optional=(PEAK,),
    )


def conditions(study: Study) -> str:
    """What a caption says of how requests were timed."""
    timings = study.timings
    if timings.empty:
        return ""
    several = {
        name: " / ".join(str(value) for value in timings[name].dropna().unique()) for name in ("device", "dtype")
    }
    threads = " / ".join(f"{count:g}" for count in timings["threads"].dropna().unique())
    repeats, written = timings["repeat"].max() + 1, " / ".join(map(str, timings["new_tokens"].unique()))
    return (
        f"{repeats} requests each, {written} tokens written after the first one, {several['dtype']} on "
        f"{several['device']}, {threads} threads, load of the machine up to {timings['load'].max():.1f}; by "
        "transformers, the pruned model alone, prompts from a text. Peak memory: the weights, and what a request takes "
        "beyond them."
    )


DARK = 0.55
"""Where a shade becomes too dark for black letters."""


def memory_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Weights and working memory of every model that was timed, at its largest request."""
    largest = _largest(study, comparison)
    if largest.empty:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE, 0.24 * len(largest) + 1.1)
        axes = drawing.add_subplot()
        places = range(len(largest))
        axes.barh(places, largest[WEIGHTS], color=style.CRITERIA["reap"], label="weights")
        working = (largest[PEAK] - largest[WEIGHTS]).fillna(0)
        axes.barh(places, working, left=largest[WEIGHTS], color=style.CRITERIA["man"], label="a request beyond them")
        axes.set_yticks(list(places), largest["label"], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("MiB")
        axes.grid(axis="x")
        drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    size, length = int(largest["batch_size"].iloc[0]), int(largest["prompt_length"].iloc[0])
    caption = f"Memory at {size} prompts of {length} tokens. {conditions(study)}"
    return Figure(name, f"Memory of a served model: {comparison.model}", caption, drawing)


BLOCK_MAPS = {DECODE: "tokens written a second", PEAK: "peak memory (MiB)"}
"""What the maps of the published figure show of every pair of block and smallest expert."""


def blocks_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Fig. 10: tokens a second and peak memory by the block that channels are rounded to (across) and the smallest
    expert (down), a row of two maps per ratio and recovery."""
    timed, rounded = _largest(study, comparison), plans.blocks(comparison.cells, study.reader)
    if timed.empty or rounded.empty:
        return None
    by_block = timed.merge(rounded, on="cell")
    if len(by_block) < 2:
        return None
    full = timed[timed["cell"] == comparison.unpruned]
    cells = comparison.cells.loc[by_block["cell"], ["ratio", "recovery"]].reset_index(drop=True)
    panels = list(groups(pd.concat([by_block, cells], axis=1), ["ratio", "recovery", "device"]))
    with style.look():
        heights = [0.22 * part["smallest"].nunique() + 0.85 for _, part in panels]
        drawing = style.drawing(style.PAGE, sum(heights) + 0.2)
        grid = drawing.subplots(len(panels), len(BLOCK_MAPS), squeeze=False, gridspec_kw={"height_ratios": heights})
        for row, (key, part) in zip(grid, panels, strict=True):
            recovery = names.RECOVERIES.get(key["recovery"], key["recovery"])
            pruned = ", ".join(word for word in (f"{names.ratio(key['ratio'])} pruned", recovery) if word)
            for axes, (column, what) in zip(row, BLOCK_MAPS.items(), strict=True):
                _heat(axes, part, column)
                unpruned = f"; unpruned {full[column].iloc[0]:,.0f}" if full[column].notna().any() else ""
                axes.set_title(f"{pruned}\n{what}{unpruned}", pad=18, fontsize=7.5)
    caption = (
        "By the block a that kept channels of an expert are a multiple of, and by m: experts with fewer channels lose "
        f"all. Tokens written a second are medians. The unpruned model is in 16 bits. {conditions(study)}"
    )
    return Figure(name, f"Throughput and memory by blocks of channels: {comparison.model}", caption, drawing)


def _largest(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Of each cell the request of most tokens, with the cell's label; on one device, the first."""
    timings = requests(study)
    if timings.empty:
        return timings
    words = labels(comparison)
    timings = timings[timings["cell"].isin(words)]
    timings = timings[timings["device"] == timings["device"].iloc[0]] if len(timings) else timings
    tokens = timings["batch_size"] * timings["prompt_length"]
    timings = timings.loc[tokens.groupby(timings["cell"]).idxmax()]
    ratios = comparison.cells["ratio"][timings["cell"]]
    spelled = [
        words[cell] if ratio == 0 else f"{words[cell]}, {names.ratio(ratio)}"
        for cell, ratio in zip(timings["cell"], ratios, strict=True)
    ]
    return timings.assign(label=spelled).reset_index(drop=True)


def _heat(axes: Axes, timings: pd.DataFrame, column: str) -> None:
    """Squares shaded from the least to the most of `column`; – where it was not measured, nothing where nothing ran."""
    blocks, smallest = (sorted(timings[axis].unique()) for axis in ("block", "smallest"))
    shades = colormaps[style.SEQUENTIAL]
    least, most = float(timings[column].min()), float(timings[column].max())
    for row in records(timings):
        x, y, value = blocks.index(row["block"]), smallest.index(row["smallest"]), row[column]
        share = 0.1 if np.isnan(value) or most == least else 0.1 + 0.8 * (value - least) / (most - least)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=shades(share), linewidth=0))
        ink = "#000000" if share < DARK else "#ffffff"
        word = "–" if np.isnan(value) else f"{value:,.{1 if most < 100 else 0}f}"
        axes.text(x + 0.5, y + 0.5, word, ha="center", va="center", color=ink, fontweight="bold")
    axes.set(xlim=(0, len(blocks)), ylim=(len(smallest), 0))
    axes.set_xticks(np.arange(len(blocks)) + 0.5, [f"a={block}" for block in blocks])
    axes.set_yticks(np.arange(len(smallest)) + 0.5, [f"m={channels}" for channels in smallest])
    axes.xaxis.tick_top()
    style.bare(axes)


@output("coverage.fig6", chapter="cost", needs=TIMED)
def memory(results: Results, name: str) -> list[Item | None]:
    """Memory of every model that was timed."""
    return [memory_figure(results.study, comparison, name=own) for comparison, own in results.per_pruned_model(name)]


@output(
    "coverage.fig10",
    chapter="cost",
    needs=f"{TIMED}, of several aligned allocations (coverage_fig10 of sweeps)",
)
def speed_and_memory_by_blocks(results: Results, name: str) -> list[Item | None]:
    """Tokens a second and peak memory by the block that channels are rounded to and the smallest expert."""
    return [blocks_figure(results.study, comparison, name=own) for comparison, own in results.per_pruned_model(name)]
