"""Winner maps by scores and by losses on right answers.

An item's loss is in bits per byte of its right answer; lower is better. Every item has a loss that differs between two
plans, whereas right or wrong only differs on items that one plan solves and the other does not.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from analysis import names
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import LOSSES, setting
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import LETTER, SMALL_LETTER, Figure
from analysis.render.table import SCORE, Table, spelled
from analysis.stats.uncertainty import LEVEL
from analysis.stats.winners import CAPTION, SETTINGS, label


def _map_and_table(results: Results, win_rows: pd.DataFrame, name: str, title: str) -> list[Item]:
    if win_rows.empty or win_rows["column"].nunique() < 2:  # of one column, the ranking says it all
        return []
    return [winner_figure(win_rows, name, title), winner_table(results.study, win_rows, name, title)]


@output("winners", chapter="winners", filters="*Model|Pruned|Calibration", needs="several benchmarks or groups of them")
def all_winners(results: Results, name: str) -> list[Item]:
    """The winner map of all criteria."""
    return _map_and_table(results, results.winners, name, "Best criterion by task and calibration set")


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
        results, results.baseline_winners, name, "Best of the five baselines by task and calibration set"
    )


def winner_table(study: Study, win_rows: pd.DataFrame, name: str, title: str) -> Table:
    """A winner map as a table: the best method in each column, its lead, and whether the lead is beyond noise."""
    rows = win_rows.assign(
        winner=[_winner(w, s) for w, s in zip(win_rows["winners"], win_rows["score"], strict=True)],
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
        caption="p: paired test of the winner against every other criterion, the largest of them (McNemar for a "
        "benchmark of right-or-wrong items and plans of one seed, otherwise t-tests over seeds and items); Holm: "
        f"corrected for all columns of one model and ratio; beyond noise below {LEVEL}. {setting(study)}",
        frame=spelled(rows, text | numbers),
        formats={"Score": SCORE, "Lead": SCORE, "p": "{:.4f}", "p (Holm)": SCORE},
        blocks=("Model", "Pruned", "Calibration"),
        optional=("Lead", "p", "p (Holm)"),
        low=win_rows[["lead_low"]].set_axis(["Lead"], axis=1),
        high=win_rows[["lead_high"]].set_axis(["Lead"], axis=1),
    )


def _winner(winners: Sequence[str], score: float) -> str:
    """The winner, or all that share the first place; of more than four only three are named."""
    if len(winners) <= 4 or score == 0:
        return label(winners, score)
    return f"{label(winners[:3], score)} and {len(winners) - 3} others"


def verdict(win: Mapping[str, Any]) -> str:
    """Verdict on a cell of the winner map: gap, tie, not tested, beyond noise or within noise."""
    winners = win["winners"]
    if not winners:
        return "gap"
    if len(winners) > 1:
        return "tie"
    if pd.isna(win["p"]):
        return "not tested"
    return "beyond noise" if win["beyond_noise"] else "within noise"


def winner_figure(win_rows: pd.DataFrame, name: str, title: str) -> Figure:
    """Draw the rows of `winner_map`: a map of columns x calibration sets per model and ratio, hatched within noise."""
    maps = list(groups(win_rows, SETTINGS))
    rows = max(len(group["column"].unique()) for _, group in maps)
    drawing, grid = style.panels(len(maps), 2, max(0.36 * rows, 1.1) + 0.75, below=0)
    for axes, (key, group) in zip(grid, maps, strict=True):
        _winner_axes(axes, group, drawing.get_figwidth() / min(2, len(maps)) - _LABELS)
        axes.set_title(f"{key['model']}, {group['pruned'].iloc[0]} pruned")
    handles = [
        Patch(facecolor=style.RULE, label="beyond noise"),
        Patch(facecolor=style.RULE, edgecolor=style.MUTED, hatch=style.HATCH, label="within noise"),
        Patch(facecolor="none", edgecolor=style.RULE, label="tie"),
    ]
    drawing.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=2.2)
    caption = (
        "Each cell names the criterion with the best score in a column under a calibration set. Hatched wins are "
        "within noise (paired test against every other criterion, Holm-corrected over the map, 5 %); ties name all."
    )
    return Figure(name, title, caption, drawing)


_LABELS = 0.8
"""Inches for the labels of the rows."""


def _winner_axes(axes: Axes, win_rows: pd.DataFrame, inches: float) -> None:
    columns = list(dict.fromkeys(win_rows["column"]))
    sets = names.calibrations_in_order(win_rows["calibration"])
    for win in records(win_rows):
        x, y = sets.index(win["calibration"]), columns.index(win["column"])
        winners: tuple[str, ...] = win["winners"]
        if len(winners) == 1:
            noise = not win["beyond_noise"]
            square = Rectangle((x, y), 1, 1, facecolor=style.colour(winners[0]), edgecolor=style.MUTED, linewidth=0)
            square.set(alpha=0.3, hatch=style.HATCH if noise else None)
            axes.add_patch(square)
        text, size = _fitted(winners, win["score"], inches / len(sets))
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=size, linespacing=1.0)
    for edge in range(len(sets) + 1):
        axes.axvline(edge, color=style.SURFACE, linewidth=2)
    for edge in range(len(columns) + 1):
        axes.axhline(edge, color=style.SURFACE, linewidth=2)
    style.squares(axes, list(map(names.calibration, sets)), list(map(names.benchmark, columns)))


def _fitted(winners: Sequence[str], score: float, inches: float) -> tuple[str, float]:
    """The text of a map's cell that is `inches` wide, and its font size; at most three names, the others counted."""
    small = int(inches / SMALL_LETTER)
    if len(winners) > 1 and score != 0:
        shown = [names.method(name) for name in winners[:3]]
        more = f" +{len(winners) - 3}" if len(winners) > 3 else ""
        text = (" =\n" if len(winners) == 2 else " = ").join(shown[:2]) + (f" =\n{shown[2]}{more}" if shown[2:] else "")
        fits = max(map(len, text.splitlines())) <= small
        return (text, 5.6) if fits else (f"{len(winners)} tied", 6.5)
    text = label(winners, score)
    if len(text) > inches / LETTER:
        return textwrap.fill(text, small), 5.6
    return text, 7.5 if len(winners) == 1 else 6.5
