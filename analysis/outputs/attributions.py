"""Attributions of experts and scores of their channels: agreement with ablation, smoothed losses of
layers, concentration of scores, and losses of layers with pruned channels (MoE-Slimming, Table 14
and Figs. 4, 12, 15 and 16)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import passes, plans, settings
from moe_lab.analysis.load.passes import ABLATION, MEASURES, PASS, shown_passes
from moe_lab.analysis.load.reader import (
    groups,
    records,
    steps_with_inputs,
    time_and_memory,
)
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import (
    ABLATIONS,
    SUMS,
    pass_setup,
    timing_note,
)
from moe_lab.analysis.outputs.score_rows import (
    COVERAGE_PLANS,
    cells_without_recovery,
    coverage_cells,
    ratio_lines,
    sort_cells,
)
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import SCORE, Table
from moe_lab.analysis.stats.comparison import Comparison

TRUTHS = {"second": "layer loss", "ablation": "model loss"}
"""Exact measure of an expert's effect -> the loss whose change it measures."""
MEASURE_OF_PRIOR = {
    "usage": "tokens",
    "ala1": "first",
    "ala2": "second",
    "true_ablation": "second",
    "loss": "ablation",
}
"""Prior of allocation=coverage -> the measure of experts to which it is proportional."""
SECONDS = "Time (s)"
FEWEST_EXPERTS = 3
"""Fewest experts over which a correlation is computed."""


@output("coverage.table14", chapter="attribution", needs=ABLATIONS)
def agreement_table(results: Results) -> Table | None:
    """Agreement of attributions with ablations, and seconds of attributions.

    Table 14: correlations of each of MEASURES with each of TRUTHS over experts. A row per
    measure, and per model and calibration set whose experts were ablated."""
    kinds = ("Pearson", "Rank", "Rank in a layer", "Pearson of channels kept")
    columns = [f"{kind}, {truth}" for truth in TRUTHS.values() for kind in kinds]
    study = results.study
    shown_folders = shown_passes(study.cells)["statistics_folder"]
    cells_of_passes = study.cells[study.cells["statistics_folder"].isin(shown_folders)]
    frames = []
    machines: list[str] = []
    for key, experts in groups(study.experts, PASS):
        if experts["ablation"].isna().all():
            continue
        cells = cells_of_passes[(cells_of_passes[PASS] == tuple(key.values())).all(axis=1)]
        measures = experts[list(MEASURES)]
        by_layer = measures.groupby(experts["layer"]).corr("spearman", FEWEST_EXPERTS)
        # each has a row and a column for each measure
        correlations = (
            measures.corr("pearson", FEWEST_EXPERTS),
            measures.corr("spearman", FEWEST_EXPERTS),
            by_layer.groupby(level=1).mean(),
            channel_agreement(study, cells),
        )
        numbers = [matrix.get(truth) for truth in TRUTHS for matrix in correlations]
        frame = pd.concat(numbers, axis=1).set_axis(columns, axis=1).reindex(list(MEASURES))
        steps = time_and_memory(steps_with_inputs(cells["plan_folder"], study.reader), study.reader)
        steps = steps.drop_duplicates("kind").set_index("kind").reindex(["statistics", ABLATION])
        machines += steps["machine"].dropna().tolist()
        seconds = steps["seconds"].to_dict()
        frame[SECONDS] = seconds["statistics"]
        frame.loc[ABLATION, SECONDS] = seconds[ABLATION]
        frame["Model"] = key["model"]
        frame["Calibration"] = names.calibration(key["calibration"])
        frame["Estimate"] = frame.index.map(MEASURES).map(names.capitalised)
        frames.append(frame)
    if not frames:
        return None
    return Table(
        title="Agreement of attributions with the effect of removing an expert",
        caption="Correlations over experts: Pearson's and Spearman's over all layers, Spearman's "
        "inside a layer (mean over layers). Layer loss: change of the routed output relative to "
        "the residual stream without one expert; it is quadratic in that expert's factor, so the "
        "second order is the true value and agrees by construction. Model loss: rise of the "
        "language model's loss without the expert. Channels kept: "
        "correlation of each expert's kept share in two plans of allocation=coverage, one with "
        "this estimate as prior and one with the true value (mean over such pairs). Time: of the "
        "step that measures it. One forward pass gives all estimates but the ablation, so first "
        f"and second order take the same time. {timing_note(machines)}Based on "
        f"{pass_setup(study)}",
        frame=pd.concat(frames)[["Model", "Calibration", "Estimate", *columns, SECONDS]],
        formats={**dict.fromkeys(columns, SCORE), SECONDS: "{:,.1f}"},
        optional=(*columns, SECONDS),
    )


def channel_agreement(study: Study, cells: pd.DataFrame) -> pd.DataFrame:
    """Pearson's correlations, over experts, between the shares of channels that two plans retain. A
    row and a column for each measure to which the prior of a plan is proportional.

    Means over pairs of plans: one pair for each combination of values in
    `plans.EQUAL_BUT_PRIOR`."""
    shares = study.retained[study.retained["cell"].isin(cells.index)]
    shares = shares.pivot(index=["layer", "expert"], columns="cell", values="share")
    matrices = [pd.DataFrame()]
    for _, plans_of_group in groups(
        cells.join(plans.priors(cells, study.reader), how="inner"), plans.EQUAL_BUT_PRIOR
    ):
        # the first plan of each measure
        measures = plans_of_group["prior"].map(MEASURE_OF_PRIOR).dropna().drop_duplicates()
        matrices.append(shares[measures.index].set_axis(list(measures), axis=1).corr())
    return pd.concat(matrices).groupby(level=0).mean().reindex(columns=list(TRUTHS))


@output("coverage.fig12", chapter="attribution", needs=f"{COVERAGE_PLANS}, and {SUMS}")
@per_model
def smoothing_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Target share of the score that each layer keeps, under each smoothing of layer losses.

    A panel per calibration set, a line per smoothing."""
    losses = results.study.layer_losses
    losses = losses[losses["model"] == comparison.model].dropna(subset=["loss"])
    if losses.empty or coverage_cells(comparison).empty:
        return None
    from moe_lab.allocation.shapes import SMOOTHINGS, smooth  # takes almost half a second

    frames = []
    for key, layers in groups(sort_cells(losses, "calibration", "layer"), ["calibration"]):
        set_name = names.calibration(key["calibration"])
        for smoothing in [name for name in SMOOTHINGS if "." not in name]:
            targets = smooth(layers["loss"].to_numpy(float), smoothing)
            texts = {"panel": set_name, "label": smoothing, "Calibration": set_name}
            frames.append(layers.assign(**texts, y=targets / targets.mean()))
    title = "Smoothed layer losses"
    caption = (
        "Target share of the score that each layer keeps, relative to the mean, under each "
        "smoothing of the layer losses (none: proportional to the loss). Based on "
        f"{pass_setup(results.study)}"
    )
    rows = pd.concat(frames).drop(columns=["calibration", "model"])
    return charts.layer_figure(title, caption, rows, charts.number("y", "target, mean 1"))


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
    losses = study.profiles[["cell", "layer", "output_loss"]].dropna()
    losses = losses.rename(columns={"output_loss": "loss"})
    retained = study.retained[study.retained["cell"].isin(losses["cell"])]
    shares = retained.groupby(["cell", "layer"])["share"].mean().rename("kept").reset_index()
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


def expert_bars(
    curves: pd.DataFrame, retained: pd.DataFrame, experts: pd.DataFrame
) -> pd.DataFrame:
    """Data for the bars of experts, a row per expert and tenth of its channels.

    Columns: "layer", "expert", "piece" (0 for the tenth with the highest scores), "score" (share of
    the expert's score in this tenth) and, for piece 0 only, "kept" (retained share of the expert's
    channels) and "attribution" (of first order, divided by the largest in the layer; 0 if it is
    negative).

    curves: see `concentration`. Columns of `retained`: "layer", "expert", "share"; of `experts`:
    "layer", "expert", "first" (the attribution)."""
    tenths = np.linspace(0, 1, PIECES + 1)
    pieces = []
    for key, curve in groups(curves, ["layer", "expert"]):
        cumulated_shares = np.interp(tenths, curve["channels"], curve["score"])
        pieces.append(
            pd.DataFrame({**key, "piece": range(PIECES), "score": np.diff(cumulated_shares)})
        )
    largest = experts.groupby("layer")["first"].transform("max")
    attributions = (experts["first"] / largest.where(largest > 0)).clip(lower=0)
    once = retained.rename(columns={"share": "kept"}).merge(
        experts.assign(attribution=attributions), on=["layer", "expert"], how="outer"
    )
    bars = pd.concat(pieces).merge(
        once.assign(piece=0), on=["layer", "expert", "piece"], how="left"
    )
    return bars[["layer", "expert", "piece", "score", "kept", "attribution"]]


@output(
    "coverage.fig15",
    chapter="attribution",
    needs=f"{COVERAGE_PLANS} and criterion={' or '.join(FIGURE_SCORES)}, and their scores in the "
    "store",
    aliases=("coverage.fig16",),
)
@per_model
def bars_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Channel scores, kept channels and attribution of each expert, by layer and by score.

    A panel for a shallow, a middle and a deep layer of the first plan of each of FIGURE_SCORES."""
    study = results.study
    cells = coverage_cells(comparison).drop_duplicates("criterion")
    frames = []
    for row in records(cells[cells["criterion"].isin(FIGURE_SCORES)]):
        curves = concentration(study, row["scores_folder"])
        if curves is None:
            continue
        of_pass = study.experts[PASS] == (comparison.model, row["calibration"])
        experts = study.experts[of_pass.all(axis=1)]
        retained = study.retained[study.retained["cell"] == row["cell"]]
        # the first layer, the middle one (the lower of two), and the last
        layers = curves["layer"].drop_duplicates().quantile([0, 0.5, 1], interpolation="lower")
        bars = expert_bars(curves[curves["layer"].isin(layers)], retained, experts)
        frames.append(bars.assign(panel=f"{row['label']}, layer " + bars["layer"].astype(str)))
    if not frames:
        return None
    rows = pd.concat(frames)
    x = {"field": "expert", "type": "ordinal"}
    shade = {"scheme": charts.SEQUENTIAL, "reverse": True}
    piece = charts.number("piece", "tenth of the channels, highest first", scale=shade)
    score, kept, attribution = (
        charts.number(column, "share", **charts.PERCENT)
        for column in ("score", "kept", "attribution")
    )
    diamond = {"shape": "diamond", "filled": True, "color": "#b39a25", "stroke": charts.INK}
    marks = [
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
    return Figure(title, caption, rows, marks, 1, ({"step": 14}, 150))
