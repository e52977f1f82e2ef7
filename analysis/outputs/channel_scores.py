"""Distribution of an expert's scores over its channels, and the output loss of layers with pruned
channels (MoE-Slimming, Figs. 4, 15 and 16)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_lab.analysis import names
from moe_lab.analysis.load import passes, settings
from moe_lab.analysis.load.reader import groups, records
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import pass_setup
from moe_lab.analysis.outputs.score_rows import (
    COVERAGE_PLANS,
    cells_without_recovery,
    coverage_cells,
    ratio_lines,
    shallow_middle_deep_layers,
)
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import marks, style
from moe_lab.analysis.render.style import Figure
from moe_lab.analysis.stats.comparison import Comparison

MOST_PANELS = 6
"""Largest number of panels in a figure."""
MOST_VECTOR_POINTS = 5000
"""Largest number of points in a figure that are not drawn as pixels."""
PIECES = 10
"""Number of pieces of an expert's bar; a piece is a tenth of the expert's channels."""
FIGURE_SCORES = ("channel_activation", "snip")
"""The channel scores of the published Figs. 15 and 16: activations, and weights times
gradients."""
PIECE_COLOURS = {piece: style.shade(0.9 - 0.8 * piece / (PIECES - 1)) for piece in range(PIECES)}
"""Piece of a bar -> its colour; piece 0 has the highest scores and the darkest colour."""
RETAINED_COLOUR = "#bb3311"
ATTRIBUTION_ENTRY = style.legend_entry(
    "attribution, of the highest",
    color="#b39a25",
    marker="D",
    linestyle="",
    markersize=3.5,
    markeredgecolor=style.INK,
    markeredgewidth=0.4,
)


def concentration(study: Study, scores_folder: str) -> pd.DataFrame | None:
    """A curve per expert: how much of the expert's score its highest channels hold. The rows are
    points of the curves. None if the store lacks the file.

    Columns: "layer", "expert", "channels" (share of the expert's channels, highest scores first)
    and "score" (share of the expert's sum of scores that these channels hold)."""
    return passes.read_table(
        study.reader.find_folder(scores_folder), "expert_concentration.parquet", study.reader
    )


@output("coverage.fig4", chapter="attribution", needs="scores of channels in the store")
@per_model
def concentration_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Concentration of channel scores in experts.

    Fig. 4 (a): curves of `concentration`. A panel per scoring step, a line per expert."""
    study = results.study
    cells = cells_without_recovery(comparison, "channel")
    cells = cells.assign(gate_text=settings.gate_and_seed(cells))
    frames: list[pd.DataFrame] = []
    for row in records(cells[cells["scores_folder"].notna()].drop_duplicates("scores_folder")):
        curves = concentration(study, row["scores_folder"])
        if curves is not None and len(frames) < MOST_PANELS:
            criterion, calibration = row["criterion"], names.calibration(row["calibration"])
            title = names.comma_joined(names.criterion(criterion), calibration, row["gate_text"])
            frames.append(curves.assign(panel=title))
    if not frames:
        return None
    curves = pd.concat(frames).rename(columns={"layer": "label", "channels": "x", "score": "y"})
    # the experts of a layer are one line, which NaN interrupts after each expert
    curve = ["panel", "label", "expert"]
    ends = curves.drop_duplicates(curve).assign(x=np.nan, y=np.nan)
    points = pd.concat([curves, ends]).sort_values([*curve, "x"], kind="stable")
    entries = _layer_entries(curves["label"], linewidth=0.6)
    drawing = marks.lines(
        points,
        entries,
        marks.Axis("channels, highest score first", style.format_percent, (0, 1)),
        marks.Axis("share of the expert's score", style.format_percent, marks.SCORES),
    )
    for axes in drawing.axes:
        for line in axes.lines:  # many points as vectors would make the file too large
            line.set_rasterized(len(points) > MOST_VECTOR_POINTS)
        axes.plot([0, 1], [0, 1], **style.DASHED)
    style.legend(drawing, _ends(entries))
    caption = (
        "(a) Each line is an expert, its shade the depth of its layer: share of the sum of its "
        "channel scores that its highest channels hold. Dashed: equal channels. The further a line "
        f"is above it, the less of the score pruning removes. Based on {pass_setup(study)}"
    )
    return Figure(
        name, f"How concentrated channel scores are: {comparison.model}", caption, drawing
    )


def _layer_entries(layers: Iterable[int], **properties: Any) -> dict[int, Line2D]:
    """Layer -> legend entry of its lines, from light for the first layer to dark for the last."""
    ordered = sorted(set(layers))
    # without the lightest and the darkest colours of the map
    shades = colormaps["viridis_r"](np.linspace(0.1, 0.95, len(ordered)))
    return {
        layer: style.legend_entry(f"layer {layer}", color=to_hex(shade), **properties)
        for layer, shade in zip(ordered, shades, strict=True)
    }


def _ends(entries: Mapping[int, Line2D]) -> Iterable[Line2D]:
    """The legend entries of the first and of the last layer."""
    return {layer: entries[layer] for layer in (min(entries), max(entries))}.values()


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
    cells = ratio_lines(cells_without_recovery(comparison, "channel"))
    losses = losses.merge(cells["label"], left_on="cell", right_index=True)
    cell_counts = losses.groupby("label")["cell"].transform("nunique")
    return losses[cell_counts > 1]


@output(
    "coverage.fig4.loss",
    chapter="attribution",
    needs="profile=true with a channel criterion at three ratios",
)
@per_model
def output_loss_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Output losses of layers by kept share.

    Fig. 4 (b): `output_losses` against the retained share of the layer's channels. A panel per
    method, a line per layer."""
    study = results.study
    losses = output_losses(study, comparison)
    if losses.empty:
        return None
    losses = losses[losses["label"].isin(losses["label"].unique()[:MOST_PANELS])]
    # a layer that keeps all channels has no error
    ends = losses.drop_duplicates(["label", "layer"]).assign(kept=1.0, loss=0.0)
    points = pd.concat([losses, ends]).sort_values("kept", kind="stable")
    entries = _layer_entries(losses["layer"], marker="o", markersize=2.5)
    drawing = marks.lines(
        points.rename(columns={"label": "panel", "layer": "label", "kept": "x", "loss": "y"}),
        entries,
        marks.Axis("channels of the layer kept", style.format_percent, marks.SCORES),
        marks.Axis("loss of the output"),
    )
    style.legend(drawing, _ends(entries))
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
    """Layer -> `expert_stacks` from the channel scores and the plan of `cell`, for a shallow, a
    middle and a deep layer."""
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
        layer: expert_stacks(curves, retained, experts, layer)
        for layer in shallow_middle_deep_layers(list(curves["layer"]))
    }


def _draw_bars(axes: Axes, stacks: pd.DataFrame) -> None:
    """Draw one panel of `expert_bars`. stacks: rows of `expert_stacks`."""
    positions = np.arange(len(stacks))
    # from the lowest scores, at the bottom, to the highest
    tops = stacks[list(PIECE_COLOURS)].fillna(0).iloc[:, ::-1].cumsum(axis=1).iloc[:, ::-1]
    for piece, colour in PIECE_COLOURS.items():  # the shorter bars cover the longer ones
        axes.bar(positions, tops[piece], width=0.8, color=colour, linewidth=0)
    edges = np.arange(len(stacks) + 1) - 0.5
    axes.stairs(stacks["kept"], edges, color=RETAINED_COLOUR, linewidth=1.4, baseline=None)
    attributions = stacks["attribution"].clip(lower=0)
    style.draw_line(axes, ATTRIBUTION_ENTRY, positions, attributions)
    style.label_ticks(axes.xaxis, stacks.index, max_numbers=32, labelsize=6)
    axes.set_xlim(-0.7, len(stacks) - 0.3)


@output(
    "coverage.fig15",
    chapter="attribution",
    needs=f"{COVERAGE_PLANS} and criterion={' or '.join(FIGURE_SCORES)}, and their scores in the "
    "store",
    aliases=("coverage.fig16",),
)
@per_model
def expert_bars(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Channel scores, kept channels and attribution of each expert, by layer and by score.

    A panel for a shallow, a middle and a deep layer of the first plan of each of FIGURE_SCORES."""
    cells = coverage_cells(comparison).drop_duplicates("criterion")
    labels = settings.method_labels(cells)
    stacks_of_title = {
        f"{labels[cell]}, layer {layer}": stacks
        for cell in cells.index[cells["criterion"].isin(FIGURE_SCORES)]
        for layer, stacks in stacks_by_layer(results.study, comparison, int(cell)).items()
    }
    if not stacks_of_title:
        return None
    drawing, panel_of_title = marks.panels(
        list(stacks_of_title),
        marks.Axis("expert"),
        marks.Axis("share", style.format_percent, (-0.03, 1.03)),
        columns=1,
        height=1.7,
    )
    for title, stacks in stacks_of_title.items():
        _draw_bars(panel_of_title[title], stacks)
    handles = [
        Patch(facecolor=PIECE_COLOURS[0], label="highest tenth of the channels"),
        Patch(facecolor=PIECE_COLOURS[PIECES - 1], label="lowest"),
        style.legend_entry("channels kept", color=RETAINED_COLOUR, linewidth=1.4),
        ATTRIBUTION_ENTRY,
    ]
    style.legend(drawing, handles)
    caption = (
        "Each bar is an expert: the sum of its channel scores in tenths of its channels, from the "
        "highest scores (top, dark) to the lowest (bottom, light). Red: the share of its channels "
        "that the plan keeps. Diamonds: its first-order attribution, relative to the highest of "
        f"the layer, negative ones at 0. Based on {pass_setup(results.study)}"
    )
    title = f"Channel scores and budgets, expert by expert: {comparison.model}"
    return Figure(name, title, caption, drawing)
