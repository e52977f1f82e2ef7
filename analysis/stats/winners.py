"""The winner map: the best method in each displayed column for each calibration set.

Figure 2 of Unified Expert Pruning.

The winner is tested against all other methods: its p-value is the largest of the paired tests, and Holm's correction
covers all cells of one map. Methods whose scores are equal when printed (three decimals) share the first place, and
none of them wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.reader import groups
from analysis.load.study import Study
from analysis.stats import uncertainty
from analysis.stats.comparison import Comparison, Panel, Target
from analysis.stats.ranks import PRINTED_DECIMALS

LEVEL = 0.05
"""A win is beyond noise below this Holm-corrected p-value."""

SETTINGS = ["model", "ratio", "gate", "seed"]
"""One map per combination of these; its rows and columns are displayed columns and calibration sets."""


_BEST = ("winners", "score", "runner_up", "runner_up_score", "lead", "lead_low", "lead_high", "p")


def winner_map(comparisons: Iterable[Comparison], criteria: Sequence[str] | None = None) -> pd.DataFrame:
    """Find the winners: one row per model, ratio, gate, seed, calibration set and displayed column.

    criteria: methods' keys that compete, by default all. Returned columns: SETTINGS, pruned (the ratio, in words),
    calibration, column, winners (tuple of methods' keys, several when tied), score, runner_up, runner_up_score,
    lead, lead_low, lead_high (95 % interval), p, p_holm, beyond_noise.
    """
    rows = [
        {**_settings(panel), "column": column, **_best(comparison, panel, column, criteria)}
        for comparison in comparisons
        for panel in comparison.panels
        for column in panel.columns(comparison)
    ]
    winners = pd.DataFrame(rows, columns=[*SETTINGS, "pruned", "calibration", "column", *_BEST])
    if winners.empty:
        return winners
    winners["p_holm"] = np.nan
    for _, group in groups(winners, SETTINGS):
        winners.loc[group.index, "p_holm"] = uncertainty.holm(group["p"].to_numpy(float))
    winners["beyond_noise"] = winners["p_holm"] < LEVEL
    return winners


def _settings(panel: Panel) -> dict[str, object]:
    return {name: getattr(panel, name) for name in (*SETTINGS, "pruned", "calibration")}


def _best(comparison: Comparison, panel: Panel, column: str, criteria: Sequence[str] | None) -> dict[str, object]:
    cells = {name: cell for name, cell in panel.cells.items() if criteria is None or name in criteria}
    scores = comparison.score((column,))
    values = {name: float(scores[cell]) for name, cell in cells.items() if not np.isnan(scores[cell])}
    if not values:
        return {"winners": (), "score": np.nan, "runner_up": "", "p": np.nan}
    sign = -1 if column in comparison.lower_is_better else 1
    printed = {name: sign * round(value, PRINTED_DECIMALS) for name, value in values.items()}
    top = max(printed.values())
    winners = tuple(name for name, value in printed.items() if value == top)
    rest = {name: value for name, value in printed.items() if value != top}
    best = {"winners": winners, "score": values[winners[0]], "runner_up": "", "p": np.nan}
    if not rest:
        return best
    second = max(rest, key=lambda name: rest[name])
    best |= {"runner_up": second, "runner_up_score": values[second]}
    best["lead"] = comparison.difference((column,), cells[winners[0]], cells[second])
    best["lead_low"], best["lead_high"] = comparison.lead((column,), cells[winners[0]], cells[second])
    if len(winners) == 1:
        p_values = comparison.p_values((column,), cells[winners[0]], [cells[name] for name in rest])
        best["p"] = np.nan if np.isnan(p_values).any() else float(p_values.max())
    return best


def label(winners: Sequence[str], score: float) -> str:
    """The text of one cell of the map: the winner, all that share the first place, `all 0`, or `gap`."""
    if not winners:
        return "gap"
    if len(winners) > 1 and score == 0:
        return "all 0"
    return " = ".join(names.method(name) for name in winners)


METRIC = "answer_loss"
CAPTION = "Loss on right answers, in bits per byte of the answer: lower is better."
MEAN = "mean"
"""In place of a column: the mean of all displayed columns that are averaged."""
PAIR_COLUMNS = ("model", "pruned", "calibration", "column", "pairs", "score", "loss", "both", "opposite")


def study_of_losses(study: Study) -> Study:
    """The study with losses on right answers as results and outcomes, of benchmarks that have such losses."""
    with_loss = study.samples.dropna(subset=[METRIC]).drop_duplicates(["cell", "benchmark", "item"])
    samples = with_loss.assign(outcome=with_loss[METRIC])
    summary = samples.groupby(["cell", "benchmark"])["outcome"].agg(["mean", "sem", "size"]).reset_index()
    described = study.results.drop(columns=["metric", "score", "stderr", "n"])
    results = described.merge(summary, on=["cell", "benchmark"]).assign(metric=METRIC)
    results = results.rename(columns={"mean": "score", "sem": "stderr", "size": "n"})[list(study.results.columns)]
    return replace(study, results=results, samples=samples)


def decided_pairs(by_score: Iterable[Comparison], by_loss: Iterable[Comparison]) -> pd.DataFrame:
    """Count the pairs of methods that differ at the 5 % level; columns PAIR_COLUMNS, a row per panel and column.

    Pairs are tested on the items that all cells share (`Comparison.pairwise`), with Holm's correction over the pairs of
    the row. score, loss: pairs that differ by scores and by losses, NaN where there are none; both: pairs that differ
    by both with the same better method; opposite: pairs that differ by both with opposite better methods.
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
    """Column -> for each pair of methods 1 if the first is better, -1 if the second is, 0 if not significant."""
    targets: dict[str, Target] = {column: (column,) for column in panel.columns(comparison)}
    if averaged:
        targets[MEAN] = averaged
    cells = list(panel.cells.values())
    return {column: _decided(comparison, target, cells) for column, target in targets.items()}


def _decided(comparison: Comparison, target: Target, cells: Sequence[int]) -> np.ndarray:
    """The signs of one target, for the pairs above the diagonal of the matrix (cells, cells)."""
    differences, p_values = (found[np.triu_indices(len(cells), 1)] for found in comparison.pairwise(target, cells))
    lower = set(comparison.weights(target)) <= set(comparison.lower_is_better)
    better = np.sign(differences) * (-1 if lower else 1)
    return np.where(uncertainty.holm(p_values) < LEVEL, better, 0)
