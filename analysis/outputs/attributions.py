"""Attributions of experts: their agreement with ablation, their cost, the scores of plans that use
them, and smoothed losses of layers (MoE-Slimming, Table 14 and Fig. 12)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import plans
from moe_lab.analysis.load.passes import ABLATION, MEASURES, shown_passes
from moe_lab.analysis.load.reader import groups, step_kind, steps_with_inputs, time_and_memory
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import (
    ABLATIONS,
    SECONDS_NOTE,
    SUMS,
    machines_sentence,
    pass_setup,
)
from moe_lab.analysis.outputs.score_rows import COVERAGE_PLANS, Block, coverage_cells, score_table
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import SCORE, Table
from moe_lab.analysis.stats.cell_scores import MEAN
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.ranks import correlations, rank_correlation_by_layer

TRUTHS = {"second": "layer loss", "ablation": "model loss"}
"""Exact measure of an expert's effect -> the loss whose change it measures."""
PRIORS = {
    "tokens": ("usage",),
    "first": ("ala1",),
    "second": ("ala2", "true_ablation"),
    "ablation": ("loss",),
}
"""Measure of an expert -> the priors of allocation=coverage that are proportional to it."""
PRIOR_LABELS = {
    "ala1": "Attribution, first order",
    "ala2": "Attribution, second order",
    "true_ablation": "Layer loss without the expert",
    "loss": "Model loss without the expert",
    "usage": "Tokens routed to the expert",
    "router_weight": "Sum of router weights",
    "ala_lm": "Attribution of the model's loss",
    "none": "No prior",
}
EQUAL_COLUMNS = ["ratio", "criterion", "gate", "other_settings"]
"""Plans with equal values in these columns differ in the prior alone."""
SECONDS = "Time (s)"


@output("coverage.table14", chapter="attribution", needs=ABLATIONS)
def agreement_table(results: Results) -> Table:
    """Agreement of attributions with ablations, and seconds of attributions.

    Table 14: correlations of each of MEASURES with each of TRUTHS over experts. A row per
    measure, and per model and calibration set whose experts were ablated."""
    kinds = ("Pearson", "Rank", "Rank in a layer", "Pearson of channels kept")
    columns = [f"{kind}, {truth}" for truth in TRUTHS.values() for kind in kinds]
    study = results.study
    rows = []
    machines = []
    for key, experts in groups(study.experts, ["model", "calibration"]):
        if experts["ablation"].isna().all():
            continue
        is_of_group = (study.cells["model"] == key["model"]) & (
            study.cells["calibration"] == key["calibration"]
        )
        cells = study.cells[is_of_group]
        plans_with_priors = cells.join(plans.priors(cells, study.reader), how="inner")
        seconds, step_machines = seconds_and_machines(study, cells)
        machines += step_machines
        for measure in MEASURES:
            numbers: list[float] = []  # for each truth, one number per kind
            for truth in TRUTHS:
                if measure == truth:
                    numbers += [1.0, 1.0, 1.0]
                else:
                    correlation = correlations(experts, measure, truth)
                    rank_in_layer = rank_correlation_by_layer(experts, measure, truth)
                    numbers += [correlation["linear"], correlation["rank"], rank_in_layer]
                numbers.append(channel_agreement(plans_with_priors, study.retained, measure, truth))
            time = seconds["ablation" if measure == "ablation" else "pass"]
            rows.append(
                (
                    key["model"],
                    names.calibration(key["calibration"]),
                    names.capitalised(MEASURES[measure]),
                    *numbers,
                    time,
                )
            )
    text_columns = ["Model", "Calibration", "Estimate"]
    return Table(
        title="Agreement of attributions with the effect of removing an expert",
        caption="Correlations over experts: Pearson's and Spearman's over all layers, Spearman's "
        "inside a layer (mean over layers). Layer loss: change of the routed output relative to "
        "the residual stream without one expert; it is quadratic in that expert's factor, so the "
        "second order is the true value and agrees by construction. Model loss: rise of the "
        "language model's loss without the expert. Channels kept: "
        "correlation of each expert's kept share in two plans of allocation=coverage, one with "
        "this estimate as prior and one with the true value (mean over such pairs). Time: of the "
        "step that measures it. One forward pass gives all estimates but the ablation, so first "
        f"and second order take the same time. {SECONDS_NOTE}{machines_sentence(machines)}Based on "
        f"{pass_setup(study)}",
        frame=pd.DataFrame(rows, columns=[*text_columns, *columns, SECONDS]),
        formats={**dict.fromkeys(columns, SCORE), SECONDS: "{:,.1f}"},
        optional=(*columns, SECONDS),
    )


def channel_agreement(
    plans_with_priors: pd.DataFrame, retained: pd.DataFrame, measure: str, truth: str
) -> float:
    """Pearson's correlation, over experts, between the shares of channels that two plans retain.
    The first plan's prior is proportional to `measure`, the second plan's prior to `truth`.

    Returns the mean over pairs of plans: one pair for each combination of values in EQUAL_COLUMNS.

    plans_with_priors: a row per plan with index cell, and the columns "prior" and EQUAL_COLUMNS;
    retained: see `plans.retained_shares`."""
    values = []
    for _, candidates in groups(plans_with_priors, EQUAL_COLUMNS):
        shares = {}  # "measure" or "truth" -> shares with the index (layer, expert)
        for column, proportional_to in (("measure", measure), ("truth", truth)):
            has_prior = candidates["prior"].isin(PRIORS.get(proportional_to, ()))
            # the first plan with this prior, if there is one
            for cell in candidates.index[has_prior][:1]:
                plan_shares = retained[retained["cell"] == cell]
                shares[column] = plan_shares.set_index(["layer", "expert"])["share"]
        if len(shares) == 2:
            values.append(correlations(pd.DataFrame(shares), "measure", "truth")["linear"])
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else np.nan


def seconds_and_machines(study: Study, cells: pd.DataFrame) -> tuple[dict[str, float], list[str]]:
    """Time and machines of two steps: the calibration pass that `shown_passes` selects, and the
    first ablation that a plan of `cells` reads.

    Returns ({"pass": seconds, "ablation": seconds}, names of the machines).

    cells: all cells of one model and calibration set."""
    shown_folders = shown_passes(study.cells)["statistics_folder"]
    pass_folders = list(shown_folders[shown_folders.index.isin(cells.index)])
    ablation_folders = [
        folder
        for plan_folder in cells["plan_folder"].dropna()
        for folder in steps_with_inputs([plan_folder], study.reader)
        if step_kind(folder) == ABLATION
    ]
    seconds = {}
    machines: list[str] = []
    for kind, folders in (("pass", pass_folders), ("ablation", ablation_folders)):
        times = time_and_memory(folders[:1], study.reader)
        # without a step, min_count=1 gives NaN in place of the sum 0
        seconds[kind] = float(times["seconds"].sum(min_count=1))
        machines += map(str, times["machine"])
    return seconds, machines


@score_table(
    "coverage.table14.scores",
    "Channel budgets by the prior that divides a layer among its experts",
    (*names.COMMON_SENSE, "gsm8k", "mmlu", MEAN),
    "Rows name the prior by which allocation=coverage divides a layer among its experts. "
    "Difference: Mean minus that of the first order, paired.",
    chapter="attribution",
    needs="plans of allocation=coverage that differ in the prior alone",
)
def prior_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 14: scores of coverage budgets that differ in the prior alone."""
    priors = plans.priors(comparison.cells, results.study.reader)
    cells = comparison.cells.join(priors, how="inner")
    for key, competitors in groups(cells, [*EQUAL_COLUMNS, "calibration", "recovery"]):
        if competitors["prior"].nunique() < 2:
            continue
        rows = competitors.sort_values(
            "prior", key=lambda prior: prior.map(list(PRIOR_LABELS).index), kind="stable"
        )
        labels = dict(zip(rows.index.map(int), rows["prior"].map(PRIOR_LABELS), strict=True))
        recovery = names.recovery_name(key["recovery"])
        allocation = ""
        base = None
        first_order_plans = competitors[competitors["prior"] == plans.FIRST_ORDER_PRIOR]
        if len(first_order_plans):
            # first order is the default prior, which names of allocations usually leave out: this
            # name fits all rows of the block
            allocation = names.allocation_name(str(first_order_plans["allocation"].iloc[0]))
            base = int(first_order_plans.index[0])
        title = names.comma_joined(comparison.removed_text(key["ratio"]), recovery, allocation)
        yield Block(comparison, title, labels, base)


@output("coverage.fig12", chapter="attribution", needs=f"{COVERAGE_PLANS}, and {SUMS}")
@per_model
def smoothing_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Target share of the score that each layer keeps, under each smoothing of layer losses.

    A panel per calibration set, a line per smoothing."""
    from moe_lab.allocation.shapes import SMOOTHINGS, smooth

    losses = results.study.layer_losses
    losses = losses[losses["model"] == comparison.model].dropna(subset=["loss"])
    if losses.empty or coverage_cells(comparison).empty:
        return None
    frames = []
    for calibration in names.calibrations_in_order(losses["calibration"]):
        layers = losses[losses["calibration"] == calibration].sort_values("layer")
        for smoothing in [name for name in SMOOTHINGS if "." not in name]:
            targets = smooth(layers["loss"].to_numpy(float), smoothing)
            set_name = names.calibration(calibration)
            texts = {"panel": set_name, "label": smoothing, "Calibration": set_name}
            frames.append(layers.assign(**texts, y=targets / targets.mean()))
    title = "Smoothed layer losses"
    caption = (
        "Target share of the score that each layer keeps, relative to the mean, under each "
        "smoothing of the layer losses (none: proportional to the loss). Based on "
        f"{pass_setup(results.study)}"
    )
    rows = pd.concat(frames).drop(columns=["calibration", "model"])
    return charts.layer_figure(title, caption, rows, charts.number("y", "target, mean 1"))
