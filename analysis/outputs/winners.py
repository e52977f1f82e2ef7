"""Winner maps: the leading criterion by task and calibration set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import score_setup
from moe_lab.analysis.outputs.score_rows import sort_cells
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import SCORE, Columns, Table, frame_and_formats
from moe_lab.analysis.stats.uncertainty import LEVEL
from moe_lab.analysis.stats.winners import SETTINGS, label


def _map_and_table(results: Results, wins: pd.DataFrame, title: str) -> list[Item]:
    """The figure and the table of a winner map. [] if `wins` is on fewer than two displayed
    columns: the map then adds nothing to the ranking of the methods.

    wins: rows of `winner_map`."""
    if wins.empty or wins["column"].nunique() < 2:
        return []
    return [winner_figure(wins, title), winner_table(results.study, wins, title)]


@output(
    "winners",
    chapter="winners",
    needs="several benchmarks or groups of them",
)
def all_winners(results: Results) -> list[Item]:
    """The winner map of all criteria."""
    return _map_and_table(results, results.winners, "Leading criterion by task and calibration set")


@output("unified.fig2", needs="some of its five criteria, and several benchmarks or groups of them")
def baseline_winners(results: Results) -> list[Item]:
    """The winner map of the five baselines of Unified Expert Pruning."""
    return _map_and_table(
        results, results.baseline_winners, "Leading baseline by task and calibration set"
    )


def winner_table(study: Study, wins: pd.DataFrame, title: str) -> Table:
    """A winner map as a table, a row per cell of the map. wins: rows of `winner_map`."""
    rows = wins.assign(
        winner=[label(win["winners"], win["score"]) for win in records(wins)],
        runner_up=wins["runner_up"].map(names.method),
        verdict=[verdict(win) for win in records(wins)],
    )
    columns: Columns = {
        "Model": "model",
        "Pruned": "pruned",
        "Calibration": "calibration",
        "Column": "column",
        "Winner": "winner",
        "Runner-up": "runner_up",
        "Verdict": "verdict",
        "Score": ("score", SCORE),
        "Lead": ("lead", SCORE),
        "p": ("p", "{:.4f}"),
        "p (Holm)": ("p_holm", SCORE),
    }
    return Table(
        title=title,
        caption=(f"{proved_wins_sentence(wins)} {_MEANING_OF_P} {score_setup(study)}"),
        **frame_and_formats(rows, columns),
        optional=("Lead", "p", "p (Holm)"),
        low=wins[["lead_low"]].set_axis(["Lead"], axis=1),
        high=wins[["lead_high"]].set_axis(["Lead"], axis=1),
    )


NO_RESULT, TIE, PROVED, NOT_PROVED, UNTESTED = (
    "gap",
    "tie",
    "proved win",
    "not proved",
    "not tested",
)
"""Verdicts on a cell of the winner map."""


def verdict(win: Mapping[str, Any]) -> str:
    """Verdict on a row of `winner_map`."""
    winners = win["winners"]
    if not winners:
        return NO_RESULT
    if len(winners) > 1:
        return TIE
    if pd.isna(win["p"]):
        return UNTESTED
    return PROVED if win["proved"] else NOT_PROVED


_MEANING_OF_P = (
    "p: the largest of the tests of the winner against every other criterion, over seeds and "
    "items; Holm: corrected over all columns of one model and ratio. A win is proved below "
    f"{LEVEL}. Criteria with one seed are not tested."
)


def proved_wins_sentence(wins: pd.DataFrame) -> str:
    """A sentence on how many cells of a winner map are proved wins."""
    return f"Proved wins: {wins['proved'].sum()} of {len(wins)} cells."


def winner_figure(wins: pd.DataFrame, title: str) -> Figure:
    """A map for each model, ratio and gate, with a row per displayed column and a column per
    calibration set. wins: rows of `winner_map`."""
    wins = sort_cells(wins, *SETTINGS, "calibration")
    frame = {
        "panel": wins["model"] + ", " + wins["pruned"] + " pruned",
        "Model": wins["model"],
        "Pruned": wins["pruned"],
        "Calibration": wins["calibration"].map(names.calibration),
        "Metric": wins["column"].map(names.benchmark),
        "winner": list(map(_text, wins["winners"], wins["score"])),
        "score": wins["score"],
        "lead": wins["lead"],
        "verdict": [verdict(win) for win in records(wins)],
        "colour": [charts.colour(winners[0]) if winners else None for winners in wins["winners"]],
    }
    place: dict[str, Any] = {
        "x": charts.label("Calibration", axis=charts.TOP),
        "y": charts.label("Metric"),
        "tooltip": [{"field": column} for column in ("winner", "verdict", "score", "lead")],
    }
    is_proved = f"datum.verdict == '{PROVED}'"
    own_colour = {"field": "colour", "scale": None}
    text: dict[str, Any] = {"limit": SQUARE[0] - 6, "fontSize": 10}
    layers = [
        charts.layer("rect", {"opacity": 0.35}, is_proved, color=own_colour, **place),
        charts.layer("text", {"fontWeight": "bold", **text}, is_proved, text="winner", **place),
        charts.layer(
            "text", {"color": charts.MUTED, **text}, f"!({is_proved})", text="winner", **place
        ),
    ]
    caption = (
        f"{proved_wins_sentence(wins)} Each cell names the leading criterion of a column and "
        "calibration set, or both of two that tie, or the number of those that tie; "
        '"all 0": every score is 0. '
        "A win is proved, and coloured, if it holds against every other criterion over seeds "
        f"and items (Holm-corrected over the map, {LEVEL:.0%}); criteria with one seed are not "
        "tested."
    )
    width, height = ({"step": step} for step in SQUARE)
    return Figure(title, caption, pd.DataFrame(frame), layers, 4, (width, height))


SQUARE = (90, 24)
"""Width and height of a square of the map, in pixels."""


def _text(winners: Sequence[str], score: float) -> str:
    """Text of a square: the winner, or two that are tied, or the number of those tied."""
    if len(winners) > 2 and score != 0:
        return f"{len(winners)} tied"
    return label(winners, score)
