"""Distribution of an expert's scores over its channels, and the output loss of layers with pruned
channels (MoE-Slimming, Figs. 4, 15 and 16)."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Patch

from analysis import names
from analysis.load import passes, settings
from analysis.load.reader import groups, records, stacked
from analysis.load.study import Study
from analysis.outputs.captions import pass_setup
from analysis.outputs.score_rows import (
    COVERAGE_PLANS,
    cells_without_recovery,
    coverage_cells,
    ratio_lines,
    shallow_middle_deep_layers,
)
from analysis.registry import Item, Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.stats.comparison import Comparison

MOST_PANELS = 6
"""Largest number of panels in a figure."""
PIECES = 10
"""Number of pieces of an expert's bar; a piece is a tenth of the expert's channels."""
MOST_EXPERTS_IN_PANEL = 64
"""Largest number of experts in a panel of `expert_bars_by_score`."""
ACTIVATION, WEIGHT_GRADIENT = "channel_activation", "snip"
"""The two channel scores that the published Fig. 16 compares."""
RETAINED_COLOUR, ATTRIBUTION_COLOUR = "#bb3311", "#b39a25"


def concentration(study: Study, scores_folder: str) -> pd.DataFrame | None:
    """A curve per expert: how much of the expert's score its highest channels hold. The rows are
    points of the curves. None if the store lacks the file.

    Columns: "layer", "expert", "channels" (share of the expert's channels, highest scores first)
    and "score" (share of the expert's sum of scores that these channels hold)."""
    return passes.read_table(
        study.reader.find_folder(scores_folder), "expert_concentration.parquet", study.reader
    )


@output(
    "coverage.fig4",
    chapter="attribution",
    needs=(
        "scores of channels in the store; for losses, profile=true with a channel criterion at "
        "three ratios"
    ),
)
@per_model("pruned")
def channel_scores(results: Results, comparison: Comparison, name: str) -> list[Item | None]:
    """Concentration of channel scores in experts, and output losses of layers by kept share."""
    study = results.study
    return [
        concentration_figure(study, comparison, name),
        output_loss_figure(study, comparison, f"{name}.loss"),
    ]


def concentration_figure(study: Study, comparison: Comparison, name: str) -> Figure | None:
    """Fig. 4 (a): curves of `concentration`. A panel per scoring step, a line per expert."""
    cells = cells_without_recovery(comparison, "channel")
    panels: list[tuple[str, pd.DataFrame]] = []
    for row in records(cells[cells["scores_folder"].notna()].drop_duplicates("scores_folder")):
        curves = concentration(study, row["scores_folder"])
        if curves is not None and len(panels) < MOST_PANELS:
            title = f"{names.criterion(row['criterion'])}, {names.calibration(row['calibration'])}"
            panels.append((title, curves))
    if not panels:
        return None
    drawing, grid = style.panels(len(panels), 3, 2.2)
    for axes, (title, curves) in zip(grid, panels, strict=True):
        layers = sorted(curves["layer"].unique())
        lines = []
        shades = []
        for key, curve in groups(curves.dropna(subset=["score"]), ["layer", "expert"]):
            lines.append(curve[["channels", "score"]].to_numpy(float))
            shades.append(style.depth_colour(key["layer"], layers))
        # many lines are drawn as pixels, because vectors would make the file too large
        has_many_lines = len(lines) > 256
        axes.add_collection(
            LineCollection(
                lines, colors=shades, linewidths=0.5, alpha=0.6, rasterized=has_many_lines
            )
        )
        axes.plot([0, 1], [0, 1], **style.DASHED)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="channels, highest score first")
        axes.set_title(title, fontsize=7.5)
        style.format_percent(axes.xaxis, axes.yaxis)
        axes.locator_params(nbins=4)
        axes.grid()
    grid[0].set_ylabel("share of the expert's score")
    style.legend(drawing, style.depth_keys(layers))  # all panels have the same layers
    caption = (
        "(a) Each line is an expert, its shade the depth of its layer: share of the sum of its "
        "channel scores that its highest channels hold. Dashed: equal channels. The further a line "
        f"is above it, the less of the score pruning removes. Based on {pass_setup(study)}"
    )
    return Figure(
        name, f"How concentrated channel scores are: {comparison.model}", caption, drawing
    )


def output_losses(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Relative error of each layer's routed output when this layer alone is pruned, for the methods
    of `ratio_lines` that prune channels.

    Columns: "label" (the method), "cell", "layer", "kept" (retained share of channels, the mean
    over the layer's experts) and "loss" (the error)."""
    losses = (
        study.profiles[["cell", "layer", "output_loss"]]
        .dropna()
        .rename(columns={"output_loss": "loss"})
    )
    shares = study.retained.groupby(["cell", "layer"])["share"].mean().rename("kept").reset_index()
    losses = losses.merge(shares, on=["cell", "layer"])
    frames = []
    for label, line in ratio_lines(cells_without_recovery(comparison, "channel")).items():
        line_losses = losses[losses["cell"].isin(line.index)]
        if line_losses["cell"].nunique() > 1:
            frames.append(line_losses.assign(label=label))
    return stacked(frames, ["label", "cell", "layer", "kept", "loss"])


def output_loss_figure(study: Study, comparison: Comparison, name: str) -> Figure | None:
    """Fig. 4 (b): `output_losses` against the retained share of the layer's channels. A panel per
    method, a line per layer."""
    losses = output_losses(study, comparison)
    if losses.empty:
        return None
    labels = list(losses["label"].unique())[:MOST_PANELS]
    layers = sorted(losses["layer"].unique())
    drawing, grid = style.panels(len(labels), 3, 2.2)
    for axes, label in zip(grid, labels, strict=True):
        for key, line in groups(losses[losses["label"] == label].sort_values("kept"), ["layer"]):
            shade = style.depth_colour(key["layer"], layers)
            axes.plot(
                [*line["kept"], 1.0],  # a layer that keeps all channels has no error
                [*line["loss"], 0.0],
                color=shade,
                marker="o",
                markersize=2.5,
                linewidth=1,
            )
        axes.set_title(fill(label, 30), fontsize=7.5)
        axes.set(xlabel="channels of the layer kept", xlim=(0, 1.02), ylim=(0, None))
        style.format_percent(axes.xaxis)
        axes.grid(axis="y")
    grid[0].set_ylabel("loss of the output")
    style.legend(drawing, style.depth_keys(layers))
    caption = (
        "(b) Each line is a layer: error of its routed output when this layer alone is pruned, ‖m "
        "− m′‖² / (‖y‖² + ε), the mean over the tokens of a text; m: routed output, y: residual "
        f"stream after the layer. With everything kept it is 0. Based on {pass_setup(study)}"
    )
    return Figure(
        name, f"Loss of layer outputs against the kept share: {comparison.model}", caption, drawing
    )


def expert_stacks(
    curves: pd.DataFrame, retained: pd.DataFrame, experts: pd.DataFrame, layer: int
) -> pd.DataFrame:
    """Data for the bars of one layer; a row per expert.

    Columns: "kept" (retained share of the expert's channels), "attribution" (of first order,
    divided by the largest attribution in the layer), and 0, 1, ... PIECES - 1 (share of the
    expert's score in each tenth of the expert's channels, highest scores first).

    curves: see `concentration`. Columns of `retained`: "layer", "expert", "share"; of `experts`:
    "layer", "expert", "first" (the attribution)."""
    tenths = np.linspace(0, 1, PIECES + 1)
    pieces_of_expert = {}
    for key, curve in groups(curves[curves["layer"] == layer], ["expert"]):
        cumulated_shares = np.interp(tenths, curve["channels"], curve["score"])
        pieces_of_expert[key["expert"]] = np.diff(cumulated_shares)
    stacks = pd.DataFrame.from_dict(pieces_of_expert, orient="index").sort_index()
    shares = retained[retained["layer"] == layer].set_index("expert")["share"]
    attributions = experts[experts["layer"] == layer].set_index("expert")["first"]
    largest_attribution = attributions.max()
    scale = largest_attribution if largest_attribution > 0 else np.nan
    return stacks.assign(kept=shares, attribution=attributions / scale)


def stacks_by_layer(study: Study, comparison: Comparison, cell: int) -> dict[int, pd.DataFrame]:
    """Layer -> `expert_stacks` from the channel scores and the plan of `cell`."""
    row = comparison.cells.loc[cell]
    curves = concentration(study, str(row["scores_folder"]))
    if curves is None:
        return {}
    experts = study.experts
    experts = experts[
        (experts["model"] == comparison.model) & (experts["calibration"] == row["calibration"])
    ]
    retained = study.retained[study.retained["cell"] == cell]
    return {
        int(layer): expert_stacks(curves, retained, experts, layer)
        for layer in sorted(curves["layer"].unique())
    }


def _piece_colour(piece: int) -> Any:
    """Colour of a piece of a bar; piece 0 has the highest scores and the darkest colour."""
    return colormaps[style.SEQUENTIAL](0.9 - 0.8 * piece / (PIECES - 1))


def _draw_bars(axes: Axes, stacks: pd.DataFrame) -> None:
    """Draw one panel of `bars_figure`. stacks: rows of `expert_stacks`."""
    positions = np.arange(len(stacks))
    bottom = np.zeros(len(stacks))
    for piece in reversed(range(PIECES)):  # the lowest scores are at the bottom
        height = stacks[piece].fillna(0).to_numpy(float)
        axes.bar(
            positions, height, bottom=bottom, width=0.8, color=_piece_colour(piece), linewidth=0
        )
        bottom = bottom + height
    retained = stacks["kept"].to_numpy(float)
    edges = np.arange(len(retained) + 1) - 0.5
    axes.stairs(retained, edges, color=RETAINED_COLOUR, linewidth=1.4, baseline=None)
    axes.plot(
        positions,
        stacks["attribution"].clip(lower=0),
        "D",
        color=ATTRIBUTION_COLOUR,
        markersize=3.5,
        markeredgecolor=style.INK,
        markeredgewidth=0.4,
    )
    step = -(-len(stacks) // 32)  # at most 32 labels
    style.label_ticks(axes.xaxis, positions[::step], stacks.index[::step].map(str), labelsize=6)
    axes.set(xlim=(-0.7, len(stacks) - 0.3), ylim=(-0.03, 1.03))
    style.format_percent(axes.yaxis)


def bars_figure(
    study: Study, panels: Sequence[tuple[str, pd.DataFrame]], name: str, title: str, plans: str
) -> Figure:
    """A figure with a bar per expert, and a panel for each (title of the panel, `expert_stacks`) in
    `panels`.

    plans: a sentence for the caption that names the plans."""
    drawing = style.drawing(style.PAGE, 1.55 * len(panels) + 0.6)
    for axes, (panel_title, stacks) in zip(
        np.atleast_1d(drawing.subplots(len(panels), 1)), panels, strict=True
    ):
        _draw_bars(axes, stacks)
        axes.set_title(panel_title, fontsize=7.5)
        axes.set_ylabel("share")
    axes.set_xlabel("expert")
    handles = [
        Patch(facecolor=_piece_colour(0), label="highest tenth of the channels"),
        Patch(facecolor=_piece_colour(PIECES - 1), label="lowest"),
        style.legend_entry("channels kept", color=RETAINED_COLOUR, linewidth=1.4),
        style.legend_entry(
            "attribution, of the highest",
            color=ATTRIBUTION_COLOUR,
            marker="D",
            linestyle="",
            markersize=4,
        ),
    ]
    style.legend(drawing, handles)
    caption = (
        "Each bar is an expert: the sum of its channel scores in tenths of its channels, from the "
        "highest scores (top, dark) to the lowest (bottom, light). Red: the share of its channels "
        "that the plan keeps. Diamonds: its first-order attribution, relative to the highest of "
        f"the layer, negative ones at 0. {plans} Based on {pass_setup(study)}"
    )
    return Figure(name, title, caption, drawing)


@output(
    "coverage.fig15",
    chapter="attribution",
    needs=f"{COVERAGE_PLANS}, and their scores in the store",
)
@per_model("pruned")
def expert_bars(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Channel scores, kept channels and attribution of each expert in three layers.

    A shallow, a middle and a deep layer of one plan."""
    cells = coverage_cells(comparison)
    if cells.empty:
        return None
    # the first cell of criterion ACTIVATION (False sorts first), or else of any criterion
    cell = (cells["criterion"] != ACTIVATION).sort_values(kind="stable").index[0]
    stacks = stacks_by_layer(results.study, comparison, int(cell))
    if not stacks:
        return None
    panels = [
        (f"Layer {layer}", stacks[layer]) for layer in shallow_middle_deep_layers(list(stacks))
    ]
    label = settings.method_labels(cells)[cell]
    title = f"Channel scores and budgets, expert by expert: {comparison.model}"
    return bars_figure(results.study, panels, name, title, plans=f"Plan: {label}.")


@output(
    "coverage.fig16",
    chapter="attribution",
    needs=f"cells with criterion={ACTIVATION} and with criterion={WEIGHT_GRADIENT}, both with the "
    "same allocation=coverage, ratio and calibration set, and their scores in the store",
)
@per_model("pruned")
def expert_bars_by_score(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Channel scores, kept channels and attribution in the middle layer, by two scores.

    The upper panels show a plan by the criterion ACTIVATION, the lower panels a plan by
    WEIGHT_GRADIENT."""
    cell_of_criterion = _cells_of_two_scores(coverage_cells(comparison))
    stacks_of_criterion = {
        criterion: stacks_by_layer(results.study, comparison, cell)
        for criterion, cell in cell_of_criterion.items()
    }
    if not stacks_of_criterion or not all(stacks_of_criterion.values()):
        return None
    layers = sorted(stacks_of_criterion[ACTIVATION])
    layer = layers[(len(layers) - 1) // 2]  # the shallower of two middle layers
    panels: list[tuple[str, pd.DataFrame]] = []
    for criterion, stacks in stacks_of_criterion.items():
        for part in _split(stacks[layer]):
            panels.append((f"({'abcdefgh'[len(panels)]}) {names.criterion(criterion)}", part))
    above, below = map(names.criterion, stacks_of_criterion)
    title = f"Channel scores and budgets of layer {layer} by two scores: {comparison.model}"
    return bars_figure(
        results.study,
        panels,
        name,
        title,
        plans=f"Above by {above}, below by {below} (weight times gradient).",
    )


def _cells_of_two_scores(cells: pd.DataFrame) -> dict[str, int]:
    """{ACTIVATION: cell, WEIGHT_GRADIENT: cell}, two cells with the same allocation, calibration
    set and gate; {} without two such cells.

    cells: cells of one ratio."""
    criteria = (ACTIVATION, WEIGHT_GRADIENT)
    for _, candidates in groups(cells, ["allocation", "calibration", "gate"]):
        first_cells = candidates.reset_index().drop_duplicates("criterion")
        cell_of_criterion = first_cells.set_index("criterion")["cell"]
        if set(criteria) <= set(cell_of_criterion.index):
            return {criterion: int(cell_of_criterion[criterion]) for criterion in criteria}
    return {}


def _split(stacks: pd.DataFrame) -> list[pd.DataFrame]:
    """Split `stacks` into parts of nearly equal size, of at most MOST_EXPERTS_IN_PANEL rows."""
    part_count = -(-len(stacks) // MOST_EXPERTS_IN_PANEL)  # rounded up
    return [stacks.iloc[rows] for rows in np.array_split(np.arange(len(stacks)), part_count)]
