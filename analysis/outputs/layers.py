"""Layers and experts: hidden states (AIMER, Fig. 6), entropy of routers, losses and budgets of
layers, and the loss without an expert (MoE-Slimming, Figs. 2, 3, 7, 11, 13 and 14)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import passes, plans
from moe_lab.analysis.load.passes import STATISTICS
from moe_lab.analysis.load.reader import groups, records, stacked
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import ABLATIONS, SUMS, pass_setup, run_setup
from moe_lab.analysis.outputs.score_rows import (
    COVERAGE_PLANS,
    DEFAULT_SMOOTHING,
    SMOOTHING,
    coverage_cells,
    criterion_colours,
)
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import PERCENT, format_number
from moe_lab.analysis.stats.comparison import Comparison, Panel
from moe_lab.result_files import BUDGETS


@output("aimer.fig6", chapter="inside", needs="a run with profile=true")
@per_model
def variance_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Token variance of hidden states by layer.

    A panel per ratio and calibration set, a line per method and for the unpruned model."""
    cells = [panel_cells(comparison, panel) for panel in comparison.panels]
    profiles = results.study.profiles.dropna(subset=["variance"])
    points = pd.concat(cells).merge(profiles, on="cell").rename(columns={"variance": "y"})
    caption = (
        "Variance of the coordinates of the residual stream after each layer, mean over the tokens "
        f"of a text; dashed: the unpruned model. Based on {run_setup(results.study)}"
    )
    title = "Variance of hidden states by layer"
    y = charts.number("y", "token variance")
    return charts.layer_figure(title, caption, points, y, criterion_colours(points))


def panel_cells(comparison: Comparison, panel: Panel) -> pd.DataFrame:
    """The unpruned model and the methods of a panel, a row each: columns "panel" (a title),
    "method", "label" (display name of the method) and "cell" (NaN if the unpruned model was not
    run), and those of menus."""
    cells = {"none": comparison.unpruned_cell, **panel.cells}
    title = f"{names.calibration(panel.calibration)}, {panel.pruned_text} pruned"
    rows = [(title, method, names.method(method), cell) for method, cell in cells.items()]
    frame = pd.DataFrame(rows, columns=["panel", "method", "label", "cell"])
    return frame.assign(Pruned=panel.pruned_text, Calibration=names.calibration(panel.calibration))


QUARTILES = {"low": 0.25, "y": 0.5, "high": 0.75}
"""Column of `quartiles` -> share of the tokens with a lower entropy."""


def quartiles(entropies: pd.DataFrame) -> pd.DataFrame:
    """Quartiles of router entropy over the tokens of each layer. Columns: model, calibration, layer
    and each of QUARTILES.

    entropies: histograms, see `passes.router_entropies`. Tokens are assumed to be evenly spread
    inside a bin."""
    rows = []
    for key, histogram in groups(entropies, ["model", "calibration", "layer"]):
        bins = histogram.sort_values("entropy")
        # number of tokens below each of `bin_ends`
        cumulated_tokens = np.concatenate([[0.0], np.cumsum(bins["tokens"].to_numpy(float))])
        if cumulated_tokens[-1] > 0:
            bin_ends = np.concatenate([[0.0], bins["entropy"].to_numpy(float)])
            tokens_below = np.array(list(QUARTILES.values())) * cumulated_tokens[-1]
            rows.append((*key.values(), *np.interp(tokens_below, cumulated_tokens, bin_ends)))
    return pd.DataFrame(rows, columns=["model", "calibration", "layer", *QUARTILES])


@output(
    "coverage.fig13", chapter="attribution", needs="the sums of a pass over a text in the store"
)
def entropy_figure(results: Results) -> Figure | None:
    """Router entropy over tokens, by calibration set, layer and model."""
    points = quartiles(results.study.router_entropies)
    caption = (
        "Entropy of the softmax of the router's logits over all experts, for each token of a "
        "calibration set, as a share of the highest possible: 1 where all experts are equally "
        f"likely. Median over tokens, with quartiles. Based on {pass_setup(results.study)}"
    )
    title = "Router entropy across texts, layers and models"
    y = charts.number("y", "router entropy / ln(experts)", **charts.SHARE)
    return charts.layer_figure(title, caption, charts.by_calibration(points), y)


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
    columns = ["cell", "calibration", "label"]
    frames = []
    for row in records(cells[:MOST_PLANS]):
        folder = study.reader.find_folder(str(row["plan_folder"]))
        budgets = passes.read_table(folder, "budgets.parquet", study.reader)
        if budgets is not None:
            plan = study.reader.json(folder, "plan.json") or {}
            parameters = row["parameters"] | (plans.allocation_of(plan).get("parameters") or {})
            # the name of the setting differs between allocations
            smoothings = (parameters[name] for name in SMOOTHING if name in parameters)
            texts = {name: row[name] for name in columns}
            smoothing = next(smoothings, DEFAULT_SMOOTHING)
            frames.append(budgets.assign(**texts, smoothing=smoothing))
    return stacked(frames, [*BUDGETS, *columns, "smoothing"])


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
    return pd.concat(frames, ignore_index=True)


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
    budgets = layer_budgets(study, comparison)
    if budgets.empty:
        return None
    budgets = budget_strips(budgets, losses)
    columns = [column for column in STRIPS if budgets[column].notna().any()]
    squares = (
        budgets.sort_values("layer", kind="stable")
        .melt(["label", "layer"], columns, "column", "value")
        .dropna(subset=["value"])
    )
    texts = [
        format_number(value, PERCENT if column in ("coverage", "kept") else "{:.2f}")
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


ROUTING_MEASURES = {"gate": "mean router weight", "tokens": "tokens"}
"""Routing measure of an expert -> its name in Fig. 2."""
TOP_EXPERTS = 50
"""Number of experts in a panel of Fig. 2."""
LOSS_LABEL = "rise of the loss (nats per token)"


def experts_of_first_set(experts: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows of one model that have an ablation loss, for the first calibration set that has such
    rows, in the order of `names.calibrations_in_order`.

    experts: columns model, calibration and ablation, as in `Study.experts`."""
    rows = experts[(experts["model"] == model) & experts["ablation"].notna()]
    sets = names.calibrations_in_order(rows["calibration"])
    return rows[rows["calibration"] == sets[0]] if sets else rows


@output("coverage.fig2", chapter="attribution", needs=ABLATIONS)
@per_model
def router_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Ablation losses of the experts that routers rank highest."""
    experts = experts_of_first_set(results.study.experts, comparison.model)
    if experts.empty:
        return None
    frames = []
    for letter, (measure, label) in zip("ab", ROUTING_MEASURES.items(), strict=True):
        correlation = experts[measure].corr(experts["ablation"], "spearman", min_periods=3)
        highest_experts = experts.dropna(subset=[measure]).nlargest(TOP_EXPERTS, measure)
        frames.append(
            highest_experts.assign(
                panel=f"({letter}) by {label}; rank correlation over all experts {correlation:.2f}",
                line=highest_experts[measure],
                x=highest_experts["layer"].astype(str)
                + "."
                + highest_experts["expert"].astype(str),
            )
        )
    rows = pd.concat(frames)
    # the caption gives the number of experts in the last panel
    caption = (
        f"The {len(highest_experts)} experts with the highest mean router weight (a) and with the "
        "most tokens (b), highest first. Bars: rise of the model's loss without that expert's "
        "output; orange: the loss falls. Router weight: the gate, the mean over the expert's "
        f"tokens. Based on {pass_setup(results.study)}"
    )
    title = (
        f"Experts that routers rank highest, and the loss without them, "
        f"{names.calibration(experts['calibration'].iloc[0])}"
    )
    return _bars_and_line(title, caption, rows, "layer.expert", "router weight, tokens")


def _bars_and_line(
    title: str, caption: str, rows: pd.DataFrame, x_title: str, line_title: str
) -> Figure:
    """Bars of ablation losses, and points or a line with an axis of their own on the right.

    rows: columns "panel", "x", "ablation", "line" and, for points with error bars, "low" and
    "high"."""
    rows = rows.filter(items=["panel", "x", "ablation", "line", "low", "high"])
    x = charts.label("x", x_title)
    loss = charts.number("ablation", LOSS_LABEL)
    falls = {"condition": {"test": "datum.ablation < 0", "value": "#ee7733"}, "value": "#2277bb"}
    y = charts.number("line", line_title, scale={"zero": False})
    line = [charts.layer("line", {"point": True, "color": charts.INK}, x=x, y=y)]
    if "low" in rows:  # points with error bars are not joined
        interval: dict[str, Any] = {"y": {**y, "field": "low"}, "y2": "high"}
        line = [
            charts.layer("point", {"filled": True, "color": charts.INK}, x=x, y=y),
            charts.layer("rule", {"color": charts.INK}, x=x, **interval),
        ]
    bars = charts.layer("bar", x=x, y=loss, color=falls)
    both = {"layer": [bars, {"layer": line}], "resolve": {"scale": {"y": "independent"}}}
    size, independent = (480, 180), ("x", "y")
    return Figure(title, caption, rows, [both], 2, size, independent)


@output(
    "coverage.fig3",
    chapter="attribution",
    needs=(
        f"{ABLATIONS}; for weights also a criterion that reads weights of experts, such as "
        "magnitude, and for gradients one that reads gradients, such as heapr, on the same text"
    ),
)
@per_model
def statistics_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Weights, activations and gradients of experts with ablation losses, by depth and in a layer.

    None if no expert has both a raw statistic and an ablation loss.
    """
    experts = experts_of_first_set(results.study.raw_statistics, comparison.model)
    rows_of_statistic = {
        label: experts[experts["statistic"] == statistic] for statistic, label in STATISTICS.items()
    }
    drawn = {label: rows for label, rows in rows_of_statistic.items() if len(rows)}
    if not drawn:
        return None
    middle = experts["layer"].drop_duplicates().quantile(interpolation="lower")
    frames = []
    for label, statistic in drawn.items():
        by_layer = statistic.groupby("layer", as_index=False)
        sums = by_layer.agg({"sum": "sum", "square": "sum", "count": "sum", "ablation": "mean"})
        frames.append(sums.assign(panel=f"(a) {label}", x=sums["layer"]))
    for label, statistic in drawn.items():
        experts_of_layer = statistic[statistic["layer"] == middle]
        by_loss = experts_of_layer.sort_values("ablation", ascending=False, kind="stable")
        frames.append(by_loss.assign(panel=f"(b) {label}, layer {middle}", x=by_loss["expert"]))
    rows = pd.concat(frames)
    mean = rows["sum"] / rows["count"]
    # rounding errors can give less than 0
    variance = (rows["square"] / rows["count"] - mean**2).clip(lower=0)
    deviation = variance**0.5
    rows = rows.assign(line=mean, low=mean - deviation, high=mean + deviation)
    caption = (
        "Weights: |w| of an expert. Activations and gradients: the root mean square over its "
        "tokens of each channel, the input of its down projection, and of the gradient of the loss "
        "at it. (a) Mean and standard deviation over all weights or channels of a layer; bars: "
        "rise of the loss without one expert, the mean over the layer. (b) Experts of layer "
        f"{middle} by the rise of the loss without them (bars). Based on "
        f"{pass_setup(results.study)}"
    )
    title = (
        f"Raw statistics across layers and experts, "
        f"{names.calibration(experts['calibration'].iloc[0])}"
    )
    return _bars_and_line(title, caption, rows, "layer, expert", "mean ± standard deviation")


@output("coverage.fig14", chapter="attribution", needs=SUMS)
def activation_figure(results: Results) -> Figure | None:
    """Activation magnitudes of experts in each layer, by calibration set.

    The magnitudes are in the column "size" of `Study.experts`.
    """
    experts = results.study.experts.dropna(subset=["size"])
    if experts.empty:
        return None
    sizes = experts.groupby(["model", "calibration", "layer"], sort=False)["size"]
    points = sizes.quantile(np.array([*QUARTILES.values()])).unstack()
    points = points.set_axis(list(QUARTILES), axis=1).reset_index()
    caption = (
        "Of each expert: the root mean square of its channels, the inputs of its down projection, "
        "over its tokens of the calibration set. Median over the experts of a layer, with "
        f"quartiles. Based on {pass_setup(results.study)}"
    )
    title = "Activation magnitudes of experts by calibration set"
    y = charts.number("y", "root mean square of channels")
    return charts.layer_figure(title, caption, charts.by_calibration(points), y)
