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
from analysis.load.reader import records, stacked
from analysis.load.study import Study
from analysis.outputs.captions import pass_setup
from analysis.outputs.score_rows import (
    COVERAGE_PLANS,
    DEFAULT_SMOOTHING,
    SMOOTHING,
    cells_by_ratio,
    cells_without_recovery,
    coverage_cells,
)
from analysis.registry import Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.comparison import Comparison
from moe_lab.results import BUDGETS

MOST_LAYER_LABELS = 8
"""Largest number of layers with a label on an axis."""


def layer_shares(cells: pd.DataFrame, retained: pd.DataFrame) -> pd.DataFrame:
    """Retained share of each layer's channels, the mean over the layer's experts: a row per
    allocation, a column per layer. Allocations with equal shares have one row, whose label names
    them all.

    retained: see `Study.retained`."""
    expert_shares = retained[retained["cell"].isin(cells.index)]
    shares = expert_shares.pivot_table(
        index="cell", columns="layer", values="share", aggfunc="mean"
    )
    # in the order of `cells`
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

    A panel per ratio, a line per allocation."""
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
            # after as many lines as there are colours, the dashes change
            dashes = _DASHES[number // len(style.SHADES) % len(_DASHES)]
            look = {**style.line_look(number), "markersize": 4.5, "linewidth": 1.2}
            axes.plot(range(len(row)), row * 100, label=label, linestyle=dashes, **look)
        # rounded up, so that at most MOST_LAYER_LABELS layers have a label
        step = -(-shares.shape[1] // MOST_LAYER_LABELS)
        labels = [f"layer {layer}" for layer in shares.columns[::step]]
        style.label_ticks(axes.xaxis, range(0, shares.shape[1], step), labels)
        axes.set(ylabel="channels kept (%)", ylim=(0, 104))
        axes.set_title(f"{comparison.model}, {comparison.removed_text(ratio)} pruned")
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
    """(ratio, cells) for each ratio, with one cell per allocation. All cells have the same
    criterion: of the criteria with coverage budgets, the one with the most allocations."""
    cells = cells_without_recovery(comparison, "channel").drop_duplicates(
        ["criterion", "allocation", "ratio"]
    )
    is_coverage = cells["allocation"].map(
        lambda allocation: settings.allocation(allocation)[0] == "coverage"
    )
    allocation_counts = cells.groupby("criterion", sort=False)["allocation"].nunique()
    # only the criteria that were run with coverage budgets
    allocation_counts = allocation_counts[list(dict.fromkeys(cells.loc[is_coverage, "criterion"]))]
    if allocation_counts.empty or allocation_counts.max() < 2:
        return []
    return list(cells_by_ratio(cells[cells["criterion"] == allocation_counts.idxmax()]))


MOST_PLANS = 4
"""Largest number of plans whose layers are drawn."""
STRIPS = {
    "loss": "layer loss",
    "smoothed": "smoothed loss",
    "coverage": "score coverage",
    "kept": "channels kept",
}
"""Column of `budget_strips` -> label of its strip."""
MOST_LAYERS_WITH_NUMBERS = 24
"""Largest number of layers for which strips show numbers."""


def layer_budgets(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Coverage budgets of the first MOST_PLANS cells of `coverage_cells`: a row per plan and layer.

    Columns: "layer", "coverage" (retained share of the layer's score), "kept" (retained share of
    the layer's channels), "cell", "calibration", "label" (of the method) and "smoothing" (of layer
    losses)."""
    cells = coverage_cells(comparison)
    labels = settings.method_labels(cells)
    frames = []
    # strict=False, because only the first MOST_PLANS cells are drawn
    for cell, row in zip(cells.index[:MOST_PLANS].map(int), records(cells), strict=False):
        folder = study.reader.find_folder(str(row["plan_folder"]))
        budgets = passes.read_table(folder, "budgets.parquet", study.reader)
        if budgets is not None:
            frames.append(
                budgets.assign(
                    cell=cell,
                    calibration=row["calibration"],
                    label=labels[cell],
                    smoothing=_smoothing(study, row),
                )
            )
    return stacked(frames, [*BUDGETS, "cell", "calibration", "label", "smoothing"])


def _smoothing(study: Study, cell: Mapping[str, Any]) -> str:
    """Smoothing of layer losses in the plan of `cell`, a row of `Study.cells`."""
    folder = study.reader.find_folder(str(cell["plan_folder"]))
    plan = study.reader.json(folder, "plan.json") or {}
    allocation = (plan.get("provenance") or {}).get("allocation") or {}
    _, parameters = settings.allocation(str(cell["allocation"]))
    parameters |= allocation.get("parameters") or {}
    for setting in SMOOTHING:  # its name differs between allocations
        if setting in parameters:
            return str(parameters[setting])
    return DEFAULT_SMOOTHING


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
    return pd.concat(frames, ignore_index=True) if frames else rows.assign(smoothed=np.nan)


_MEANING = (
    "Layer loss: size of a layer's routed output relative to the residual stream after it, the "
    "mean over calibration tokens of ‖m‖² / (‖y‖² + ε), divided by its mean over layers. Score "
    "coverage: share of the sum of the layer's channel scores that the plan keeps. Squares of a "
    "row are shaded between its least and its greatest value."
)


@output("coverage.fig7", chapter="attribution", needs=COVERAGE_PLANS)
@per_model("pruned")
def coverage_budgets(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Loss, score coverage and retained share of each layer."""
    return strip_figure(
        results,
        comparison,
        name,
        ("loss", "coverage", "kept"),
        title="Losses of layers and their budgets",
        caption=_MEANING,
    )


@output(
    "coverage.fig11",
    chapter="attribution",
    needs=f"{COVERAGE_PLANS}, and the sums of their pass in the store",
)
@per_model("pruned")
def smoothed_losses_and_budgets(
    results: Results, comparison: Comparison, name: str
) -> Figure | None:
    """Raw and smoothed loss, score coverage and retained share of each layer."""
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
    """A figure of `budget_strips` with a panel per plan; None without budgets.

    A panel has a row of squares for each column in `strips`, with one square per layer.

    strips: keys of STRIPS."""
    study = results.study
    losses = study.layer_losses[study.layer_losses["model"] == comparison.model]
    budgets = budget_strips(layer_budgets(study, comparison), losses)
    if budgets.empty:
        return None
    plans = [plan.sort_values("layer") for _, plan in budgets.groupby("cell", sort=False)]
    columns = [column for column in strips if budgets[column].notna().any()]
    # height in inches: 0.3 per row of squares, 0.5 for title and labels of a panel, 0.35 for the
    # label of the last x axis
    drawing = style.drawing(style.PAGE, len(plans) * (0.3 * len(columns) + 0.5) + 0.35)
    grid = drawing.subplots(len(plans), 1, squeeze=False)[:, 0]
    for axes, plan in zip(grid, plans, strict=True):
        for row, column in enumerate(columns):
            form = "{:.0%}" if column in ("coverage", "kept") else "{:.2f}"
            _draw_strip(axes, row, plan[column].to_numpy(float), form)
        # every step-th layer has a label; rounded up, for at most MOST_LAYERS_WITH_NUMBERS labels
        step = -(-len(plan) // MOST_LAYERS_WITH_NUMBERS)
        layer_labels = [
            str(layer) if position % step == 0 else ""
            for position, layer in enumerate(plan["layer"])
        ]
        style.label_squares(axes, layer_labels, [STRIPS[column] for column in columns], above=False)
        axes.set_title(plan["label"].iloc[0], fontsize=7.5)
    grid[-1].set_xlabel("decoder layer")
    return Figure(
        name, f"{title}: {comparison.model}", f"{caption} Based on {pass_setup(study)}", drawing
    )


def _draw_strip(
    axes: Axes, row: int, values: np.ndarray[Any, np.dtype[np.float64]], form: str
) -> None:
    """Draw row number `row` of a panel: a square for each of `values` (layers,), none for NaN.

    form: format of the values in the squares."""
    low = np.nanmin(values)
    high = np.nanmax(values)
    for position, value in enumerate(values):
        if not np.isnan(value):
            shade = (value - low) / (high - low) if high > low else 0.5
            text = (
                form.format(value).replace("%", " %")
                if len(values) <= MOST_LAYERS_WITH_NUMBERS
                else ""
            )
            style.draw_square(axes, position, row, shade, text, size=6)
