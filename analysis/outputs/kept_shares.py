"""How much of its channels each layer and each expert keeps under different allocations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from analysis import names
from analysis.load import settings
from analysis.load.reader import groups
from analysis.outputs.score_rows import plain
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
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
    counted = kept[kept["cell"].isin(cells.index)]
    shares = counted.pivot_table(index="cell", columns="layer", values="share", aggfunc="mean")
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
    counted = kept[kept["cell"].isin(cells.index)]
    spread = counted.groupby(["cell", "layer"])["share"].agg(np.ptp).groupby("cell").max()
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


@output("coverage.fig", chapter="channels")
def kept_by_layer(results: Results, name: str) -> list[Item | None]:
    """How much of each layer is kept, and of each expert."""
    figures: list[Item | None] = []
    for comparison, own in results.per_pruned_model(name):
        figures.append(layer_figure(comparison, results.study.kept, name=own))
        figures.append(expert_figure(comparison, results.study.kept, name=f"{own}.experts"))
    return figures
