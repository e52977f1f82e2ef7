"""Winner maps by scores and by losses on right answers.

An item's loss is in bits per byte of its right answer; lower is better. The losses of two plans
differ on every item, whereas their outcomes (right or wrong) differ only on items that one plan
solves and the other does not.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from analysis import names
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import LOSSES, score_setup
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import LETTER, SMALL_LETTER, Figure
from analysis.render.table import SCORE, Table, spelled
from analysis.stats.uncertainty import LEVEL
from analysis.stats.winners import CAPTION, SETTINGS, label


def _map_and_table(results: Results, win_rows: pd.DataFrame, name: str, title: str) -> list[Item]:
    """The figure and the table of a winner map; [] for a map of one column, which would repeat the
    ranking."""
    if win_rows.empty or win_rows["column"].nunique() < 2:
        return []
    return [
        winner_figure(win_rows, name, title),
        winner_table(results.study, win_rows, name, title),
    ]


@output(
    "winners",
    chapter="winners",
    filters="*Model|Pruned|Calibration",
    needs="several benchmarks or groups of them",
)
def all_winners(results: Results, name: str) -> list[Item]:
    """The winner map of all criteria."""
    return _map_and_table(
        results, results.winners, name, "Leading criterion by task and calibration set"
    )


@output("winners.loss", chapter="winners", filters="*Model|Pruned|Calibration", needs=LOSSES)
def winners_by_loss(results: Results, name: str) -> list[Item]:
    """The winner map by the loss on right answers, where lower is better."""
    by_loss = results.by_answer_loss
    title = "Criterion with the lowest loss on correct answers, by task and calibration set"
    items = _map_and_table(by_loss, by_loss.winners, name, title)
    return [replace(item, caption=f"{CAPTION} {item.caption}") for item in items]


@output("unified.fig2", needs="some of its five criteria, and several benchmarks or groups of them")
def baseline_winners(results: Results, name: str) -> list[Item]:
    """The winner map of the five baselines of Unified Expert Pruning."""
    return _map_and_table(
        results, results.baseline_winners, name, "Leading baseline by task and calibration set"
    )


def winner_table(study: Study, win_rows: pd.DataFrame, name: str, title: str) -> Table:
    """A winner map as a table: the best method in each column, its lead over the second, and a
    verdict."""
    rows = win_rows.assign(
        winner=[
            label(tied, score)
            for tied, score in zip(win_rows["winners"], win_rows["score"], strict=True)
        ],
        runner_up=win_rows["runner_up"].map(names.method),
        verdict=[verdict(row) for row in records(win_rows)],
    )
    text = {
        "Model": "model",
        "Pruned": "pruned",
        "Calibration": "calibration",
        "Column": "column",
        "Winner": "winner",
        "Runner-up": "runner_up",
        "Verdict": "verdict",
    }
    numbers = {"Score": "score", "Lead": "lead", "p": "p", "p (Holm)": "p_holm"}
    return Table(
        name=name,
        title=title,
        caption=(
            f"{proved_wins(win_rows)} {_P_MEANS if _tested(win_rows) else _UNTESTED} "
            f"{score_setup(study)}"
        ),
        frame=spelled(rows, text | numbers),
        formats={"Score": SCORE, "Lead": SCORE, "p": "{:.4f}", "p (Holm)": SCORE},
        blocks=("Model", "Pruned", "Calibration"),
        optional=("Lead", "p", "p (Holm)"),
        low=win_rows[["lead_low"]].set_axis(["Lead"], axis=1),
        high=win_rows[["lead_high"]].set_axis(["Lead"], axis=1),
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
    """Verdict on a row of `winner_map`: NO_RESULT, TIE, UNTESTED (where a criterion has one seed),
    PROVED or NOT_PROVED."""
    winners = win["winners"]
    if not winners:
        return NO_RESULT
    if len(winners) > 1:
        return TIE
    if pd.isna(win["p"]):
        return UNTESTED
    return PROVED if win["proved"] else NOT_PROVED


_UNTESTED = (
    "Wins are tested where every criterion has several seeds; none is here, and intervals are over "
    "items."
)
_P_MEANS = (
    "p: the largest of the tests of the winner against every other criterion, over seeds and "
    "items; Holm: corrected over all columns of one model and ratio. A win is proved below "
    f"{LEVEL}. Criteria with one seed are not tested."
)


def _tested(win_rows: pd.DataFrame) -> bool:
    """Whether some win is tested."""
    return bool(win_rows["p"].notna().any())


def proved_wins(win_rows: pd.DataFrame) -> str:
    """A sentence with the number of cells of a winner map that are proved wins, tied, not tested
    and without a result."""
    counts = Counter(verdict(row) for row in records(win_rows))
    phrases = [f"{counts[kind]} {phrase}" for kind, phrase in _PHRASES.items() if kind in counts]
    more = f" ({names.listing(phrases)})" if phrases else ""
    return f"Proved wins: {counts[PROVED]} of {len(win_rows)} cells{more}."


_PHRASES = {
    TIE: "tied",
    UNTESTED: "not tested",
    NO_RESULT: "without a result",
}
"""Verdict -> its description in `proved_wins`."""


def winner_figure(win_rows: pd.DataFrame, name: str, title: str) -> Figure:
    """Figure of the rows of `winner_map`: a map of displayed columns and calibration sets for each
    model, ratio and gate; wins that are not proved are hatched."""
    maps = list(groups(win_rows, SETTINGS))
    rows = max(len(group["column"].unique()) for _, group in maps)
    drawing, grid = style.panels(len(maps), 2, max(0.36 * rows, 1.1) + 0.75, below=0)
    for axes, (key, group) in zip(grid, maps, strict=True):
        _draw_map(axes, group, drawing.get_figwidth() / min(2, len(maps)) - _LABELS)
        axes.set_title(f"{key['model']}, {group['pruned'].iloc[0]} pruned")
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
    proved = (
        "A win is proved, and not hatched, if it holds against every other criterion over seeds "
        f"and items (Holm-corrected over the map, {LEVEL:.0%}); criteria with one seed are not "
        "tested."
    )
    caption = (
        f"{proved_wins(win_rows)} Each cell names the leading criterion of a column and "
        "calibration set, or all criteria with the highest score. "
        f"{proved if _tested(win_rows) else _UNTESTED}"
    )
    return Figure(name, title, caption, drawing)


_LABELS = 0.8
"""Inches for the labels of the rows."""


def _draw_map(axes: Axes, win_rows: pd.DataFrame, inches: float) -> None:
    """Draw one map, whose cells are `inches` wide together."""
    columns = list(dict.fromkeys(win_rows["column"]))
    sets = names.calibrations_in_order(win_rows["calibration"])
    for win in records(win_rows):
        x = sets.index(win["calibration"])
        y = columns.index(win["column"])
        winners: tuple[str, ...] = win["winners"]
        if len(winners) == 1:
            square = Rectangle(
                (x, y), 1, 1, facecolor=style.colour(winners[0]), edgecolor=style.MUTED, linewidth=0
            )
            square.set(alpha=0.3, hatch=None if win["proved"] else style.HATCH)
            axes.add_patch(square)
        text, size = _fitted(winners, win["score"], inches / len(sets))
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=size, linespacing=1.0)
    for edge in range(len(sets) + 1):
        axes.axvline(edge, color=style.SURFACE, linewidth=2)
    for edge in range(len(columns) + 1):
        axes.axhline(edge, color=style.SURFACE, linewidth=2)
    style.squares(axes, list(map(names.calibration, sets)), list(map(names.benchmark, columns)))


def _fitted(winners: Sequence[str], score: float, inches: float) -> tuple[str, float]:
    """The text in a cell of a map that is `inches` wide, and its font size in points.

    Tied winners are named on two lines, at most three of them, with the number of the others:
    `A = B =` and `C +2`; if this does not fit, only their number is given."""
    letters = int(inches / SMALL_LETTER)
    if len(winners) > 1 and score != 0:
        displayed = [names.method(name) for name in winners[:3]]
        more = f" +{len(winners) - 3}" if len(winners) > 3 else ""
        if len(winners) == 2:
            text = " =\n".join(displayed)
        else:
            text = f"{displayed[0]} = {displayed[1]} =\n{displayed[2]}{more}"
        fits = max(map(len, text.splitlines())) <= letters
        return (text, 5.6) if fits else (f"{len(winners)} tied", 6.5)
    text = label(winners, score)
    if len(text) > inches / LETTER:
        return textwrap.fill(text, letters), 5.6
    return text, 7.5 if len(winners) == 1 else 6.5
