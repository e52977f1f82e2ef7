"""Plans by their loss on right answers, beside right-or-wrong items; and how many pairs of criteria each tells apart.

An item's loss is in bits per byte of its right answer, so that lower is better. It grades every item, where right or
wrong tells two plans apart only on items that one of them solves and the other does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.outputs.captions import setting
from analysis.render.table import RANK, SCORE, Table
from analysis.stats import ranks, uncertainty
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


def loss_table(study: Study, comparisons: Iterable[Comparison], *, name: str = "ranks.loss") -> Table:
    """Losses in displayed columns, their mean and the average rank; a block per model, ratio and calibration set."""
    blocks = [_block(comparison, panel) for comparison in comparisons for panel in comparison.panels]
    frame, low, high = (pd.concat(parts, ignore_index=True) for parts in zip(*blocks, strict=True))
    numbers = [str(column) for column in frame if column not in (*_BLOCK, "Criterion")]
    order = [*(column for column in numbers if column not in _SUMMARY), *_SUMMARY]
    return Table(
        name=name,
        title="Loss on right answers, mean and average rank",
        caption=f"{CAPTION} Mean is that of the displayed columns; the lowest loss has rank 1, the unpruned model is "
        f"not ranked. {setting(study)}",
        frame=frame[[*_BLOCK, "Criterion", *order]].rename(columns=names.benchmark),
        formats={names.benchmark(column): RANK if column == "Avg Rank" else SCORE for column in order},
        best={names.benchmark(column): "min" for column in order},
        blocks=_BLOCK,
        low=low.rename(columns=names.benchmark),
        high=high.rename(columns=names.benchmark),
    )


_BLOCK = ["Model", "Pruned", "Calibration"]
_SUMMARY = ["Mean loss", "Avg Rank"]


def _block(comparison: Comparison, panel: Panel) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """One block, a row per cell and the unpruned model first: numbers, lower and upper ends."""
    full = comparison.unpruned
    shown = panel.cells if full is None else {"none": full, **panel.cells}
    cells, columns = list(shown.values()), panel.columns(comparison)
    targets: dict[str, Target] = {**{column: (column,) for column in columns}, "Mean loss": columns}
    ends = {column: comparison.interval(target) for column, target in targets.items()}
    frame = pd.DataFrame({column: comparison.score(target)[cells] for column, target in targets.items()})
    ranked = frame.loc[list(panel.cells.values()), list(columns)]
    frame["Avg Rank"] = ranks.average_rank(ranked, lower_is_better=comparison.lower_is_better)
    frame["Model"], frame["Pruned"] = comparison.model, panel.pruned
    frame["Calibration"] = names.calibration(panel.calibration)
    frame["Criterion"] = [names.method(key) for key in shown]
    low, high = (pd.DataFrame({column: pair[side][cells] for column, pair in ends.items()}) for side in (0, 1))
    return frame, low, high


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


def pair_table(study: Study, found: pd.DataFrame, *, name: str = "pairs") -> Table:
    """How many pairs of criteria are told apart in each column."""
    frame = pd.DataFrame(
        {
            "Model": found["model"],
            "Pruned": found["pruned"],
            "Calibration": found["calibration"].map(names.calibration),
            "Column": found["column"].map(names.benchmark),
            "Pairs": found["pairs"],
            "By score": found["score"],
            "By answer loss": found["loss"],
            "By both": found["both"],
            "Opposite": found["opposite"],
        }
    )
    numbers = ["Pairs", "By score", "By answer loss", "By both", "Opposite"]
    return Table(
        name=name,
        title="How many pairs of criteria are told apart",
        caption=f"Of the pairs of criteria, those that differ at the {LEVEL:.0%} level by their scores and by their "
        "loss on right answers: paired tests on the same items (McNemar or t), corrected by Holm over the "
        f"pairs of a row; {MEAN}: of the displayed columns. By both: with the same better criterion. Opposite: with "
        f"the other one. {setting(study)}",
        frame=frame,
        formats=dict.fromkeys(numbers, "{:.0f}"),
        blocks=_BLOCK,
        optional=("By score", "By answer loss"),
    )


def pair_finding(found: pd.DataFrame) -> list[str]:
    """How many pairs of criteria are told apart by their mean, by score and by loss."""
    means = found[found["column"] == MEAN]
    if means.empty or means["loss"].isna().all():
        return []
    row = means.sum(numeric_only=True)
    return [
        f"Of {row['pairs']:.0f} pairs of criteria with one model and calibration set, {row['score']:.0f} are told "
        f"apart by their average score and {row['loss']:.0f} by their mean loss on right answers; {row['both']:.0f} by "
        f"both alike, {row['opposite']:.0f} by both with opposite signs."
    ]
