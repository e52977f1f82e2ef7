"""Criteria that read weights alone compared with those that read a text, and distributions of their
scores (AIMER, Tables 2, 3 and 5 to 7, and Fig. 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import names
from analysis.load import settings
from analysis.load.reader import groups, records, stacked
from analysis.load.study import Study
from analysis.outputs.score_rows import (
    Block,
    Blocks,
    by_ratio,
    cells_without_recovery,
    only_cell,
    ratio_block,
    score_table,
)
from analysis.registry import Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats.cell_scores import CODING, GROUPS, WRITING_AND_MATH
from analysis.stats.comparison import Comparison

WEIGHTS = "cells with criterion=aimer"
SHADES = colormaps["viridis"]
"""Colours of scores from the lowest to the highest of a layer."""


def weights_table(
    what: str, columns: Sequence[str]
) -> Callable[[Blocks], Callable[[Results, str], Table | None]]:
    """Decorator for functions that yield blocks: make a `score_table` of `columns` that compares
    criteria that read weights alone with criteria that read a text. what: end of the title."""
    title = f"Scores from weights alone and from text: {what}"
    return score_table(title, columns, f"Difference: {columns[-1]} minus that of AIMER, paired.")


def against_aimer(comparison: Comparison) -> Iterator[Block]:
    """Blocks of all criteria at each ratio at which AIMER was run; differences are to AIMER."""
    for ratio, cells in by_ratio(cells_without_recovery(comparison)):
        aimer = cells[cells["criterion"] == "aimer"]
        if len(aimer):
            yield ratio_block(comparison, ratio, settings.method_labels(cells), only_cell(aimer))


@output(
    "aimer.table2", chapter="weights", filters="Model|Pruned", needs=WEIGHTS, also=("aimer.table3",)
)
@weights_table("group averages", GROUPS)
def group_table(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Group averages of criteria that read weights alone and of those that read a text."""
    return against_aimer(comparison)


@output("aimer.table5", needs=f"{WEIGHTS}, and WildBench, gsm8k or math500")
@weights_table("writing and mathematics", WRITING_AND_MATH)
def weight_writing_and_mathematics(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Criteria that read weights alone, and others: writing and mathematics."""
    return against_aimer(comparison)


@output("aimer.table6", needs=f"{WEIGHTS}, and coding benchmarks")
@weights_table("coding", CODING)
def weight_coding(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Criteria that read weights alone, and others: coding benchmarks."""
    return against_aimer(comparison)


@output("aimer.table7", needs=f"{WEIGHTS}, and multiple-choice benchmarks")
@weights_table("multiple choice", (*names.MULTIPLE_CHOICE, "MC Avg"))
def weight_multiple_choice(results: Results, comparison: Comparison) -> Iterator[Block]:
    """Criteria that read weights alone, and others: multiple choice."""
    return against_aimer(comparison)


PROFILED = ("magnitude", "aimer")
"""The two criteria of the published figure."""
NEGATED = ("aimer",)
"""Criteria with the opposite sign in the store, in which the lowest scores are always pruned
first."""
COLUMNS = ("model", "criterion", "layer", "expert", "score")
MODELS_IN_ROW = 3
"""Largest number of models side by side in the figure."""
LAYERS = 8
"""Largest number of layers labelled on an axis."""


def weight_scores(study: Study) -> pd.DataFrame:
    """Scores by the criteria PROFILED, if the study has them: model, criterion, layer, expert,
    score.

    Scores have the sign of the paper: AIMER = ||w||_1 / (sqrt(N) ||w||_2) prunes the highest."""
    cells = study.cells[
        study.cells["criterion"].isin(PROFILED) & study.cells["scores_folder"].notna()
    ]
    frames = []
    for row in records(cells.drop_duplicates(["model", "criterion"])):
        folder = study.reader.folder(row["scores_folder"])
        table = study.reader.table(folder, "scores.parquet", COLUMNS[2:]) if folder else None
        if table is not None:
            scores = table.to_pandas().assign(model=row["model"], criterion=row["criterion"])
            if row["criterion"] in NEGATED:
                scores["score"] = -scores["score"]
            frames.append(scores)
    return stacked(frames, COLUMNS)


def profiles(scores: pd.DataFrame) -> pd.DataFrame:
    """`scores` with the columns profile and position.

    profile: the score, min-max normalised in each layer of a model and criterion (0: lowest, 1:
    highest); NaN when all experts of a layer have the same score. position: the rank of the expert
    in its layer, from 0 (lowest score)."""
    layer = scores.groupby(["model", "criterion", "layer"])["score"]
    low = layer.transform("min")
    high = layer.transform("max")
    rank = layer.rank(method="first") - 1
    return scores.assign(
        profile=(scores["score"] - low) / (high - low).replace(0, np.nan), position=rank
    )


@output("aimer.fig2", chapter="weights", needs="cells with criterion=magnitude or aimer")
def profile_figure(results: Results, name: str) -> Figure | None:
    """Distribution of Magnitude and AIMER scores over the experts of each layer.

    A column of maps per model and a row per criterion; x axis: experts by rank, y axis: layers.
    """
    scores = weight_scores(results.study)
    if scores.empty:
        return None
    scaled = profiles(scores)
    models = list(dict.fromkeys(scaled["model"]))
    criteria = names.in_order(scaled["criterion"], PROFILED)
    columns = min(MODELS_IN_ROW, len(models))
    rows = -(-len(models) // columns) * len(criteria)
    drawing = style.drawing(style.PAGE, 1.9 * rows + 0.5)
    grid = drawing.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for key, panel in groups(scaled, ["model", "criterion"]):
        row, column = divmod(models.index(key["model"]), columns)
        axes = grid[row * len(criteria) + criteria.index(key["criterion"])][column]
        axes.set_visible(True)
        _draw_profile(axes, panel, first=column == 0)
        axes.set_title(f"{key['model']}\n{names.criterion(key['criterion'])}", fontsize=7.5)
    ends = {0.0: "0 (lowest)", 0.25: "0.25", 0.5: "0.5", 0.75: "0.75", 1.0: "1 (highest)"}
    handles = [Patch(facecolor=SHADES(share), label=label) for share, label in ends.items()]
    style.legend(drawing, handles, title="score, min-max in its layer")
    caption = (
        "Experts of each layer from the lowest score (rank 0) to the highest, shaded by their "
        "score, scaled from the lowest (0) to the highest (1) of the layer. Magnitude prunes the "
        "lowest scores first; AIMER, with the paper's sign, the highest. White: all experts of the "
        "layer have the same score."
    )
    return Figure(name, "Profiles of scores that read weights only", caption, drawing)


def _draw_profile(axes: Axes, panel: pd.DataFrame, *, first: bool) -> None:
    """Draw a map of `profiles`: a row per layer, experts by position; first: whether the panel is
    the first of its row."""
    image = panel.pivot_table(index="layer", columns="position", values="profile", dropna=False)
    axes.imshow(
        image, cmap=SHADES, vmin=0, vmax=1, aspect="auto", interpolation="nearest", origin="lower",
    )  # fmt: skip
    step = -(-len(image) // LAYERS)
    style.ticks(axes.yaxis, range(0, len(image), step), image.index[::step].map(str))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_xlabel("rank of the expert in its layer", fontsize=7)
    if first:
        axes.set_ylabel("layer")
