"""What coverage budgets keep of each layer: its loss, the score that is covered and the channels that stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from analysis.load import passes, settings
from analysis.load.reader import records
from analysis.load.study import Study
from analysis.outputs.captions import of_passes
from analysis.outputs.score_rows import BUDGETED, DEFAULT_SMOOTHING, SMOOTHING, coverage_cells
from analysis.registry import Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.comparison import Comparison
from moe_lab.results import BUDGETS

PANELS = 4
"""Plans that are drawn at most."""
STRIPS = {
    "loss": "layer loss",
    "smoothed": "smoothed loss",
    "coverage": "score coverage",
    "kept": "channels kept",
}
"""What a layer has -> what its strip is called."""
NUMBERS = 24
"""Layers up to which strips show numbers."""


def layer_budgets(study: Study, comparison: Comparison) -> pd.DataFrame:
    """cell, label, smoothing, calibration, layer, coverage, kept: coverage budgets at the ratio closest to a half.

    coverage: share of the layer's score that is kept; kept: share of its channels; smoothing: of layer losses. At most
    PANELS plans.
    """
    chosen = coverage_cells(comparison)
    labels = settings.method_labels(chosen)
    frames = [pd.DataFrame(columns=["cell", "label", "smoothing", "calibration", *BUDGETS])]
    for cell, about in zip(chosen.index[:PANELS].map(int), records(chosen), strict=False):
        plan, scores = (study.reader.find(str(about[f"{kind}_folder"])) for kind in ("plan", "scores"))
        kept = passes.read(plan, "budgets.parquet", study.reader, arrays_in=scores)
        if kept is not None:
            labelled = {"label": labels[cell], "smoothing": _smoothing(study, about)}
            frames.append(kept.assign(cell=cell, calibration=about["calibration"], **labelled))
    return pd.concat(frames[1:] or frames, ignore_index=True)


def _smoothing(study: Study, about: Mapping[str, Any]) -> str:
    """How the plan of a cell smooths layer losses: from its settings, or the word of the study's record."""
    plan = study.reader.find(str(about["plan_folder"]))
    provenance = ((study.reader.json(plan, "plan.json") if plan else None) or {}).get("provenance") or {}
    parameters = (provenance.get("allocation") or {}).get("parameters") or {}
    parameters_of = {**settings.allocation(str(about["allocation"]))[1], **parameters}
    return str(next((parameters_of[word] for word in SMOOTHING if word in parameters_of), DEFAULT_SMOOTHING))


def budget_strips(budgets: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """`budgets` with the columns loss, as measured in the calibration set of the plan, and smoothed: both with a mean
    of one over the layers of the plan. Without losses, NaN."""
    from moe_lab.allocation.smoothing import smooth

    both = budgets.merge(losses[["calibration", "layer", "loss"]], on=["calibration", "layer"], how="left")
    parts = []
    for _, plan in both.groupby("cell", sort=False):
        loss = plan["loss"].to_numpy(float)
        target = smooth(loss, plan["smoothing"].iloc[0]) if np.isfinite(loss).all() else loss
        parts.append(plan.assign(loss=loss / loss.mean(), smoothed=target / target.mean()))
    return pd.concat(parts, ignore_index=True) if parts else both.assign(smoothed=np.nan)


def strip_figure(budgets: pd.DataFrame, strips: Iterable[str], *, name: str, title: str, caption: str) -> Figure | None:
    """A row of cells, one per layer, for each of `strips` (columns of `budgets`): a block of them per plan."""
    plans = [plan.sort_values("layer") for _, plan in budgets.groupby("cell", sort=False)]
    shown = [strip for strip in strips if len(plans) and budgets[strip].notna().any()]
    if not plans:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE, len(plans) * (0.3 * len(shown) + 0.5) + 0.35)
        grid = drawing.subplots(len(plans), 1, squeeze=False)[:, 0]
        for axes, plan in zip(grid, plans, strict=True):
            for at, strip in enumerate(shown):
                _strip(axes, at, plan[strip].to_numpy(float), percent=strip in ("coverage", "kept"))
            axes.set(xlim=(0, len(plan)), ylim=(len(shown), 0))
            axes.set_yticks(np.arange(len(shown)) + 0.5, [STRIPS[strip] for strip in shown])
            step = -(-len(plan) // NUMBERS)
            axes.set_xticks(np.arange(0, len(plan), step) + 0.5, plan["layer"].iloc[::step].map(str))
            axes.set_title(plan["label"].iloc[0], fontsize=7.5)
            style.bare(axes)
        grid[-1].set_xlabel("decoder layer")
    return Figure(name, title, caption, drawing)


def _strip(axes: Axes, at: int, values: np.ndarray[Any, np.dtype[np.float64]], *, percent: bool) -> None:
    """One row of squares, each shaded between the least and the greatest value of the row."""
    low, high = np.nanmin(values), np.nanmax(values)
    place = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    for layer, (value, shade) in enumerate(zip(values, place, strict=True)):
        if np.isnan(value):
            continue
        axes.fill_between([layer + 0.03, layer + 0.97], at + 0.05, at + 0.95, color=colormaps[style.SEQUENTIAL](shade))
        if len(values) <= NUMBERS:
            text = f"{value * 100:.0f} %" if percent else f"{value:.2f}"
            ink = "#ffffff" if shade > 0.55 else style.INK
            axes.text(layer + 0.5, at + 0.5, text, ha="center", va="center", color=ink, fontsize=6)


def stack_figure(study: Study, comparison: Comparison, experts: pd.DataFrame, *, name: str) -> Figure | None:
    """Experts of each layer stacked by their share of its attribution, beside what a plan keeps."""
    budgets = layer_budgets(study, comparison).drop_duplicates("cell")
    if budgets.empty or experts.empty:
        return None
    first = records(budgets)[0]
    here = (experts["model"] == comparison.model) & (experts["calibration"] == first["calibration"])
    shares = experts.loc[here, ["layer", "expert", "first"]]
    plan = study.kept.loc[study.kept["cell"] == first["cell"], ["layer", "expert", "share"]]
    both = shares.merge(plan, on=["layer", "expert"]).assign(first=lambda frame: frame["first"].clip(lower=0))
    if both.empty or not both["first"].sum() > 0:
        return None
    both["place"] = both.groupby("layer")["first"].rank(method="first", ascending=False).astype(int) - 1
    with style.look():
        drawing = style.drawing(style.PAGE, 3.0)
        left, right = drawing.subplots(1, 2, sharey=True)
        for axes, column, title in (
            (left, "first", "Share of the attribution"),
            (right, "share", "Share of what is kept"),
        ):
            _stack(axes, both, column)
            axes.set_title(title)
            axes.set_xlabel("decoder layer")
        left.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    caption = (
        "Each bar is a layer, each piece of it an expert, from the highest attribution (bottom, dark) to the lowest; "
        "left: its share of the layer's attribution (first order, negative ones as 0), right: its share of the "
        f"channels that the layer keeps under {first['label']}."
    )
    return Figure(name, f"Experts of each layer by attribution and by budget: {comparison.model}", caption, drawing)


def _stack(axes: Axes, both: pd.DataFrame, column: str) -> None:
    parts = both.pivot_table(index="place", columns="layer", values=column)
    parts = parts / parts.sum()
    bottom, where = np.zeros(parts.shape[1]), range(parts.shape[1])
    for at, (_, row) in enumerate(parts.iterrows()):
        shade = colormaps["YlGnBu_r"](0.05 + 0.85 * at / max(1, len(parts) - 1))
        axes.bar(where, row.fillna(0), bottom=bottom, width=0.85, color=shade, edgecolor=style.SURFACE, linewidth=0.2)
        bottom = bottom + row.fillna(0).to_numpy()
    shown = range(0, parts.shape[1], -(-parts.shape[1] // 12))
    axes.set_xticks(shown, [str(parts.columns[at]) for at in shown])
    axes.set_ylim(0, 1)


_MEANING = (
    "Layer loss: what the routed output of a layer weighs against the residual stream after it, the mean over "
    "calibration tokens of ‖m‖² / (‖y‖² + ε), divided by its mean over layers. Score coverage: share of the sum of the "
    "layer's channel scores that the plan keeps. Squares of a row are shaded between its least and its greatest value."
)


def _strips(results: Results, name: str, strips: Iterable[str], title: str, caption: str) -> list[Figure]:
    study = results.study
    losses, figures = study.layer_losses, []
    for comparison, own in results.per_pruned_model(name):
        budgets = budget_strips(layer_budgets(study, comparison), losses[losses["model"] == comparison.model])
        words = {"title": f"{title}: {comparison.model}", "caption": caption}
        figures.append(strip_figure(budgets, strips, name=own, **words))
    return of_passes(study, figures)


@output("coverage.fig7", chapter="attribution", needs=BUDGETED)
def coverage_budgets(results: Results, name: str) -> list[Figure]:
    """Losses, coverage and the kept share of each layer."""
    title = "Losses of layers and what their budgets keep"
    return _strips(results, name, ("loss", "coverage", "kept"), title, _MEANING)


@output(
    "coverage.fig11",
    chapter="attribution",
    needs=f"{BUDGETED}, and the sums of their pass in the store",
)
def smoothed_losses_and_budgets(results: Results, name: str) -> list[Figure]:
    """Raw and smoothed losses, coverage and the kept share of each layer."""
    title = "From layer losses to budgets"
    caption = (
        f"Smoothed loss: by the smoothing of the plan, divided by its mean; the target of the coverage. {_MEANING}"
    )
    return _strips(results, name, STRIPS, title, caption)


@output(
    "attribution_by_layer",
    chapter="attribution",
    needs=f"{BUDGETED}, and the sums of their pass in the store",
)
def attribution_stacks(results: Results, name: str) -> list[Figure]:
    """Experts of each layer by attribution and by budget, one above the other."""
    study = results.study
    return of_passes(
        study, (stack_figure(study, one, study.experts, name=own) for one, own in results.per_pruned_model(name))
    )
