"""Ablation losses of experts compared with routing and raw statistics (MoE-Slimming, Figs. 2 and
3), and activations by calibration set (Fig. 14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis import names
from analysis.load.passes import STATISTICS
from analysis.load.reader import groups
from analysis.outputs.captions import ABLATIONS, SUMS, pass_setup
from analysis.outputs.score_rows import shallow_middle_deep_layers
from analysis.registry import Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.comparison import Comparison
from analysis.stats.ranks import correlations

ROUTING_MEASURES = {"gate": "mean router weight", "tokens": "tokens"}
"""Routing measure of an expert -> its name in Fig. 2."""
TOP_EXPERTS = 50
"""Number of experts in a panel of Fig. 2."""
RISE_COLOUR, FALL_COLOUR = "#2277bb", "#ee7733"
"""Colours of bars: of experts whose removal raises the loss, and of experts whose removal lowers
the loss."""
LOSS_LABEL = "rise of the loss (nats per token)"
SOURCES = {
    "weight": "a criterion that reads weights of experts, such as magnitude",
    "activation": "statistics of this moe_lab",
    "gradient": "a criterion that reads gradients, such as heapr, on the same text",
}
"""Raw statistic -> what a run must include for it."""


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
@per_model("pruned")
def router_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Ablation losses of the experts that routers rank highest."""
    experts = experts_of_first_set(results.study.experts, comparison.model)
    if experts.empty:
        return None
    drawing = style.drawing(style.PAGE, 4.6)
    panels = zip("ab", drawing.subplots(2, 1), ROUTING_MEASURES.items(), strict=True)
    for letter, axes, (measure, label) in panels:
        highest_experts = top_experts(experts, measure)
        positions = np.arange(len(highest_experts))
        _draw_loss_bars(axes, highest_experts["ablation"])
        labels = [f"{row.layer}.{row.expert}" for row in highest_experts.itertuples()]
        style.label_ticks(axes.xaxis, positions, labels, labelrotation=90, labelsize=5)
        _add_right_axis(axes, label).plot(
            positions,
            highest_experts[measure],
            color=style.INK,
            marker=".",
            markersize=3,
            linewidth=0.9,
        )
        rank = correlations(experts, measure, "ablation")["rank"]
        axes.set_title(
            f"({letter}) by {label}; rank correlation over all experts {rank:.2f}", fontsize=7.5
        )
    axes.set_xlabel("layer.expert")  # of the last panel
    style.legend(drawing, _bar_and_line_entries("router weight, tokens"))
    # the caption gives the number of experts in the last panel
    caption = (
        f"The {len(highest_experts)} experts with the highest mean router weight (a) and with the "
        "most tokens (b), highest first. Bars: rise of the model's loss without that expert's "
        "output; orange: the loss falls. Router weight: the gate, the mean over the expert's "
        f"tokens. Based on {pass_setup(results.study)}"
    )
    title = (
        f"Experts that routers rank highest, and the loss without them: {comparison.model}, "
        f"{_calibration_names(experts)}"
    )
    return Figure(name, title, caption, drawing)


def _calibration_names(experts: pd.DataFrame) -> str:
    return names.enumeration(map(names.calibration, experts["calibration"].unique()))


def _draw_loss_bars(axes: Axes, losses: pd.Series) -> None:
    """Draw a bar for each of `losses`, the ablation losses of experts."""
    shades = [RISE_COLOUR if loss >= 0 else FALL_COLOUR for loss in losses]
    axes.bar(np.arange(len(losses)), losses.to_numpy(float), width=0.75, color=shades)
    axes.axhline(0, color=style.RULE, linewidth=0.8)
    axes.set(xlim=(-0.8, len(losses) - 0.2))
    axes.set_ylabel(LOSS_LABEL, fontsize=7)
    style.format_power(axes.yaxis)


def _add_right_axis(axes: Axes, label: str = "") -> Axes:
    """Add a second y axis on the right of a panel. Returns the axes that have this y axis."""
    right = axes.twinx()
    right.set_ylabel(label, fontsize=7)
    right.spines["right"].set_visible(True)
    style.format_power(right.yaxis)
    return right


def _bar_and_line_entries(line_label: str) -> list[Artist]:
    """Legend entries for the two colours of bars and for a line."""
    return [
        Patch(facecolor=RISE_COLOUR, label="the loss rises without it"),
        Patch(facecolor=FALL_COLOUR, label="the loss falls without it"),
        style.legend_entry(line_label, color=style.INK, marker=".", linewidth=0.9),
    ]


def statistics_by_layer(statistics: pd.DataFrame) -> pd.DataFrame:
    """Pool one raw statistic by layer; a row per layer.

    Columns:

    - layer
    - mean, std: over all weights or channels of the layer's experts
    - ablation: mean ablation loss of the layer's experts

    statistics: a row per expert, with the columns layer, count (number of weights or channels),
    mean, std and ablation."""
    rows = []
    for key, experts in groups(statistics.sort_values("layer"), ["layer"]):
        weights = experts["count"] / experts["count"].sum()
        mean = float((weights * experts["mean"]).sum())
        # mean of squares = std ** 2 + mean ** 2, for an expert and for the layer
        mean_square = float((weights * (experts["std"] ** 2 + experts["mean"] ** 2)).sum())
        std = max(mean_square - mean**2, 0.0) ** 0.5  # rounding errors can give less than 0
        rows.append((key["layer"], mean, std, experts["ablation"].mean()))
    return pd.DataFrame(rows, columns=["layer", "mean", "std", "ablation"])


@output(
    "coverage.fig3",
    chapter="attribution",
    needs=(
        f"{ABLATIONS}; for weights and gradients also {SOURCES['weight']}, and "
        f"{SOURCES['gradient']}"
    ),
)
@per_model("pruned")
def statistics_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Weights, activations and gradients of experts with ablation losses, by depth and in a layer.

    None if no expert has both a raw statistic and an ablation loss.
    """
    experts = experts_of_first_set(results.study.raw_statistics, comparison.model)
    available_statistics = [
        statistic for statistic in STATISTICS if (experts["statistic"] == statistic).any()
    ]
    if not available_statistics:
        return None
    layers = sorted(experts["layer"].unique())
    middle = layers[(len(layers) - 1) // 2]
    drawing = style.drawing(style.PAGE, 4.4)
    upper, lower = drawing.subplots(2, len(available_statistics), squeeze=False)
    for above, below, statistic in zip(upper, lower, available_statistics, strict=True):
        label = STATISTICS[statistic]
        rows = experts[experts["statistic"] == statistic]
        _draw_over_depth(above, statistics_by_layer(rows), label)
        _draw_over_experts(below, rows[rows["layer"] == middle], label)
        above.set_title(f"(a) {label}", fontsize=7.5)
        below.set_title(f"(b) {label}, layer {middle}", fontsize=7.5)
    for axes in (*upper[1:], *lower[1:]):
        axes.set_ylabel(None)
    mean_key = style.legend_entry(
        "layer's mean rise of the loss", color=RISE_COLOUR, marker="o", linestyle="", markersize=4
    )
    style.legend(
        drawing, [mean_key, *_bar_and_line_entries("mean of the statistic ± standard deviation")]
    )
    gaps = [
        f"{label} ({SOURCES[statistic]})"
        for statistic, label in STATISTICS.items()
        if statistic not in available_statistics
    ]
    sentence_on_gaps = f" Not in this store: {names.enumeration(gaps)}." if gaps else ""
    caption = (
        "Weights: |w| of an expert. Activations and gradients: the root mean square over its "
        "tokens of each channel, the input of its down projection, and of the gradient of the loss "
        "at it. (a) Mean and standard deviation over all weights or channels of a layer; dots: "
        "rise of the loss without one expert, the mean over the layer. (b) Experts of layer "
        f"{middle} by the rise of the loss without them (bars).{sentence_on_gaps} Based on "
        f"{pass_setup(results.study)}"
    )
    title = (
        f"Raw statistics across layers and experts: {comparison.model}, "
        f"{_calibration_names(experts)}"
    )
    return Figure(name, title, caption, drawing)


def _draw_over_depth(axes: Axes, layers: pd.DataFrame, label: str) -> None:
    """Draw the panel (a) of a statistic: ablation losses of layers, and on the right axis the
    statistic.

    layers: rows of `statistics_by_layer`; label: name of the statistic."""
    axes.plot(layers["layer"], layers["ablation"], "o", color=RISE_COLOUR, markersize=4)
    axes.set_ylabel(LOSS_LABEL, fontsize=7)
    style.format_power(axes.yaxis)
    style.layer_axis(axes)
    right = _add_right_axis(axes)
    low = layers["mean"] - layers["std"]
    high = layers["mean"] + layers["std"]
    right.fill_between(layers["layer"], low, high, color=style.MUTED, alpha=0.2, linewidth=0)
    right.plot(
        layers["layer"], layers["mean"], color=style.INK, marker=".", linewidth=0.9, label=label
    )


def _draw_over_experts(axes: Axes, experts: pd.DataFrame, label: str) -> None:
    """Draw the panel (b) of a statistic: ablation losses of one layer's experts, and on the right
    axis the statistic.

    experts: rows of `Study.raw_statistics`; label: name of the statistic."""
    ordered = experts.sort_values("ablation", ascending=False, kind="stable")
    _draw_loss_bars(axes, ordered["ablation"])
    style.label_ticks(axes.xaxis, [], [])
    axes.set_xlabel("experts")
    look: Any = {
        "color": style.INK,
        "marker": ".",
        "markersize": 3,
        "linewidth": 0,
        "elinewidth": 0.6,
    }
    _add_right_axis(axes).errorbar(
        np.arange(len(ordered)), ordered["mean"], ordered["std"], label=label, **look
    )


@output("coverage.fig14", chapter="attribution", needs=SUMS)
@per_model("pruned")
def activation_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Activation magnitudes of experts in three layers, by calibration set.

    The magnitudes are in the column "size" of `Study.experts`.
    """
    experts = results.study.experts
    experts = experts[(experts["model"] == comparison.model) & experts["size"].notna()]
    layers = shallow_middle_deep_layers(list(experts["layer"]))
    if not layers:
        return None
    sets = names.calibrations_in_order(experts["calibration"])
    drawing = style.drawing(style.PAGE, 2.6)
    for axes, layer in zip(drawing.subplots(1, len(layers), squeeze=False)[0], layers, strict=True):
        _draw_distributions(axes, magnitudes_by_set(experts, layer, sets))
        axes.set_title(f"Layer {layer}")
        labels = map(names.calibration, sets)
        style.label_ticks(
            axes.xaxis, range(len(sets)), labels, labelrotation=0 if len(sets) < 4 else 30
        )
        axes.grid(axis="y")
    drawing.axes[0].set_ylabel("root mean square of channels", fontsize=7)
    caption = (
        "Each point is an expert: the root mean square of its channels, the inputs of its down "
        "projection, over its tokens of the calibration set. Boxes: quartiles and median of the "
        f"layer. Based on {pass_setup(results.study)}"
    )
    title = f"Activation magnitudes of experts by calibration set: {comparison.model}"
    return Figure(name, title, caption, drawing)


def magnitudes_by_set(experts: pd.DataFrame, layer: int, sets: Sequence[str]) -> list[list[float]]:
    """For each calibration set in `sets`, a list of the activation magnitudes of one layer's
    experts. experts: columns "layer", "calibration" and "size" (the magnitude)."""
    layer_experts = experts[experts["layer"] == layer]
    return [
        layer_experts.loc[layer_experts["calibration"] == calibration, "size"].tolist()
        for calibration in sets
    ]


def _draw_distributions(axes: Axes, magnitudes: Sequence[Sequence[float]]) -> None:
    """Draw a box for each list of activation magnitudes, and a point for each magnitude."""
    line_style = {"color": style.INK, "linewidth": 0.9}
    box_style: Any = {
        "medianprops": {**line_style, "linewidth": 1.6},
        **dict.fromkeys(("boxprops", "whiskerprops", "capprops"), line_style),
    }
    axes.boxplot(
        magnitudes,
        positions=range(len(magnitudes)),
        widths=0.5,
        showfliers=False,
        manage_ticks=False,
        **box_style,
    )
    for position, values in enumerate(magnitudes):
        # the points are spread at random, so that they hide each other less
        x = position + np.random.default_rng(0).uniform(-0.18, 0.18, len(values))
        axes.plot(x, values, "o", color=RISE_COLOUR, markersize=2.5, alpha=0.5, markeredgewidth=0)
