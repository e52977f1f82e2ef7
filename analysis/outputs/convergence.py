"""Convergence of the experts and channels to keep with the number of calibration tokens.

A pass writes scores from its first eighth, quarter, and so on. The keep-set of each is compared with that of the whole
set, layer by layer, with ties broken as in plans. Channels are too many to store their scores, so the step itself
compares them, at many ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import names
from analysis.load.reader import groups
from analysis.load.study import Study
from analysis.outputs.captions import of_pass
from analysis.registry import Item, Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table, tabulated
from analysis.stats import overlap
from analysis.stats.comparison import Comparison

KEY = ["model", "calibration", "criterion"]
SETTLED = 0.02
"""Largest share of the keep-set that may still change for a calibration set to be called settled."""
COLUMNS = [*KEY, "ratio", "tokens", "whole", "jaccard", "lowest", "changed", "chance"]
EXPERTS, CHANNELS = "expert", "channel"
"""Granularities, as in a study's cells."""
_REMOVED = {
    EXPERTS: "Uniform removal from each layer.",
    CHANNELS: "The best channels of each layer, of all its experts together.",
}


def settlings(study: Study, what: str) -> pd.DataFrame:
    """`settling` of experts, or `channel_settling`, at the study's ratios of this granularity.

    The papers' ratios are used when the study removes none."""
    cells = study.cells
    removed = cells.loc[(cells["granularity"] == what) & (cells["ratio"] > 0), "ratio"]
    ratios = sorted(set(removed)) or list(overlap.RATIOS)
    if what == EXPERTS:
        return settling(study.convergence, ratios)
    return channel_settling(study.channel_convergence, ratios)


def settling(scores: pd.DataFrame, ratios: Sequence[float]) -> pd.DataFrame:
    """Compare the keep-set after each number of tokens with the last one: a row per KEY, ratio and number of tokens.

    scores: KEY, tokens, layer, expert, score. Columns: jaccard (intersection over union with the keep-set of all
    tokens, mean over layers), lowest (over layers), changed (share of the final keep-set that is not kept yet), chance
    (Jaccard of random sets of this size, ratio of expectations). The last number of tokens, which would be compared
    with itself, and ratios that remove nothing are left out.
    """
    rows = []
    for key, snapshots in groups(scores.sort_values(["tokens", "layer", "expert"], kind="stable"), KEY):
        steps = sorted(snapshots["tokens"].unique())
        wide = [
            part.pivot(index="tokens", columns="expert", values="score").loc[steps].to_numpy(float)
            for _, part in snapshots.groupby("layer", sort=True)
        ]
        for ratio in ratios:
            kept = [~overlap.bottom(layer, ratio) for layer in wide]
            if all(layer.all() for layer in kept):
                continue
            common = np.array([(layer & layer[-1]).sum(axis=1) for layer in kept])
            union = np.array([(layer | layer[-1]).sum(axis=1) for layer in kept])
            sizes = np.array([layer[-1].sum() for layer in kept])
            expected = sizes**2 / np.array([layer.shape[1] for layer in kept])
            jaccard = common / union
            for at, tokens in enumerate(steps[:-1]):
                rows.append(
                    {
                        **key,
                        "ratio": ratio,
                        "tokens": int(tokens),
                        "whole": int(steps[-1]),
                        "jaccard": jaccard[:, at].mean(),
                        "lowest": jaccard[:, at].min(),
                        "changed": 1 - common[:, at].sum() / sizes.sum(),
                        "chance": float(np.mean(expected / (2 * sizes - expected))),
                    }
                )
    return pd.DataFrame(rows, columns=COLUMNS)


def channel_settling(shares: pd.DataFrame, ratios: Sequence[float]) -> pd.DataFrame:
    """The same for channels, ranked over all experts of a layer, at the kept share closest to each ratio.

    shares: KEY, tokens, whole, layer, channels, kept, same. With s the share of kept channels that is the same,
    intersection over union is s / (2 - s).
    """
    rows = []
    for key, snapshots in groups(shares, KEY):
        grid = np.sort(snapshots["kept"].unique())
        for ratio in ratios:
            kept = grid[np.abs(grid - (1 - ratio)).argmin()]
            chosen = snapshots[snapshots["kept"] == kept].sort_values("tokens", kind="stable")
            rows += [{**key, "ratio": ratio, **_after(layers)} for _, layers in groups(chosen, ["tokens"])]
    return pd.DataFrame(rows, columns=COLUMNS)


def _after(layers: pd.DataFrame) -> dict[str, float]:
    """Columns of `settling` for one number of tokens and one kept share."""
    same, weight = layers["same"].to_numpy(float), layers["channels"].to_numpy(float)
    tokens, whole, kept = (layers[column].iloc[0] for column in ("tokens", "whole", "kept"))
    jaccard = same / (2 - same)
    return {
        "tokens": int(tokens),
        "whole": int(whole),
        "jaccard": float(jaccard.mean()),
        "lowest": float(jaccard.min()),
        "changed": 1 - float((same * weight).sum() / weight.sum()),
        "chance": float(kept / (2 - kept)),
    }


@output(
    "convergence", chapter="coverage", filters="*Model|Pruned|Calibration", needs="a run with calibration.snapshots=8"
)
def convergence(results: Results, name: str) -> list[Item]:
    """Change of the experts, and of the channels, to keep with the calibration tokens."""
    experts, channels = experts_figure(results, name), channels_figure(results, f"{name}.channels")
    return [
        *experts,
        settling_table(results.study, EXPERTS, name),
        *channels,
        settling_table(results.study, CHANNELS, f"{name}.channels"),
    ]


def settling_table(study: Study, what: str, name: str) -> Table:
    """`settling`, or `channel_settling`, as a table."""
    text = {"Model": "model", "Pruned": "ratio", "Calibration": "calibration", "Criterion": "criterion"}
    numbers = {
        "Tokens": ("tokens", "{:,.0f}"),
        "Jaccard": ("jaccard", SCORE),
        "Lowest layer": ("lowest", SCORE),
        "By chance": ("chance", SCORE),
        "Change": ("changed", "{:.1%}"),
    }
    return Table(
        name=name,
        title=f"How the {what}s to keep settle with more calibration text",
        caption="The keep-set after so many tokens against that of the whole calibration set: intersection over union, "
        "mean over layers and in the layer where it is lowest; what random sets would share. Change: share of the "
        f"{what}s kept at the end that are not kept yet. {_REMOVED[what]} Based on {of_pass(study)}",
        **tabulated(settlings(study, what), text, numbers),
        blocks=("Model", "Pruned", "Calibration"),
    )


@per_model("pruned")
def experts_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Experts to keep against the tokens read."""
    return settling_figure(settlings(results.study, EXPERTS), EXPERTS, comparison.model, name)


@per_model("pruned")
def channels_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Channels to keep against the tokens read."""
    return settling_figure(settlings(results.study, CHANNELS), CHANNELS, comparison.model, name)


def settling_figure(settled: pd.DataFrame, what: str, model: str, name: str) -> Figure | None:
    """Jaccard against tokens, a panel per ratio and calibration set, a line per criterion; dotted: random sets."""
    settled = settled[settled["model"] == model]
    if settled.empty:
        return None
    sets = names.calibrations_in_order(settled["calibration"])
    ratios = sorted(settled["ratio"].unique())
    criteria = names.in_order(settled["criterion"], names.CRITERIA)
    keys = {}
    for at, criterion in enumerate(criteria):
        look: Any = {"color": style.colour(criterion), "marker": style.MARKERS[at % len(style.MARKERS)]}
        keys[criterion] = style.key(names.criterion(criterion), markersize=3, linewidth=1.1, **look)
    drawing = style.drawing(style.PAGE, 1.9 * len(ratios) + 0.8)
    grid = drawing.subplots(len(ratios), len(sets), squeeze=False, sharey="row")
    for row, ratio in zip(grid, ratios, strict=True):
        for axes, calibration in zip(row, sets, strict=True):
            _panel(axes, settled[(settled["ratio"] == ratio) & (settled["calibration"] == calibration)], keys)
            words = (names.calibration(calibration), f"{names.ratio(ratio)} pruned")
            axes.set_title(("\n" if len(sets) > style.WIDE else ", ").join(words), fontsize=7.5)
        row[0].set_ylabel(f"same {what}s kept (Jaccard)")
    for axes in grid[-1]:
        axes.set_xlabel("calibration tokens read")
    style.legend(drawing, keys.values())
    caption = (
        f"The {what}s that would be kept after reading a part of the calibration set, against those kept after all of "
        "it (the right end, where all lines meet at 1): intersection over union, mean over layers. A line that is "
        f"still rising at its last points says that more text would change the choice. Dotted: random sets. "
        f"{_REMOVED[what]}"
    )
    title = "Would more calibration text matter" + (" to channels" if what == CHANNELS else "")
    return Figure(name, f"{title}: {model}", caption, drawing)


def _panel(axes: Axes, settled: pd.DataFrame, keys: Mapping[str, Line2D]) -> None:
    for about, line in groups(settled, ["criterion"]):
        style.draw(axes, keys[about["criterion"]], [*line["tokens"], line["whole"].iloc[0]], [*line["jaccard"], 1.0])
    for chance in settled["chance"].iloc[:1]:
        axes.axhline(chance, color=style.MUTED, linestyle=":", linewidth=1)
    axes.set_ylim(top=1.02)
    axes.xaxis.set_major_formatter(style.tokens)
    axes.locator_params(axis="x", nbins=4)
    axes.grid()


def convergence_findings(study: Study) -> list[str]:
    """Sentences on whether the experts and the channels to keep have settled."""
    return [line for what in (EXPERTS, CHANNELS) for line in convergence_finding(settlings(study, what), what)]


def convergence_finding(settled: pd.DataFrame, what: str) -> list[str]:
    """A sentence per model and calibration set: how much the keep-set still changed at the end of the pass."""
    sentences = []
    for key, part in groups(settled, ["model", "calibration"]):
        last = part[part["tokens"] == part["tokens"].max()]
        moved = last.loc[last["changed"].idxmax()]
        read = int(moved["tokens"]) / int(moved["whole"])
        change = f"{moved['changed'] * 100:.1f} %"
        state = "has settled" if moved["changed"] <= SETTLED else "has not settled"
        sentences.append(
            f"Calibration on {names.calibration(key['calibration'])} {state} for {key['model']}: after "
            f"{names.share(read)} of the text at most {change} of the {what}s to keep still changed "
            f"({names.criterion(str(moved['criterion']))}, {names.ratio(float(moved['ratio']))} pruned)."
        )
    return sentences
