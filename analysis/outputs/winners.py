"""Winner maps: the leading criterion by task and calibration set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import score_setup
from moe_lab.analysis.outputs.score_rows import sort_cells
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import marks, style
from moe_lab.analysis.render.style import Figure
from moe_lab.analysis.render.table import SCORE, Columns, Table, frame_and_formats
from moe_lab.analysis.stats.uncertainty import LEVEL
from moe_lab.analysis.stats.winners import SETTINGS, label


def _map_and_table(results: Results, wins: pd.DataFrame, name: str, title: str) -> list[Item]:
    """The figure and the table of a winner map. [] if `wins` is on fewer than two displayed
    columns: the map then adds nothing to the ranking of the methods.

    wins: rows of `winner_map`."""
    if wins.empty or wins["column"].nunique() < 2:
        return []
    return [winner_figure(wins, name, title), winner_table(results.study, wins, name, title)]


@output(
    "winners",
    chapter="winners",
    needs="several benchmarks or groups of them",
)
def all_winners(results: Results, name: str) -> list[Item]:
    """The winner map of all criteria."""
    return _map_and_table(
        results, results.winners, name, "Leading criterion by task and calibration set"
    )


@output("unified.fig2", needs="some of its five criteria, and several benchmarks or groups of them")
def baseline_winners(results: Results, name: str) -> list[Item]:
    """The winner map of the five baselines of Unified Expert Pruning."""
    return _map_and_table(
        results, results.baseline_winners, name, "Leading baseline by task and calibration set"
    )


def winner_table(study: Study, wins: pd.DataFrame, name: str, title: str) -> Table:
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
        name=name,
        title=title,
        caption=(f"{proved_wins_sentence(wins)} {_MEANING_OF_P} {score_setup(study)}"),
        **frame_and_formats(rows, columns),
        blocks=("Model", "Pruned", "Calibration"),
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


def winner_figure(wins: pd.DataFrame, name: str, title: str) -> Figure:
    """A map for each model, ratio and gate, with a row per displayed column and a column per
    calibration set. wins: rows of `winner_map`."""
    squares = sort_cells(wins, *SETTINGS, "calibration")
    is_win = squares["winners"].map(len) == 1
    drawing = marks.heat_map(
        squares.assign(
            panel=squares["model"] + ", " + squares["pruned"] + " pruned",
            x=squares["calibration"].map(names.calibration),
            y=squares["column"].map(names.benchmark),
            colour=squares["winners"].map(_colour),
            text=list(map(_text, squares["winners"], squares["score"])),
            is_hatched=is_win & ~squares["proved"].astype(bool),
        ),
        columns=2
        if wins["calibration"].nunique() < 5
        else 1,  # so that the squares are wide enough for most names
    )
    handles = [
        Patch(facecolor=style.RULE, label="proved win"),
        Patch(
            facecolor=style.RULE,
            edgecolor=style.MUTED,
            hatch=style.HATCH,
            label="win that is not proved",
        ),
        Patch(facecolor="none", edgecolor=style.RULE, label="tie"),
    ]
    drawing.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=2.2)
    caption = (
        f"{proved_wins_sentence(wins)} Each cell names the leading criterion of a column and "
        "calibration set, or both of two that tie, or the number of those that tie; names that do "
        'not fit are in the table; "all 0": every score is 0. '
        "A win is proved, and not hatched, if it holds against every other criterion over seeds "
        f"and items (Holm-corrected over the map, {LEVEL:.0%}); criteria with one seed are not "
        "tested."
    )
    return Figure(name, title, caption, drawing)


def _colour(winners: Sequence[str]) -> Any:
    """Colour of a square: that of the only winner, light; none for a tie."""
    return to_rgba(style.colour(winners[0]), 0.3) if len(winners) == 1 else "none"


def _text(winners: Sequence[str], score: float) -> str:
    """Text of a square: the winner, or two that are tied, or the number of those tied."""
    if len(winners) > 2 and score != 0:
        return f"{len(winners)} tied"
    return label(winners, score)
