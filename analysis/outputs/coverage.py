"""A table: numbers with what a reader needs beside them; and the tables that are not about scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from analysis import names
from analysis.load.reader import groups
from analysis.load.study import Study
from analysis.outputs.captions import of_pass
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table


def coverage_table(study: Study, *, name: str = "coverage") -> Table:
    """How many tokens the calibration sets sent to the experts."""
    summary = coverage_summary(study.coverage)
    columns = ["Model", "Calibration", "Experts", "Unseen", "Rare", "Least tokens", "Median tokens", "Most tokens"]
    frame = pd.DataFrame(columns=columns)
    if len(summary):
        keys = ["model", "calibration", "experts", "unseen", "rare", "least", "median", "most"]
        frame = (
            summary[keys].set_axis(columns, axis=1).assign(Calibration=summary["calibration"].map(names.calibration))
        )
    return Table(
        name=name,
        title="Tokens per expert",
        caption="Unseen: experts that no calibration token reached; they are scored 0 and pruned first. "
        f"Rare: fewer than a tenth of the tokens an even load would give. Based on {of_pass(study)}",
        frame=frame,
        formats=dict.fromkeys(columns[2:], "{:,.0f}"),
    )


RARE = 0.1
"""An expert below this share of an even load is called rare."""


def coverage_summary(coverage: pd.DataFrame) -> pd.DataFrame:
    """One row per model and calibration set: experts, unseen (no token), rare (under a tenth of an even load), tokens.

    `routed` counts token-expert pairs; `least` and `most` are tokens of the least and most used expert.
    """
    rows = []
    for key, frame in groups(coverage, ["model", "calibration"]):
        even = frame.groupby("layer")["tokens"].transform("mean")
        rows.append(
            {
                **key,
                "layers": frame["layer"].nunique(),
                "experts": len(frame),
                "unseen": int((frame["tokens"] == 0).sum()),
                "rare": int((frame["tokens"] < RARE * even).sum()),
                "least": int(frame["tokens"].min()),
                "median": float(frame["tokens"].median()),
                "most": int(frame["tokens"].max()),
                "routed": int(frame["tokens"].sum()),
            }
        )
    return pd.DataFrame(rows)


def unseen(coverage: pd.DataFrame) -> pd.DataFrame:
    """Experts that saw no token: model, calibration, layer and the experts' ids as a list."""
    silent = coverage[coverage["tokens"] == 0]
    return (
        silent.groupby(["model", "calibration", "layer"], sort=False)["expert"]
        .apply(list)
        .rename("experts")
        .reset_index()
    )


def coverage_figure(coverage: pd.DataFrame, *, name: str) -> Figure:
    """Tokens of every expert relative to an even load, sorted within its layer; experts without a token are crossed."""
    panels = list(groups(coverage, ["model", "calibration"]))
    order = names.calibrations_in_order(coverage["calibration"])
    panels.sort(key=lambda group: (group[0]["model"], order.index(group[0]["calibration"])))
    with style.look():
        layers = max(frame["layer"].nunique() for _, frame in panels)
        drawing = style.drawing(style.PAGE, len(panels) * (0.2 * min(layers, 24) + 0.5) + 0.5)
        for at, (key, frame) in enumerate(panels):
            axes = drawing.add_subplot(len(panels), 1, at + 1)
            _coverage_axes(axes, frame)
            axes.set_title(f"{key['model']}, {names.calibration(key['calibration'])}")
        axes.set_xlabel("experts of a layer, from the least to the most used")
        handles = [
            Patch(facecolor=colormaps[style.SEQUENTIAL](level), label=label)
            for level, label in ((0.15, "a tenth of an even load"), (0.5, "even load"), (0.85, "ten times"))
        ]
        none = Patch(facecolor="none", edgecolor="#bb3311", hatch="xxxx", label="no token")
        drawing.legend(handles=[none, *handles], loc="outside lower center", ncols=4, fontsize=7)
    caption = (
        "Each square is an expert; its shade is its share of tokens on a logarithmic scale. Crossed ones saw no token."
    )
    return Figure(name, "Tokens per expert", caption, drawing)


def _coverage_axes(axes: Axes, frame: pd.DataFrame) -> None:
    shades = colormaps[style.SEQUENTIAL]
    layers = sorted(frame["layer"].unique())
    widest = 1
    for y, layer in enumerate(layers):
        tokens = np.sort(frame.loc[frame["layer"] == layer, "tokens"].to_numpy(float))
        widest = max(widest, len(tokens))
        even = max(tokens.mean(), 1e-9)
        level = 0.5 + 0.35 * np.clip(np.log10(np.maximum(tokens, 1e-9) / even), -1.4, 1.4)
        image = shades(level)[None]
        silent = int((tokens == 0).sum())
        image[0, :silent, 3] = 0
        axes.imshow(image, extent=(0, len(tokens), y + 0.94, y + 0.06), aspect="auto", interpolation="nearest")
        if silent:
            box = Rectangle(
                (0, y + 0.06), silent, 0.88, facecolor="none", edgecolor="#bb3311", hatch="xxxx", linewidth=0
            )
            axes.add_patch(box)
    axes.set(xlim=(0, widest), ylim=(len(layers), 0))
    shown = layers if len(layers) <= 12 else layers[:: -(-len(layers) // 12)]
    axes.set_yticks([layers.index(layer) + 0.5 for layer in shown], [f"layer {layer}" for layer in shown], fontsize=6.5)
    axes.set_xticks([])
    style.bare(axes)


@output("coverage", chapter="coverage")
def tokens_per_expert(results: Results, name: str) -> list[Item]:
    """How many tokens the calibration sets sent to the experts."""
    study = results.study
    if study.coverage.empty:
        return []
    figure = coverage_figure(study.coverage, name=name)
    caption = f"{figure.caption} Based on {of_pass(study)}"
    return [replace(figure, caption=caption), coverage_table(study, name=name)]
