"""Distribution of an expert's scores over its channels, and the output loss of layers with pruned
channels (MoE-Slimming, Figs. 4, 15 and 16)."""

from __future__ import annotations

import numpy as np
import pandas as pd

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
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.stats.comparison import Comparison

MOST_PANELS = 6
"""Largest number of panels in a figure."""
PIECES = 10
"""Number of pieces of an expert's bar; a piece is a tenth of the expert's channels."""
FIGURE_SCORES = ("channel_activation", "snip")
"""The channel scores of the published Figs. 15 and 16: activations, and weights times
gradients."""
LAYER_COLOUR = {
    "field": "layer",
    "type": "ordinal",
    "scale": {"scheme": "viridis", "reverse": True},
    "title": "layer",
}
"""Channel with the colours of layers, from light for the first to dark for the last."""


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
def concentration_figure(results: Results, comparison: Comparison) -> Figure | None:
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
    rows = pd.concat(frames)
    x = charts.number("channels", "channels, highest score first", **charts.PERCENT, **charts.SHARE)
    y = charts.number("score", "share of the expert's score", **charts.PERCENT, **charts.SHARE)
    look = {"strokeWidth": 0.7, "opacity": 0.7}
    layers = [charts.layer("line", look, x=x, y=y, color=LAYER_COLOUR, detail="expert")]
    caption = (
        "(a) Each line is an expert, its shade the depth of its layer: share of the sum of its "
        "channel scores that its highest channels hold. Equal channels would give the diagonal; "
        f"the further above it, the less of the score pruning removes. Based on {pass_setup(study)}"
    )
    title = "How concentrated channel scores are"
    return Figure(title, caption, rows, layers)


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
def output_loss_figure(results: Results, comparison: Comparison) -> Figure | None:
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
    rows = pd.concat([losses, ends]).sort_values("kept", kind="stable")
    rows = rows.rename(columns={"label": "panel"})
    x = charts.number("kept", "channels of the layer kept", **charts.PERCENT)
    y = charts.number("loss", "loss of the output")
    layers = [charts.layer("line", {"point": True}, x=x, y=y, color=LAYER_COLOUR)]
    caption = (
        "(b) Each line is a layer: error of its routed output when this layer alone is pruned, ‖m "
        "− m′‖² / (‖y‖² + ε), the mean over the tokens of a text; m: routed output, y: residual "
        f"stream after the layer. With everything kept it is 0. Based on {pass_setup(study)}"
    )
    title = "Loss of layer outputs against the kept share"
    return Figure(title, caption, rows, layers)


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


@output(
    "coverage.fig15",
    chapter="attribution",
    needs=f"{COVERAGE_PLANS} and criterion={' or '.join(FIGURE_SCORES)}, and their scores in the "
    "store",
    aliases=("coverage.fig16",),
)
@per_model
def expert_bars(results: Results, comparison: Comparison) -> Figure | None:
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
    frames = [
        stacks.melt(
            ["kept", "attribution"], var_name="piece", value_name="score", ignore_index=False
        )
        .rename_axis("expert")
        .reset_index()
        .assign(panel=title)
        for title, stacks in stacks_of_title.items()
    ]
    rows = pd.concat(frames)
    # once for each expert, not for each piece
    rows[["kept", "attribution"]] = rows[["kept", "attribution"]].where(rows["piece"] == 0)
    rows["attribution"] = rows["attribution"].clip(lower=0)
    x = {"field": "expert", "type": "ordinal"}
    shade = {"scheme": charts.SEQUENTIAL, "reverse": True}
    piece = charts.number("piece", "tenth of the channels, highest first", scale=shade)
    score, kept, attribution = (
        charts.number(column, "share", **charts.PERCENT)
        for column in ("score", "kept", "attribution")
    )
    diamond = {"shape": "diamond", "filled": True, "color": "#b39a25", "stroke": charts.INK}
    layers = [
        charts.layer("bar", x=x, y=score, color=piece, order="piece"),
        charts.layer("tick", {"color": "#bb3311", "thickness": 2}, x=x, y=kept),
        charts.layer("point", diamond, x=x, y=attribution),
    ]
    caption = (
        "Each bar is an expert: the sum of its channel scores in tenths of its channels, from the "
        "highest scores (dark) to the lowest (light). Red: the share of its channels "
        "that the plan keeps. Diamonds: its first-order attribution, relative to the highest of "
        f"the layer, negative ones at 0. Based on {pass_setup(results.study)}"
    )
    title = "Channel scores and budgets, expert by expert"
    return Figure(title, caption, rows, layers, 1, ({"step": 14}, 150))
