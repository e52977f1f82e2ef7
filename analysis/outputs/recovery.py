"""Pruning combined with quantisation and fine-tuning: scores and bytes by ratio and recovery
(MoE-Slimming, Tables 3 to 5, 9, 11 and 19 and Fig. 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import settings
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import SLIMMING
from moe_lab.analysis.outputs.score_rows import (
    STORAGE,
    STORAGE_COSTS,
    Block,
    block_table,
    cells_by_ratio,
    only_cell,
    ratio_block,
    score_table,
    sort_cells,
)
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.stats.cell_scores import MEAN
from moe_lab.analysis.stats.comparison import Comparison

NO_RECOVERY = "16 bits"
"""Label of models that were neither quantised nor fine-tuned."""
SWEEP_COLUMNS = ["criterion", "allocation", "calibration", "gate"]
"""Cells with equal values in these columns form one sweep over ratios and recoveries."""


def sweeps(comparison: Comparison) -> list[pd.DataFrame]:
    """The model's sweeps with several recoveries. A sweep has the cells with equal values in
    SWEEP_COLUMNS, sorted by ratio and recovery. The unpruned model is in no sweep."""
    cells = comparison.pruned_cells
    cells = sort_cells(cells, "ratio", "recovery")
    return [sweep for _, sweep in groups(cells, SWEEP_COLUMNS) if sweep["recovery"].nunique() > 1]


def labels(comparison: Comparison) -> pd.Series:
    """Label of each cell of `sweeps`, indexed by cell: the display name of the recovery, after the
    name of the method if there are several sweeps."""
    all_sweeps = sweeps(comparison)
    cells = pd.concat(all_sweeps) if all_sweeps else comparison.cells[:0]
    recoveries = cells["recovery"].map(names.recovery_name).replace("", NO_RECOVERY)
    if len(all_sweeps) > 1:
        return cells["method"].map(_method_without_recovery) + ", " + recoveries
    return recoveries


def _method_without_recovery(method: str) -> str:
    criterion, allocation, _ = names.method_parts(method)
    return names.method(names.method_key(criterion, allocation))


@score_table(
    "coverage.table11",
    "Pruning and recovery together",
    (*names.ABLATION, MEAN),
    "Rows name how pruned models were quantised or tuned. Difference: Mean minus that of 16 bits "
    "at the same ratio, paired. Storage: weights on disk, with the scales of quantised ones.",
    costs=STORAGE_COSTS,
    drawn=(STORAGE,),
    chapter="recovery",
    needs=f"cells with a recovery, and {SLIMMING}",
    aliases=("coverage.fig8",),
)
def recovery_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 11 and Fig. 8: every ratio with every recovery."""
    label_of_cell = labels(comparison)
    for sweep in sweeps(comparison):
        for ratio, cells in cells_by_ratio(sweep):
            base = only_cell(cells[cells["recovery"] == "none"])
            yield ratio_block(comparison, ratio, label_of_cell[cells.index], base)


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
    needs="cells with a recovery, and reasoning benchmarks, such as gsm8k",
)
def recovery_blocks(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Tables 3 (general) and 4 (reasoning): pruned and recovered models.

    Yields a block for each ratio at which a cell has a recovery: all pruned cells of this ratio,
    sorted by method."""
    for ratio, cells in cells_by_ratio(comparison.pruned_cells):
        if set(cells["recovery"]) != {"none"}:
            labels = settings.method_labels(cells)
            yield ratio_block(comparison, ratio, labels[sort_cells(cells, "method").index])


@output(
    "coverage.table9",
    chapter="cost",
    needs="cells with model.top_k=null,2,1 (coverage_table9 of sweeps)",
    aliases=("coverage.table19",),
)
def top_k_table(results: Results) -> Table | None:
    """Pruned models with several numbers of experts per token.

    None unless a model was run with at least two numbers of experts per token.
    """
    study = results.study
    blocks = []
    for family in _families(study, results.comparisons):
        for comparison, top_k in family:
            cells = comparison.pruned_cells
            for ratio, ratio_cells in cells_by_ratio(cells):
                label_of_cell = settings.method_labels(ratio_cells) + f", top-{top_k}"
                blocks.append(ratio_block(comparison, ratio, label_of_cell))
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        title="Fewer experts per token",
        caption="Top-k: experts per token, in calibration and in evaluation; models without it in "
        "their name use the number that they were trained with.",
    )


def _families(
    study: Study, comparisons: Sequence[Comparison]
) -> list[list[tuple[Comparison, int]]]:
    """Families of two or more models that differ only in the number of experts per token.

    A family is a list of (comparison of a model, experts per token), most experts first. An unknown
    number of experts per token is 0."""
    # name of the trained model -> family
    families: dict[str, list[tuple[Comparison, int]]] = {}
    for comparison in comparisons:
        trained_model, top_k = names.split_top_k(comparison.model)
        if top_k is None:  # the model routes as in training
            layers = study.models.get(comparison.model, {}).get("layers", {}).values()
            top_k = max((layer["top_k"] for layer in layers), default=0)
        families.setdefault(trained_model, []).append((comparison, top_k))
    return [
        sorted(family, key=lambda member: -member[1])
        for family in families.values()
        if len(family) > 1
    ]
