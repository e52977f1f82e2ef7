"""Token variance of hidden states by layer (AIMER, Fig. 6), and entropy of the routers over tokens
(MoE-Slimming, Fig. 13)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.outputs.captions import pass_setup, run_setup
from moe_lab.analysis.outputs.score_rows import criterion_colours, listed_cells
from moe_lab.analysis.registry import Item, Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Columns, Table, frame_and_formats
from moe_lab.analysis.stats.comparison import Comparison, Panel

PROFILE = "a run with profile=true"
"""Data that `aimer.fig6` needs."""


@output("aimer.fig6", chapter="inside", needs=PROFILE)
def token_variance(results: Results) -> list[Item | None]:
    """Token variance of hidden states by layer."""
    return [*variance_figure(results), profile_table(results)]


@per_model
def variance_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Token variance of hidden states against layers: a panel per ratio and calibration set, a line
    per method and for the unpruned model."""
    cells = [panel_cells(comparison, panel) for panel in comparison.panels]
    profiles = results.study.profiles.dropna(subset=["variance"])
    points = pd.concat(cells).merge(profiles, on="cell").rename(columns={"variance": "y"})
    caption = (
        "Variance of the residual stream after each layer over the tokens of a text, the mean over "
        "its coordinates; dashed: the unpruned model."
    )
    title = "Variance of hidden states between tokens"
    y = charts.number("y", "token variance")
    return charts.layer_figure(title, caption, points, y, criterion_colours(points))


def panel_cells(comparison: Comparison, panel: Panel) -> pd.DataFrame:
    """The unpruned model and the methods of a panel, a row each: columns "panel" (a title),
    "method", "label" (display name of the method) and "cell" (NaN if the unpruned model was not
    run), and those of menus."""
    cells = {"none": comparison.unpruned_cell, **panel.cells}
    title = f"{names.calibration(panel.calibration)}, {panel.pruned_text} pruned"
    rows = [(title, method, names.method(method), cell) for method, cell in cells.items()]
    frame = pd.DataFrame(rows, columns=["panel", "method", "label", "cell"])
    return frame.assign(Pruned=panel.pruned_text, Calibration=names.calibration(panel.calibration))


def profile_table(results: Results) -> Table | None:
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
        title="Variance of hidden states between tokens",
        caption="Token variance: of the residual stream after the layer over the tokens of a text, "
        f"the mean over its coordinates. Based on {run_setup(study)}",
        **frame_and_formats(rows, columns),
        optional=tuple(columns),
    )


QUARTILES = {"low": 0.25, "y": 0.5, "high": 0.75}
"""Column of `quartiles` -> share of the tokens with a lower entropy."""


def quartiles(entropies: pd.DataFrame) -> pd.DataFrame:
    """Quartiles of router entropy over the tokens of each layer. Columns: model, calibration, layer
    and each of QUARTILES.

    entropies: histograms, see `passes.router_entropies`. Tokens are assumed to be evenly spread
    inside a bin."""
    rows = []
    for key, histogram in groups(entropies, ["model", "calibration", "layer"]):
        bins = histogram.sort_values("entropy")
        # number of tokens below each of `bin_ends`
        cumulated_tokens = np.concatenate([[0.0], np.cumsum(bins["tokens"].to_numpy(float))])
        if cumulated_tokens[-1] > 0:
            bin_ends = np.concatenate([[0.0], bins["entropy"].to_numpy(float)])
            tokens_below = np.array(list(QUARTILES.values())) * cumulated_tokens[-1]
            rows.append((*key.values(), *np.interp(tokens_below, cumulated_tokens, bin_ends)))
    return pd.DataFrame(rows, columns=["model", "calibration", "layer", *QUARTILES])


@output(
    "coverage.fig13", chapter="attribution", needs="the sums of a pass over a text in the store"
)
def entropy_figure(results: Results) -> Figure | None:
    """Router entropy over tokens, by calibration set, layer and model."""
    points = quartiles(results.study.router_entropies)
    caption = (
        "Entropy of the softmax of the router's logits over all experts, for each token of a "
        "calibration set, as a share of the highest possible: 1 where all experts are equally "
        f"likely. Median over tokens, with quartiles. Based on {pass_setup(results.study)}"
    )
    title = "Router entropy across texts, layers and models"
    y = charts.number("y", "router entropy / ln(experts)", **charts.SHARE)
    return charts.layer_figure(title, caption, charts.by_calibration(points), y)
