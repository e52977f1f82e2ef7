"""The ranking of all plans by average, with their comparison with chance and with the best of the
methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis.outputs.captions import LOSSES, score_setup
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import PERCENT, SCORE, Table, display_frame
from moe_lab.analysis.stats.cell_scores import mean_definitions, notes_on_average
from moe_lab.analysis.stats.ranking import (
    AVERAGE,
    BEST,
    SEPARATED,
    TIED,
    UNTESTED,
    Ranking,
    overview,
)
from moe_lab.analysis.stats.winners import CAPTION

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
    return replace(table, caption=f"{CAPTION} {table.caption}")


def ranking_table(results: Results) -> Table:
    """All rankings in one table, with a row per plan."""
    rankings = results.rankings
    averages = list(dict.fromkeys(ranking.mean_name for ranking in rankings))
    frame = pd.concat([_displayed_rows(ranking) for ranking in rankings], ignore_index=True)
    frame = frame.dropna(axis="columns", how="all")
    # the plans of `frame` in the same order, with the columns of `Ranking.rows`
    rows = pd.concat(
        [ranking.rows.assign(average=ranking.mean_name) for ranking in rankings],
        ignore_index=True,
    )
    formats = {
        "Rank": "{:.0f}",
        **dict.fromkeys(averages, SCORE),
        "Of unpruned": PERCENT,
        "Spread": SCORE,
        "Behind": SCORE,
        "p": "{:.4f}",
    }
    # Each frame has a column for each name in `averages`. A row has a number only in the column of
    # its ranking's average.
    low, high = (
        pd.DataFrame(
            {average: rows[end].where(rows["average"] == average) for average in averages}
            | {"Behind": rows[f"behind_{end}"]}
        )
        for end in ("low", "high")
    )
    spread_sentence = (
        "Spread: standard deviation between seeds, or models." if "Spread" in frame else ""
    )
    sentences = (
        mean_definitions(results.comparisons),
        _SHARED_RANKS,
        spread_sentence,
        _caption(rankings),
        score_setup(results.study),
    )
    return Table(
        title="Plans by average",
        caption=" ".join(filter(None, sentences)),
        frame=frame,
        formats={column: form for column, form in formats.items() if column in frame},
        best={ranking.mean_name: ranking.quantity.best for ranking in rankings},
        low=low[low.columns.intersection(frame.columns)],
        high=high[high.columns.intersection(frame.columns)],
        bold=pd.concat([_separated(ranking) for ranking in rankings], ignore_index=True),
        optional=("Of unpruned", "Spread", "Behind", "p"),
        footnotes=notes_on_average(results.comparisons),
    )


def _separated(ranking: Ranking) -> pd.DataFrame:
    """Booleans: whether a plan's average is the best and is separated from all others by a test."""
    verdicts = ranking.rows["verdict"]
    is_separated = SEPARATED in set(verdicts) and not set(verdicts) & {TIED, UNTESTED}
    return pd.DataFrame({ranking.mean_name: (verdicts == BEST) & is_separated})


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


def _displayed_rows(ranking: Ranking) -> pd.DataFrame:
    """The rows of one ranking in `ranking_table`, with all displayed columns."""
    rows = ranking.rows.assign(model=ranking.model, pruned=ranking.pruned_text)
    text_columns = {
        "Model": "model",
        "Pruned": "pruned",
        "Criterion": "method",
        "Calibration": "calibration",
    }
    number_columns = {"Of unpruned": "share", "Spread": "spread", "Behind": "behind", "p": "p"}
    return display_frame(
        rows,
        {
            **text_columns,
            "Rank": "rank",
            ranking.mean_name: "score",
            "Interval over": "over",
            **number_columns,
            "Status": "status",
        },
    )


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
