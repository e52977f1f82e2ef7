"""The tables of HEAPr (1, 2), of MoE-Slimming's budgets (6, 7, 13) and of AIMER (2): which cells stand in each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import names
from analysis.load import settings
from analysis.load.reader import groups
from analysis.load.study import Study
from analysis.outputs.captions import HEAPR, SLIMMING
from analysis.outputs.score_rows import (
    DEFAULT_SMOOTHING,
    SMOOTHING,
    block_table,
    only_cell,
    plain,
    ratio_block,
    ratio_lines,
)
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats.cell_scores import COMMON, MEAN, averaged, mean_target
from analysis.stats.comparison import Comparison

COMPETING = ["ratio", "calibration", "gate", "seed"]
"""Cells that agree in these are compared with each other where allocations or channel scores vary."""


@output(
    "heapr.table1",
    chapter="channels",
    filters="*Model|Pruned",
    needs=f"HEAPr or CAMERA with allocation=global or layerwise, and {HEAPR}",
)
def method_table(results: Results, name: str) -> Table:
    """HEAPr's Table 1: every method at every ratio, its seven benchmarks and their mean."""
    study, comparisons = results.study, list(filter(_of_heapr, results.comparisons))
    blocks = [
        ratio_block(comparison, key["ratio"], settings.method_labels(cells))
        for comparison in comparisons
        for key, cells in groups(plain(comparison), ["ratio"])
    ]
    return block_table(
        study,
        blocks,
        columns=(*names.HEAPR, MEAN),
        name=name,
        title="Channels and whole experts",
        caption="Kept: share of the parameters of routed experts. FLOPs saved: per token, with the routing the pruned "
        "model has.",
    )


@output(
    "heapr.table2",
    chapter="channels",
    filters="Model|Pruned",
    needs=f"CAMERA with allocation=sequential or layerwise, HEAPr with layerwise or global, and {HEAPR}",
)
def channel_choice_table(results: Results, name: str) -> Table:
    """HEAPr's Table 2: CAMERA-P, HEAPr-L and HEAPr-G where CAMERA-P was run; differences are to CAMERA-P, to its
    one-shot form where only that was run."""
    study, comparisons = results.study, results.comparisons
    blocks = []
    for comparison in comparisons:
        cells = plain(comparison)
        pairs = zip(cells["criterion"], cells["allocation"], strict=True)
        for key, compared in groups(cells[[pair in names.METHODS for pair in pairs]], COMPETING):
            camera = compared[compared["criterion"] == "camera"]
            sequential = camera[camera["allocation"] == "sequential"]
            base = only_cell(sequential if len(sequential) else camera)
            if base is not None and len(compared) > 1:
                blocks.append(ratio_block(comparison, key["ratio"], settings.method_labels(compared), base))
    return block_table(
        study,
        blocks,
        columns=(*names.HEAPR, MEAN),
        name=name,
        title="Which channels: CAMERA and HEAPr inside layers, HEAPr over all",
        caption="CAMERA-P scores each layer on what the pruned layers below it give, as its code does; one-shot scores "
        "all layers of the unpruned model. Difference: Mean minus that of CAMERA-P (one-shot where only that was run), "
        "paired.",
    )


@output(
    "coverage.table6",
    chapter="channels",
    needs=f"one channel criterion under allocation=coverage and others, and {SLIMMING}",
)
def allocator_table(results: Results, name: str) -> Table:
    """MoE-Slimming's Table 6: one channel score under every allocation; differences are to uniform widths."""
    study, comparisons = results.study, results.comparisons
    blocks = []
    for comparison, key, cells in _channel_groups(comparisons, [*COMPETING, "criterion"]):
        chosen = cells[[set(SMOOTHING).isdisjoint(settings.allocation(word)[1]) for word in cells["allocation"]]]
        if "coverage" in set(chosen["allocation"]) and chosen["allocation"].nunique() > 1:
            base = only_cell(chosen[chosen["allocation"] == "uniform"])
            labels = chosen["allocation"].map(names.allocated).map(names.capitalised)
            blocks.append(ratio_block(comparison, key["ratio"], labels, base))
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        name=name,
        title="Channel budgets: allocations",
        caption="Difference: Mean minus that of uniform widths, paired. Rows name the allocation.",
    )


@output(
    "coverage.table7",
    chapter="channels",
    needs=f"allocation=coverage and its coverage_smoothing_* variants, and {SLIMMING}",
    also=("coverage.table15",),
)
def smoothing_table(results: Results, name: str) -> Table:
    """MoE-Slimming's Table 7: coverage budgets with losses smoothed differently; differences are to the default."""
    study, comparisons = results.study, results.comparisons
    blocks = []
    for comparison, key, cells in _channel_groups(comparisons, [*COMPETING, "criterion"]):
        parsed = [settings.allocation(word) for word in cells["allocation"]]
        chosen = cells[
            [allocation == "coverage" and set(parameters) <= set(SMOOTHING) for allocation, parameters in parsed]
        ]
        if chosen["allocation"].nunique() > 1:
            words = chosen["allocation"].map(_smoothing)
            base = only_cell(chosen[words == DEFAULT_SMOOTHING])
            blocks.append(ratio_block(comparison, key["ratio"], words.map(names.capitalised), base))
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        name=name,
        title="Channel budgets: smoothing",
        caption="How layer losses are smoothed; the priors of experts keep their own smoothing. Difference: Mean minus "
        f"that of {DEFAULT_SMOOTHING}, the default, paired.",
    )


@output(
    "coverage.table13", chapter="channels", needs=f"several channel criteria under allocation=coverage, and {SLIMMING}"
)
def channel_score_table(results: Results, name: str) -> Table:
    """MoE-Slimming's Table 13: channel scores under one coverage allocation; differences are to the default score."""
    study, comparisons = results.study, results.comparisons
    blocks = []
    for comparison in comparisons:
        cells = plain(comparison)
        cells = cells[(cells["granularity"] == "channel") & (cells["allocation"] == "coverage")]
        for ratio in sorted(cells["ratio"].unique()):
            chosen = cells[cells["ratio"] == ratio]
            if chosen["criterion"].nunique() > 1:
                base = only_cell(chosen[chosen["criterion"] == "channel_activation"])
                blocks.append(ratio_block(comparison, ratio, chosen["criterion"].map(names.criterion), base))
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        name=name,
        title="Channel scores under coverage budgets",
        caption="Activations, weights and gradients are those of the down projection, unless a row names another. "
        "Difference: Mean minus that of Activation, the default, paired.",
    )


def _channel_groups(
    comparisons: Sequence[Comparison], columns: Sequence[str]
) -> Iterator[tuple[Comparison, dict[str, float], pd.DataFrame]]:
    for comparison in comparisons:
        cells = plain(comparison)
        for key, group in groups(cells[cells["granularity"] == "channel"], columns):
            yield comparison, key, group


def _smoothing(allocation: str) -> str:
    """How an allocation smooths layer losses."""
    return next(iter(settings.allocation(allocation)[1].values()), DEFAULT_SMOOTHING)


ALIGNED = re.compile(r"coverage aligned \d+( scores)?")
"""Allocations that round channel budgets to blocks, and go by remainders or by scores."""
SMALLEST = re.compile(r"coverage (aligned 128|min \d+)")
"""Allocations that differ in the smallest expert they leave; the first one is USUAL."""
USUAL = "coverage aligned 128"
"""The published one, which others are measured against."""


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
        aligned = cells[cells["allocation"].map(lambda word: bool(words.fullmatch(str(word))))]
        for key, part in groups(aligned, ["ratio", "calibration", "gate", "seed", "criterion", "recovery"]):
            if len(part) > 1:
                base = only_cell(part[part["allocation"] == USUAL])
                labels = part["allocation"].map(names.capitalised)
                blocks.append(ratio_block(comparison, key["ratio"], labels, base))
    return block_table(
        study,
        blocks,
        columns=columns,
        name=name,
        title=title,
        caption="Aligned: kept channels of an expert are a multiple of so many; min: experts below so many lose all; "
        f"scores: blocks left over go by score. Difference: {columns[-1]} minus that of {USUAL}, paired.",
    )


def ratio_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """HEAPr's Fig. 2: the mean of its benchmarks with intervals, and FLOPs saved, against the share removed.

    None below three ratios, or without any of its benchmarks.
    """
    lines = ratio_lines(plain(comparison))
    cells = [int(str(cell)) for line in lines.values() for cell in line.index]
    target = mean_target(comparison, cells, names.HEAPR)
    if not target:
        return None
    saved = 1 - study.costs.set_index("cell")["flops_ratio"].astype(float)
    with style.look():
        drawing = style.drawing(style.PAGE, 2.7)
        left, right = drawing.subplots(1, 2)
        _unpruned(left, comparison, target)
        score, (low, high) = comparison.score(target), comparison.interval(target)
        handles = []
        for at, (label, line) in enumerate(lines.items()):
            look: Any = {"color": style.colour(line["criterion"].iloc[0]), "marker": style.MARKERS[at % 11]}
            x = line["ratio"].to_numpy(float) * 100 + 0.6 * (at - (len(lines) - 1) / 2)
            y, rows = score[line.index].to_numpy(float), line.index
            left.vlines(x, low[rows], high[rows], color=look["color"], linewidth=1.4, alpha=0.6)
            left.plot(x, y, markersize=4, linewidth=1.2, **look)
            right.plot(line["ratio"] * 100, saved.reindex(rows) * 100, markersize=4, linewidth=1.2, **look)
            handles.append(Line2D([], [], label=label, markersize=4, **look))
        left.set(ylabel="mean of HEAPr's benchmarks", ylim=(0, None))
        right.set(ylabel="FLOPs saved per token (%)", ylim=(0, None))
        for axes in (left, right):
            axes.set(xlabel="routed parameters removed (%)")
            axes.grid(axis="y")
        dashes = Line2D([], [], color=style.INK, linestyle=(0, (4, 2)), linewidth=0.9, label="Unpruned")
        drawing.legend(handles=[*handles, dashes], loc="outside lower center", ncols=min(5, len(handles) + 1))
    caption = (
        f"Left: {averaged(target, names.HEAPR)}, with 95 % intervals (items resampled), points of one ratio set side "
        "by side; dashed: the unpruned model. Right: FLOPs of a token saved, with the routing that the pruned model "
        "has; whole experts save only rows of routers, since as many experts as before answer each token."
    )
    return Figure(name, f"Accuracy and FLOPs against the ratio: {comparison.model}", caption, drawing)


def _unpruned(axes: Axes, comparison: Comparison, target: tuple[str, ...]) -> None:
    full = comparison.unpruned
    if full is None:
        return
    low, high = comparison.interval(target)
    axes.axhspan(low[full], high[full], color=style.RULE, alpha=0.5, linewidth=0)
    axes.axhline(comparison.score(target)[full], color=style.INK, linestyle=(0, (4, 2)), linewidth=0.9)


def loss_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Loss against the ratio, where a benchmark is a loss or a perplexity and a method was run at three ratios."""
    results = study.results[study.results["metric"].astype(str).str.endswith(names.LOWER_IS_BETTER)]
    lines = ratio_lines(plain(comparison))
    drawable = [cell for found in lines.values() for cell in found.index]
    results = results[results["cell"].isin([comparison.unpruned, *drawable])]
    drawn = [str(benchmark) for benchmark in results["benchmark"].unique()] if lines else []
    if not drawn:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE, 2.8)
        for axes, benchmark in zip(np.atleast_1d(drawing.subplots(1, len(drawn))), drawn, strict=True):
            found = results[results["benchmark"] == benchmark].set_index("cell")
            for at, (label, cells) in enumerate(lines.items()):
                some = cells[cells.index.isin(found.index)]
                errors = 1.96 * found.loc[some.index, "stderr"].astype(float).fillna(0)
                axes.errorbar(
                    some["ratio"] * 100, found.loc[some.index, "score"], errors,
                    color=style.colour(cells["criterion"].iloc[0]), label=label,
                    marker=style.MARKERS[at % 11], markersize=4, linewidth=1.2,
                )  # fmt: skip
            whole = found["score"][found.index == comparison.unpruned]
            if len(whole):
                axes.axhline(whole.iloc[0], color=style.INK, linestyle="--", linewidth=0.9)
            axes.set(xlabel="routed parameters removed (%)", ylabel=str(found["metric"].iloc[0]).replace("_", " "))
            axes.set_title(names.benchmark(benchmark))
            axes.grid(axis="y")
        handles, labels = axes.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=min(2, len(handles)))
    caption = "Bars: 95 %, from standard errors over windows of the text. Dashed: the unpruned model. Lower is better."
    return Figure(name, f"Loss against the ratio: {comparison.model}", caption, drawing)


def _of_heapr(comparison: Comparison) -> bool:
    """Whether a method of HEAPr's tables was run."""
    pairs = zip(comparison.cells["criterion"], comparison.cells["allocation"], strict=True)
    return any(pair in names.METHODS for pair in pairs)


@output("heapr.fig2", chapter="channels", needs=f"HEAPr or CAMERA at three ratios, and {HEAPR}")
def accuracy_by_ratio(results: Results, name: str) -> list[Item | None]:
    """Accuracy and FLOPs against the ratio."""
    return [
        ratio_figure(results.study, comparison, name=own)
        for comparison, own in results.per_model(name)
        if _of_heapr(comparison)
    ]


@output("loss_by_ratio", chapter="channels", needs="a perplexity at three ratios")
def loss_by_ratio(results: Results, name: str) -> list[Item | None]:
    """The model's loss or perplexity against the ratio."""
    return [loss_figure(results.study, comparison, name=own) for comparison, own in results.per_model(name)]


@output(
    "coverage.table8",
    needs=f"several of coverage_aligned_* of sweeps (coverage_table8), and {SLIMMING}",
    also=("coverage.table17",),
)
def aligned_blocks(results: Results, name: str) -> Table:
    """Which experts get the channels that rounding to blocks leaves over."""
    columns = (*names.COMMON_SENSE, COMMON, "gsm8k", "humaneval", MEAN)
    title = "Channel budgets in blocks: who gets what rounding leaves over"
    return block_size_table(results.study, results.comparisons, name=name, columns=columns, title=title, words=ALIGNED)


@output(
    "coverage.table16",
    chapter="channels",
    needs=f"coverage_aligned_128 and coverage_min_* of sweeps (coverage_table16), and {SLIMMING}",
)
def smallest_experts(results: Results, name: str) -> Table:
    """With how few channels an expert loses all of them."""
    columns = (*names.ABLATION, MEAN)
    title = "Channel budgets in blocks: with how few channels an expert loses all"
    return block_size_table(results.study, results.comparisons, name=name, columns=columns, title=title, words=SMALLEST)
