"""Channels that allocations retain in each layer, their share of the layer's score, and the losses
from which coverage budgets are computed (MoE-Slimming, Figs. 7 and 11)."""

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
    cells_without_recovery,
    coverage_cells,
)
from analysis.registry import Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.comparison import Comparison
from moe_lab.results import BUDGETS

LAYERS = 8
"""Largest number of layers with a label on an axis."""


def layer_shares(cells: pd.DataFrame, retained: pd.DataFrame) -> pd.DataFrame:
    """Retained share of channels (allocations, layers): the mean over the experts of a layer.

    Allocations whose shares are equal, to a thousandth, form one row; the label of the row has a
    line for each of these allocations. Cells without a plan are left out. Columns of `retained`:
    cell, layer, expert, share.
    """
    plan_shares = retained[retained["cell"].isin(cells.index)]
    shares = plan_shares.pivot_table(index="cell", columns="layer", values="share", aggfunc="mean")
    shares = shares.reindex([cell for cell in cells.index if cell in shares.index])
    cells_by_shares: dict[tuple[float, ...], list[int]] = {}
    for cell, row in shares.round(3).iterrows():
        # through str, because pandas' types allow any label in an index
        cells_by_shares.setdefault(tuple(row), []).append(int(str(cell)))
    labels = {  # first of the cells with equal shares -> label
        equal_cells[0]: "\n".join(map(names.allocation_name, cells.loc[equal_cells, "allocation"]))
        for equal_cells in cells_by_shares.values()
    }
    return shares.loc[list(labels)].rename(index=labels).rename_axis("allocation")


@output(
    "coverage.fig",
    chapter="channels",
    needs="a channel criterion under allocation=coverage and others",
)
@per_model("pruned")
def layer_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Retained share of each layer, by allocation.

    A panel per ratio, a line per allocation. None without plans of several allocations.
    """
    retained = results.study.retained
    panels = []
    for ratio, cells in _cells_with_most_allocations(comparison):
        shares = layer_shares(cells, retained)
        if len(shares):
            panels.append((ratio, shares))
    if not panels:
        return None
    drawing = style.drawing(style.PAGE, 3.0 * len(panels))
    for axes, (ratio, shares) in zip(
        np.atleast_1d(drawing.subplots(len(panels), 1)), panels, strict=True
    ):
        for number, (label, row) in enumerate(shares.iterrows()):
            # other dashes when all colours are in use
            dashes = _DASHES[number // len(style.SHADES) % len(_DASHES)]
            look = {**style.line_look(number), "markersize": 4.5, "linewidth": 1.2}
            axes.plot(range(len(row)), row * 100, label=label, linestyle=dashes, **look)
        step = -(-shares.shape[1] // LAYERS)  # at most LAYERS labels
        labels = [f"layer {layer}" for layer in shares.columns[::step]]
        style.label_ticks(axes.xaxis, range(0, shares.shape[1], step), labels)
        axes.set(ylabel="channels kept (%)", ylim=(0, 104))
        axes.set_title(f"{comparison.model}, {comparison.removed_words(ratio)} pruned")
        axes.grid(axis="y")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=6.5, labelspacing=0.9)
    caption = (
        "Share of its channels that each layer keeps. Allocations that keep the same shares are "
        "one line."
    )
    return Figure(name, "Channels kept by layer", caption, drawing)


_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))
"""Line styles of matplotlib: a solid line, dashes, dots."""


def _cells_with_most_allocations(comparison: Comparison) -> list[tuple[float, pd.DataFrame]]:
    """(ratio, cells) for each ratio. The cells are of one channel criterion, one cell for each
    allocation, without recovery.

    The criterion is the one with most allocations, among the channel criteria that were run with
    coverage budgets. [] if it has only one allocation, or if no such criterion was run."""
    cells = cells_without_recovery(comparison, "channel").drop_duplicates(
        ["criterion", "allocation", "ratio"]
    )
    is_coverage = cells["allocation"].map(
        lambda allocation: settings.allocation(allocation)[0] == "coverage"
    )
    counts = cells.groupby("criterion", sort=False)["allocation"].nunique()
    counts = counts[list(dict.fromkeys(cells.loc[is_coverage, "criterion"]))]
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
    """Coverage budgets of the first PLANS plans of `coverage_cells`; a row per plan and layer.

    Columns: cell, label (of the method), smoothing (of layer losses), calibration, layer, coverage
    (retained share of the layer's score), kept (retained share of the layer's channels). Plans
    without budgets in the store are left out.
    """
    plans = coverage_cells(comparison)
    labels = settings.method_labels(plans)
    # the first frame has no rows; its columns are for a study without budgets
    frames = [pd.DataFrame(columns=["cell", "label", "smoothing", "calibration", *BUDGETS])]
    # strict=False, because only the first PLANS plans are drawn
    for cell, plan in zip(plans.index[:PLANS].map(int), records(plans), strict=False):
        folder = study.reader.find(str(plan["plan_folder"]))
        budgets = passes.read(folder, "budgets.parquet", study.reader)
        if budgets is not None:
            frames.append(
                budgets.assign(
                    cell=cell,
                    calibration=plan["calibration"],
                    label=labels[cell],
                    smoothing=_smoothing(study, plan),
                )
            )
    return pd.concat(frames[1:] or frames, ignore_index=True)


def _smoothing(study: Study, cell: Mapping[str, Any]) -> str:
    """Smoothing of layer losses in the plan of `cell`, a row of `Study.cells`.

    It is the parameter in plan.json, or else the parameter in the cell's allocation, or else
    DEFAULT_SMOOTHING."""
    folder = study.reader.find(str(cell["plan_folder"]))
    plan = study.reader.json(folder, "plan.json") or {}
    allocation = (plan.get("provenance") or {}).get("allocation") or {}
    _, parameters = settings.allocation(str(cell["allocation"]))
    parameters |= allocation.get("parameters") or {}
    for setting in SMOOTHING:
        if setting in parameters:
            return str(parameters[setting])
    return DEFAULT_SMOOTHING


def budget_strips(budgets: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """`budgets` with two more columns: loss (the layer's loss on the plan's calibration set) and
    smoothed (this loss after the plan's smoothing).

    Both columns are scaled to mean 1 over the layers of a plan; they are NaN in a plan with a layer
    without loss. budgets: see `layer_budgets`; columns of `losses`: calibration, layer, loss."""
    from moe_lab.allocation.shapes import smooth

    rows = budgets.merge(
        losses[["calibration", "layer", "loss"]], on=["calibration", "layer"], how="left"
    )
    frames = []
    for _, plan in rows.groupby("cell", sort=False):
        loss = plan["loss"].to_numpy(float)
        smoothed = smooth(loss, plan["smoothing"].iloc[0]) if np.isfinite(loss).all() else loss
        frames.append(plan.assign(loss=loss / loss.mean(), smoothed=smoothed / smoothed.mean()))
    return pd.concat(frames, ignore_index=True) if frames else rows.assign(smoothed=np.nan)


_MEANING = (
    "Layer loss: size of a layer's routed output relative to the residual stream after it, the "
    "mean over calibration tokens of ‖m‖² / (‖y‖² + ε), divided by its mean over layers. Score "
    "coverage: share of the sum of the layer's channel scores that the plan keeps. Squares of a "
    "row are shaded between its least and its greatest value."
)


@output("coverage.fig7", chapter="attribution", needs=BUDGETED)
@per_model("pruned")
def coverage_budgets(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Loss, score coverage and retained share of each layer.

    None without budgets.
    """
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
    """Raw and smoothed loss, score coverage and retained share of each layer.

    None without budgets.
    """
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
    """A figure of `budget_strips` with a panel per plan. A panel has a row of squares, one per
    layer, for each column in `strips` that has numbers. None without budgets.

    title: text before the model's name; caption: the first sentences of the caption."""
    study = results.study
    losses = study.layer_losses[study.layer_losses["model"] == comparison.model]
    budgets = budget_strips(layer_budgets(study, comparison), losses)
    if budgets.empty:
        return None
    plans = [plan.sort_values("layer") for _, plan in budgets.groupby("cell", sort=False)]
    columns = [column for column in strips if budgets[column].notna().any()]
    drawing = style.drawing(style.PAGE, len(plans) * (0.3 * len(columns) + 0.5) + 0.35)
    grid = drawing.subplots(len(plans), 1, squeeze=False)[:, 0]
    for axes, plan in zip(grid, plans, strict=True):
        for row, strip in enumerate(columns):
            form = "{:.0%}" if strip in ("coverage", "kept") else "{:.2f}"
            _draw_strip(axes, row, plan[strip].to_numpy(float), form)
        step = -(-len(plan) // NUMBERS)  # at most NUMBERS labels
        layer_labels = [
            str(layer) if position % step == 0 else ""
            for position, layer in enumerate(plan["layer"])
        ]
        style.label_squares(axes, layer_labels, [STRIPS[strip] for strip in columns], above=False)
        axes.set_title(plan["label"].iloc[0], fontsize=7.5)
    grid[-1].set_xlabel("decoder layer")
    return Figure(
        name, f"{title}: {comparison.model}", f"{caption} Based on {pass_setup(study)}", drawing
    )


def _draw_strip(
    axes: Axes, row: int, values: np.ndarray[Any, np.dtype[np.float64]], form: str
) -> None:
    """Draw a row of squares, one for each of `values` (layers,), in panel row `row`. Squares are
    shaded from the smallest (0) to the largest value (1), equal values by 0.5; NaN has no square.

    form: format of the numbers in the squares. With more than NUMBERS layers, squares have no
    numbers."""
    low = np.nanmin(values)
    high = np.nanmax(values)
    for position, value in enumerate(values):
        if not np.isnan(value):
            share = (value - low) / (high - low) if high > low else 0.5
            text = form.format(value).replace("%", " %") if len(values) <= NUMBERS else ""
            style.draw_square(axes, position, row, share, text, size=6)
