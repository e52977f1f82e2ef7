"""Channel criteria and channel budgets: HEAPr's Tables 1 and 2 and Fig. 2, and the tables of
MoE-Slimming that compare budgets, channel scores and blocks (6, 7, 8, 13 and 16)."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import settings
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.outputs.captions import HEAPR, SLIMMING
from moe_lab.analysis.outputs.score_rows import (
    DEFAULT_SMOOTHING,
    SMOOTHING,
    Block,
    cells_by_ratio,
    cells_without_recovery,
    only_cell,
    ratio_block,
    score_table,
)
from moe_lab.analysis.registry import Results
from moe_lab.analysis.stats.cell_scores import COMMON_SENSE_MEAN, MEAN
from moe_lab.analysis.stats.comparison import Comparison

EQUAL_COLUMNS = ["ratio", "calibration", "gate"]
"""Cells with equal values in these columns are compared across allocations or channel scores."""


def heapr_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells that prune channels by HEAPr or CAMERA, the methods of HEAPr's tables."""
    channels = cells[cells["granularity"] == "channel"]
    pairs = zip(channels["criterion"], channels["allocation"], strict=True)
    return channels[[pair in names.METHODS for pair in pairs]]


@score_table(
    "heapr.table1",
    "Channels and whole experts",
    (*names.HEAPR, MEAN),
    (
        "Kept: share of the parameters of routed experts. FLOPs: per token, with the pruned "
        "model's routing, as a share of the unpruned model's; removing whole experts saves only "
        "rows of routers, since a token is still given to as many experts."
    ),
    drawn=("Kept", "FLOPs"),
    chapter="channels",
    needs=f"HEAPr or CAMERA with allocation=global or layerwise, and {HEAPR}",
    aliases=("heapr.fig2",),
)
def method_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """HEAPr's Table 1 and Fig. 2: every method and ratio, HEAPr's seven benchmarks, their mean."""
    if len(heapr_cells(comparison.cells)):
        for ratio, cells in cells_by_ratio(cells_without_recovery(comparison)):
            yield ratio_block(comparison, ratio, settings.method_labels(cells))


@score_table(
    "heapr.table2",
    "Choice of channels: CAMERA and HEAPr within layers, HEAPr over all layers",
    (*names.HEAPR, MEAN),
    "CAMERA-P scores each layer on the outputs of the pruned layers below it, as its code does; "
    "one-shot scores all layers of the unpruned model. Difference: Mean minus that of CAMERA-P "
    "(one-shot where only that was run), paired.",
    chapter="channels",
    needs=(
        "CAMERA with allocation=sequential or layerwise, HEAPr with layerwise or global, and "
        f"{HEAPR}"
    ),
)
def channel_choice_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """HEAPr's Table 2: CAMERA-P, HEAPr-L and HEAPr-G."""
    for key, cells in groups(heapr_cells(cells_without_recovery(comparison)), EQUAL_COLUMNS):
        camera_cells = cells[cells["criterion"] == "camera"]
        sequential_cells = camera_cells[camera_cells["allocation"] == "sequential"]
        # without sequential cells, all of `camera_cells` are one-shot (allocation=layerwise)
        base = only_cell(sequential_cells if len(sequential_cells) else camera_cells)
        if base is not None and len(cells) > 1:
            yield ratio_block(comparison, key["ratio"], settings.method_labels(cells), base)


@score_table(
    "coverage.table6",
    "Channel budgets: allocations",
    (*names.ABLATION, MEAN),
    "Difference: Mean minus that of uniform widths, paired. Rows name the allocation.",
    chapter="channels",
    needs=f"one channel criterion under allocation=coverage and others, and {SLIMMING}",
)
def allocator_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 6: one channel score under every allocation."""
    for key, cells in groups(
        cells_without_recovery(comparison, "channel"), [*EQUAL_COLUMNS, "criterion"]
    ):
        # plans that set a smoothing belong to Table 7
        has_default_smoothing = []
        for text in cells["allocation"]:
            _, parameters = names.name_and_settings(text)
            has_default_smoothing.append(set(SMOOTHING).isdisjoint(parameters))
        competitors = cells[has_default_smoothing]
        allocations = competitors["allocation"]
        if "coverage" in set(allocations) and allocations.nunique() > 1:
            base = only_cell(competitors[allocations == "uniform"])
            labels = allocations.map(names.allocation_name).map(names.capitalised)
            yield ratio_block(comparison, key["ratio"], labels, base)


@score_table(
    "coverage.table7",
    "Channel budgets: smoothing",
    (*names.ABLATION, MEAN),
    "How layer losses are smoothed; the priors of experts keep their own smoothing. Difference: "
    f"Mean minus that of {DEFAULT_SMOOTHING}, the default, paired.",
    chapter="channels",
    needs=f"allocation=coverage and its coverage_smoothing_* variants, and {SLIMMING}",
    aliases=("coverage.table15",),
)
def smoothing_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 7: coverage budgets with different smoothings of layer losses."""
    for key, cells in groups(
        cells_without_recovery(comparison, "channel"), [*EQUAL_COLUMNS, "criterion"]
    ):
        smoothing_of_cell = {}
        for cell, text in cells["allocation"].items():
            allocation, parameters = names.name_and_settings(text)
            if allocation == "coverage" and set(parameters) <= set(SMOOTHING):
                # the only parameter, if there is one, is the smoothing
                smoothing_of_cell[cell] = next(iter(parameters.values()), DEFAULT_SMOOTHING)
        smoothings = pd.Series(smoothing_of_cell, dtype=object)
        # these allocations differ in the smoothing alone, so their number is that of smoothings
        if cells["allocation"][smoothings.index].nunique() > 1:
            base = only_cell(smoothings[smoothings == DEFAULT_SMOOTHING])
            yield ratio_block(comparison, key["ratio"], smoothings.map(names.capitalised), base)


@score_table(
    "coverage.table13",
    "Channel scores under coverage budgets",
    (*names.ABLATION, MEAN),
    "Activations, weights and gradients are those of the down projection, unless a row names "
    "another. Difference: Mean minus that of Activation, the default, paired.",
    chapter="channels",
    needs=f"several channel criteria under allocation=coverage, and {SLIMMING}",
)
def channel_score_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 13: channel scores under the allocation `coverage`."""
    cells = cells_without_recovery(comparison, "channel")
    for ratio, competitors in cells_by_ratio(cells[cells["allocation"] == "coverage"]):
        criteria = competitors["criterion"]
        if criteria.nunique() > 1:
            base = only_cell(competitors[criteria == "channel_activation"])
            yield ratio_block(comparison, ratio, criteria.map(names.criterion), base)


PUBLISHED_BLOCKS = "coverage aligned 128"
"""The allocation with the published block size and smallest expert, the reference of
differences."""


def allocation_blocks(comparison: Comparison, pattern: str) -> Iterator[Block]:
    """Blocks of cells that differ in the allocation alone. Differences are to the cell with the
    allocation PUBLISHED_BLOCKS.

    pattern: regular expression that the allocations match."""
    matches = comparison.cells[comparison.cells["allocation"].str.fullmatch(pattern)]
    for key, cells in groups(matches, [*EQUAL_COLUMNS, "criterion", "recovery"]):
        if len(cells) > 1:
            base = only_cell(cells[cells["allocation"] == PUBLISHED_BLOCKS])
            yield ratio_block(
                comparison, key["ratio"], cells["allocation"].map(names.capitalised), base
            )


_BLOCKS_CAPTION = (
    "Aligned: an expert keeps a multiple of so many channels; min: experts below so many lose all; "
    "scores: channels left over by rounding go to the blocks of the highest scores. Difference: "
    f"{MEAN} minus that of {PUBLISHED_BLOCKS}, paired."
)


@score_table(
    "coverage.table8",
    "Channel budgets in blocks: channels left over by rounding",
    (*names.COMMON_SENSE, COMMON_SENSE_MEAN, "gsm8k", "humaneval", MEAN),
    _BLOCKS_CAPTION,
    needs=f"several of coverage_aligned_* of sweeps (coverage_table8), and {SLIMMING}",
    aliases=("coverage.table17",),
)
def aligned_blocks(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Channel budgets in blocks: sizes of blocks, and assignment of channels left by rounding."""
    return allocation_blocks(comparison, r"coverage aligned \d+( scores)?")


@score_table(
    "coverage.table16",
    "Channel budgets in blocks: the smallest expert that is kept",
    (*names.ABLATION, MEAN),
    _BLOCKS_CAPTION,
    chapter="channels",
    needs=f"coverage_aligned_128 and coverage_min_* of sweeps (coverage_table16), and {SLIMMING}",
)
def smallest_experts(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Channel budgets in blocks: smallest number of channels with which an expert is kept."""
    return allocation_blocks(comparison, r"coverage (aligned 128|min \d+)")
