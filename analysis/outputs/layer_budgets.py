"""Channels that allocations retain in each layer, their share of the layer's score, and the losses
from which coverage budgets are computed (MoE-Slimming, Figs. 7 and 11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import passes, plans, settings
from moe_lab.analysis.load.reader import records, stacked
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import pass_setup
from moe_lab.analysis.outputs.score_rows import (
    COVERAGE_PLANS,
    DEFAULT_SMOOTHING,
    SMOOTHING,
    coverage_cells,
)
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.result_files import BUDGETS

MOST_PLANS = 4
"""Largest number of plans whose layers are drawn."""
STRIPS = {
    "loss": "layer loss",
    "smoothed": "smoothed loss",
    "coverage": "score coverage",
    "kept": "channels kept",
}
"""Column of `budget_strips` -> label of its strip."""


def layer_budgets(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Coverage budgets of the first MOST_PLANS cells of `coverage_cells`: a row per plan and layer.

    Columns: "layer", "coverage" (retained share of the layer's score), "kept" (retained share of
    the layer's channels), "cell", "calibration", "label" (of the method) and "smoothing" (of layer
    losses)."""
    cells = coverage_cells(comparison)
    labels = settings.method_labels(cells)
    frames = []
    # strict=False, because only the first MOST_PLANS cells are drawn
    for cell, row in zip(cells.index[:MOST_PLANS].map(int), records(cells), strict=False):
        folder = study.reader.find_folder(str(row["plan_folder"]))
        budgets = passes.read_table(folder, "budgets.parquet", study.reader)
        if budgets is not None:
            frames.append(
                budgets.assign(
                    cell=cell,
                    calibration=row["calibration"],
                    label=labels[cell],
                    smoothing=_smoothing(study, row),
                )
            )
    return stacked(frames, [*BUDGETS, "cell", "calibration", "label", "smoothing"])


def _smoothing(study: Study, cell: Mapping[str, Any]) -> str:
    """Smoothing of layer losses in the plan of `cell`, a row of `Study.cells`."""
    folder = study.reader.find_folder(str(cell["plan_folder"]))
    plan = study.reader.json(folder, "plan.json") or {}
    _, parameters = names.name_and_settings(str(cell["allocation"]))
    parameters |= plans.allocation_of(plan).get("parameters") or {}
    for setting in SMOOTHING:  # its name differs between allocations
        if setting in parameters:
            return str(parameters[setting])
    return DEFAULT_SMOOTHING


def budget_strips(budgets: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """`budgets` with two more columns, scaled to mean 1 over the layers of a plan:

    - loss: the layer's loss on the plan's calibration set
    - smoothed: the loss after the plan's smoothing

    If one layer of a plan has no loss, both columns are NaN in all layers of this plan.

    budgets: see `layer_budgets`; losses: see `passes.layer_losses`, for one model."""
    from moe_lab.allocation.shapes import smooth

    rows = budgets.merge(
        losses[["calibration", "layer", "loss"]], on=["calibration", "layer"], how="left"
    )
    frames = []
    for _, plan in rows.groupby("cell", sort=False):  # a cell has one plan
        loss = plan["loss"].to_numpy(float)
        smoothed = smooth(loss, plan["smoothing"].iloc[0]) if np.isfinite(loss).all() else loss
        frames.append(plan.assign(loss=loss / loss.mean(), smoothed=smoothed / smoothed.mean()))
    return pd.concat(frames, ignore_index=True) if frames else rows.assign(smoothed=np.nan)


@output(
    "coverage.fig11",
    chapter="attribution",
    needs=f"{COVERAGE_PLANS}; for losses also the sums of their pass in the store",
    aliases=("coverage.fig7",),
)
@per_model
def budget_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Raw and smoothed loss, score coverage and retained share of each layer.

    A panel per plan with a row of squares for each of STRIPS, one square per layer."""
    study = results.study
    losses = study.layer_losses[study.layer_losses["model"] == comparison.model]
    budgets = budget_strips(layer_budgets(study, comparison), losses)
    if budgets.empty:
        return None
    columns = [column for column in STRIPS if budgets[column].notna().any()]
    squares = (
        budgets.sort_values("layer", kind="stable")
        .melt(["label", "layer"], columns, "column", "value")
        .dropna(subset=["value"])
    )
    texts = [
        names.share(value) if column in ("coverage", "kept") else f"{value:.2f}"
        for column, value in zip(squares["column"], squares["value"], strict=True)
    ]
    squares = squares.assign(
        panel=squares["label"],
        x=squares["layer"],
        y=squares["column"].map(STRIPS),
        share=charts.shares_of_range(squares, ["label", "column"], "value").fillna(0.5),
        text=texts,
    )
    x = {"field": "x", "type": "ordinal", "title": "decoder layer"}
    layers = charts.heat_map(x, charts.label("y"))
    caption = (
        "Layer loss: size of a layer's routed output relative to the residual stream after it, the "
        "mean over calibration tokens of ‖m‖² / (‖y‖² + ε), divided by its mean over layers. "
        "Smoothed loss: by the smoothing of the plan, divided by its mean; the target of the "
        "coverage. Score coverage: share of the sum of the layer's channel scores that the plan "
        "keeps. Squares of a row are shaded between its least and its greatest value. Based on "
        f"{pass_setup(study)}"
    )
    title = "From layer losses to budgets"
    size = ({"step": 38}, {"step": 22})
    return Figure(title, caption, squares, layers, columns=1, size=size)
