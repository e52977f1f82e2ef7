"""How the experts and channels to keep change with the calibration tokens: would more data matter?

A pass leaves scores from its first eighth, quarter, and so on; the keep-set of each is compared with that of the whole
set, layer by layer, ties broken as plans break them. Channels are so many that the step compares them itself, for many
ratios at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import names
from analysis.load.reader import groups
from analysis.load.study import Study
from analysis.outputs.captions import of_pass
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table
from analysis.stats import overlap

KEY = ["model", "calibration", "criterion"]
SETTLED = 0.02
"""Share of what is kept that may still change in a set that is called settled."""
_REMOVED = {
    "expert": "Uniform removal from each layer.",
    "channel": "The best channels of each layer, of all its experts together.",
}


COLUMNS = [*KEY, "ratio", "tokens", "whole", "jaccard", "lowest", "changed", "chance"]
EXPERTS, CHANNELS = "expert", "channel"
"""What is kept; how a study's cells call it."""


def of_experts(study: Study) -> pd.DataFrame:
    """`settling` of the study at its ratios."""
    return settling(study.convergence, ratios_of(study, EXPERTS))


def of_channels(study: Study) -> pd.DataFrame:
    """`channel_settling` of the study at its ratios."""
    return channel_settling(study.channel_convergence, ratios_of(study, CHANNELS))


def ratios_of(study: Study, granularity: str) -> list[float]:
    """The ratios at which the study removes whole experts, or channels; those of the papers where it removes none."""
    cells = study.cells
    ratios = cells.loc[(cells["granularity"] == granularity) & (cells["ratio"] > 0), "ratio"]
    return sorted(set(ratios)) or list(overlap.RATIOS)


def settling(scores: pd.DataFrame, ratios: Sequence[float]) -> pd.DataFrame:
    """Keep-sets against the last one: a row per KEY, ratio and number of tokens.

    scores: KEY, tokens, layer, expert, score. Columns: jaccard (intersection over union with the keep-set of all
    tokens, mean over layers), lowest (of any layer), changed (share of the final keep-set that is not kept yet), chance
    (Jaccard of random sets of this size, ratio of expectations). The last number of tokens is compared with itself and
    left out. Ratios that remove nothing are left out too.
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
    """The same for channels: the best of each layer, of all its experts together, at the kept share closest to a ratio.

    shares: KEY, tokens, whole, layer, channels, kept, same. With s the part of n kept channels that is the same,
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
    """Layers after one number of tokens, at one kept share."""
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
    "convergence",
    chapter="coverage",
    filters="*Model|Pruned|Calibration",
    needs="a run with calibration.snapshots=8",
)
def convergence(results: Results, name: str) -> list[Item]:
    """Change of the experts, and of the channels, to keep with the calibration tokens."""
    study = results.study
    items: list[Item] = []
    for what, stem, found in (
        (EXPERTS, name, of_experts(study)),
        (CHANNELS, f"{name}.channels", of_channels(study)),
    ):
        models = list(dict.fromkeys(found["model"]))
        for model in models:
            own = f"{stem}.{model}" if len(models) > 1 else stem
            items.append(settling_figure(found, what=what, model=model, name=own))
        items.append(settling_table(study, found, what=what, name=stem))
    return items


def settling_table(study: Study, settlings: pd.DataFrame, *, what: str, name: str) -> Table:
    """`settling`, or `channel_settling`, as a table."""
    columns = [
        "Model",
        "Pruned",
        "Calibration",
        "Criterion",
        "Tokens",
        "Jaccard",
        "Lowest layer",
        "By chance",
        "Change",
    ]
    frame = pd.DataFrame(
        {
            "Model": settlings["model"],
            "Pruned": settlings["ratio"].map(names.ratio),
            "Calibration": settlings["calibration"].map(names.calibration),
            "Criterion": settlings["criterion"].map(names.criterion),
            "Tokens": settlings["tokens"],
            "Jaccard": settlings["jaccard"],
            "Lowest layer": settlings["lowest"],
            "By chance": settlings["chance"],
            "Change": settlings["changed"],
        },
        columns=columns,
    )
    return Table(
        name=name,
        title=f"How the {what}s to keep settle with more calibration text",
        caption="The keep-set after so many tokens against that of the whole calibration set: intersection over union, "
        "mean over layers and in the layer where it is lowest; what random sets would share. Change: share of the "
        f"{what}s kept at the end that are not kept yet. {_REMOVED[what]} Based on {of_pass(study)}",
        frame=frame,
        formats={
            "Tokens": "{:,.0f}",
            **dict.fromkeys(("Jaccard", "Lowest layer", "By chance"), SCORE),
            "Change": "{:.1%}",
        },
        blocks=("Model", "Pruned", "Calibration"),
    )


def settling_figure(settlings: pd.DataFrame, *, what: str, model: str, name: str) -> Figure:
    """Jaccard against tokens, a panel per ratio and calibration set, a line per criterion; dotted: random sets."""
    settlings = settlings[settlings["model"] == model]
    sets = names.calibrations_in_order(settlings["calibration"])
    ratios = sorted(settlings["ratio"].unique())
    criteria = names.in_order(settlings["criterion"], names.CRITERIA)
    with style.look():
        drawing = style.drawing(style.PAGE, 1.9 * len(ratios) + 0.8)
        grid = drawing.subplots(len(ratios), len(sets), squeeze=False, sharey="row")
        for row, ratio in zip(grid, ratios, strict=True):
            for axes, calibration in zip(row, sets, strict=True):
                panel = settlings[(settlings["ratio"] == ratio) & (settlings["calibration"] == calibration)]
                _panel(axes, panel, criteria)
                words = (names.calibration(calibration), f"{names.ratio(ratio)} pruned")
                axes.set_title(("\n" if len(sets) > style.WIDE else ", ").join(words), fontsize=7.5)
        for row in grid:
            row[0].set_ylabel(f"same {what}s kept (Jaccard)")
        for axes in grid[-1]:
            axes.set_xlabel("calibration tokens read")
        drawing.legend(handles=_handles(criteria), loc="outside lower center", ncols=min(6, len(criteria)), fontsize=7)
    caption = (
        f"The {what}s that would be kept after reading a part of the calibration set, against those kept after all of "
        "it (the right end, where all lines meet at 1): intersection over union, mean over layers. A line that is "
        f"still rising at its last points says that more text would change the choice. Dotted: random sets. "
        f"{_REMOVED[what]}"
    )
    title = "Would more calibration text matter" + (" to channels" if what == CHANNELS else "")
    return Figure(name, f"{title}: {model}", caption, drawing)


def _panel(axes: Axes, settlings: pd.DataFrame, criteria: Sequence[str]) -> None:
    handles = dict(zip(criteria, _handles(criteria), strict=True))
    for about, line in groups(settlings, ["criterion"]):
        look = handles[about["criterion"]]
        x = [*line["tokens"], line["whole"].iloc[0]]
        axes.plot(
            x, [*line["jaccard"], 1.0], color=look.get_color(), marker=look.get_marker(), markersize=3, linewidth=1.1
        )
    if len(settlings):
        axes.axhline(settlings["chance"].iloc[0], color=style.MUTED, linestyle=":", linewidth=1)
    axes.set_ylim(top=1.02)
    axes.ticklabel_format(axis="x", style="plain")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k")
    axes.locator_params(axis="x", nbins=4)
    axes.grid()


def _handles(criteria: Sequence[str]) -> list[Line2D]:
    return [
        Line2D(
            [],
            [],
            color=style.colour(name),
            marker=style.MARKERS[at % len(style.MARKERS)],
            markersize=3,
            linewidth=1.1,
            label=names.criterion(name),
        )
        for at, name in enumerate(criteria)
    ]


def finding(study: Study) -> list[str]:
    """Sentences about experts and about channels."""
    return [*settled(of_experts(study), EXPERTS), *settled(of_channels(study), CHANNELS)]


def settled(settlings: pd.DataFrame, what: str) -> list[str]:
    """A sentence per model and calibration set: how much the choice still moved at the end of the pass."""
    sentences = []
    for key, part in groups(settlings, ["model", "calibration"]):
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
