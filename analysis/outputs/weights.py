"""Criteria that read weights alone compared with those that read a text, and distributions of their
scores (AIMER, Tables 2, 3 and 5 to 7, and Fig. 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import settings
from moe_lab.analysis.load.reader import records, stacked
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.score_rows import (
    Block,
    BlockMaker,
    cells_by_ratio,
    cells_without_recovery,
    only_cell,
    ratio_block,
    score_table,
)
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.stats.cell_scores import CODE_BENCHMARKS, GROUPS, WRITING_AND_MATH
from moe_lab.analysis.stats.comparison import Comparison

WEIGHTS = "cells with criterion=aimer"
"""Data that the tables of this module need."""


def weights_table(
    name: str, title_end: str, columns: Sequence[str], **fields: Any
) -> Callable[[BlockMaker], BlockMaker]:
    """The decorator `score_table` with a title and a caption for tables of this module.

    title_end: last words of the title; columns: benchmarks and averages."""
    title = f"Scores from weights alone and from text: {title_end}"
    caption = "Difference: last of the scores minus that of AIMER, paired."
    return score_table(name, title, columns, caption, **fields)


@weights_table(
    "aimer.table2",
    "group averages",
    GROUPS,
    chapter="weights",
    needs=WEIGHTS,
    aliases=("aimer.table3",),
)
@weights_table(
    "aimer.table5",
    "writing and mathematics",
    WRITING_AND_MATH,
    needs=f"{WEIGHTS}, and WildBench, gsm8k or math500",
)
@weights_table("aimer.table6", "coding", CODE_BENCHMARKS, needs=f"{WEIGHTS}, and coding benchmarks")
@weights_table(
    "aimer.table7",
    "multiple choice",
    (*names.MULTIPLE_CHOICE, "MC Avg"),
    needs=f"{WEIGHTS}, and multiple-choice benchmarks",
)
def aimer_blocks(results: Results, comparison: Comparison) -> Iterator[Block]:
    """AIMER's Tables 2 (groups), 5 (writing, mathematics), 6 (coding) and 7 (multiple choice).

    Yields a block for each ratio at which AIMER was run, with the cells of all criteria without
    recovery. AIMER's cell is the base of the block's differences."""
    for ratio, cells in cells_by_ratio(cells_without_recovery(comparison)):
        aimer_cells = cells[cells["criterion"] == "aimer"]
        if len(aimer_cells):
            base = only_cell(aimer_cells)
            yield ratio_block(comparison, ratio, settings.method_labels(cells), base)


FIGURE_CRITERIA = ("magnitude", "aimer")
OPPOSITE_SIGN_CRITERIA = ("aimer",)
"""Criteria whose scores in the store have the opposite sign of the paper's scores, because the
lowest scores in the store are pruned first."""
COLUMNS = ("model", "criterion", "layer", "expert", "score")


def weight_scores(study: Study) -> pd.DataFrame:
    """Scores of experts by FIGURE_CRITERIA, with the columns COLUMNS.

    Scores have the sign that they have in the papers. AIMER's score in its paper is
    ||w||_1 / (sqrt(N) ||w||_2), and the experts with the highest scores are pruned first."""
    cells = study.cells[
        study.cells["criterion"].isin(FIGURE_CRITERIA) & study.cells["scores_folder"].notna()
    ]
    frames = []
    # one cell per model and criterion: scores that read weights alone depend on nothing else
    for cell in records(cells.drop_duplicates(["model", "criterion"])):
        folder = study.reader.folder(cell["scores_folder"])
        # COLUMNS without model and criterion
        scores = study.reader.frame(folder, "scores.parquet", COLUMNS[2:])
        if scores is not None:
            scores = scores.assign(model=cell["model"], criterion=cell["criterion"])
            if cell["criterion"] in OPPOSITE_SIGN_CRITERIA:
                scores["score"] = -scores["score"]
            frames.append(scores)
    return stacked(frames, COLUMNS)


def profiles(scores: pd.DataFrame) -> pd.DataFrame:
    """`weight_scores` with two more columns, computed inside each layer of a model and criterion.

    - "profile": the score, scaled from 0 (lowest score of the layer) to 1 (highest); NaN if all are
      equal
    - "position": rank of the expert in the layer, from 0 (lowest score)"""
    layer = ["model", "criterion", "layer"]
    rank = scores.groupby(layer)["score"].rank(method="first") - 1
    return scores.assign(profile=charts.shares_of_range(scores, layer, "score"), position=rank)


@output("aimer.fig2", chapter="weights", needs="cells with criterion=magnitude or aimer")
def profile_figure(results: Results) -> Figure | None:
    """Distribution of Magnitude and AIMER scores over the experts of each layer.

    A map per model and criterion; x axis: experts by rank, y axis: layers.
    """
    scores = weight_scores(results.study)
    if scores.empty:
        return None
    scores = profiles(scores)
    scores["panel"] = scores["model"] + ", " + scores["criterion"].map(names.criterion)
    rows = scores.rename(columns={"model": "Model"})[
        ["Model", "panel", "layer", "position", "profile"]
    ]
    scale = {"scheme": charts.SEQUENTIAL, "domain": [0, 1]}
    layers = [
        charts.layer(
            "rect",
            x={"field": "position", "type": "ordinal", "title": "rank of the expert in its layer"},
            y={"field": "layer", "type": "ordinal", "sort": "descending"},
            color=charts.number("profile", "score, from the lowest of the layer", scale=scale),
        )
    ]
    caption = (
        "Experts of each layer from the lowest score (rank 0) to the highest, shaded by their "
        "score, scaled from the lowest (0) to the highest (1) of the layer. Magnitude prunes the "
        "lowest scores first; AIMER, with the paper's sign, the highest. White: all experts of the "
        "layer have the same score."
    )
    title = "Profiles of scores that read weights only"
    return Figure(title, caption, rows, layers, independent=("x", "y"))
