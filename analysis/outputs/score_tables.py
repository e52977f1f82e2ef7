"""The papers' tables of scores: which cells they compare, with which reference, on which columns.

HEAPr, Tables 1 and 2 and Fig. 2; MoE-Slimming, Tables 3 to 11 and 13 to 19 and Figs. 8 and 9;
AIMER, Tables 2, 3 and 5 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import plans
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.load.settings import method_labels
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import HEAPR, SLIMMING
from moe_lab.analysis.outputs.score_rows import (
    COSTS_OF_MODEL,
    COVERAGE,
    DEFAULT_SMOOTHING,
    OF_MODEL,
    SMOOTHING,
    STORAGE,
    STORAGE_COSTS,
    Block,
    BlockMaker,
    calibrated_cells,
    cells_without_recovery,
    only_cell,
    score_table,
    sort_cells,
)
from moe_lab.analysis.registry import Results
from moe_lab.analysis.stats.cell_scores import (
    CODE_BENCHMARKS,
    COMMON_SENSE_MEAN,
    GROUPS,
    MEAN,
    WRITING_AND_MATH,
)
from moe_lab.analysis.stats.comparison import Comparison

EQUAL_COLUMNS = ["ratio", "calibration", "gate"]
"""Cells with equal values in these columns are compared across allocations or channel scores."""
PUBLISHED_BLOCKS = "coverage aligned 128"
"""The allocation with the published block size and smallest expert, the reference of
differences."""
PRIOR_LABELS = {
    "ala1": "Attribution, first order",
    "moe_slimming.moving_average": "Attribution, first order, moving average",
    "ala2": "Attribution, second order",
    "true_ablation": "Layer loss without the expert",
    "loss": "Model loss without the expert",
    "usage": "Tokens routed to the expert",
    "router_weight": "Sum of router weights",
    "moe_slimming.router": "Softmax of router outputs",
    "ala_lm": "Attribution of the model's loss",
    "none": "No prior",
}
"""Prior of allocation=coverage -> its label, in the order of rows."""


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
        "Kept: share of the parameters of routed experts. Of the model: share of all parameters. "
        "FLOPs: per token, with the pruned model's routing, as a share of the unpruned model's; "
        "removing whole experts saves only rows of routers, since a token is still given to as "
        "many experts."
    ),
    costs=COSTS_OF_MODEL,
    drawn=(OF_MODEL, "FLOPs"),
    chapter="channels",
    needs=f"HEAPr or CAMERA with allocation=global or layerwise, and {HEAPR}",
    aliases=("heapr.fig2",),
)
def method_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """HEAPr's Table 1 and Fig. 2: every method and ratio, HEAPr's seven benchmarks, their mean."""
    if len(heapr_cells(comparison.cells)):
        for _, cells in groups(cells_without_recovery(comparison), ["ratio"]):
            yield Block(comparison, method_labels(cells))


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
    for _, cells in groups(heapr_cells(cells_without_recovery(comparison)), EQUAL_COLUMNS):
        camera_cells = cells[cells["criterion"] == "camera"]
        sequential_cells = camera_cells[camera_cells["allocation"] == "sequential"]
        # without sequential cells, all of `camera_cells` are one-shot (allocation=layerwise)
        base = only_cell(sequential_cells if len(sequential_cells) else camera_cells)
        if base is not None and len(cells) > 1:
            yield Block(comparison, method_labels(cells), base)


@score_table(
    "coverage.table10",
    "Channels and whole experts, benchmark by benchmark",
    (*names.COMMON_SENSE, MEAN),
    "Kept: share of the parameters of routed experts. Storage: weights on disk.",
    costs=STORAGE_COSTS,
    drawn=(STORAGE,),
    chapter="cost",
    needs=(
        "cells of channels and of whole experts, without recovery, at several ratios, and "
        f"{SLIMMING}"
    ),
    aliases=("coverage.fig9",),
)
def channels_and_experts(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 10 and Fig. 9: channels and whole experts, benchmark by benchmark."""
    all_cells = cells_without_recovery(comparison)
    if all_cells["granularity"].nunique() > 1:
        for _, cells in groups(all_cells, ["ratio"]):
            yield Block(comparison, method_labels(cells.sort_index()))


@score_table(
    "coverage.table6",
    "Channel budgets: allocations",
    (*names.ABLATION, MEAN),
    "Difference: Mean minus that of uniform widths, paired. Rows name the allocation.",
    chapter="channels",
    by_domain=True,
    needs=f"one channel criterion under allocation=coverage and others, and {SLIMMING}",
)
def allocator_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 6: one channel score under every allocation."""
    for cells in _channel_cells(comparison):
        # plans that set a smoothing belong to Table 7
        competitors = cells[cells["parameters"].map(set(SMOOTHING).isdisjoint)]
        allocations = competitors["allocation"]
        if COVERAGE in set(allocations) and allocations.nunique() > 1:
            base = only_cell(competitors[allocations == "uniform"])
            labels = allocations.map(names.allocation_name).map(names.capitalised)
            yield Block(comparison, labels, base)


@score_table(
    "coverage.table7",
    "Channel budgets: smoothing",
    (*names.ABLATION, MEAN),
    "How layer losses are smoothed; the priors of experts keep their own smoothing. Difference: "
    f"Mean minus that of {DEFAULT_SMOOTHING}, the default, paired.",
    chapter="channels",
    by_domain=True,
    needs=f"allocation=coverage and its coverage_smoothing_* variants, and {SLIMMING}",
    aliases=("coverage.table15",),
)
def smoothing_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 7: coverage budgets with different smoothings of layer losses."""
    for cells in _channel_cells(comparison):
        smooths_alone = cells["parameters"].map(set(SMOOTHING).issuperset)
        parameters = cells["parameters"][smooths_alone & (cells["allocation_name"] == COVERAGE)]
        smoothings = parameters.map(lambda pairs: next(iter(pairs.values()), DEFAULT_SMOOTHING))
        # these allocations differ in the smoothing alone, so their number is that of smoothings
        if cells["allocation"][smoothings.index].nunique() > 1:
            base = only_cell(smoothings[smoothings == DEFAULT_SMOOTHING])
            yield Block(comparison, smoothings.map(names.capitalised), base)


def _channel_cells(comparison: Comparison) -> Iterator[pd.DataFrame]:
    """Yield cells of channels that differ in the allocation alone."""
    cells = cells_without_recovery(comparison, "channel")
    for _, equal_cells in groups(cells, [*EQUAL_COLUMNS, "criterion"]):
        yield equal_cells


@score_table(
    "coverage.table13",
    "Channel scores under coverage budgets",
    (*names.ABLATION, MEAN),
    "Activations, weights and gradients are those of the down projection, unless a row names "
    "another. Difference: Mean minus that of Activation, the default, paired.",
    chapter="channels",
    by_domain=True,
    needs=f"several channel criteria under allocation=coverage, and {SLIMMING}",
)
def channel_score_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 13: channel scores under the allocation `coverage`."""
    cells = cells_without_recovery(comparison, "channel")
    cells = cells[cells["allocation"] == COVERAGE]
    for panel in comparison.panels:
        competitors = cells[cells.index.isin(panel.cells.values())]
        criteria = competitors["criterion"]
        if criteria.nunique() > 1:
            base = only_cell(competitors[criteria == "channel_activation"])
            yield Block(comparison, criteria.map(names.criterion), base)


@score_table(
    "coverage.table8",
    "Channel budgets in blocks",
    (*names.COMMON_SENSE, COMMON_SENSE_MEAN, "gsm8k", "humaneval", MEAN),
    "Aligned: an expert keeps a multiple of so many channels; min: experts below so many lose all; "
    "scores: channels left over by rounding go to the blocks of the highest scores. Difference: "
    f"{MEAN} minus that of {PUBLISHED_BLOCKS}, paired.",
    chapter="channels",
    by_domain=True,
    needs=(
        "several of coverage_aligned_* and coverage_min_* of sweeps (coverage_table8 and "
        f"coverage_table16), and {SLIMMING}"
    ),
    aliases=("coverage.table16", "coverage.table17"),
)
def aligned_blocks(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Channel budgets in blocks: sizes of blocks, smallest experts, and channels left over."""
    pattern = r"coverage (aligned \d+( scores)?|min \d+)"
    matches = comparison.cells[comparison.cells["allocation"].str.fullmatch(pattern)]
    for _, cells in groups(matches, [*EQUAL_COLUMNS, "criterion", "recovery"]):
        if len(cells) > 1:
            base = only_cell(cells[cells["allocation"] == PUBLISHED_BLOCKS])
            yield Block(comparison, cells["allocation"].map(names.capitalised), base)


@score_table(
    "coverage.table14.scores",
    "Channel budgets by the prior that divides a layer among its experts",
    (*names.COMMON_SENSE, "gsm8k", "mmlu", MEAN),
    "Rows name the prior by which allocation=coverage divides a layer among its experts. "
    "Difference: Mean minus that of the first order, paired.",
    chapter="attribution",
    by_domain=True,
    needs="plans of allocation=coverage that differ in the prior alone",
)
def prior_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 14: scores of coverage budgets that differ in the prior alone."""
    cells = comparison.cells.join(plans.priors(comparison.cells, results.study.reader), how="inner")
    for key, plans_of_block in groups(cells, [*plans.EQUAL_BUT_PRIOR, "calibration", "recovery"]):
        # a prior without a label, such as a plugin's, comes last
        labels = plans_of_block["prior"].map(PRIOR_LABELS).fillna(plans_of_block["prior"])
        order = [*PRIOR_LABELS.values(), *labels.unique()].index
        rows = plans_of_block.assign(label=labels).sort_values(
            "label", key=lambda column: column.map(order), kind="stable"
        )
        if rows["prior"].nunique() < 2:
            continue
        allocation = ""
        base = None
        first_order = rows[rows["prior"] == plans.FIRST_ORDER_PRIOR]
        if len(first_order):
            # first order is the default prior, which names of allocations usually leave out: this
            # name fits all rows of the block
            allocation = names.allocation_name(str(first_order["allocation"].iloc[0]))
            base = int(first_order.index[0])
        detail = names.comma_joined(names.recovery_name(key["recovery"]), allocation)
        yield Block(comparison, rows["label"], base, detail)


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
    cells = calibrated_cells(results.study, comparison)
    for key, rows in groups(cells, ["ratio", "method", "gate"]):
        if rows["calibration"].nunique() > 1:
            suffixes = rows["read"].map(", {:,.0f} tokens".format, na_action="ignore").fillna("")
            labels = rows["calibration"].map(names.calibration) + suffixes
            yield Block(comparison, labels, int(rows.index[-1]), names.method(key["method"]))


@score_table(
    "coverage.table11",
    "Pruning and recovery together",
    (*names.ABLATION, MEAN),
    "Rows name how pruned models were quantised or tuned. Difference: Mean minus that of the same "
    "method without recovery, in 16 bits, paired. Storage: weights on disk, with the scales of "
    "quantised ones.",
    costs=STORAGE_COSTS,
    drawn=(STORAGE,),
    chapter="recovery",
    by_domain=True,
    needs=f"cells with a recovery, and {SLIMMING}",
    aliases=("coverage.fig8",),
)
def recovery_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 11 and Fig. 8: every ratio with every recovery."""
    cells = sort_cells(comparison.pruned_cells, "ratio", "recovery")
    for _, sweep in groups(cells, ["criterion", "allocation", "calibration", "gate"]):
        if sweep["recovery"].nunique() > 1:
            for _, rows in groups(sweep, ["ratio"]):
                base = only_cell(rows[rows["recovery"] == "none"])
                yield Block(comparison, rows["method"].map(names.method), base)


_RECOVERY_CAPTION = "Storage: weights on disk, with the scales of quantised ones."


@score_table(
    "coverage.table3",
    "Pruned and recovered: general benchmarks",
    (*names.GENERAL, MEAN),
    _RECOVERY_CAPTION,
    costs=STORAGE_COSTS,
    needs="cells with a recovery (coverage_table3 and coverage_table5 of sweeps)",
    aliases=("coverage.table5",),
)
@score_table(
    "coverage.table4",
    "Pruned and recovered: reasoning",
    (*names.REASONING, MEAN),
    _RECOVERY_CAPTION,
    costs=STORAGE_COSTS,
    by_domain=True,
    needs="cells with a recovery, and reasoning benchmarks, such as gsm8k",
)
def recovery_blocks(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Tables 3 (general) and 4 (reasoning): pruned and recovered models.

    Yields a block for each ratio at which a cell has a recovery: all pruned cells of this ratio,
    sorted by method."""
    for _, cells in groups(sort_cells(comparison.pruned_cells, "ratio", "method"), ["ratio"]):
        if set(cells["recovery"]) != {"none"}:
            yield Block(comparison, method_labels(cells))


@score_table(
    "coverage.table9",
    "Fewer experts per token",
    (*names.ABLATION, MEAN),
    "Top-k: experts per token, in calibration and in evaluation; models without it in their name "
    "use the number that they were trained with.",
    chapter="cost",
    by_domain=True,
    needs="cells with model.top_k=null,2,1 (coverage_table9 of sweeps)",
    aliases=("coverage.table19",),
)
def top_k_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Pruned models with several numbers of experts per token.

    The first of several models that differ in this number yields the blocks of all of them, most
    experts first."""
    trained_model, _ = names.split_top_k(comparison.model)
    family = [
        (experts_per_token(results.study, member.model), member)
        for member in results.comparisons
        if names.split_top_k(member.model)[0] == trained_model
    ]
    if len(family) < 2 or family[0][1] is not comparison:
        return
    for top_k, member in sorted(family, key=lambda pair: -pair[0]):
        for _, cells in groups(member.pruned_cells.sort_values("ratio", kind="stable"), ["ratio"]):
            yield Block(member, method_labels(cells) + f", top-{top_k}")


def experts_per_token(study: Study, model: str) -> int:
    """Number of experts that a model gives a token; 0 if it is unknown."""
    _, top_k = names.split_top_k(model)
    if top_k is not None:
        return top_k
    # the model routes as in training
    layers = study.models.get(model, {}).get("layers", {}).values()
    return max((layer["top_k"] for layer in layers), default=0)


def weights_table(
    name: str, title_end: str, columns: Sequence[str], needs: str = "", **fields: Any
) -> Callable[[BlockMaker], BlockMaker]:
    """The decorator `score_table` for tables of criteria that read weights alone.

    title_end: last words of the title; columns: benchmarks and averages; needs: data besides
    AIMER's cells."""
    title = f"Scores from weights alone and from text: {title_end}"
    caption = "Difference: last of the scores minus that of AIMER, paired."
    needs = f"cells with criterion=aimer{needs}"
    return score_table(name, title, columns, caption, needs=needs, **fields)


@weights_table(
    "aimer.table2", "group averages", GROUPS, chapter="weights", aliases=("aimer.table3",)
)
@weights_table(
    "aimer.table5",
    "writing and mathematics",
    WRITING_AND_MATH,
    ", and WildBench, gsm8k or math500",
)
@weights_table("aimer.table6", "coding", CODE_BENCHMARKS, ", and coding benchmarks")
@weights_table(
    "aimer.table7",
    "multiple choice",
    (*names.MULTIPLE_CHOICE, "MC Avg"),
    ", and multiple-choice benchmarks",
)
def aimer_blocks(results: Results, comparison: Comparison) -> Iterator[Block]:
    """AIMER's Tables 2 (groups), 5 (writing, mathematics), 6 (coding) and 7 (multiple choice).

    Yields a block for each ratio at which AIMER was run, with the cells of all criteria without
    recovery. AIMER's cell is the base of the block's differences."""
    for _, cells in groups(cells_without_recovery(comparison), ["ratio"]):
        aimer_cells = cells[cells["criterion"] == "aimer"]
        if len(aimer_cells):
            yield Block(comparison, method_labels(cells), only_cell(aimer_cells))
