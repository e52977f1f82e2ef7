"""A table: numbers with what a reader needs beside them; and the tables that are not about scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle

from analysis import names
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import of_pass
from analysis.registry import Item, Results, figures, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table
from analysis.stats import overlap
from analysis.stats.overlap import variant_name


def overlap_table(study: Study, overlaps: pd.DataFrame, *, name: str = "overlap") -> Table:
    """Overlap over calibration sets of every S(b, alpha, beta), by three readings, with chance levels."""
    columns = ["Model", "Pruned", "Variant", "b", "α", "β", "Triple", "Pairwise", "Jaccard"]
    chance = ["Triple, by chance", "Pairwise, by chance", "Jaccard, by chance"]
    frame = pd.DataFrame(columns=[*columns, *chance])
    if len(overlaps):
        keys = [
            "b",
            "alpha",
            "beta",
            "triple",
            "pairwise",
            "jaccard",
            "chance_triple",
            "chance_pairwise",
            "chance_jaccard",
        ]
        numbers = overlaps[keys].set_axis([*columns[3:], *chance], axis=1)
        variants = [variant_name(row["b"], row["alpha"], row["beta"]) for row in records(overlaps)]
        text = {"Model": overlaps["model"], "Pruned": overlaps["ratio"].map(names.ratio), "Variant": variants}
        frame = pd.concat([pd.DataFrame(text), numbers], axis=1)
    shown = dict.fromkeys(("b", "α", "β"), "{:.0f}") | dict.fromkeys((*columns[6:], *chance), SCORE)
    return Table(
        name=name,
        title="Overlap of the experts to prune across calibration sets",
        caption="Triple: share of the lowest experts that is the same under all calibration sets; pairwise: mean over "
        f"pairs of sets; Jaccard: intersection over union. (1,0,0) is the same for all. Based on {of_pass(study)}",
        frame=frame,
        formats=shown,
        best=dict.fromkeys(("Triple", "Pairwise", "Jaccard"), "max"),
        blocks=("Model", "Pruned"),
    )


def proxy_table(study: Study, overlaps: pd.DataFrame, *, name: str = "proxy") -> Table:
    """Fig. 3 as numbers: how many of the experts with the lowest exact damage the proxy S(0,1,1) finds too."""
    columns = ["Model", "Calibration", "Pruned", "Overlap", "Lowest layer", "By chance"]
    frame = pd.DataFrame(columns=columns)
    if len(overlaps):
        frame = overlaps[["model", "calibration", "ratio", "overlap", "lowest", "chance"]].set_axis(columns, axis=1)
        frame = frame.assign(
            Calibration=overlaps["calibration"].map(names.calibration), Pruned=overlaps["ratio"].map(names.ratio)
        )
    return Table(
        name=name,
        title="Overlap of proxy and exact damage",
        caption="Share of the experts with the lowest exact damage that have the lowest proxy S(0,1,1) too: mean over "
        f"layers, the lowest layer, and what random sets would share. Based on {of_pass(study)}",
        frame=frame,
        formats=dict.fromkeys(columns[3:], SCORE),
    )


ROWS = [(b, alpha) for b in (0, 1) for alpha in (0, 1, 2)]
BETAS = (0, 1, 2)
_SHADES = {"b": "#2277bb", "alpha": "#ee7733", "beta": "#117733"}
_GREEK = {"b": "b", "alpha": "α", "beta": "β"}


def proxy_figure(overlaps: pd.DataFrame, *, name: str) -> Figure:
    """Fig. 3 from `proxy_overlap`: a point per model, calibration set and ratio, and the chance level."""
    with style.look():
        rows = list(dict.fromkeys(zip(overlaps["model"], overlaps["calibration"], strict=True)))
        drawing = style.drawing(style.PAGE * 0.75, 0.34 * len(rows) + 0.95)
        axes = drawing.add_subplot()
        for at, (key, group) in enumerate(groups(overlaps.sort_values("ratio", kind="stable"), ["ratio"])):
            y = np.array([rows.index(key) for key in zip(group["model"], group["calibration"], strict=True)])
            shade, marker = ("#2277bb", "#ee7733", "#117733", "#aa4499")[at % 4], style.MARKERS[at]
            y = y + 0.22 * (at - 0.5)
            axes.hlines(y, group["lowest"], group["overlap"], color=shade, linewidth=1.4, alpha=0.6)
            axes.plot(
                group["overlap"], y, marker, color=shade, markersize=5, label=f"{names.ratio(key['ratio'])} pruned"
            )
            axes.plot(group["chance"], y, "|", color=shade, markersize=7)
        single = overlaps["model"].nunique() == 1
        labels = [names.calibration(s) if single else f"{m}, {names.calibration(s)}" for m, s in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set(xlim=(0, 1.02), ylim=(len(rows) - 0.5, -0.5), xlabel="share of the same experts")
        axes.grid(axis="x")
        drawing.legend(loc="outside upper center", ncols=4)
    caption = (
        "How many of the experts with the lowest exact damage the proxy S(0,1,1) also finds: mean over layers (point), "
        "the worst layer (end of the line), and what random sets would share (tick)."
    )
    return Figure(name, "Proxy and exact damage agree on what to prune", caption, drawing)


def pooled_figure(overlaps: pd.DataFrame, *, name: str) -> Figure:
    """Fig. 4 from `calibration_overlap`: component effects beside the pooled heat map over (b, alpha, beta)."""
    pooled = overlap.pooled(overlaps)
    ratios = sorted(pooled["ratio"].unique())
    with style.look():
        drawing = style.drawing(style.PAGE, 2.75 * len(ratios))
        rows = drawing.subfigures(len(ratios), 1, squeeze=False)[:, 0]
        for row, ratio in zip(rows, ratios, strict=True):
            left, right = row.subplots(1, 2, width_ratios=(1, 1.15))
            one = pooled[pooled["ratio"] == ratio]
            _effects_axes(left, one)
            _heat_axes(right, one)
            row.suptitle(f"{names.ratio(ratio)} pruned", fontsize=8.5, fontweight="bold", x=0.01, ha="left")
    caption = (
        "Share of the lowest-scored experts of a layer that is the same under all calibration sets (mean over layers "
        "and models). Left: mean over all usable variants with this b, α or β. Right: each variant. Dashed: random "
        "sets. (1,0,0) scores all experts alike."
    )
    return Figure(name, "Which scores depend least on the calibration set", caption, drawing)


def per_model_figure(overlaps: pd.DataFrame, *, name: str) -> Figure:
    """Fig. 5 from `calibration_overlap`: a heat map per model and ratio."""
    models, ratios = list(dict.fromkeys(overlaps["model"])), sorted(overlaps["ratio"].unique())
    with style.look():
        drawing: Drawing = style.drawing(style.PAGE, 2.6 * len(models))
        grid = drawing.subplots(len(models), len(ratios), squeeze=False)
        for row, model in enumerate(models):
            for column, ratio in enumerate(ratios):
                axes = grid[row][column]
                _heat_axes(axes, overlaps[(overlaps["model"] == model) & (overlaps["ratio"] == ratio)])
                axes.set_title(f"{model}, {names.ratio(ratio)} pruned", pad=18)
    caption = (
        "The heat map of each model: share of the lowest-scored experts that is the same under all calibration sets."
    )
    return Figure(name, "Overlap across calibration sets, model by model", caption, drawing)


def _effects_axes(axes: Axes, pooled: pd.DataFrame) -> None:
    effects = overlap.component_effects(pooled)
    position = 0.0
    ticks: list[tuple[float, str]] = []
    for component in overlap.VARIANT:
        for row in records(effects[effects["component"] == component]):
            axes.bar(position, row["overlap"], width=0.8, color=_SHADES[component], alpha=0.8)
            axes.text(position, row["overlap"] + 0.015, f"{row['overlap']:.2f}", ha="center", fontsize=6.5)
            ticks.append((position, f"{_GREEK[component]}={row['level']}"))
            position += 1
        position += 0.6
    chance = float(pooled["chance_triple"].iloc[0])
    axes.axhline(chance, color=style.INK, linestyle=(0, (4, 2)), linewidth=0.8)
    axes.text(position - 0.9, chance, "chance", fontsize=6.5, va="center", color=style.MUTED)
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=7)
    axes.set(ylim=(0, 1), ylabel="overlap")
    axes.grid(axis="y")


def _heat_axes(axes: Axes, overlaps: pd.DataFrame) -> None:
    cells = {(row["b"], row["alpha"], row["beta"]): row["triple"] for row in records(overlaps)}
    shades = colormaps[style.SEQUENTIAL]
    for y, (b, alpha) in enumerate(ROWS):
        for x, beta in enumerate(BETAS):
            value = cells.get((b, alpha, beta), np.nan)
            if (b, alpha, beta) == overlap.DEGENERATE or np.isnan(value):
                axes.add_patch(
                    Rectangle((x, y), 1, 1, facecolor="none", edgecolor=style.RULE, hatch="///", linewidth=0)
                )
                axes.text(x + 0.5, y + 0.5, "N/A", ha="center", va="center", color=style.MUTED)
                continue
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=shades(float(value)), linewidth=0))
            dark = "#000000" if value < 0.55 else "#ffffff"
            axes.text(x + 0.5, y + 0.36, f"{value:.2f}", ha="center", va="center", color=dark, fontweight="bold")
            axes.text(
                x + 0.5,
                y + 0.74,
                overlap.variant_name(b, alpha, beta),
                ha="center",
                va="center",
                color=dark,
                fontsize=5.8,
            )
    axes.set(xlim=(0, len(BETAS)), ylim=(len(ROWS), 0))
    axes.set_xticks(np.arange(len(BETAS)) + 0.5, [f"β={beta}" for beta in BETAS])
    axes.set_yticks(np.arange(len(ROWS)) + 0.5, [f"b={b}, α={alpha}" for b, alpha in ROWS])
    axes.xaxis.tick_top()
    style.bare(axes)


def _of_pass(results: Results, figure: Figure) -> Figure:
    """The figure, whose caption says with which gate, seed and texts the passes behind it were made."""
    return replace(figure, caption=f"{figure.caption} Based on {of_pass(results.study)}")


def _several_models(study: Study, items: Sequence[Item]) -> Sequence[Item]:
    """With one model, the figure per model is the pooled one."""
    return items if study.family["model"].nunique() > 1 else ()


@output("unified.fig4", chapter="overlap", shown=figures, needs="a run with overlap=true and two calibration sets")
def pooled_overlap(results: Results, name: str) -> list[Item]:
    """Overlap of the experts to prune over calibration sets, all models together."""
    if results.overlaps.empty:
        return []
    figure = _of_pass(results, pooled_figure(results.overlaps, name=name))
    return [figure, overlap_table(results.study, results.overlaps, name=name)]


@output(
    "unified.fig5",
    chapter="overlap",
    shown=_several_models,
    needs="a run with overlap=true and two calibration sets",
)
def overlap_per_model(results: Results, name: str) -> list[Item]:
    """Overlap of the experts to prune over calibration sets, model by model."""
    return [] if results.overlaps.empty else [_of_pass(results, per_model_figure(results.overlaps, name=name))]


@output("unified.fig3", chapter="overlap", shown=figures, needs="a run with overlap=true")
def proxy_and_damage(results: Results, name: str) -> list[Item]:
    """Overlap of the proxy S(0,1,1) and exact damage."""
    if results.proxy.empty:
        return []
    figure = _of_pass(results, proxy_figure(results.proxy, name=name))
    return [figure, proxy_table(results.study, results.proxy, name=name)]
