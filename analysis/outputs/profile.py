"""Token variance of hidden states by layer (AIMER, Fig. 6), and entropy of the routers over tokens
(MoE-Slimming, Fig. 13)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.reader import groups
from analysis.outputs.captions import pass_setup, run_setup
from analysis.outputs.score_rows import criterion_entries, listed_cells, panel_cells
from analysis.registry import Item, Results, output, per_model
from analysis.render import marks, style
from analysis.render.style import Figure
from analysis.render.table import Columns, Table, frame_and_formats
from analysis.stats.comparison import Comparison

PROFILE = "a run with profile=true"
"""Data that `aimer.fig6` needs."""


@output(
    "aimer.fig6", chapter="inside", filters="*Model|Pruned|Calibration|Criterion", needs=PROFILE
)
def token_variance(results: Results, name: str) -> list[Item | None]:
    """Token variance of hidden states by layer."""
    return [*variance_figure(results, name), profile_table(results, name)]


@per_model("pruned")
def variance_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Token variance of hidden states against layers: a panel per ratio and calibration set, a line
    per method and for the unpruned model."""
    profiles = results.study.profiles.dropna(subset=["variance"])
    frames = [
        panel_cells(comparison, panel).merge(profiles, on="cell")
        for panel in comparison.panels
        if profiles["cell"].isin(panel.cells.values()).any()
    ]
    if not frames:
        return None
    points = pd.concat(frames).sort_values("layer", kind="stable")
    points = points.assign(x=points["layer"], y=points["variance"])
    entries = criterion_entries(points)
    y = marks.Axis("token variance")
    drawing = marks.lines(points, entries, marks.LAYERS, y, height=1.9, sharey="row")
    style.legend(drawing, entries.values())
    caption = (
        "Variance of the residual stream after each layer over the tokens of a text, the mean over "
        "its coordinates; dashed: the unpruned model."
    )
    title = f"Variance of hidden states between tokens: {comparison.model}"
    return Figure(name, title, caption, drawing)


def profile_table(results: Results, name: str) -> Table | None:
    """A row per layer of each cell that has a profile."""
    study = results.study
    frames = []
    for comparison in results.pruned:
        profiles = study.profiles[study.profiles["cell"].isin(comparison.cells.index)]
        cells = listed_cells(comparison)[["model", "calibration", "method", "pruned"]]
        unpruned = profiles[profiles["cell"] == comparison.unpruned_cell]
        unpruned_variance = profiles["layer"].map(unpruned.set_index("layer")["variance"])
        if len(profiles):
            share = profiles["variance"] / unpruned_variance
            frames.append(profiles.join(cells, on="cell").assign(unpruned_share=share))
    if not frames:
        return None
    rows = pd.concat(frames, ignore_index=True)
    # displayed column -> (column of `rows`, format)
    columns: Columns = {
        "Model": "model",
        "Pruned": "pruned",
        "Calibration": "calibration",
        "Criterion": "method",
        "Layer": "layer",
        "Token variance": ("variance", "{:.3f}"),
        "Of the unpruned": ("unpruned_share", "{:.0%}"),
    }
    rows = rows.assign(layer=rows["layer"].astype(str))
    return Table(
        name=name,
        title="Variance of hidden states between tokens",
        caption="Token variance: of the residual stream after the layer over the tokens of a text, "
        f"the mean over its coordinates. Based on {run_setup(study)}",
        **frame_and_formats(rows, columns),
        blocks=("Model", "Pruned", "Calibration", "Criterion"),
        optional=tuple(columns),
    )


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Ends of whiskers, ends of boxes, and medians of Fig. 13."""


def quantiles(entropies: pd.DataFrame) -> pd.DataFrame:
    """Quantiles of router entropy over the tokens of each layer. Columns: model, calibration, layer
    and each of QUANTILES.

    entropies: histograms, see `passes.router_entropies`. Tokens are assumed to be evenly spread
    inside a bin."""
    rows = []
    for key, histogram in groups(entropies, ["model", "calibration", "layer"]):
        bins = histogram.sort_values("entropy")
        # number of tokens below each of `bin_ends`
        cumulated_tokens = np.concatenate([[0.0], np.cumsum(bins["tokens"].to_numpy(float))])
        if cumulated_tokens[-1] > 0:
            bin_ends = np.concatenate([[0.0], bins["entropy"].to_numpy(float)])
            quantile_tokens = np.array(QUANTILES) * cumulated_tokens[-1]
            rows.append((*key.values(), *np.interp(quantile_tokens, cumulated_tokens, bin_ends)))
    return pd.DataFrame(rows, columns=["model", "calibration", "layer", *QUANTILES])


@output(
    "coverage.fig13", chapter="attribution", needs="the sums of a pass over a text in the store"
)
def entropy_figure(results: Results, name: str) -> Figure | None:
    """Router entropy over tokens, by calibration set, layer and model."""
    entropies = quantiles(results.study.router_entropies)
    if entropies.empty:
        return None
    # a box of five numbers has them as ends of whiskers, quartiles and median
    rows = entropies.melt(["model", "calibration", "layer"], list(QUANTILES), value_name="y")
    panels = rows["model"] + ", " + rows["calibration"].map(names.calibration)
    drawing = marks.box_plots(
        rows.assign(panel=panels, label=rows["layer"]),
        marks.LAYERS,
        marks.Axis("router entropy / ln(experts)", limits=marks.SCORES),
        height=1.7,
    )
    caption = (
        "Entropy of the softmax of the router's logits over all experts, for each token of a "
        "calibration set, as a share of the highest possible: 1 where all experts are equally "
        "likely. Boxes: quartiles over tokens; line: median; whiskers: 5 % to 95 %. Based on "
        f"{pass_setup(results.study)}"
    )
    return Figure(name, "Router entropy across texts, layers and models", caption, drawing)
