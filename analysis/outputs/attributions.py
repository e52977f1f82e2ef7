"""What attributions say of experts: against ablation, over depth, and smoothed (MoE-Slimming, Fig. 12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import names
from analysis.load.passes import MAGNITUDES, MEASURES
from analysis.load.reader import groups
from analysis.outputs.captions import ABLATED, SUMS, per_model
from analysis.registry import Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.ranks import correlations, rank_correlation_by_layer

AGAINST = ("gate", "first", "second")
"""What routing, and what attribution, would prune by: drawn against the ablation."""
SPREAD = (0.1, 0.9)
"""Quantiles of a layer's experts between which the band of a line lies."""
_SHADES = ("#2277bb", "#ee7733", "#117733", "#aa4499", "#8a8a2b", "#7a7a7a")


def ablation_figure(measures: pd.DataFrame, *, model: str, name: str) -> Figure | None:
    """Each expert's router weight and attributions against what the model's loss gains without it."""
    chosen = measures[(measures["model"] == model) & measures["ablation"].notna()]
    if chosen.empty:
        return None
    sets = names.calibrations_in_order(chosen["calibration"])
    with style.look():
        drawing = style.drawing(style.PAGE, 2.1 * len(sets) + 0.4)
        grid = drawing.subplots(len(sets), len(AGAINST), squeeze=False, sharey="row")
        for row, calibration in zip(grid, sets, strict=True):
            experts = chosen[chosen["calibration"] == calibration]
            for axes, measure in zip(row, AGAINST, strict=True):
                _points(axes, experts, measure)
            row[0].set_ylabel("rise of the loss (nats a token)")
            row[0].annotate(
                names.calibration(calibration), (0, 1.16), xycoords="axes fraction", fontsize=8.5, fontweight="bold"
            )
        for axes, measure in zip(grid[-1], AGAINST, strict=True):
            axes.set_xlabel(MEASURES[measure])
        layers = sorted(chosen["layer"].unique())
        ends = [layers[0], layers[-1]] if len(layers) > 1 else layers
        look: Any = {"linestyle": "", "marker": "o"}
        handles = [Line2D([], [], color=_depth(layer, layers), label=f"layer {layer}", **look) for layer in ends]
        drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    caption = (
        "Each point is an expert, its shade the depth of its layer. Up: what the model's loss gains when that expert "
        "alone is silent, gates as they are. ρ: rank correlation over all experts, and its mean over layers. Experts "
        "without a token have no router weight and are left out there."
    )
    return Figure(name, f"What losing an expert costs, and what foretells it: {model}", caption, drawing)


def _depth(layer: int, layers: Sequence[int]) -> str:
    """From light to dark with depth."""
    return to_hex(colormaps["viridis_r"](0.1 + 0.85 * layers.index(layer) / max(1, len(layers) - 1)))


def _points(axes: Axes, experts: pd.DataFrame, measure: str) -> None:
    layers = sorted(experts["layer"].unique())
    for about, points in groups(experts.sort_values("layer"), ["layer"]):
        axes.plot(
            points[measure], points["ablation"], "o", markersize=3, alpha=0.75, markeredgewidth=0,
            color=_depth(about["layer"], layers),
        )  # fmt: skip
    pooled, inside = (
        correlations(experts, measure, "ablation")["rank"],
        rank_correlation_by_layer(experts, measure, "ablation"),
    )
    axes.set_title(f"ρ = {_spelled(pooled)}; in a layer {_spelled(inside)}", fontsize=7.5, fontweight="normal")
    axes.axhline(0, color=style.RULE, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.ticklabel_format(axis="both", style="sci", scilimits=(-2, 3))
    for offset in (axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()):
        offset.set_fontsize(6.5)


def _spelled(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")


def smoothing_figure(losses: pd.DataFrame, *, model: str, name: str) -> Figure | None:
    """Fig. 12: what each smoothing makes of the layer losses, a panel per calibration set; targets with mean one."""
    from moe_lab.allocation.smoothing import Smoothing, smooth

    chosen = losses[losses["model"] == model].dropna(subset=["loss"])
    sets = names.calibrations_in_order(chosen["calibration"])
    if not sets:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE, 2.1 * -(-len(sets) // 3) + 0.5)
        for at, calibration in enumerate(sets):
            part = chosen[chosen["calibration"] == calibration].sort_values("layer")
            axes = drawing.add_subplot(-(-len(sets) // 3), min(3, len(sets)), at + 1)
            for place, (word, shade) in enumerate(zip(get_args(Smoothing), _SHADES, strict=False)):
                target = smooth(part["loss"].to_numpy(float), word)
                look: Any = {"color": shade, "marker": style.MARKERS[place], "label": word}
                axes.plot(part["layer"], target / target.mean(), markersize=3.5, linewidth=1.2, **look)
            axes.set_title(names.calibration(calibration))
            axes.set(xlabel="decoder layer", ylabel="target, mean 1" if at % 3 == 0 else None)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.grid(axis="y")
        _legend(drawing.axes, drawing)
    caption = (
        "How much of its score each layer is to keep, relative to the others, after its loss is smoothed; none: as the "
        "loss is."
    )
    return Figure(name, f"What smoothing makes of layer losses: {model}", caption, drawing)


def depth_figure(
    expert_rows: pd.DataFrame, measures: Mapping[str, str], *, model: str, name: str, title: str, caption: str
) -> Figure | None:
    """A panel per measure over the decoder layers: the median expert of each layer, a line per calibration set, and
    the band in which four of five experts lie. None when no expert of `model` has any of them."""
    chosen = expert_rows[expert_rows["model"] == model]
    shown = [measure for measure in measures if chosen[measure].notna().any()]
    if not shown:
        return None
    sets = names.calibrations_in_order(chosen["calibration"])
    across = min(3, len(shown))
    with style.look():
        drawing = style.drawing(style.PAGE, 1.9 * -(-len(shown) // across) + 0.5)
        for at, measure in enumerate(shown):
            axes = drawing.add_subplot(-(-len(shown) // across), across, at + 1)
            for place, calibration in enumerate(sets):
                experts = chosen[chosen["calibration"] == calibration].dropna(subset=[measure])
                _line(axes, experts, measure, place, names.calibration(calibration))
            axes.set_title(measures[measure], fontsize=7.5)
            axes.set_xlabel("decoder layer")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
            axes.yaxis.get_offset_text().set_fontsize(6.5)
            axes.grid(axis="y")
        _legend(drawing.axes, drawing)
    band = "The line is the median expert of a layer; four of five experts lie in the band."
    return Figure(name, f"{title}: {model}", f"{caption} {band}", drawing)


def _line(axes: Axes, experts: pd.DataFrame, measure: str, place: int, label: str) -> None:
    by_layer = experts.groupby("layer")[measure]
    shade = _SHADES[place % len(_SHADES)]
    middle, low, high = by_layer.median(), by_layer.quantile(SPREAD[0]), by_layer.quantile(SPREAD[1])
    axes.fill_between(middle.index, low, high, color=shade, alpha=0.15, linewidth=0)
    axes.plot(
        middle.index, middle, color=shade, marker=style.MARKERS[place % len(style.MARKERS)], markersize=3.5,
        linewidth=1.2, label=label,
    )  # fmt: skip


def _legend(panels: Iterable[Axes], drawing: Drawing) -> None:
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    drawing.legend(handles=list(handles.values()), loc="outside lower center", ncols=min(6, len(handles)))


@output("attributions_and_ablation", chapter="attribution", needs=ABLATED)
def ablations(results: Results, name: str) -> list[Figure]:
    """Attributions against the loss that ablating an expert causes."""
    study = results.study
    return per_model(study, name, lambda model, own: ablation_figure(study.experts, model=model, name=own))


def _by_depth(results: Results, name: str, measures: Mapping[str, str], title: str, caption: str) -> list[Figure]:
    study = results.study
    return per_model(
        study,
        name,
        lambda model, own: depth_figure(study.experts, measures, model=model, name=own, title=title, caption=caption),
    )


@output("attributions_by_depth", chapter="attribution", needs=SUMS)
def attributions_by_depth(results: Results, name: str) -> list[Figure]:
    """Statistics of experts by depth."""
    caption = "Statistics of experts by depth, as gathered."
    return _by_depth(results, name, MEASURES, "Routing and attribution by depth", caption)


@output("activations_by_depth", chapter="attribution", needs=SUMS)
def activations_by_depth(results: Results, name: str) -> list[Figure]:
    """Sizes of activations by depth."""
    caption = "Activations: the inputs of an expert's down projection over the tokens that it got."
    return _by_depth(results, name, MAGNITUDES, "Size of activations", caption)


@output("coverage.fig12", chapter="attribution", needs=SUMS)
def smoothings(results: Results, name: str) -> list[Figure]:
    """Layer losses as each smoothing leaves them."""
    losses = results.study.layer_losses
    return per_model(results.study, name, lambda model, own: smoothing_figure(losses, model=model, name=own))
