"""The winner map: the best method in each displayed column for each calibration set (Figure 2 of
Unified Expert Pruning).

If all methods have several seeds, the winner is tested against each other method. The p-value of
the winner is the largest p-value of these tests, and Holm's correction covers all cells of one map.
Choosing the winner by the data needs no further correction, because a winner must be significantly
ahead of every other method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.stats import uncertainty
from moe_lab.analysis.stats.comparison import Comparison, Panel
from moe_lab.analysis.stats.quantity import PRINTED_DECIMALS
from moe_lab.analysis.stats.uncertainty import LEVEL
from moe_lab.result_files import RANDOM

SETTINGS = ["model", "ratio", "gate"]
"""Axes that identify a map. The rows of a map are displayed columns, its columns are calibration
sets."""

_WINNER_COLUMNS = (
    "winners",
    "score",
    "runner_up",
    "lead",
    "lead_low",
    "lead_high",
    "p",
)
"""Columns of `winner_map` that `_winner_columns` computes."""


def winner_map(
    comparisons: Iterable[Comparison], criteria: Sequence[str] | None = None
) -> pd.DataFrame:
    """The winners: one row per model, ratio, gate, calibration set and displayed column.

    criteria: keys of the methods that compete, by default all methods.

    Columns of the result, with scores in displayed form:

    - model, ratio, gate, calibration: axes of the panel in which the methods compete
    - pruned: text with the removed share
    - column: displayed column
    - winners: tuple with the keys of the best methods, whose scores are equal when printed
    - score: score of the winners
    - runner_up: key of the best method that is not a winner
    - lead, lead_low, lead_high: score minus that of the runner-up, and the ends of its 95 %
      interval
    - p: largest p-value of the tests of the winner against each other method; NaN when several
      methods win, or when a test is not possible
    - p_holm: p with Holm's correction over all rows with equal model, ratio and gate
    - proved: whether p_holm is below LEVEL
    """
    rows = [
        {
            **{axis: getattr(panel, axis) for axis in (*SETTINGS, "calibration")},
            "pruned": panel.pruned_text,
            "column": column,
            **_winner_columns(comparison, panel, column, criteria),
        }
        for comparison in comparisons
        for panel in comparison.panels
        for column in panel.columns
    ]
    winners = pd.DataFrame(
        rows, columns=[*SETTINGS, "pruned", "calibration", "column", *_WINNER_COLUMNS]
    )
    winners["p_holm"] = np.nan
    for _, group in groups(winners, SETTINGS):
        winners.loc[group.index, "p_holm"] = uncertainty.holm(group["p"].to_numpy(float))
    winners["proved"] = winners["p_holm"] < LEVEL
    return winners


def _winner_columns(
    comparison: Comparison, panel: Panel, column: str, criteria: Sequence[str] | None
) -> dict[str, object]:
    """Values of the columns _WINNER_COLUMNS of `winner_map`."""
    quantity = comparison.quantity((column,))
    cells = {key: cell for key, cell in panel.cells.items() if criteria is None or key in criteria}
    scores = pd.Series(cells, dtype=int).map(quantity.to_displayed(comparison.score((column,))))
    ranked_scores = quantity.sort_best_first(scores.dropna())
    if ranked_scores.empty:
        return {"winners": (), "runner_up": ""}
    printed_scores = ranked_scores.round(PRINTED_DECIMALS)
    is_best = printed_scores == printed_scores.iloc[0]
    # `is_best` lacks methods without a score
    winners = tuple(key for key in cells if is_best.get(key, False))
    row = {"winners": winners, "score": ranked_scores[winners[0]], "runner_up": ""}
    losers = ranked_scores[~is_best]
    if losers.empty:
        return row
    runner_up = str(losers.index[0])
    reference = cells[runner_up]
    lead = comparison.difference((column,), cells[winners[0]], reference)
    displayed_lead = quantity.displayed_estimate(comparison.score((column,))[reference], lead)
    row["runner_up"] = runner_up
    row |= dict(zip(("lead", "lead_low", "lead_high"), displayed_lead, strict=True))
    if len(winners) == 1:
        row["p"] = _p_of_winner(
            comparison, column, [cells[key] for key in (*winners, *losers.index)]
        )
    return row


def _p_of_winner(comparison: Comparison, column: str, cells: Sequence[int]) -> float:
    """The largest p-value of the tests of the winner, `cells[0]`, against each other
    cell; NaN if they cannot be tested."""
    criteria = comparison.cells["criterion"]
    methods = [cell for cell in cells if criteria[cell] not in RANDOM]
    seeds = [len(comparison.seed_scores((column,), cell)) for cell in methods]
    # a random winner is not in `methods`
    if cells[0] not in methods or len(methods) < 2 or min(seeds) < 2:
        return np.nan
    leads = comparison.leads_of_best((column,), methods)
    # With methods=2, p is from Student's t. The studentised range would correct for the choice of
    # the winner, but the largest p needs no correction. np.max is NaN if any p is NaN.
    return float(np.max([replace(lead, methods=2).p for lead in leads]))


def label(winners: Sequence[str], score: float) -> str:
    """Text of one cell of the map: the method on the first place, both of two that are tied, or the
    number of those tied; `all 0` if several methods share the first place with a score of 0, or
    `gap` if no method has a score."""
    if not winners:
        return "gap"
    if len(winners) > 1 and score == 0:
        return "all 0"
    if len(winners) > 2:
        return f"{len(winners)} tied"
    return " = ".join(names.method(name) for name in winners)
