"""Token variance of hidden states (AIMER, Fig. 6) and entropy of the routers, by layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import names
from analysis.load.reader import groups
from analysis.load.settings import pruned
from analysis.load.study import Study
from analysis.outputs.captions import of_pass, reading
from analysis.outputs.score_rows import method_lines
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats.comparison import Comparison, Panel

VARIANCE, ENTROPY = "variance", "router_entropy"
_TITLES = {VARIANCE: "How much hidden states differ between tokens", ENTROPY: "How undecided routers are"}
_AXES = {VARIANCE: "token variance", ENTROPY: "router entropy (nats)"}
_CAPTIONS = {
    VARIANCE: "Variance of the residual stream after each layer over the tokens of a text, the mean over its "
    "coordinates; dashed: the unpruned model.",
    ENTROPY: "Entropy of the router's softmax over the experts it chooses from, the mean over the tokens of a text; "
    "dashed: the unpruned model. With fewer experts to choose from the highest possible entropy is lower.",
}


def profile_figure(study: Study, comparison: Comparison, measure: str, *, name: str) -> Figure | None:
    """`measure` of every layer: a panel per ratio and calibration set, a line per method. None without profiles."""
    values = _by_layer(study, measure)
    panels = [panel for panel in comparison.panels if set(panel.cells.values()) & set(values)]
    if not panels:
        return None
    sets = names.calibrations_in_order(panel.calibration for panel in panels)
    settings = list(dict.fromkeys(panel.settings for panel in panels))
    lines = method_lines(comparison)
    with style.look():
        drawing = style.drawing(style.PAGE, 1.9 * len(settings) + 0.9)
        grid = drawing.subplots(len(settings), len(sets), squeeze=False, sharex=True, sharey="row")
        for axes in grid.flat:
            axes.set_visible(False)
        for panel in panels:
            axes = grid[settings.index(panel.settings)][sets.index(panel.calibration)]
            axes.set_visible(True)
            _draw(axes, panel, values, comparison, lines, narrow=len(sets) > style.WIDE)
        for row in grid:
            row[0].set_ylabel(_AXES[measure])
        for axes in grid[-1]:
            axes.set_xlabel("decoder layer")
        drawn = {key for panel in panels for key, cell in panel.cells.items() if cell in values}
        handles = [lines[key] for key in ("none", *names.methods_in_order(drawn))]
        longest = max(len(str(line.get_label())) for line in handles)
        ncols = max(1, min(6, len(handles), 100 // (longest + 8)))
        drawing.legend(handles=handles, loc="outside lower center", ncols=ncols, fontsize=7)
    return Figure(name, f"{_TITLES[measure]}: {comparison.model}", _CAPTIONS[measure], drawing)


def _by_layer(study: Study, measure: str) -> dict[int, pd.Series]:
    """Cell -> layer -> the measure, where the layer has it."""
    profiles = study.profiles.dropna(subset=[measure])
    return {int(str(cell)): part.set_index("layer")[measure].sort_index() for cell, part in profiles.groupby("cell")}


def _draw(
    axes: Axes,
    panel: Panel,
    values: dict[int, pd.Series],
    comparison: Comparison,
    lines: dict[str, Line2D],
    *,
    narrow: bool,
) -> None:
    cells = {"none": comparison.unpruned, **panel.cells}
    for key, cell in cells.items():
        if cell is None or cell not in values:
            continue
        line = copy(lines[key])
        line.set_data(values[cell].index, values[cell])
        axes.add_line(line)
    axes.autoscale_view()
    words = (names.calibration(panel.calibration), f"{panel.pruned} pruned")
    axes.set_title(("\n" if narrow else ", ").join(words), fontsize=7.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(axis="y")


def profile_table(study: Study, comparisons: Sequence[Comparison], *, name: str) -> Table:
    """Every layer of every pruned model that was looked into, beside the unpruned one."""
    frames = [_rows(study, comparison) for comparison in comparisons]
    text = ["Model", "Pruned", "Calibration", "Criterion", "Layer"]
    numbers = {
        "Token variance": "{:.3f}",
        "Of the unpruned": "{:.0%}",
        "Router entropy": "{:.3f}",
        "Gate entropy": "{:.3f}",
        "Load entropy": "{:.3f}",
        "Experts": "{:.0f}",
    }
    kept = [frame for frame in frames if len(frame)]
    frame = pd.concat(kept, ignore_index=True) if kept else pd.DataFrame()
    return Table(
        name=name,
        title="Layer by layer: hidden states and routing",
        caption="Token variance: of the residual stream after the layer over the tokens of a text, the mean over its "
        "coordinates. Entropies in nats, means over tokens: of the router's softmax over the experts it chooses from, "
        "and of the gates of the chosen ones; load: of the shares of tokens that experts are given. A layer without "
        f"experts has none. Based on {reading(study)}",
        frame=frame.reindex(columns=[*text, *numbers]),
        formats=numbers,
        blocks=text[:4],
        optional=tuple(numbers),
    )


def _rows(study: Study, comparison: Comparison) -> pd.DataFrame:
    profiles = study.profiles[study.profiles["cell"].isin(comparison.cells.index)]
    if profiles.empty:
        return pd.DataFrame()
    cells = comparison.cells.loc[profiles["cell"]].reset_index(drop=True)
    profiles = profiles.reset_index(drop=True)
    whole = profiles[profiles["cell"] == comparison.unpruned].set_index("layer")["variance"]
    return pd.DataFrame(
        {
            "Model": comparison.model,
            "Pruned": pruned(comparison.cells)[profiles["cell"]].to_numpy(),
            "Calibration": cells["calibration"].map(names.calibration),
            "Criterion": cells["method"].map(names.method),
            "Layer": profiles["layer"].astype(str),
            "Token variance": profiles["variance"],
            "Of the unpruned": profiles["variance"] / profiles["layer"].map(whole),
            "Router entropy": profiles["router_entropy"],
            "Gate entropy": profiles["gate_entropy"],
            "Load entropy": profiles["load_entropy"],
            "Experts": profiles["experts"].where(profiles["experts"] > 0),
        }
    )


PROFILED = "a run with profile=true"


@output("aimer.fig6", chapter="inside", filters="*Model|Pruned|Calibration|Criterion", needs=PROFILED)
def token_variance(results: Results, name: str) -> list[Item | None]:
    """Token variance of hidden states by layer."""
    return [*_figures(results, VARIANCE, name), profile_table(results.study, results.pruned, name=name)]


@output("router_entropy", chapter="inside", needs=PROFILED)
def router_entropy(results: Results, name: str) -> list[Item | None]:
    """Entropy of the router by layer."""
    return _figures(results, ENTROPY, name)


def _figures(results: Results, measure: str, name: str) -> list[Item | None]:
    return [
        profile_figure(results.study, comparison, measure, name=own)
        for comparison, own in results.per_pruned_model(name)
    ]


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def quantiles(entropies: pd.DataFrame) -> pd.DataFrame:
    """model, calibration, layer and QUANTILES of router entropies over tokens, from their histograms: within a bin,
    tokens are taken to lie evenly."""
    rows = []
    for about, histogram in groups(entropies, ["model", "calibration", "layer"]):
        bins = histogram.sort_values("entropy")
        reached = np.concatenate([[0.0], np.cumsum(bins["tokens"].to_numpy(float))])
        if reached[-1] > 0:
            ends = np.concatenate([[0.0], bins["entropy"].to_numpy(float)])
            rows.append((*about.values(), *np.interp(np.array(QUANTILES) * reached[-1], reached, ends)))
    return pd.DataFrame(rows, columns=["model", "calibration", "layer", *QUANTILES])


@output("coverage.fig13", chapter="attribution", needs="the sums of a pass over a text in the store")
def entropy_figure(results: Results, name: str) -> Figure | None:
    """Router entropy over tokens, by calibration set, layer and model."""
    entropies = quantiles(results.study.router_entropies)
    if entropies.empty:
        return None
    models = list(entropies["model"].unique())
    sets = names.calibrations_in_order(entropies["calibration"])
    with style.look():
        drawing = style.drawing(style.PAGE, 1.7 * len(models) + 0.4)
        grid = drawing.subplots(len(models), len(sets), squeeze=False, sharey=True)
        for row, model in zip(grid, models, strict=True):
            for axes, calibration in zip(row, sets, strict=True):
                own = entropies[(entropies["model"] == model) & (entropies["calibration"] == calibration)]
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
