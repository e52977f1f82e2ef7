"""Accuracy against cost: every cell's Avg against parameters, FLOPs and bytes, with Pareto fronts;
and a comparison of channels with whole experts (MoE-Slimming, Table 10 and Fig. 9)."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import settings
from moe_lab.analysis.load.plans import BYTES
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import MEBIBYTE, SLIMMING, score_setup
from moe_lab.analysis.outputs.score_rows import (
    STORAGE,
    STORAGE_COSTS,
    Block,
    cells_by_ratio,
    cells_without_recovery,
    cost_figure,
    pareto_front,
    ratio_block,
    score_table,
)
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render.table import SCORE, Columns, Table, frame_and_formats
from moe_lab.analysis.stats.cell_scores import MEAN, mean_definitions, notes_on_average
from moe_lab.analysis.stats.comparison import Comparison, mean_quantities

COST_SHARES = {
    "parameters_kept": "Parameters",
    "flops_ratio": "FLOPs per token",
    "storage_share": "Storage",
}
"""Column with a cost, as a share of the unpruned model's cost -> its display name."""

KINDS = {
    "expert": "whole experts",
    "constant": "experts, replaced by constants",
    "merged": "experts, merged into others",
    "channel": "channels",
    "none": "nothing removed",
}
"""Kind of a pruned cell -> description of what is removed, and of what replaces it."""


def average_and_costs(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Avg and costs of one model. A row per cell that has costs, including the unpruned model.

    Columns:

    - cell, method, calibration, ratio, recovery
    - kind: a key of KINDS; NaN where the plan cannot be read
    - pruned: text with the removed share
    - avg, low, high: Avg and its 95 % interval; NaN if the cell lacks one of the averaged scores
    - merit: `avg`, negated if lower is better
    - bits, and each of `plans.COSTS`
    - storage_share: `storage_bytes` as a share of the unpruned model's bytes in bfloat16
    - front_<cost>, for each column <cost> in COST_SHARES: whether the cell is on the Pareto front
      of low <cost> and high `merit` among the pruned cells
    """
    target = comparison.all_average_columns
    average, low, high = comparison.displayed_scores(target)
    scores = pd.DataFrame({"avg": average, "low": low, "high": high})
    cells = comparison.cells[["criterion", "method", "calibration", "ratio", "recovery"]]
    cells = cells.assign(
        pruned=settings.removed_share_texts(comparison.cells), kind=_kinds(study, comparison.cells)
    )
    rows = cells.join(scores).join(study.costs, how="inner").rename_axis("cell").reset_index()
    # BYTES: bytes of one parameter in bfloat16
    rows["storage_share"] = rows["storage_bytes"] / (BYTES * rows["parameters_unpruned"])
    rows["merit"] = comparison.quantity(target).sign * rows["avg"]
    is_pruned = rows["criterion"] != "none"
    pruned = rows[is_pruned]
    for cost in COST_SHARES:
        rows[f"front_{cost}"] = False
        rows.loc[is_pruned, f"front_{cost}"] = pareto_front(pruned[cost], pruned["merit"])
    return rows.drop(columns="criterion")


def _kinds(study: Study, cells: pd.DataFrame) -> pd.Series:
    """The kind of each cell, a key of KINDS; NaN where the plan cannot be read."""
    # an unpruned model has no plan
    is_known = (cells["granularity"] == "none") | cells.index.isin(study.retained["cell"])
    kinds = cells["granularity"].where(is_known)
    for kind in ("constant", "merged"):
        cells_of_kind = study.retained.loc[study.retained[kind].astype(bool), "cell"]
        kinds[kinds.index.isin(cells_of_kind)] = kind
    return kinds


@output("pareto", chapter="cost")
def pareto(results: Results) -> list[Item | None]:
    """All methods: accuracy against parameters, FLOPs and storage, with Pareto fronts."""
    if results.study.costs.empty or not results.comparisons:
        return []
    frames = []
    for comparison in results.comparisons:
        average_name = comparison.quantity(comparison.all_average_columns).mean_name
        model_rows = average_and_costs(results.study, comparison)
        frames.append(model_rows.assign(model=comparison.model, average_name=average_name))
    rows = pd.concat(frames).sort_values(
        ["model", "parameters_kept", "merit"],
        ascending=[True, False, False],
        kind="stable",
        ignore_index=True,
    )
    rows["storage_bytes"] /= MEBIBYTE
    rows["kind"] = rows["kind"].replace(KINDS)
    rows["front"] = _fronts_in_words(rows)
    quantities = mean_quantities(results.comparisons)
    averages = list(quantities)  # names: Avg, the name of a mean loss
    # Each frame has a column for each name in `averages`. A row has a number only in the column of
    # its model's average.
    values, low, high = (
        pd.DataFrame(
            {average: rows[column].where(rows["average_name"] == average) for average in averages}
        )
        for column in ("avg", "low", "high")
    )
    columns: Columns = {
        "Model": "model",
        "Criterion": "method",
        "Calibration": "calibration",
        "Pruned": "pruned",
        "Removes": "kind",
        **{average: (average, SCORE) for average in averages},
        "Parameters kept": ("parameters_kept", "{:.1%}"),
        "Routed kept": ("routed_kept", "{:.1%}"),
        "FLOPs": ("flops_ratio", "{:.1%}"),
        STORAGE: ("storage_bytes", "{:,.2f}"),
        "Front": "front",
    }
    table = Table(
        title="All methods: accuracy against what is kept",
        caption=f"{mean_definitions(results.comparisons)} Parameters kept, routed kept, FLOPs: "
        "shares of all parameters, of those of routed experts, and of the unpruned model's FLOPs "
        "per token. Front: the costs by which no cheaper pruned model is as good. "
        f"{score_setup(results.study)}",
        **frame_and_formats(rows.join(values), columns),
        best={average: quantity.best for average, quantity in quantities.items()},
        low=low,
        high=high,
        footnotes=notes_on_average(results.comparisons),
    )
    # models with another average, such as a mean loss, are in the table alone
    figure = cost_figure(table, ("Parameters kept", "FLOPs", STORAGE), averages[0], label="Removes")
    return [figure, table]


def _fronts_in_words(rows: pd.DataFrame) -> list[str]:
    """For each row of `average_and_costs`, the costs by which the cell is on a Pareto front: "all"
    or a text such as "Parameters, Storage"."""
    texts = []
    for row in records(rows):
        costs = [name.split(" ")[0] for cost, name in COST_SHARES.items() if row[f"front_{cost}"]]
        texts.append("all" if len(costs) == len(COST_SHARES) else ", ".join(costs))
    return texts


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
    all_cells = cells_without_recovery(comparison).sort_index()
    if all_cells["granularity"].nunique() > 1:
        for ratio, cells in cells_by_ratio(all_cells):
            yield ratio_block(comparison, ratio, settings.method_labels(cells))
