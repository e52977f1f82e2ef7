"""The ranking of all plans by average, with their comparison with chance and with the best of the
methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.patches import Patch

from moe_lab.analysis.load.reader import records
from moe_lab.analysis.outputs.captions import LOSSES, score_setup
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import marks, style
from moe_lab.analysis.render.style import Figure
from moe_lab.analysis.render.table import PERCENT, SCORE, Table, display_frame
from moe_lab.analysis.stats.cell_scores import mean_definitions, notes_on_average
from moe_lab.analysis.stats.ranking import ABOVE_CHANCE, BEST, TIED, Ranking, overview, plan_name
from moe_lab.analysis.stats.winners import CAPTION

MOST_PLANS, MOST_PANELS = 40, 6
"""Most plans in a panel of a figure, and most panels in a figure; the table lists all plans."""


@output("ranking", chapter="ranking")
def ranking(results: Results, name: str) -> list[Item]:
    """All plans of a model and ratio by average, compared with chance and with the best method."""
    if not results.rankings:
        return []
    return [*_figures(results, name), ranking_table(results, name)]


@output("ranking.loss", chapter="ranks", needs=LOSSES)
def ranking_by_loss(results: Results, name: str) -> Table | None:
    """All plans by their mean loss on right answers, where lower is better."""
    if not results.by_answer_loss.rankings:
        return None
    table = ranking_table(results.by_answer_loss, name)
    return replace(table, caption=f"{CAPTION} {table.caption}")


def ranking_table(results: Results, name: str) -> Table:
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
        name=name,
        title="Plans by average",
        caption=" ".join(filter(None, sentences)),
        frame=frame,
        formats={column: form for column, form in formats.items() if column in frame},
        best={ranking.mean_name: ranking.quantity.best for ranking in rankings},
        blocks=("Model", "Pruned"),
        low=low[low.columns.intersection(frame.columns)],
        high=high[high.columns.intersection(frame.columns)],
        optional=("Of unpruned", "Spread", "Behind", "p"),
        footnotes=notes_on_average(results.comparisons),
    )


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


def _figures(results: Results, name: str) -> list[Figure]:
    """A figure for each model, with a panel per ranking. name: name of the output."""
    models = list(dict.fromkeys(ranking.model for ranking in results.rankings))
    figures = []
    for model in models:
        rankings = [ranking for ranking in results.rankings if ranking.model == model]
        # every step-th ranking; rounded up, so that at most MOST_PANELS are drawn
        step = -(-len(rankings) // MOST_PANELS)
        sample = rankings[::step]
        notes = notes_on_average(results.comparisons)
        if len(sample) < len(rankings):
            notes.append(f"Drawn: {len(sample)} of {len(rankings)} ratios.")
        figure_name = name if len(models) == 1 else f"{name}.{model.replace(' ', '_')}"
        figures.append(_figure(sample, figure_name, notes))
    return figures


def _figure(rankings: Sequence[Ranking], name: str, notes: Sequence[str]) -> Figure:
    """A figure with a panel for each of `rankings`, all of one model.

    notes: sentences at the end of the caption."""
    frames = []
    for ranking in rankings:
        count = len(ranking.scored_rows)
        note = f", the best {MOST_PLANS} of {count} plans" if count > MOST_PLANS else ""
        rows = ranking.scored_rows.iloc[:MOST_PLANS]
        frames.append(
            rows.assign(
                panel=f"{ranking.pruned_text} pruned{note}",
                label=list(map(plan_name, records(rows))),
                x=rows["score"],
                colour=rows["method"].map(style.colour),
                is_open=~rows["status"].str.startswith((ABOVE_CHANCE, BEST, TIED)),
            )
        )
    plans = pd.concat(frames)
    # The label of the axis and the legend are made for the first ranking. They hold for the others
    # if all plans of the model were run on the same benchmarks.
    first_ranking = rankings[0]
    x = marks.Axis(f"{first_ranking.mean_name} ({first_ranking.quantity.direction})")
    drawing = marks.intervals(plans, x, sharex=True)
    for axes, ranking in zip(drawing.axes, rankings, strict=True):
        for chance in ranking.chance.values():
            low, high = chance.limits(ranking.plans_tested)
            axes.axvspan(low, high, color=style.RULE, alpha=0.6, linewidth=0)
        axes.axvline(ranking.unpruned_score, **style.DASHED)  # not drawn if it is NaN
    legend_entries: list[Artist] = [style.legend_entry("unpruned", **style.DASHED)]
    sentences = [
        f"{first_ranking.mean_name} of every plan with its 95 % interval, best first.",
        _caption(rankings),
    ]
    has_chance = any(ranking.chance for ranking in rankings)
    if not plans["is_open"].all():
        meaning = "above chance" if has_chance else "the best method, or not separated from it"
        sentences.append(f"Filled marks: {meaning}.")
    if has_chance:
        legend_entries.append(Patch(facecolor=style.RULE, alpha=0.6, label="chance"))
        sentences.append("Grey: within chance.")
    style.legend(drawing, legend_entries)
    return Figure(
        name,
        f"Ranking: {first_ranking.model}",
        " ".join(filter(None, (*sentences, *notes))),
        drawing,
    )
