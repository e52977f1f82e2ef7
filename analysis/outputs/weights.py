"""The tables of HEAPr (1, 2), of MoE-Slimming's budgets (6, 7, 13) and of AIMER (2): which cells stand in each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.lines import Line2D

from analysis import names
from analysis.frames import groups, records
from analysis.load import settings
from analysis.load.study import Study
from analysis.outputs.channels import _groups, _in_order, _only, plain
from analysis.outputs.score_rows import Block, block_table
from analysis.registry import output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.results import Results
from analysis.stats.cell_scores import CODING, GROUPS, WRITING_AND_MATH
from analysis.stats.comparison import Comparison


def group_table(
    study: Study, comparisons: Sequence[Comparison], *, name: str, columns: Sequence[str], title: str
) -> Table:
    """AIMER's Tables 2, 3 and 5 to 7: criteria at each ratio; differences are to AIMER, where run."""
    blocks = []
    for comparison in comparisons:
        for key, cells in _groups(plain(comparison), ["ratio"]):
            if "aimer" not in set(cells["criterion"]):
                continue
            base = _only(cells[cells["criterion"] == "aimer"])
            blocks.append(Block(comparison, names.ratio(key["ratio"]), _in_order(settings.method_labels(cells)), base))
    return block_table(
        study,
        blocks,
        columns=columns,
        name=name,
        title=title,
        caption=f"Difference: {columns[-1]} minus that of AIMER, paired.",
    )


PROFILED = ("magnitude", "aimer")
"""The two criteria of the published figure."""
COLUMNS = ("model", "criterion", "layer", "expert", "score")
LEGEND = 6
"""Layers named in the legend, at most."""


def weight_scores(study: Study, criteria: Sequence[str] = PROFILED) -> pd.DataFrame:
    """model, criterion, layer, expert, score of the criteria among `criteria` that the study scored; higher: keep."""
    cells = study.cells[study.cells["criterion"].isin(criteria) & study.cells["scores_folder"].notna()]
    frames = []
    for row in records(cells.drop_duplicates(["model", "criterion"])):
        folder = study.reader.folder(row["scores_folder"])
        table = study.reader.table(folder, "scores.parquet", COLUMNS[2:]) if folder else None
        if table is not None:
            frames.append(table.to_pandas().assign(model=row["model"], criterion=row["criterion"]))
    return pd.concat(frames, ignore_index=True)[list(COLUMNS)] if frames else pd.DataFrame(columns=COLUMNS)


def profiles(scores: pd.DataFrame) -> pd.DataFrame:
    """`scores` with `profile`, min-max normalised in each layer of a model and criterion (0: lowest, 1: highest), and
    `place`, the expert's place from 0 (lowest) to 1 (highest). NaN profiles where all experts of a layer are alike."""
    layer = scores.groupby(["model", "criterion", "layer"])["score"]
    low, high = layer.transform("min"), layer.transform("max")
    place = (layer.rank(method="first") - 1) / (layer.transform("size") - 1)
    return scores.assign(profile=(scores["score"] - low) / (high - low).replace(0, np.nan), place=place)


def profile_figure(found: pd.DataFrame, *, name: str) -> Figure:
    """Fig. 2 from `profiles`: a panel per model and criterion, a line per layer, experts from lowest to highest."""
    models = list(dict.fromkeys(found["model"]))
    criteria = names.in_order(found["criterion"], PROFILED)
    layers = sorted(found["layer"].unique())
    shade = {layer: colormaps["viridis"](0.9 * at / max(1, len(layers) - 1)) for at, layer in enumerate(layers)}
    with style.look():
        drawing = style.drawing(style.PAGE, 2.2 * len(models) + 0.45)
        grid = drawing.subplots(len(models), len(criteria), squeeze=False, sharex=True, sharey=True)
        for key, panel in groups(found, ["model", "criterion"]):
            axes = grid[models.index(key["model"])][criteria.index(key["criterion"])]
            for about, line in groups(panel.sort_values(["layer", "place"], kind="stable"), ["layer"]):
                axes.plot(line["place"], line["profile"], color=shade[about["layer"]], linewidth=1.2)
            axes.set_title(f"{key['model']}, {names.criterion(key['criterion'])}")
            axes.grid(axis="y")
        grid[0][0].set(xlim=(0, 1), ylim=(-0.02, 1.02))
        grid[0][0].set_xticks([0, 0.5, 1], ["lowest", "median", "highest"])
        for row in grid:
            row[0].set_ylabel("score, min-max in its layer")
        for axes in grid[-1]:
            axes.set_xlabel("experts of a layer, by score")
        shown = layers[:: -(-len(layers) // LEGEND)]
        handles = [Line2D([], [], color=shade[layer], label=f"layer {layer}") for layer in shown]
        drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    caption = (
        "Scores of the experts of each layer, scaled from the lowest (0) to the highest (1) of the layer; experts from "
        "the one pruned first to the one kept longest. A line close to the diagonal spreads experts evenly; one that "
        "stays low or high singles out a few."
    )
    return Figure(name, "Profiles of scores that read weights only", caption, drawing)


WEIGHTS = "cells with criterion=aimer"


def _scores(results: Results, name: str, columns: Sequence[str], what: str) -> Table:
    title = f"Scores from weights alone and from text: {what}"
    return group_table(results.study, results.comparisons, name=name, columns=columns, title=title)


@output("aimer.table2", chapter="weights", filters="Model|Pruned", needs=WEIGHTS, also=("aimer.table3",))
def weight_averages(results: Results, name: str) -> Table:
    """Group averages of criteria that read weights alone, beside those that read a text."""
    return _scores(results, name, GROUPS, "group averages")


@output("aimer.table5", needs=f"{WEIGHTS}, and WildBench, gsm8k or math500")
def weight_writing_and_mathematics(results: Results, name: str) -> Table:
    """Writing and mathematics."""
    return _scores(results, name, WRITING_AND_MATH, "writing and mathematics")


@output("aimer.table6", needs=f"{WEIGHTS}, and coding benchmarks")
def weight_coding(results: Results, name: str) -> Table:
    """Coding benchmarks."""
    return _scores(results, name, CODING, "coding")


@output("aimer.table7", needs=f"{WEIGHTS}, and multiple-choice benchmarks")
def weight_multiple_choice(results: Results, name: str) -> Table:
    """Multiple choice."""
    return _scores(results, name, (*names.MULTIPLE_CHOICE, "MC Avg"), "multiple choice")


@output("aimer.fig2", chapter="weights", needs="cells with criterion=magnitude or aimer")
def weight_profiles(results: Results, name: str) -> Figure | None:
    """How Magnitude and AIMER spread the experts of each layer."""
    scores = weight_scores(results.study)
    return profile_figure(profiles(scores), name=name) if len(scores) else None
