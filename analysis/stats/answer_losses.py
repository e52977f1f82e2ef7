"""The loss on right answers in place of scores, and how many pairs of criteria each tells apart.

An item's loss is in bits per byte of its right answer, so that lower is better. It grades every item, where right or
wrong tells two plans apart only on items that one of them solves and the other does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.load.study import Study
from analysis.stats import uncertainty
from analysis.stats.comparison import Comparison, Panel, Target
from analysis.stats.winners import LEVEL

METRIC = "answer_loss"
CAPTION = "Loss on right answers, in bits per byte of the answer: lower is better."
MEAN = "mean"
"""In place of a column: the mean of all displayed columns that are averaged."""
PAIR_COLUMNS = ("model", "pruned", "calibration", "column", "pairs", "score", "loss", "both", "opposite")


def study_of_losses(study: Study) -> Study:
    """The study whose results and outcomes are the losses on right answers, of benchmarks that have them."""
    known = study.samples.dropna(subset=[METRIC]).drop_duplicates(["cell", "benchmark", "item"])
    samples = known.assign(outcome=known[METRIC])
    found = samples.groupby(["cell", "benchmark"])["outcome"].agg(["mean", "sem", "size"]).reset_index()
    described = study.results.drop(columns=["metric", "score", "stderr", "n"])
    results = described.merge(found, on=["cell", "benchmark"]).assign(metric=METRIC)
    results = results.rename(columns={"mean": "score", "sem": "stderr", "size": "n"})[list(study.results.columns)]
    return replace(study, results=results, samples=samples)


def decided_pairs(by_score: Iterable[Comparison], by_loss: Iterable[Comparison]) -> pd.DataFrame:
    """How many pairs of methods differ at the 5 % level; columns PAIR_COLUMNS, a row per panel and displayed column.

    Pairs are tested on the items all cells were asked (`Comparison.pairwise`) and corrected by Holm over the pairs of
    the row. score, loss: pairs told apart by scores and by losses, NaN where there are none; both: by either with the
    same better method; opposite: by either with the other one.
    """
    losses = {comparison.model: comparison for comparison in by_loss}
    rows = []
    for comparison in by_score:
        other = losses.get(comparison.model)
        panels = {} if other is None else {(*panel.settings, panel.calibration): panel for panel in other.panels}
        for panel in comparison.panels:
            twin = panels.get((*panel.settings, panel.calibration))
            rows += _panel_pairs((comparison, panel), None if other is None or twin is None else (other, twin))
    return pd.DataFrame(rows, columns=list(PAIR_COLUMNS))


def _panel_pairs(
    by_score: tuple[Comparison, Panel], by_loss: tuple[Comparison, Panel] | None
) -> list[dict[str, object]]:
    comparison, panel = by_score
    pairs = len(panel.cells) * (len(panel.cells) - 1) // 2
    unknown = np.full(pairs, np.nan)
    scores = _signs(comparison, panel, panel.averaged(comparison))
    losses = {} if by_loss is None else _signs(*by_loss, by_loss[1].columns(by_loss[0]))
    rows: list[dict[str, object]] = []
    for column in dict.fromkeys([MEAN, *scores, *losses]) if pairs else ():
        score, loss = (signs.get(column, unknown) for signs in (scores, losses))
        rows.append(
            {
                "model": panel.model,
                "pruned": panel.pruned,
                "calibration": panel.calibration,
                "column": column,
                "pairs": pairs,
                "score": np.abs(score).sum(),
                "loss": np.abs(loss).sum(),
                "both": int((score * loss > 0).sum()),
                "opposite": int((score * loss < 0).sum()),
            }
        )
    return rows


def _signs(comparison: Comparison, panel: Panel, averaged: Target) -> dict[str, np.ndarray]:
    """Column -> for each pair of methods 1 where the first is better, -1 where the second is, 0 where it is open."""
    targets: dict[str, Target] = {column: (column,) for column in panel.columns(comparison)}
    if averaged:
        targets[MEAN] = averaged
    cells = list(panel.cells.values())
    return {column: _decided(comparison, target, cells) for column, target in targets.items()}


def _decided(comparison: Comparison, target: Target, cells: Sequence[int]) -> np.ndarray:
    """Those of one target; the pairs are those above the diagonal of a matrix of cells."""
    differences, p_values = (found[np.triu_indices(len(cells), 1)] for found in comparison.pairwise(target, cells))
    lower = set(comparison.weights(target)) <= set(comparison.lower_is_better)
    better = np.sign(differences) * (-1 if lower else 1)
    return np.where(uncertainty.holm(p_values) < LEVEL, better, 0)
