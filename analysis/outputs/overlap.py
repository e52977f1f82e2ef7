"""Overlap of the experts to prune across calibration sets, and of a proxy with exact damage
(Unified Expert Pruning, Figs. 3 to 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis import names
from analysis.load.reader import groups, records
from analysis.outputs.captions import pass_setup
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table, display_frame
from analysis.stats import overlap


def overlap_table(results: Results, name: str) -> Table:
    """Overlap of the experts with the lowest scores S(b, alpha, beta) across calibration sets, by
    the three definitions of `overlap.agreement`. A row per model, ratio and (b, alpha, beta)."""
    overlaps = results.overlaps
    variants = [
        overlap.variant_name(*variant) for variant in overlaps[overlap.VARIANT].to_numpy(int)
    ]
    text_columns = {
        "Model": "model",
        "Pruned": "ratio",
        "Variant": "variant",
        "b": "b",
        "α": "alpha",
        "β": "beta",
    }
    # displayed column -> column of `overlaps`
    measures = {"Triple": "triple", "Pairwise": "pairwise", "Jaccard": "jaccard"}
    expectations = {
        f"{label}, by chance": f"chance_{measure}" for label, measure in measures.items()
    }
    number_columns = measures | expectations
    return Table(
        name=name,
        title="Overlap of the experts to prune across calibration sets",
        caption="Triple: share of the lowest experts that is the same under all calibration sets; "
        "pairwise: mean over pairs of sets; Jaccard: intersection over union. (1,0,0) scores all "
        f"experts alike. Based on {pass_setup(results.study)}",
        frame=display_frame(overlaps.assign(variant=variants), text_columns | number_columns),
        formats=dict.fromkeys(("b", "α", "β"), "{:.0f}") | dict.fromkeys(number_columns, SCORE),
        best=dict.fromkeys(measures, "max"),
        blocks=("Model", "Pruned"),
    )


def proxy_table(results: Results, name: str) -> Table:
    """The numbers of `proxy_figure`. A row per model, calibration set and ratio."""
    text_columns = {"Model": "model", "Calibration": "calibration", "Pruned": "ratio"}
    shares = {"Overlap": "overlap", "Lowest layer": "lowest", "By chance": "chance"}
    return Table(
        name=name,
        title="Overlap of proxy and exact damage",
        caption="Share of the experts with the lowest exact damage that also have the lowest proxy "
        "S(0,1,1): mean over layers, the lowest layer, and expectation for random sets. Based on "
        f"{pass_setup(results.study)}",
        frame=display_frame(results.proxy_overlaps, text_columns | shares),
        formats=dict.fromkeys(shares, SCORE),
    )


HEAT_MAP_ROWS = [(b, alpha) for b in (0, 1) for alpha in (0, 1, 2)]
"""(b, alpha) of the rows of a heat map."""
HEAT_MAP_COLUMNS = (0, 1, 2)
"""beta of the columns of a heat map."""
_SHADES = {"b": "#2277bb", "alpha": "#ee7733", "beta": "#117733"}
"""Parameter of a variant -> colour of the parameter's bars."""
_LETTERS = {"b": "b", "alpha": "α", "beta": "β"}
"""Parameter of a variant -> its letter in labels."""


def proxy_figure(results: Results, name: str) -> Figure:
    """Overlap of proxy and exact damage (Unified Expert Pruning, Fig. 3). A row per model and
    calibration set, a colour per ratio."""
    overlaps = results.proxy_overlaps
    # (model, calibration set) of each row of the figure
    rows = list(dict.fromkeys(zip(overlaps["model"], overlaps["calibration"], strict=True)))
    drawing = style.drawing(style.PAGE * 0.75, 0.34 * len(rows) + 0.95)
    axes = drawing.add_subplot()
    ratio_groups = groups(overlaps.sort_values("ratio", kind="stable"), ["ratio"])
    for number, (key, group) in enumerate(ratio_groups):
        rows_of_ratio = zip(group["model"], group["calibration"], strict=True)
        # number - 0.5 places the first ratio above and the second below the centre of the row
        y = np.array([rows.index(row) for row in rows_of_ratio]) + 0.22 * (number - 0.5)
        look = style.line_look(number)
        axes.hlines(
            y, group["lowest"], group["overlap"], color=look["color"], linewidth=1.4, alpha=0.6
        )
        label = f"{names.ratio(key['ratio'])} pruned"
        axes.plot(group["overlap"], y, linestyle="", markersize=5, label=label, **look)
        axes.plot(group["chance"], y, "|", color=look["color"], markersize=7)
    has_several_models = overlaps["model"].nunique() > 1
    labels = [
        f"{model}, {names.calibration(calibration)}"
        if has_several_models
        else names.calibration(calibration)
        for model, calibration in rows
    ]
    style.label_ticks(axes.yaxis, range(len(rows)), labels)
    axes.set(xlim=(0, 1.02), ylim=(len(rows) - 0.5, -0.5), xlabel="share of the same experts")
    axes.grid(axis="x")
    style.legend(drawing, axes.get_legend_handles_labels()[0], most=4)
    caption = (
        "Share of the experts with the lowest exact damage that also have the lowest proxy "
        "S(0,1,1): mean over layers (point), the lowest layer (end of the line), and expectation "
        f"for random sets (tick). Based on {pass_setup(results.study)}"
    )
    return Figure(name, "Overlap of proxy and exact damage", caption, drawing)


def pooled_figure(results: Results, name: str) -> Figure:
    """Overlap of the experts with the lowest scores S(b, alpha, beta) across calibration sets, the
    mean over models (Unified Expert Pruning, Fig. 4). Two panels per ratio."""
    overlaps = overlap.mean_over_models(results.overlaps)
    ratios = sorted(overlaps["ratio"].unique())
    drawing = style.drawing(style.PAGE, 2.75 * len(ratios))
    grid = drawing.subplots(len(ratios), 2, squeeze=False, width_ratios=(1, 1.15))
    for (left, right), ratio in zip(grid, ratios, strict=True):
        ratio_overlaps = overlaps[overlaps["ratio"] == ratio]
        _draw_effects(left, ratio_overlaps)
        _draw_heat_map(right, ratio_overlaps)
        left.set_title(f"{names.ratio(ratio)} pruned")
    caption = (
        "Share of the lowest-scored experts of a layer that is the same under all calibration sets "
        "(mean over layers and models). Left: mean over all usable variants with this b, α or β. "
        "Right: each variant. Dashed: random sets. (1,0,0) scores all experts alike. Based on "
        f"{pass_setup(results.study)}"
    )
    return Figure(name, "Which scores depend least on the calibration set", caption, drawing)


def _draw_effects(axes: Axes, overlaps: pd.DataFrame) -> None:
    """Draw a bar for each value of b, of alpha and of beta. The bar of b=1, for example, is the
    mean overlap of all scores S(b, alpha, beta) with b=1.

    overlaps: the rows of one ratio in `overlap.mean_over_models`."""
    effects = overlap.component_effects(overlaps)
    position = 0.0
    ticks: list[tuple[float, str]] = []  # (position, label) of each bar
    for component in overlap.VARIANT:
        for row in records(effects[effects["component"] == component]):
            axes.bar(position, row["overlap"], width=0.8, color=_SHADES[component], alpha=0.8)
            axes.text(
                position, row["overlap"] + 0.015, f"{row['overlap']:.2f}", ha="center", fontsize=6.5
            )
            ticks.append((position, f"{_LETTERS[component]}={row['level']}"))
            position += 1
        position += 0.6  # a gap between components
    chance = float(overlaps["chance_triple"].iloc[0])
    axes.axhline(chance, **style.DASHED)
    axes.set_xlim(-0.6, position + 1.0)  # room for "chance" to the right of the last bar
    axes.text(
        position + 1.0, chance, "chance", fontsize=6.5, ha="right", va="bottom", color=style.MUTED
    )
    style.label_ticks(axes.xaxis, *zip(*ticks, strict=True), labelsize=7)
    axes.set(ylim=(0, 1), ylabel="overlap")
    axes.grid(axis="y")


def _draw_heat_map(axes: Axes, overlaps: pd.DataFrame) -> None:
    """Draw a square for each variant (b, alpha, beta), shaded by the variant's overlap.

    overlaps: a row per variant, with the columns b, alpha, beta and triple (the overlap)."""
    overlap_of_variant = {
        (row["b"], row["alpha"], row["beta"]): row["triple"] for row in records(overlaps)
    }
    for y, (b, alpha) in enumerate(HEAT_MAP_ROWS):
        for x, beta in enumerate(HEAT_MAP_COLUMNS):
            share = overlap_of_variant.get((b, alpha, beta), np.nan)
            if (b, alpha, beta) == overlap.DEGENERATE_VARIANT or np.isnan(share):
                hatching: Any = {
                    "facecolor": "none",
                    "edgecolor": style.RULE,
                    "hatch": "///",
                    "linewidth": 0,
                }
                axes.add_patch(Rectangle((x, y), 1, 1, **hatching))
                axes.text(x + 0.5, y + 0.5, "N/A", ha="center", va="center", color=style.MUTED)
            else:
                style.draw_square(
                    axes,
                    x,
                    y,
                    float(share),
                    f"{share:.2f}",
                    below=overlap.variant_name(b, alpha, beta),
                )
    style.label_squares(
        axes,
        [f"β={beta}" for beta in HEAT_MAP_COLUMNS],
        [f"b={b}, α={alpha}" for b, alpha in HEAT_MAP_ROWS],
    )


OVERLAP = "a run with overlap=true and two calibration sets"
"""Data that Figs. 4 and 5 need."""


@output("unified.fig4", chapter="overlap", figures_only=True, needs=OVERLAP)
def pooled_overlap(results: Results, name: str) -> list[Item]:
    """Overlap of the experts to prune across calibration sets, mean over models."""
    return (
        []
        if results.overlaps.empty
        else [pooled_figure(results, name), overlap_table(results, name)]
    )


@output("unified.fig5", chapter="overlap", needs=f"{OVERLAP}, of several models")
def overlap_figure(results: Results, name: str) -> Figure | None:
    """Overlap of the experts to prune across calibration sets, model by model.

    A heat map per model and ratio. None with fewer than two models, because Fig. 4 has the heat map
    of a single model.
    """
    overlaps = results.overlaps
    if overlaps.empty or overlaps["model"].nunique() < 2:
        return None
    models = list(dict.fromkeys(overlaps["model"]))
    ratios = sorted(overlaps["ratio"].unique())
    drawing = style.drawing(style.PAGE, 2.6 * len(models))
    grid = drawing.subplots(len(models), len(ratios), squeeze=False)
    for row, model in zip(grid, models, strict=True):
        for axes, ratio in zip(row, ratios, strict=True):
            is_in_panel = (overlaps["model"] == model) & (overlaps["ratio"] == ratio)
            _draw_heat_map(axes, overlaps[is_in_panel])
            axes.set_title(f"{model}, {names.ratio(ratio)} pruned")
    caption = (
        "The heat map of each model: share of the lowest-scored experts that is the same under all "
        f"calibration sets. Based on {pass_setup(results.study)}"
    )
    return Figure(name, "Overlap across calibration sets, model by model", caption, drawing)


@output("unified.fig3", chapter="overlap", figures_only=True, needs="a run with overlap=true")
def proxy_and_damage(results: Results, name: str) -> list[Item]:
    """Overlap of the proxy S(0,1,1) and exact damage."""
    return (
        []
        if results.proxy_overlaps.empty
        else [proxy_figure(results, name), proxy_table(results, name)]
    )
