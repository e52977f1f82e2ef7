"""Which criteria lead: the ranking of all plans by average, and the maps of winners by task and
calibration set (Unified Expert Pruning, Fig. 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import LOSSES, score_setup
from moe_lab.analysis.outputs.score_rows import concatenate_numbers, numbers_table, sort_cells
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import (
    CELL_COLUMNS,
    PERCENT,
    SCORE,
    Columns,
    Table,
    display_frame,
    frame_and_formats,
)
from moe_lab.analysis.stats.cell_scores import Numbers, mean_definitions, notes_on_average
from moe_lab.analysis.stats.ranking import (
    AVERAGE,
    BEST,
    SEPARATED,
    TIED,
    UNTESTED,
    Ranking,
    overview,
)
from moe_lab.analysis.stats.uncertainty import LEVEL
from moe_lab.analysis.stats.winners import SETTINGS, label, winner_map

TOOLTIP = ("Criterion", "Calibration", "Metric", "score", "low", "high", "unpruned", "status")


@output("ranking", chapter="ranking")
def ranking(results: Results) -> list[Item]:
    """All plans of a model and ratio by average, compared with chance and with the best method."""
    if not results.rankings:
        return []
    return [ranking_figure(results), ranking_table(results)]


@output("ranking.loss", chapter="ranks", needs=LOSSES)
def ranking_by_loss(results: Results) -> Table | None:
    """All plans by their mean loss on right answers, where lower is better."""
    if not results.by_answer_loss.rankings:
        return None
    table = ranking_table(results.by_answer_loss)
    meaning = "Loss on right answers, in bits per byte of the answer: lower is better."
    return replace(table, caption=f"{meaning} {table.caption}")


def ranking_table(results: Results) -> Table:
    """All rankings in one table, with a row per plan."""
    rankings = results.rankings
    rows = concatenate_numbers(map(_displayed_rows, rankings))
    assert rows is not None  # there is at least one ranking
    sentences = (
        mean_definitions(results.comparisons),
        _SHARED_RANKS,
        "Spread: standard deviation between seeds." if "Spread" in rows.frame else "",
        _caption(rankings),
        score_setup(results.study),
    )
    return numbers_table(
        rows,
        {"Rank": "{:.0f}", "Of unpruned": PERCENT, "Spread": SCORE, "p": "{:.4f}"},
        title="Plans by average",
        caption=" ".join(filter(None, sentences)),
        bold=pd.concat([_separated(ranking) for ranking in rankings], ignore_index=True),
        optional=("Of unpruned", "Spread", "Behind", "p"),
        footnotes=notes_on_average(results.comparisons),
    )


def _separated(ranking: Ranking) -> pd.DataFrame:
    """Booleans: whether a plan's average is the best and is separated from all others by a test."""
    verdicts = ranking.rows["verdict"]
    is_separated = SEPARATED in set(verdicts) and not set(verdicts) & {TIED, UNTESTED}
    return pd.DataFrame({ranking.quantity.mean_name: (verdicts == BEST) & is_separated})


_SHARED_RANKS = "Scores that are equal when printed share a rank."


def _caption(rankings: Sequence[Ranking]) -> str:
    """Text for a caption: the meaning of the texts in the column "Status", then the `overview`."""
    sentences = []
    if any(ranking.chance for ranking in rankings):
        sentences.append(
            "Above chance: with 95 % probability none of k random plans is as good, where k is the "
            "number of the model's other plans; below chance: none is as bad. The mean of a "
            "method's seeds counts as one plan."
        )
    # a plan without a verdict has the empty text
    if any(ranking.rows["verdict"].any() for ranking in rankings):
        sentences.append(
            "Best, separated: of the methods with several seeds, without random plans. Behind: the "
            "best of these minus this one; intervals and p are simultaneous for all pairs of them "
            "(studentised range)."
        )
    return " ".join([*sentences, *overview(rankings)])


def _displayed_rows(ranking: Ranking) -> Numbers:
    """The rows of one ranking in `ranking_table`."""
    rows = ranking.rows.assign(model=ranking.comparison.model, removed_text=ranking.pruned_text)
    mean = ranking.quantity.mean_name
    columns = {
        **CELL_COLUMNS,
        "Rank": "rank",
        mean: "score",
        "Interval over": "over",
        "Of unpruned": "share",
        "Spread": "spread",
        "Behind": "behind",
        "p": "p",
        "Status": "status",
        f"{mean} low": "low",
        f"{mean} high": "high",
        "Behind low": "behind_low",
        "Behind high": "behind_high",
    }
    lower_is_better = {mean} if ranking.quantity.lower_is_better else set()
    return Numbers(display_frame(rows, columns), lower_is_better)


def ranking_figure(results: Results) -> Figure:
    """All plans with their intervals, the band of chance and the unpruned model: a panel for each
    model, ratio and gate, a row per criterion, and in it a line per calibration set."""
    rows = results.scored_plans
    rows = rows.assign(colour=rows["method"].map(charts.colour))
    several_sets = rows["Calibration"].nunique() > 1
    place: dict[str, Any] = {
        "y": charts.label("Criterion", sort=_best_first(rows)),
        "color": {"field": "colour", "scale": None},
        "tooltip": [{"field": column} for column in TOOLTIP],
    }
    if several_sets:
        place["yOffset"] = charts.label("Calibration")
    shape = charts.label("Calibration") if several_sets else {"value": "circle"}
    ends = rows[["low", "high", "score", "unpruned"]].to_numpy(float)
    scale = {"domain": [float(np.nanmin(ends)), float(np.nanmax(ends))], "nice": True}
    x = charts.number("score", "score, with 95 % interval", scale=scale)
    band: dict[str, Any] = {"x": {**x, "field": "chance_low", "aggregate": "min"}}
    band["x2"] = {"field": "chance_high", "aggregate": "max"}
    point = {"x": x, "shape": shape, **place}
    layers = [
        charts.layer("rect", {"color": charts.MUTED, "opacity": 0.2, "clip": True}, **band),
        charts.reference("x", "unpruned"),
        charts.layer("rule", {"opacity": 0.6}, x={**x, "field": "low"}, x2="high", **place),
        *charts.points(rows, **point),
    ]
    has_chance = any(ranking.chance for ranking in results.rankings)
    filled = "above chance" if has_chance else "the best method, or not separated from it"
    sentences = [
        "Every plan with its 95 % interval, best criterion first; dashed: the unpruned model.",
        "Grey band: random plans (of averages)." if has_chance else "",
        f"Filled marks: {filled}." if not rows["is_open"].all() else "",
        *notes_on_average(results.comparisons),
    ]
    title, caption = "All plans", " ".join(filter(None, sentences))
    size = (275, {"step": 7 if several_sets else 18})
    return Figure(title, caption, rows, layers, 4, size, initial={"Metric": AVERAGE})


@output("benchmark_groups", chapter="winners")
def group_figure(results: Results) -> Figure | None:
    """Scores of criteria by benchmark group, shaded by the share of the unpruned model's score.

    A map per model: the mean over all plans of a criterion, or over those that menus select."""
    if not results.rankings:
        return None
    rows = results.scored_plans
    y = charts.label("Criterion", sort=_best_first(rows))
    layers = charts.mean_map(charts.label("Metric"), y, "kept", "score")
    caption = (
        "Mean score over plans; shade: the share of the unpruned model's score that they keep. The "
        "menus choose calibration sets and ratios."
    )
    title = "Criteria by benchmark group"
    size = ({"step": 38}, {"step": 20})
    return Figure(title, caption, rows, layers, 4, size, panel="Model")


def _best_first(rows: pd.DataFrame) -> list[str]:
    """The criteria of `scored_plans` by the share of the unpruned score that they keep."""
    kept = rows.groupby("Criterion")["kept"].mean()
    return list(kept.sort_values(ascending=False, kind="stable").index)


def _map_and_table(results: Results, wins: pd.DataFrame, title: str) -> list[Item]:
    """The figure and the table of a winner map. [] if `wins` is on fewer than two displayed
    columns: the map then adds nothing to the ranking of the methods.

    wins: rows of `winner_map`."""
    if wins.empty or wins["column"].nunique() < 2:
        return []
    wins = wins.assign(
        winner=list(map(label, wins["winners"], wins["score"])),
        verdict=list(map(verdict, records(wins))),
    )
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
    if not set(results.study.cells["method"]) & set(names.BASELINES):
        return []
    wins = winner_map(results.comparisons, names.BASELINES)
    return _map_and_table(results, wins, "Leading baseline by task and calibration set")


def winner_table(study: Study, wins: pd.DataFrame, title: str) -> Table:
    """A winner map as a table, a row per cell of the map. wins: see `winner_figure`."""
    rows = wins.assign(runner_up=wins["runner_up"].map(names.method))
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
        "Lead low": "lead_low",
        "Lead high": "lead_high",
    }
    return Table(
        title=title,
        caption=(f"{proved_wins_sentence(wins)} {_MEANING_OF_P} {score_setup(study)}"),
        **frame_and_formats(rows, columns),
        optional=("Lead", "p", "p (Holm)"),
    )


NO_RESULT, TIE, PROVED, NOT_PROVED = "gap", "tie", "proved win", "not proved"
"""Verdicts on a cell of the winner map, besides UNTESTED."""


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
    calibration set. wins: rows of `winner_map`, with `label` and `verdict` of each in the columns
    "winner" and "verdict"."""
    wins = sort_cells(wins, *SETTINGS, "calibration")
    columns = {
        "Model": "model",
        "Pruned": "pruned",
        "Calibration": "calibration",
        "Metric": "column",
        "score": "score",
        "lead": "lead",
    }
    rows = display_frame(wins, columns).assign(
        panel=wins["model"] + ", " + wins["pruned"] + " pruned",
        winner=wins["winner"],
        verdict=wins["verdict"],
        colour=wins["winners"].map(lambda keys: charts.colour(keys[0]) if keys else None),
    )
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
    return Figure(title, caption, rows, layers, 4, (width, height))


SQUARE = (90, 24)
"""Width and height of a square of the map, in pixels."""
