"""Figures of differences between two studies or plans: scores with intervals, and kept experts and channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.diff import plans
from analysis.diff.plans import LayerPlan, Layers
from analysis.diff.sides import BETTER, CELL, DIFFERENCE, WORSE
from analysis.load.reader import records
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table

Pair = tuple[str, Layers, Layers]
"""The name of a pair of plans, and the layers of each."""
ROWS = 40
"""Largest number of rows of a figure."""
MAPS = 4
"""Largest number of pairs of plans whose experts are drawn one by one."""
AVERAGE = "Avg"
ONLY_A, ONLY_B, BOTH = "#ee9944", "#2b65a8", "#c3cad3"
"""Colours of kept in A only, in B only, in both; of different lightness, so that they differ in grey too."""


def score_figure(table: Table, *, name: str) -> Figure | None:
    """Draw B minus A of every average with its interval, from a `score_table`. None when nothing was tested."""
    frame = table.frame.assign(low=_ends(table.low), high=_ends(table.high), words=words(table.frame))
    tested = frame[(frame["Of"] == AVERAGE) & frame["p"].notna()]
    if tested.empty:
        return None
    shown = tested.loc[tested[DIFFERENCE].abs().sort_values(ascending=False, kind="stable").index[:ROWS]].sort_index()
    with style.look():
        drawing = style.drawing(style.PAGE, 0.2 * len(shown) + 1.0)
        axes = drawing.add_subplot()
        for at, row in enumerate(records(shown)):
            shade, fill = _look(row["Verdict"])
            axes.plot([row["low"], row["high"]], [at, at], color=shade, linewidth=1.4)
            axes.plot(row[DIFFERENCE], at, "o", color=shade, markersize=5, markerfacecolor=fill)
        axes.axvline(0, color=style.MUTED, linewidth=0.9)
        style.ticks(axes.yaxis, range(len(shown)), shown["words"], labelsize=6.5)
        axes.set(ylim=(len(shown) - 0.5, -0.5), xlabel="Avg in B minus Avg in A")
        axes.grid(axis="x")
        style.legend(drawing, map(_handle, (BETTER, WORSE, "within noise")))
    left = len(tested) - len(shown)
    caption = (
        "Mean of the displayed columns in B minus that in A, with its 95 % interval, for cells on both "
        "sides; filled: beyond noise after Holm's correction."
        + (f" The {ROWS} largest differences of {len(tested)}." if left else "")
    )
    return Figure(name, "Averages, B minus A", caption, drawing)


def _ends(frame: pd.DataFrame | None) -> pd.Series:
    assert frame is not None, "score tables have intervals"
    return frame[DIFFERENCE].astype(float)


def words(frame: pd.DataFrame) -> list[str]:
    """Label each row by those of the columns CELL that vary, or by all of them when none varies."""
    columns = [column for column in CELL if frame[column].nunique() > 1] or list(CELL)
    return [", ".join(dict.fromkeys(str(row[column]) for column in columns)) for row in records(frame)]


def _look(verdict: str) -> tuple[str, str]:
    """Line colour and fill colour of a mark."""
    shade = {BETTER: "#2277bb", WORSE: "#bb3311"}.get(verdict, style.MUTED)
    return shade, shade if verdict in (BETTER, WORSE) else style.SURFACE


def _handle(verdict: str) -> Line2D:
    shade, fill = _look(verdict)
    return Line2D([], [], color=shade, marker="o", markersize=5, markerfacecolor=fill, linewidth=1.4, label=verdict)


def exchange_figure(pairs: Sequence[Pair], *, name: str) -> Figure | None:
    """Draw the share of each layer that only one plan keeps: a row per pair of plans that differ, a square per layer.

    None with fewer than two such pairs."""
    changed = _changed(pairs)
    if len(changed) < 2:
        return None
    shown = changed[:ROWS]
    layers = sorted({layer for _, shares in shown for layer in shares})
    values = np.array([[shares.get(layer, np.nan) for layer in layers] for _, shares in shown])
    with style.look():
        drawing = style.drawing(style.PAGE, 0.22 * len(shown) + 1.1)
        axes = drawing.add_subplot()
        shades = colormaps[style.SEQUENTIAL]
        image = shades(0.9 * values)
        image[np.isnan(values), 3] = 0
        axes.imshow(image, extent=(0, len(layers), len(shown), 0), aspect="auto", interpolation="nearest")
        if len(layers) <= 16:
            _numbers(axes, values)
        style.ticks(axes.yaxis, np.arange(len(shown)) + 0.5, [called for called, _ in shown], labelsize=6.5)
        step = -(-len(layers) // 16)
        style.ticks(axes.xaxis, np.arange(0, len(layers), step) + 0.5, [str(layer) for layer in layers[::step]])
        axes.set_xlabel("decoder layer")
        style.bare(axes)
        drawing.legend(
            handles=[Patch(facecolor=shades(0.9 * level), label=f"{level:.0%}".replace("%", " %")) for level in
                     (0.0, 0.25, 0.5, 0.75, 1.0)],
            loc="outside lower center", ncols=5, fontsize=7,
        )  # fmt: skip
    caption = (
        "Of the experts of a layer that A or B keeps, which share only one of them keeps, in per cent (1 minus "
        "Jaccard); of its channels, where plans choose channels."
        + (f" The first {ROWS} of {len(changed)} pairs of plans that differ." if len(changed) > ROWS else "")
    )
    return Figure(name, "How much of each layer is kept on one side only", caption, drawing)


def _changed(pairs: Sequence[Pair]) -> list[tuple[str, dict[int, float]]]:
    """(Name, layer -> share of what either plan keeps that only one of them keeps) of the pairs that differ."""
    layers = []
    for called, first, second in pairs:
        frame = plans.changes(first, second)
        counted = frame["channels_both"].notna()
        experts = frame["out"].map(len) + frame["in"].map(len)
        alone = (frame["channels_out"] + frame["channels_in"]).where(counted, experts).to_numpy(float)
        either = alone + frame["channels_both"].where(counted, frame["both"]).to_numpy(float)
        if alone.sum() > 0:
            shares: np.ndarray = alone / np.where(either > 0, either, np.nan)
            layers.append((called, dict(zip(frame["layer"].tolist(), shares.tolist(), strict=True))))
    return layers


def _numbers(axes: Axes, values: np.ndarray) -> None:
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            ink = "#ffffff" if value > 0.6 else "#000000"
            axes.text(
                column + 0.5, row + 0.52, f"{100 * value:.0f}", ha="center", va="center", fontsize=6, color=ink
            )  # fmt: skip


def expert_figure(pairs: Sequence[Pair], *, name: str) -> Figure | None:
    """Draw every expert of plans of whole experts: kept in A only, in B only, in both or in neither.

    A panel per pair that differs, those with the largest differences first. None when all pairs are equal.
    """
    whole = [pair for pair in pairs if not _of_channels(pair)]
    caption = "Each square is an expert: kept in A only, in B only, in both or in neither."
    return _maps(whole, name, "Experts in and out of each layer", caption, ("only in A", "in both", "only in B"))


def channel_figure(pairs: Sequence[Pair], *, name: str) -> Figure | None:
    """The same for plans that choose channels, coloured by the side that keeps more of an expert's channels."""
    caption = (
        "Each square is an expert; the colour is the stronger, the more of its channels one side keeps beyond the "
        "other (their share, square root). Equal shares may be of other channels."
    )
    chosen = [pair for pair in pairs if _of_channels(pair)]
    return _maps(chosen, name, "Channels of each expert, more or fewer", caption, ("more in A", "as many", "more in B"))


def _of_channels(pair: Pair) -> bool:
    return any(plan.width is not None for layers in pair[1:] for plan in layers.values())


def _maps(pairs: Sequence[Pair], name: str, title: str, caption: str, labels: tuple[str, str, str]) -> Figure | None:
    changed = {called: float(np.nansum(list(shares.values()))) for called, shares in _changed(pairs)}
    chosen = sorted((pair for pair in pairs if pair[0] in changed), key=lambda pair: -changed[pair[0]])[:MAPS]
    if not chosen:
        return None
    heights = [0.14 * max(4, min(len(first), 48)) + 0.45 for _, first, _ in chosen]
    with style.look():
        drawing = style.drawing(style.PAGE, sum(heights) + 0.55)
        rows = drawing.subplots(len(chosen), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (called, first, second) in zip(rows, chosen, strict=True):
            _expert_map(axes, first, second)
            axes.set_title(called, fontsize=7.5)
        rows[-1].set_xlabel("expert")
        handles = [
            Patch(facecolor=shade, label=label) for shade, label in zip((ONLY_A, BOTH, ONLY_B), labels, strict=True)
        ]
        neither = Patch(facecolor="none", edgecolor=style.RULE, label="in neither")
        drawing.legend(handles=[*handles, neither], loc="outside lower center", ncols=4, fontsize=7)
    more = f" The {MAPS} pairs of plans of {len(changed)} that differ most." if len(changed) > MAPS else ""
    return Figure(name, title, caption + more, drawing)


def _expert_map(axes: Axes, first: Layers, second: Layers) -> None:
    layers = sorted(first)
    widest = max(plan.experts for plan in first.values())
    image = np.zeros((len(layers), widest, 4))
    for at, layer in enumerate(layers):
        one, other = _shares(first[layer]), _shares(second[layer])
        image[at, : len(one)] = _shades(one, other)
    axes.imshow(image, extent=(-0.5, widest - 0.5, len(layers), 0), aspect="auto", interpolation="nearest")
    step = -(-len(layers) // 12)
    labels = [f"layer {layer}" for layer in layers[::step]]
    style.ticks(axes.yaxis, np.arange(0, len(layers), step) + 0.5, labels, labelsize=6.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    style.bare(axes)


def _shares(plan: LayerPlan) -> np.ndarray:
    """Kept share of each expert's channels (experts,)."""
    shares = np.zeros(plan.experts)
    for expert, bits in plan.kept.items():
        shares[expert] = 1.0 if bits is None or plan.width is None else bits.bit_count() / plan.width
    return shares


def _shades(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """RGBA of experts from their shares in both plans; transparent when neither keeps anything."""
    more = other - one
    strength = np.sqrt(np.abs(more))[:, None]  # square root, so that a difference of few channels is visible
    side = np.where(more[:, None] > 0, to_rgba(ONLY_B), to_rgba(ONLY_A))
    mixed = (1 - strength) * np.array(to_rgba(BOTH)) + strength * side
    mixed[(one == 0) & (other == 0), 3] = 0
    return np.asarray(mixed)
