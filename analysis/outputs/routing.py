"""How undecided routers are, token by token: across texts, depths and models (MoE-Slimming, Fig. 13)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import names
from analysis.frames import groups
from analysis.outputs.captions import of_pass
from analysis.registry import output
from analysis.render import style
from analysis.render.style import Figure
from analysis.results import Results

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def quantiles(entropies: pd.DataFrame) -> pd.DataFrame:
    """model, calibration, layer and QUANTILES of router entropies over tokens, from their histograms: within a bin,
    tokens are taken to lie evenly."""
    rows = []
    for about, found in groups(entropies, ["model", "calibration", "layer"]):
        bins = found.sort_values("entropy")
        reached = np.concatenate([[0.0], np.cumsum(bins["tokens"].to_numpy(float))])
        if reached[-1] > 0:
            ends = np.concatenate([[0.0], bins["entropy"].to_numpy(float)])
            rows.append((*about.values(), *np.interp(np.array(QUANTILES) * reached[-1], reached, ends)))
    return pd.DataFrame(rows, columns=["model", "calibration", "layer", *QUANTILES])


@output("coverage.fig13", chapter="attribution", needs="the sums of a pass over a text in the store")
def entropy_figure(results: Results, name: str) -> Figure | None:
    """Router entropy over tokens, by calibration set, layer and model."""
    found = quantiles(results.study.router_entropies)
    if found.empty:
        return None
    models = list(found["model"].unique())
    sets = names.calibrations_in_order(found["calibration"])
    with style.look():
        drawing = style.drawing(style.PAGE, 1.7 * len(models) + 0.4)
        grid = drawing.subplots(len(models), len(sets), squeeze=False, sharey=True)
        for row, model in zip(grid, models, strict=True):
            for axes, calibration in zip(row, sets, strict=True):
                own = found[(found["model"] == model) & (found["calibration"] == calibration)]
                axes.set_visible(len(own) > 0)
                _boxes(axes, own)
                axes.set_title(f"{model}\n{names.calibration(calibration)}", fontsize=7.5)
            row[0].set_ylabel("router entropy / ln(experts)", fontsize=7)
    caption = (
        "Entropy of the softmax of the router's logits over all experts, for each token of a calibration set, as a "
        "share of the highest possible: 1 where all experts are equally likely. Boxes: quartiles over tokens; line: "
        f"median; whiskers: 5 % to 95 %. Based on {of_pass(results.study)}"
    )
    return Figure(name, "Router entropy across texts, layers and models", caption, drawing)


def _boxes(axes: Axes, layers: pd.DataFrame) -> None:
    low, first, middle, third, high = (layers[share].to_numpy(float) for share in QUANTILES)
    where = np.arange(len(layers))
    axes.vlines(where, low, high, color=style.INK, linewidth=0.7)
    axes.bar(where, third - first, bottom=first, width=0.6, color="#66aadd", edgecolor=style.INK, linewidth=0.6)
    axes.hlines(middle, where - 0.3, where + 0.3, color=style.INK, linewidth=1.6)
    step = max(1, -(-len(layers) // 12))
    axes.set_xticks(where[::step], layers["layer"].iloc[::step].map(str), fontsize=6.5)
    axes.set(xlabel="decoder layer", ylim=(0, 1.02))
    axes.grid(axis="y")
