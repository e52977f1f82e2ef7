"""The figures about channels: accuracy and FLOPs against the ratio (HEAPr, Fig. 2), and where budgets keep channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis import names
from analysis.frames import groups, records
from analysis.load import attributions, settings
from analysis.load.attributions import layer_losses
from analysis.load.study import Study
from analysis.outputs.captions import of_pass
from analysis.outputs.channels import plain, ratio_lines
from analysis.registry import Item, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.results import Results
from analysis.stats.comparison import Comparison

MAPS = 8
"""Allocations whose experts are drawn one by one."""
LAYERS = 8
"""Layers named at an axis, at most."""


def layer_shares(cells: pd.DataFrame, kept: pd.DataFrame) -> pd.DataFrame:
    """(allocations, layers): share of its channels that each layer keeps, experts weighing alike.

    Allocations with the same shares, to a thousandth, are one row whose label names them all. `kept`: cell, layer,
    expert, share; of `cells`, those with a plan are counted.
    """
    found = kept[kept["cell"].isin(cells.index)]
    shares = found.pivot_table(index="cell", columns="layer", values="share", aggfunc="mean")
    shares = shares.reindex([cell for cell in cells.index if cell in shares.index])
    same: dict[tuple[float, ...], list[int]] = {}
    for cell, row in shares.round(3).iterrows():
        same.setdefault(tuple(row), []).append(int(str(cell)))
    labels = {
        members[0]: "\n".join(map(names.allocated, cells.loc[members, "allocation"])) for members in same.values()
    }
    return shares.loc[list(labels)].rename(index=labels).rename_axis("allocation")


def layer_figure(comparison: Comparison, kept: pd.DataFrame, *, name: str) -> Figure | None:
    """Share of the channels that each layer keeps, a line per allocation. None without channel plans that differ."""
    blocks = [(ratio, layer_shares(cells, kept)) for ratio, cells in _budget_blocks(comparison)]
    blocks = [(ratio, shares) for ratio, shares in blocks if len(shares)]
    if not blocks:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE, 3.0 * len(blocks))
        for axes, (ratio, shares) in zip(np.atleast_1d(drawing.subplots(len(blocks), 1)), blocks, strict=True):
            for at, (label, row) in enumerate(shares.iterrows()):
                shade = _LAYER_SHADES[at % len(_LAYER_SHADES)]
                axes.plot(
                    range(len(row)), row * 100, marker=style.MARKERS[at % 11], markersize=4.5, linewidth=1.2,
                    color=shade, linestyle=_DASHES[at // len(_LAYER_SHADES) % len(_DASHES)], label=label,
                )  # fmt: skip
            shown = range(0, shares.shape[1], -(-shares.shape[1] // LAYERS))
            axes.set_xticks(shown, [f"layer {shares.columns[at]}" for at in shown])
            axes.set(ylabel="channels kept (%)", ylim=(0, 104))
            axes.set_title(f"{comparison.model}, {names.ratio(ratio)} pruned")
            axes.grid(axis="y")
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=6.5, labelspacing=0.9)
    caption = "Share of its channels that each layer keeps. Allocations that keep the same shares are one line."
    return Figure(name, "Which layers keep their channels", caption, drawing)


_LAYER_SHADES = ("#15181e", "#2277bb", "#ee7733", "#117733", "#aa4499", "#b39a25", "#cc6677", "#44aa99")
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


def expert_figure(comparison: Comparison, kept: pd.DataFrame, *, name: str) -> Figure | None:
    """Share of its channels that each expert keeps under each allocation, sorted in its layer; none is crossed.

    At the ratio closest to a half, which the papers look at; None without channel plans that differ inside a layer.
    """
    blocks = min(_budget_blocks(comparison), key=lambda block: abs(block[0] - 0.5), default=(0.0, pd.DataFrame()))
    maps = _uneven(blocks[1], kept) if len(blocks[1]) else []
    if not maps:
        return None
    with style.look():
        layers = kept["layer"].nunique()
        down = -(-len(maps) // 2)
        drawing = style.drawing(style.PAGE, down * (0.2 * min(layers, 24) + 0.45) + 0.7)
        for at, (cell, word) in enumerate(maps):
            axes = drawing.add_subplot(down, 2, at + 1)
            _expert_axes(axes, kept[kept["cell"] == cell], names_layers=at % 2 == 0)
            axes.set_title(word)
        handles = [Patch(facecolor="none", edgecolor="#bb3311", hatch="xxxx", label="no channel")]
        handles += [Patch(facecolor=_shade(level), label=names.share(level)) for level in (0.25, 0.5, 0.75, 1)]
        drawing.legend(handles=handles, loc="outside lower center", ncols=5, title="channels kept", title_fontsize=7)
    caption = (
        f"{names.ratio(blocks[0])} of all channels are pruned. Each square is an expert, its shade the share of its "
        "channels that is kept; experts of a layer go from the least to the most kept. Crossed ones keep none. "
        "Allocations that keep the same share of every expert of a layer are left out."
    )
    return Figure(name, f"Which experts keep their channels: {comparison.model}", caption, drawing)


def _budget_blocks(comparison: Comparison) -> list[tuple[float, pd.DataFrame]]:
    """Ratio and cells of the channel criterion that met most allocations, coverage among them, one cell for each."""
    cells = plain(comparison)
    cells = cells[cells["granularity"] == "channel"].drop_duplicates(["criterion", "allocation", "ratio"])
    covered = cells["allocation"].map(lambda word: settings.allocation(word)[0] == "coverage")
    counts = cells.groupby("criterion", sort=False)["allocation"].nunique()[
        list(dict.fromkeys(cells.loc[covered, "criterion"]))
    ]
    if counts.empty or counts.max() < 2:
        return []
    return [
        (float(key["ratio"]), found) for key, found in groups(cells[cells["criterion"] == counts.idxmax()], ["ratio"])
    ]


def _uneven(cells: pd.DataFrame, kept: pd.DataFrame) -> list[tuple[int, str]]:
    """Allocations under which experts of a layer keep different shares, layerwise and coverage first, with names."""
    found = kept[kept["cell"].isin(cells.index)]
    spread = found.groupby(["cell", "layer"])["share"].agg(np.ptp).groupby("cell").max()
    words = {int(str(cell)): settings.allocation(word) for cell, word in cells["allocation"].items()}
    uneven = [cell for cell in words if spread.get(cell, 0) > 1e-9]
    first = sorted(
        uneven, key=lambda cell: (words[cell][0] not in ("layerwise", "coverage"), "smoothing" in words[cell][1])
    )
    return [(cell, names.allocated(str(cells.loc[cell, "allocation"]))) for cell in first[:MAPS]]


def _shade(share: Any) -> Any:
    """The colour of a share, or of an array of them."""
    return colormaps[style.SEQUENTIAL](0.08 + 0.87 * share)


def _expert_axes(axes: Axes, kept: pd.DataFrame, *, names_layers: bool) -> None:
    layers: Sequence[int] = sorted(kept["layer"].unique())
    for y, layer in enumerate(layers):
        share = np.sort(kept.loc[kept["layer"] == layer, "share"].to_numpy(float))
        image = _shade(share)[None]
        none = int((share == 0).sum())
        image[0, :none, 3] = 0
        axes.imshow(image, extent=(0, len(share), y + 0.94, y + 0.06), aspect="auto", interpolation="nearest")
        if none:
            box = (0, y + 0.06), none, 0.88
            axes.add_patch(Rectangle(*box, facecolor="none", edgecolor="#bb3311", hatch="xxxx", linewidth=0))
    axes.set(xlim=(0, kept.groupby("layer").size().max()), ylim=(len(layers), 0))
    shown = list(layers)[:: max(1, -(-len(layers) // 12))]
    labels = [f"layer {layer}" for layer in shown] if names_layers else []
    axes.set_yticks([layers.index(layer) + 0.5 for layer in shown] if names_layers else [], labels, fontsize=6.5)
    axes.set_xticks([])
    style.bare(axes)


PANELS = 6
"""Sets of scores, and plans, that are drawn at most."""
COVERAGE = "coverage"
"""The allocation whose budgets follow the scores."""
HALF = 0.5
"""The ratio that the papers look at."""
_CURVE_SHADES = ("#2277bb", "#ee7733", "#117733", "#aa4499", "#8a8a2b", "#7a7a7a")


def concentration_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Fig. 4: how much of a layer's score its best channels hold, a panel per set of scores and a line per layer."""
    cells = plain(comparison)
    cells = cells[(cells["granularity"] == "channel") & cells["scores_folder"].notna()].drop_duplicates("scores_folder")
    panels: list[tuple[str, pd.DataFrame]] = []
    for row in records(cells):
        curves = attributions.read(study.reader.find(row["scores_folder"]), "concentration.parquet", study.reader)
        if curves is not None and len(panels) < PANELS:
            panels.append((f"{names.criterion(row['criterion'])}, {names.calibration(row['calibration'])}", curves))
    if not panels:
        return None
    across = min(3, len(panels))
    with style.look():
        drawing = style.drawing(style.PAGE * (1 if across > 1 else 0.6), 2.2 * -(-len(panels) // across) + 0.4)
        grid = drawing.subplots(-(-len(panels) // across), across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, curves) in zip(grid.flat, panels, strict=False):
            _curves(axes, curves)
            axes.set_title(title, fontsize=7.5)
        for row_axes in grid:
            row_axes[0].set_ylabel("share of the layer's score")
        for axes in grid.flat:
            axes.set_xlabel("channels, highest first")
        handles = _ends(grid.flat[0])
        drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    caption = (
        "How much of the sum of a layer's channel scores its highest channels hold, a line per layer; dashed: all "
        "channels alike. The further a line is above it, the more channels can go with little of the score."
    )
    return Figure(name, f"How concentrated channel scores are: {comparison.model}", caption, drawing)


def _curves(axes: Axes, curves: pd.DataFrame) -> None:
    layers = list(groups(curves, ["layer"]))
    for at, (about, curve) in enumerate(layers):
        shade = colormaps["viridis_r"](0.1 + 0.85 * at / max(1, len(layers) - 1))
        axes.plot(curve["channels"], curve["score"], color=shade, linewidth=1.1, label=f"layer {about['layer']}")
    axes.plot([0, 1], [0, 1], color=style.MUTED, linestyle=(0, (4, 2)), linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        axis.set_major_locator(MaxNLocator(nbins=4))
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.grid()


def _ends(axes: Axes) -> list[object]:
    """The first and the last layer's line, for the legend."""
    lines = [line for line in axes.get_lines() if str(line.get_label()).startswith("layer")]
    return list(dict.fromkeys((lines[0], lines[-1])))


def loss_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Loss against the ratio, where a benchmark is a loss or a perplexity and a method was run at three ratios."""
    results = study.results[study.results["metric"].astype(str).str.endswith(names.LOWER_IS_BETTER)]
    lines = ratio_lines(plain(comparison))
    drawable = [cell for found in lines.values() for cell in found.index]
    results = results[results["cell"].isin([comparison.unpruned, *drawable])]
    drawn = [str(benchmark) for benchmark in results["benchmark"].unique()] if lines else []
    if not drawn:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE, 2.8)
        for axes, benchmark in zip(np.atleast_1d(drawing.subplots(1, len(drawn))), drawn, strict=True):
            found = results[results["benchmark"] == benchmark].set_index("cell")
            for at, (label, cells) in enumerate(lines.items()):
                some = cells[cells.index.isin(found.index)]
                errors = 1.96 * found.loc[some.index, "stderr"].astype(float).fillna(0)
                axes.errorbar(
                    some["ratio"] * 100, found.loc[some.index, "score"], errors,
                    color=_CURVE_SHADES[at % len(_CURVE_SHADES)],
                    label=label,
                    marker=style.MARKERS[at % 11], markersize=4, linewidth=1.2,
                )  # fmt: skip
            whole = found["score"][found.index == comparison.unpruned]
            if len(whole):
                axes.axhline(whole.iloc[0], color=style.INK, linestyle="--", linewidth=0.9)
            axes.set(xlabel="routed parameters removed (%)", ylabel=str(found["metric"].iloc[0]).replace("_", " "))
            axes.set_title(names.benchmark(benchmark))
            axes.grid(axis="y")
        handles, labels = axes.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=min(2, len(handles)))
    caption = "Bars: 95 %, from standard errors over windows of the text. Dashed: the unpruned model. Lower is better."
    return Figure(name, f"Loss against the ratio: {comparison.model}", caption, drawing)


def layer_budgets(study: Study, comparison: Comparison) -> pd.DataFrame:
    """cell, label, calibration, layer, coverage, kept: coverage budgets at the ratio closest to a half.

    coverage: share of the layer's score that is kept; kept: share of its channels. At most PANELS plans.
    """
    cells = plain(comparison)
    by_name = cells["allocation"].map(lambda word: settings.allocation(str(word))[0])
    chosen = cells[(cells["granularity"] == "channel") & (by_name == COVERAGE)]
    found = [pd.DataFrame(columns=["cell", "label", "calibration", *attributions.BUDGETS])]
    if len(chosen):
        nearest = min(chosen["ratio"].unique(), key=lambda ratio: abs(ratio - HALF))
        chosen = chosen[chosen["ratio"] == nearest]
        labels = settings.method_labels(chosen)
        for cell, about in list(chosen.iterrows())[:PANELS]:
            plan, scores = (study.reader.find(str(about[f"{kind}_folder"])) for kind in ("plan", "scores"))
            kept = attributions.read(plan, "budgets.parquet", study.reader, arrays_in=scores)
            if kept is not None:
                found.append(kept.assign(cell=cell, label=labels[cell], calibration=about["calibration"]))
    return pd.concat(found[1:] or found, ignore_index=True)


def budget_figure(study: Study, comparison: Comparison, losses: pd.DataFrame, *, name: str) -> Figure | None:
    """Fig. 7: the loss of each layer as measured, the share of its score that a plan keeps, and of its channels."""
    found = layer_budgets(study, comparison)
    if found.empty:
        return None
    losses = losses[(losses["model"] == comparison.model) & losses["calibration"].isin(found["calibration"])]
    with style.look():
        drawing = style.drawing(style.PAGE, 2.7)
        left, middle, right = drawing.subplots(1, 3)
        for at, calibration in enumerate(names.calibrations_in_order(losses["calibration"])):
            part = losses[losses["calibration"] == calibration].sort_values("layer")
            dashes = ("-", (0, (4, 2)), (0, (1, 1.5)))[at % 3]
            left.plot(
                part["layer"], part["loss"], color=style.INK, linestyle=dashes, label=names.calibration(calibration)
            )
        if left.get_lines():
            left.legend(fontsize=6.5)
        for at, (_, part) in enumerate(found.groupby("cell", sort=False)):
            for axes, column in ((middle, "coverage"), (right, "kept")):
                axes.plot(
                    part["layer"],
                    part[column] * 100,
                    color=_CURVE_SHADES[at % len(_CURVE_SHADES)],
                    linewidth=1.2,
                    markersize=3.5,
                    marker=style.MARKERS[at % 11],
                    label=part["label"].iloc[0],
                )
        for axes, title in ((left, "Loss of the layer"), (middle, "Score kept (%)"), (right, "Channels kept (%)")):
            axes.set_title(title)
            axes.set_xlabel("decoder layer")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.grid(axis="y")
        handles, labels = right.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=min(2, len(handles)))
    caption = (
        "Left: what the routed output of a layer weighs against the residual stream after it, the mean over "
        "calibration tokens of ‖m‖² / (‖y‖² + ε), before smoothing. Middle: share of the sum of the layer's "
        "channel scores that the plan keeps. Right: share of its channels. Plans: at the ratio closest to a half."
    )
    return Figure(name, f"Losses of layers and what their budgets keep: {comparison.model}", caption, drawing)


def stack_figure(study: Study, comparison: Comparison, experts: pd.DataFrame, *, name: str) -> Figure | None:
    """Figs. 14 to 16: experts of each layer stacked by their share of its attribution, beside what a plan keeps."""
    budgets = layer_budgets(study, comparison).drop_duplicates("cell")
    if budgets.empty or experts.empty:
        return None
    first = records(budgets)[0]
    here = (experts["model"] == comparison.model) & (experts["calibration"] == first["calibration"])
    shares = experts.loc[here, ["layer", "expert", "first"]]
    plan = study.kept.loc[study.kept["cell"] == first["cell"], ["layer", "expert", "share"]]
    both = shares.merge(plan, on=["layer", "expert"]).assign(first=lambda frame: frame["first"].clip(lower=0))
    if both.empty or not both["first"].sum() > 0:
        return None
    both["place"] = both.groupby("layer")["first"].rank(method="first", ascending=False).astype(int) - 1
    with style.look():
        drawing = style.drawing(style.PAGE, 3.0)
        left, right = drawing.subplots(1, 2, sharey=True)
        for axes, column, title in (
            (left, "first", "Share of the attribution"),
            (right, "share", "Share of what is kept"),
        ):
            _stack(axes, both, column)
            axes.set_title(title)
            axes.set_xlabel("decoder layer")
        left.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    caption = (
        "Each bar is a layer, each piece of it an expert, from the highest attribution (bottom, dark) to the lowest; "
        "left: its share of the layer's attribution (first order, negative ones as 0), right: its share of the "
        f"channels that the layer keeps under {first['label']}."
    )
    return Figure(name, f"Experts of each layer by attribution and by budget: {comparison.model}", caption, drawing)


def _stack(axes: Axes, both: pd.DataFrame, column: str) -> None:
    parts = both.pivot_table(index="place", columns="layer", values=column)
    parts = parts / parts.sum()
    bottom, where = np.zeros(parts.shape[1]), range(parts.shape[1])
    for at, (_, row) in enumerate(parts.iterrows()):
        shade = colormaps["YlGnBu_r"](0.05 + 0.85 * at / max(1, len(parts) - 1))
        axes.bar(where, row.fillna(0), bottom=bottom, width=0.85, color=shade, edgecolor=style.SURFACE, linewidth=0.2)
        bottom = bottom + row.fillna(0).to_numpy()
    shown = range(0, parts.shape[1], -(-parts.shape[1] // 12))
    axes.set_xticks(shown, [str(parts.columns[at]) for at in shown])
    axes.set_ylim(0, 1)


@output("coverage.fig", chapter="channels")
def kept_by_layer(results: Results, name: str) -> list[Item | None]:
    """How much of each layer is kept, and of each expert."""
    figures: list[Item | None] = []
    for comparison, own in results.per_model(name):
        figures.append(layer_figure(comparison, results.study.kept, name=own))
        figures.append(expert_figure(comparison, results.study.kept, name=f"{own}.experts"))
    return figures


def _of_pass(study: Study, figures: Iterable[Figure | None]) -> list[Item | None]:
    """The figures there are, with what their numbers rest on in the captions."""
    return [replace(one, caption=f"{one.caption} Based on {of_pass(study)}") for one in figures if one]


@output(
    "coverage.fig4",
    chapter="attribution",
    needs="scores of channels in the store; for losses, a perplexity at three ratios",
)
def channel_scores(results: Results, name: str) -> list[Item | None]:
    """Where channel scores are, and the loss against the share that is kept."""
    study = results.study
    figures = []
    for comparison, own in results.per_model(name):
        figures.append(concentration_figure(study, comparison, name=own))
        figures.append(loss_figure(study, comparison, name=f"{own}.loss"))
    return _of_pass(study, figures)


@output("coverage.fig7", chapter="attribution", needs="cells of channels with allocation=coverage")
def coverage_budgets(results: Results, name: str) -> list[Item | None]:
    """Losses, coverage and the kept share of each layer."""
    study = results.study
    losses = layer_losses(study)
    return _of_pass(study, (budget_figure(study, one, losses, name=own) for one, own in results.per_model(name)))


@output(
    "coverage.fig14",
    chapter="attribution",
    needs="cells of channels with allocation=coverage, and the sums of their pass in the store",
    also=("coverage.fig15", "coverage.fig16"),
)
def coverage_stacks(results: Results, name: str) -> list[Item | None]:
    """Layers from loss to budget, one above the other."""
    study = results.study
    return _of_pass(study, (stack_figure(study, one, study.experts, name=own) for one, own in results.per_model(name)))
