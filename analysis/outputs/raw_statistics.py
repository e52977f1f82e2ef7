"""Ablation losses of experts compared with routing and raw statistics (MoE-Slimming, Figs. 2 and
3), and activations by calibration set (Fig. 14)."""

from __future__ import annotations

from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.passes import STATISTICS
from moe_lab.analysis.outputs.captions import ABLATIONS, SUMS, pass_setup
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.ranks import correlations

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


def top_experts(experts: pd.DataFrame, measure: str) -> pd.DataFrame:
    """The TOP_EXPERTS rows of `experts` with the highest values in the column `measure`, highest
    first."""
    experts = experts.dropna(subset=[measure])
    return experts.sort_values(measure, ascending=False, kind="stable").head(TOP_EXPERTS)


@output("coverage.fig2", chapter="attribution", needs=ABLATIONS)
@per_model
def router_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Ablation losses of the experts that routers rank highest."""
    experts = experts_of_first_set(results.study.experts, comparison.model)
    if experts.empty:
        return None
    frames = []
    for letter, (measure, label) in zip("ab", ROUTING_MEASURES.items(), strict=True):
        correlation = correlations(experts, measure, "ablation")["rank"]
        highest_experts = top_experts(experts, measure)
        frames.append(
            highest_experts.assign(
                panel=f"({letter}) by {label}; rank correlation over all experts {correlation:.2f}",
                line=highest_experts[measure],
                x=[f"{row.layer}.{row.expert}" for row in highest_experts.itertuples()],
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
    rows = rows[[column for column in COLUMNS if column in rows]]
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


COLUMNS = ("panel", "x", "ablation", "line", "low", "high")
"""Columns of the rows of `_bars_and_line`."""


def statistics_by_layer(statistics: pd.DataFrame) -> pd.DataFrame:
    """Pool one raw statistic by layer; a row per layer.

    Columns:

    - layer
    - mean, std: over all weights or channels of the layer's experts
    - ablation: mean ablation loss of the layer's experts

    statistics: a row per expert, with the columns layer, count (number of weights or channels),
    mean, std and ablation."""
    count = statistics["count"]
    # mean of squares = std ** 2 + mean ** 2, for an expert and for the layer
    square = statistics["std"] ** 2 + statistics["mean"] ** 2
    sums = statistics.assign(mean=count * statistics["mean"], square=count * square)
    by_layer = sums.groupby("layer")
    means = by_layer[["mean", "square"]].sum().div(by_layer["count"].sum(), axis=0)
    # rounding errors can give less than 0
    std = (means["square"] - means["mean"] ** 2).clip(lower=0) ** 0.5
    layers = {"mean": means["mean"], "std": std, "ablation": by_layer["ablation"].mean()}
    return pd.DataFrame(layers).reset_index()


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
    layers = sorted(experts["layer"].unique())
    middle = layers[(len(layers) - 1) // 2]
    frames = []
    for label, statistic in drawn.items():
        by_layer = statistics_by_layer(statistic)
        frames.append(by_layer.assign(panel=f"(a) {label}", x=by_layer["layer"]))
    for label, statistic in drawn.items():
        experts_of_layer = statistic[statistic["layer"] == middle]
        by_loss = experts_of_layer.sort_values("ablation", ascending=False, kind="stable")
        frames.append(by_loss.assign(panel=f"(b) {label}, layer {middle}", x=by_loss["expert"]))
    rows = pd.concat(frames)
    rows = rows.assign(
        line=rows["mean"],
        low=rows["mean"] - rows["std"],
        high=rows["mean"] + rows["std"],
    )
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
    points = pd.DataFrame(
        {"low": sizes.quantile(0.25), "y": sizes.median(), "high": sizes.quantile(0.75)}
    ).reset_index()
    caption = (
        "Of each expert: the root mean square of its channels, the inputs of its down projection, "
        "over its tokens of the calibration set. Median over the experts of a layer, with "
        f"quartiles. Based on {pass_setup(results.study)}"
    )
    title = "Activation magnitudes of experts by calibration set"
    y = charts.number("y", "root mean square of channels")
    return charts.layer_figure(title, caption, charts.by_calibration(points), y)
