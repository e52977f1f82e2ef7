"""Overlap of the experts to prune across calibration sets, and of a proxy with exact damage
(Unified Expert Pruning, Figs. 3 to 5)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import names
from analysis.load.reader import groups
from analysis.outputs.captions import pass_setup
from analysis.registry import Item, Results, output
from analysis.render import marks, style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Columns, Table, frame_and_formats
from analysis.stats import overlap


def overlap_table(results: Results, name: str) -> Table:
    """Overlap of the experts with the lowest scores S(b, alpha, beta) across calibration sets, by
    the three definitions of `overlap.agreement`. A row per model, ratio and (b, alpha, beta)."""
    overlaps = results.overlaps
    variants = [
        overlap.variant_name(*variant) for variant in overlaps[overlap.VARIANT].to_numpy(int)
    ]
    measures = ("Triple", "Pairwise", "Jaccard")
    columns: Columns = {
        "Model": "model",
        "Pruned": "ratio",
        "Variant": "variant",
        **{name: (source, "{:.0f}") for name, source in PARAMETERS.items()},
        **{name: (name.lower(), SCORE) for name in measures},
        **{f"{name}, by chance": (f"chance_{name.lower()}", SCORE) for name in measures},
    }
    return Table(
        name=name,
        title="Overlap of the experts to prune across calibration sets",
        caption="Triple: share of the lowest experts that is the same under all calibration sets; "
        "pairwise: mean over pairs of sets; Jaccard: intersection over union. (1,0,0) scores all "
        f"experts alike. Based on {pass_setup(results.study)}",
        **frame_and_formats(overlaps.assign(variant=variants), columns),
        best=dict.fromkeys(measures, "max"),
        blocks=("Model", "Pruned"),
    )


def proxy_table(results: Results, name: str) -> Table:
    """The numbers of `proxy_and_damage`. A row per model, calibration set and ratio."""
    columns: Columns = {
        "Model": "model",
        "Calibration": "calibration",
        "Pruned": "ratio",
        "Overlap": ("overlap", SCORE),
        "Lowest layer": ("lowest", SCORE),
        "By chance": ("chance", SCORE),
    }
    return Table(
        name=name,
        title="Overlap of proxy and exact damage",
        caption="Share of the experts with the lowest exact damage that also have the lowest proxy "
        "S(0,1,1): mean over layers, the lowest layer, and expectation for random sets. Based on "
        f"{pass_setup(results.study)}",
        **frame_and_formats(results.proxy_overlaps, columns),
    )


PARAMETERS = {"b": "b", "α": "alpha", "β": "beta"}
"""Letter of a parameter of a variant -> its column."""


OVERLAP = "a run with overlap=true and two calibration sets"
"""Data that Figs. 4 and 5 need."""


@output("unified.fig3", chapter="overlap", figures_only=True, needs="a run with overlap=true")
def proxy_and_damage(results: Results, name: str) -> list[Item]:
    """Overlap of the proxy S(0,1,1) and exact damage.

    Unified Expert Pruning, Fig. 3: a panel per ratio, a row per model and calibration set."""
    overlaps = results.proxy_overlaps
    if overlaps.empty:
        return []
    ratios = sorted(overlaps["ratio"].unique())
    sets = overlaps["calibration"].map(names.calibration)
    has_several_models = overlaps["model"].nunique() > 1
    rows = overlaps.assign(
        panel=overlaps["ratio"].map(names.ratio) + " pruned",
        label=overlaps["model"] + ", " + sets if has_several_models else sets,
        x=overlaps["overlap"],
        low=overlaps["lowest"],
        high=overlaps["overlap"],
        colour=style.SHADES[0],
        is_open=False,
    )
    rows = rows.sort_values("ratio", kind="stable")
    drawing = marks.intervals(rows, marks.Axis("share of the same experts", limits=marks.SCORES))
    for axes, ratio in zip(drawing.axes, ratios, strict=True):
        chance = rows.loc[rows["ratio"] == ratio, "chance"]
        axes.plot(chance, range(len(chance)), "|", color=style.SHADES[0], markersize=7)
    caption = (
        "Share of the experts with the lowest exact damage that also have the lowest proxy "
        "S(0,1,1): mean over layers (point), the lowest layer (end of the line), and expectation "
        f"for random sets (tick). Based on {pass_setup(results.study)}"
    )
    figure = Figure(name, "Overlap of proxy and exact damage", caption, drawing)
    return [figure, proxy_table(results, name)]


@output("unified.fig4", chapter="overlap", figures_only=True, needs=OVERLAP)
def pooled_overlap(results: Results, name: str) -> list[Item]:
    """Overlap of the experts to prune across calibration sets, mean over models.

    Unified Expert Pruning, Fig. 4: the overlap of the experts with the lowest scores S(b, alpha,
    beta), two panels per ratio."""
    if results.overlaps.empty:
        return []
    overlaps = overlap.mean_over_models(results.overlaps)
    ratios = sorted(overlaps["ratio"].unique())
    drawing = style.drawing(style.PAGE, 2.75 * len(ratios))
    grid = drawing.subplots(len(ratios), 2, squeeze=False, width_ratios=(1, 1.15))
    for (left, right), ratio in zip(grid, ratios, strict=True):
        ratio_overlaps = overlaps[overlaps["ratio"] == ratio]
        _draw_effects(left, ratio_overlaps)
        marks.draw_squares(right, _squares(ratio_overlaps), 3)
        left.set_title(f"{names.ratio(ratio)} pruned")
    caption = (
        "Share of the lowest-scored experts of a layer that is the same under all calibration sets "
        "(mean over layers and models). Left: mean over all usable variants with this b, α or β. "
        "Right: each variant. Dashed: random sets. (1,0,0) scores all experts alike. Based on "
        f"{pass_setup(results.study)}"
    )
    title = "Which scores depend least on the calibration set"
    return [Figure(name, title, caption, drawing), overlap_table(results, name)]


def _draw_effects(axes: Axes, overlaps: pd.DataFrame) -> None:
    """Draw a bar for each value of b, of alpha and of beta. The bar of b=1, for example, is the
    mean overlap of all scores S(b, alpha, beta) with b=1.

    overlaps: the rows of one ratio in `overlap.mean_over_models`."""
    effects = overlap.component_effects(overlaps)
    effects = effects.sort_values(
        "component", key=lambda component: component.map(overlap.VARIANT.index), kind="stable"
    )
    letters = dict(zip(PARAMETERS.values(), PARAMETERS, strict=True))
    labels = effects["component"].map(letters) + "=" + effects["level"].astype(str)
    shades = dict(zip(PARAMETERS.values(), style.SHADES, strict=False))
    axes.bar(labels, effects["overlap"], color=effects["component"].map(shades))
    axes.axhline(overlaps["chance_triple"].iloc[0], **style.DASHED)
    axes.set(ylim=(0, 1), ylabel="overlap")
    axes.grid(axis="y")


def _squares(overlaps: pd.DataFrame) -> pd.DataFrame:
    """A square for each variant (b, alpha, beta), shaded by the variant's overlap: the columns of
    `marks.heat_map` but for "panel".

    overlaps: a row per variant, with the columns b, alpha, beta and triple (the overlap)."""
    by_variant = overlaps.set_index(list(overlap.VARIANT))["triple"]
    rows = []
    for b, alpha, beta in product((0, 1), (0, 1, 2), (0, 1, 2)):
        share = by_variant.get((b, alpha, beta), np.nan)
        is_missing = (b, alpha, beta) == overlap.DEGENERATE_VARIANT or np.isnan(share)
        rows.append(
            {
                "x": f"β={beta}",
                "y": f"b={b}, α={alpha}",
                "colour": "none" if is_missing else style.shade(share),
                "text": "N/A"
                if is_missing
                else f"{share:.2f} {overlap.variant_name(b, alpha, beta)}",
            }
        )
    return pd.DataFrame(rows)


@output("unified.fig5", chapter="overlap", needs=f"{OVERLAP}, of several models")
def overlap_figure(results: Results, name: str) -> Figure | None:
    """Overlap of the experts to prune across calibration sets, model by model.

    A heat map per model and ratio. None with fewer than two models, because Fig. 4 has the heat map
    of a single model.
    """
    overlaps = results.overlaps
    if overlaps.empty or overlaps["model"].nunique() < 2:
        return None
    frames = [
        _squares(rows).assign(panel=f"{key['model']}, {names.ratio(key['ratio'])} pruned")
        for key, rows in groups(overlaps, ["model", "ratio"])
    ]
    drawing = marks.heat_map(pd.concat(frames))
    caption = (
        "The heat map of each model: share of the lowest-scored experts that is the same under all "
        f"calibration sets. Based on {pass_setup(results.study)}"
    )
    return Figure(name, "Overlap across calibration sets, model by model", caption, drawing)
