"""Channels that allocations keep in each layer, their share of the score, and the losses from which
coverage budgets are computed (MoE-Slimming, Figs. 7 and 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import names
from analysis.load import passes, settings
from analysis.load.reader import records
from analysis.load.study import Study
from analysis.outputs.captions import pass_setup
from analysis.outputs.score_rows import (
    BUDGETED,
    DEFAULT_SMOOTHING,
    SMOOTHING,
    by_ratio,
    coverage_cells,
    plain,
)
from analysis.registry import Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.comparison import Comparison
from moe_lab.results import BUDGETS

LAYERS = 8
"""Largest number of layers labelled on an axis."""


def layer_shares(cells: pd.DataFrame, retained: pd.DataFrame) -> pd.DataFrame:
    """Share of its channels that each layer keeps (allocations, layers), the mean over its experts.

    Allocations with the same shares, to a thousandth, form one row whose label names them all.
    `retained`: cell, layer, expert, share. Cells without a plan are left out.
    """
    counted = retained[retained["cell"].isin(cells.index)]
    shares = counted.pivot_table(index="cell", columns="layer", values="share", aggfunc="mean")
    shares = shares.reindex([cell for cell in cells.index if cell in shares.index])
    same: dict[tuple[float, ...], list[int]] = {}
    for cell, row in shares.round(3).iterrows():
        same.setdefault(tuple(row), []).append(int(str(cell)))
    labels = {
        members[0]: "\n".join(map(names.allocated, cells.loc[members, "allocation"]))
        for members in same.values()
    }
    return shares.loc[list(labels)].rename(index=labels).rename_axis("allocation")


@output(
    "coverage.fig",
    chapter="channels",
    needs="a channel criterion under allocation=coverage and others",
)
@per_model("pruned")
def layer_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Kept share of each layer, by allocation.

    A panel per ratio, a line per allocation. None without differing plans.
    """
    retained = results.study.retained
    blocks = [
        (ratio, layer_shares(cells, retained)) for ratio, cells in _compared_allocations(comparison)
    ]
    blocks = [(ratio, shares) for ratio, shares in blocks if len(shares)]
    if not blocks:
        return None
    drawing = style.drawing(style.PAGE, 3.0 * len(blocks))
    for axes, (ratio, shares) in zip(
        np.atleast_1d(drawing.subplots(len(blocks), 1)), blocks, strict=True
    ):
        for at, (label, row) in enumerate(shares.iterrows()):
            dashes = _DASHES[at // len(style.SHADES) % len(_DASHES)]
            look = {**style.cycled(at), "markersize": 4.5, "linewidth": 1.2, "linestyle": dashes}
            axes.plot(range(len(row)), row * 100, label=label, **look)
        shown = range(0, shares.shape[1], -(-shares.shape[1] // LAYERS))
        style.ticks(axes.xaxis, shown, [f"layer {shares.columns[at]}" for at in shown])
        axes.set(ylabel="channels kept (%)", ylim=(0, 104))
        axes.set_title(f"{comparison.model}, {comparison.removed(ratio)} pruned")
        axes.grid(axis="y")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=6.5, labelspacing=0.9)
    caption = (
        "Share of its channels that each layer keeps. Allocations that keep the same shares are "
        "one line."
    )
    return Figure(name, "Channels kept by layer", caption, drawing)


_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


def _compared_allocations(comparison: Comparison) -> list[tuple[float, pd.DataFrame]]:
    """(Ratio, cells) of the channel criterion that was run with most allocations, including
    coverage; one cell each."""
    cells = plain(comparison, "channel").drop_duplicates(["criterion", "allocation", "ratio"])
    covered = cells["allocation"].map(
        lambda allocation: settings.allocation(allocation)[0] == "coverage"
    )
    counts = cells.groupby("criterion", sort=False)["allocation"].nunique()
    counts = counts[list(dict.fromkeys(cells.loc[covered, "criterion"]))]
    if counts.empty or counts.max() < 2:
        return []
    return list(by_ratio(cells[cells["criterion"] == counts.idxmax()]))


PLANS = 4
"""Largest number of plans whose layers are drawn."""
STRIPS = {
    "loss": "layer loss",
    "smoothed": "smoothed loss",
    "coverage": "score coverage",
    "kept": "channels kept",
}
"""Column of `budget_strips` -> label of its strip."""
NUMBERS = 24
"""Largest number of layers for which strips show numbers."""


def layer_budgets(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Coverage budgets at the ratio closest to 1/2: cell, label, smoothing, calibration, layer,
    coverage, kept.

    coverage: share of the layer's score that is kept; kept: share of its channels; smoothing: of
    layer losses. At most PLANS plans.
    """
    plans = coverage_cells(comparison)
    labels = settings.method_labels(plans)
    frames = [pd.DataFrame(columns=["cell", "label", "smoothing", "calibration", *BUDGETS])]
    for cell, axes in zip(plans.index[:PLANS].map(int), records(plans), strict=False):
        retained = passes.read(
            study.reader.find(str(axes["plan_folder"])), "budgets.parquet", study.reader
        )
        if retained is not None:
            labelled = {"label": labels[cell], "smoothing": _smoothing(study, axes)}
            frames.append(retained.assign(cell=cell, calibration=axes["calibration"], **labelled))
    return pd.concat(frames[1:] or frames, ignore_index=True)


def _smoothing(study: Study, axes: Mapping[str, Any]) -> str:
    """Smoothing of layer losses in a cell's plan, from the plan's settings or else the study's
    record."""
    plan = study.reader.find(str(axes["plan_folder"]))
    provenance = ((study.reader.json(plan, "plan.json") if plan else None) or {}).get(
        "provenance"
    ) or {}
    parameters = (provenance.get("allocation") or {}).get("parameters") or {}
    parameters_of = {**settings.allocation(str(axes["allocation"]))[1], **parameters}
    return str(
        next(
            (parameters_of[setting] for setting in SMOOTHING if setting in parameters_of),
            DEFAULT_SMOOTHING,
        )
    )


def budget_strips(budgets: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """Add the columns loss (measured on the plan's calibration set) and smoothed to `budgets`.

    Both have mean 1 over the layers of a plan; NaN without losses."""
    from moe_lab.allocation.shapes import smooth

    merged = budgets.merge(
        losses[["calibration", "layer", "loss"]], on=["calibration", "layer"], how="left"
    )
    parts = []
    for _, plan in merged.groupby("cell", sort=False):
        loss = plan["loss"].to_numpy(float)
        target = smooth(loss, plan["smoothing"].iloc[0]) if np.isfinite(loss).all() else loss
        parts.append(plan.assign(loss=loss / loss.mean(), smoothed=target / target.mean()))
    return pd.concat(parts, ignore_index=True) if parts else merged.assign(smoothed=np.nan)


_MEANING = (
    "Layer loss: size of a layer's routed output relative to the residual stream after it, the "
    "mean over calibration tokens of ‖m‖² / (‖y‖² + ε), divided by its mean over layers. Score "
    "coverage: share of the sum of the layer's channel scores that the plan keeps. Squares of a "
    "row are shaded between its least and its greatest value."
)


@output("coverage.fig7", chapter="attribution", needs=BUDGETED)
@per_model("pruned")
def coverage_budgets(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Loss, score coverage and kept share of each layer."""
    title = "Losses of layers and their budgets"
    return strip_figure(results, comparison, name, ("loss", "coverage", "kept"), title, _MEANING)


@output(
    "coverage.fig11",
    chapter="attribution",
    needs=f"{BUDGETED}, and the sums of their pass in the store",
)
@per_model("pruned")
def smoothed_losses_and_budgets(
    results: Results, comparison: Comparison, name: str
) -> Figure | None:
    """Raw and smoothed loss, score coverage and kept share of each layer."""
    caption = (
        "Smoothed loss: by the smoothing of the plan, divided by its mean; the target of the "
        f"coverage. {_MEANING}"
    )
    return strip_figure(results, comparison, name, STRIPS, "From layer losses to budgets", caption)


def strip_figure(
    results: Results,
    comparison: Comparison,
    name: str,
    strips: Iterable[str],
    title: str,
    caption: str,
) -> Figure | None:
    """Draw a block of rows per plan: one row for each of `strips` (columns of `budget_strips`), a
    square per layer."""
    study = results.study
    losses = study.layer_losses[study.layer_losses["model"] == comparison.model]
    budgets = budget_strips(layer_budgets(study, comparison), losses)
    if budgets.empty:
        return None
    plans = [plan.sort_values("layer") for _, plan in budgets.groupby("cell", sort=False)]
    shown = [strip for strip in strips if budgets[strip].notna().any()]
    drawing = style.drawing(style.PAGE, len(plans) * (0.3 * len(shown) + 0.5) + 0.35)
    grid = drawing.subplots(len(plans), 1, squeeze=False)[:, 0]
    for axes, plan in zip(grid, plans, strict=True):
        for at, strip in enumerate(shown):
            _strip(
                axes,
                at,
                plan[strip].to_numpy(float),
                "{:.0%}" if strip in ("coverage", "kept") else "{:.2f}",
            )
        step = -(-len(plan) // NUMBERS)
        layers = [
            str(layer) if position % step == 0 else ""
            for position, layer in enumerate(plan["layer"])
        ]
        style.squares(axes, layers, [STRIPS[strip] for strip in shown], above=False)
        axes.set_title(plan["label"].iloc[0], fontsize=7.5)
    grid[-1].set_xlabel("decoder layer")
    return Figure(
        name, f"{title}: {comparison.model}", f"{caption} Based on {pass_setup(study)}", drawing
    )


def _strip(axes: Axes, at: int, values: np.ndarray[Any, np.dtype[np.float64]], form: str) -> None:
    """Draw one row of squares, shaded between the smallest and the largest value of the row."""
    low = np.nanmin(values)
    high = np.nanmax(values)
    for layer, value in enumerate(values):
        if not np.isnan(value):
            share = (value - low) / (high - low) if high > low else 0.5
            text = form.format(value).replace("%", " %") if len(values) <= NUMBERS else ""
            style.square(axes, layer, at, share, text, size=6)
