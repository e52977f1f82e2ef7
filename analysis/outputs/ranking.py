"""The ranking of all plans by average, with their status beside chance and beside the best of the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.load.reader import records
from analysis.outputs.captions import LOSSES, setting
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import PERCENT, SCORE, Table, spelled
from analysis.stats.cell_scores import means_in_words, not_averaged
from analysis.stats.ranking import ABOVE, BEST, TIED, Ranking, overview, plan_name
from analysis.stats.winners import CAPTION

DRAWN, PANELS = 40, 6
"""Most plans in a panel, and most panels of a model; the table has all."""


@output("ranking", chapter="ranking", filters="*Model|Pruned")
def ranking(results: Results, name: str) -> list[Item]:
    """All plans of a model and ratio by average, with intervals and their status beside chance and the best method."""
    if not results.rankings:
        return []
    return [*_figures(results, name), ranking_table(results, name)]


@output("ranking.loss", chapter="ranks", filters="*Model|Pruned", needs=LOSSES)
def ranking_by_loss(results: Results, name: str) -> list[Item]:
    """All plans by their mean loss on right answers, where lower is better."""
    return [replace(item, caption=f"{CAPTION} {item.caption}") for item in ranking(results.by_answer_loss, name)]


def ranking_table(results: Results, name: str) -> Table:
    """Every ranking as rows: place, average, its share of the unpruned model's, distance to the best method, status."""
    found = results.rankings
    averages = list(dict.fromkeys(ranking.mean for ranking in found))
    frame = pd.concat([_rows(ranking) for ranking in found], ignore_index=True).dropna(axis="columns", how="all")
    rows = pd.concat([ranking.rows for ranking in found], ignore_index=True)
    formats = {"Place": "{:.0f}", **dict.fromkeys(averages, SCORE), "Of unpruned": PERCENT, "Spread": SCORE}
    formats |= {"Behind": SCORE, "p": "{:.4f}"}
    mean = pd.Series([ranking.mean for ranking in found for _ in ranking.rows.index])
    low, high = (
        pd.DataFrame({name: rows[end].where(mean == name) for name in averages} | {"Behind": rows[f"behind_{end}"]})
        for end in ("low", "high")
    )
    return Table(
        name=name,
        title="Plans by average",
        caption=f"{means_in_words(results.comparisons)} Scores that are equal when printed share a place. Spread: "
        f"standard deviation between seeds, or models. {_caption(found)} {setting(results.study)}",
        frame=frame,
        formats={column: form for column, form in formats.items() if column in frame},
        best={each.mean: each.quantity.best for each in found},
        blocks=("Model", "Pruned"),
        low=low[low.columns.intersection(frame.columns)],
        high=high[high.columns.intersection(frame.columns)],
        optional=("Of unpruned", "Spread", "Behind", "p"),
        footnotes=not_averaged(results.comparisons),
    )


def _caption(found: Sequence[Ranking]) -> str:
    """What a status means, as far as the rankings have one, and what they say together."""
    sentences = []
    if any(ranking.chance for ranking in found):
        sentences.append(
            "Above chance: better than the best of as many random plans as the model has other plans would be with "
            "95 % probability; below chance: worse than the worst. A mean of seeds is taken as one plan."
        )
    if any(ranking.rows["verdict"].any() for ranking in found):
        sentences.append(
            "Best, separated: of the methods with several seeds, without random plans. Behind: the best of these minus "
            "this one; intervals and p are simultaneous for all pairs of them (studentised range)."
        )
    return " ".join([*sentences, *overview(found)])


def _rows(ranking: Ranking) -> pd.DataFrame:
    rows = ranking.rows.assign(model=ranking.model, pruned=ranking.pruned)
    text = {"Model": "model", "Pruned": "pruned", "Criterion": "method", "Calibration": "calibration"}
    numbers = {"Of unpruned": "share", "Spread": "spread", "Behind": "behind", "p": "p"}
    score = {ranking.mean: "score", "Interval over": "over"}
    return spelled(rows, {**text, "Place": "place", **score, **numbers, "Status": "status"})


def _figures(results: Results, name: str) -> list[Figure]:
    models = list(dict.fromkeys(ranking.model for ranking in results.rankings))
    found = []
    for model in models:
        own = [ranking for ranking in results.rankings if ranking.model == model]
        shown = own[:: -(-len(own) // PANELS)]
        notes = not_averaged(results.comparisons)
        notes += [f"Drawn: {len(shown)} of {len(own)} ratios."] if len(shown) < len(own) else []
        drawn = name if len(models) == 1 else f"{name}.{model.replace(' ', '_')}"
        found.append(_figure(shown, drawn, " ".join(notes)))
    return found


def _figure(own: list[Ranking], name: str, note: str) -> Figure:
    heights = [max(0.155 * min(len(ranking.scored), DRAWN), 0.6) for ranking in own]
    drawing = style.drawing(style.PAGE, sum(heights) + 0.75 * len(own) + 0.3)
    grid = drawing.subplots(len(own), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for axes, ranking in zip(grid, own, strict=True):
        _axes(axes, ranking)
    grid[-1].set_xlabel(f"{own[0].mean} ({own[0].quantity.direction})")
    look: dict[str, Any] = {"marker": "o", "linestyle": "none", "color": style.INK, "markersize": 4.5}
    filled = any(_filled(row) for ranking in own for row in records(ranking.scored))
    chance = any(ranking.chance for ranking in own)
    meaning = "above chance" if chance else "the best method, or not separated from it"
    keys = [style.key(f"unpruned {own[0].unpruned:.3f}", **style.DASHED)]
    if filled:
        keys += [style.key(meaning, **look), style.key("others", **look, markerfacecolor=style.SURFACE)]
    bands = [Patch(facecolor=style.RULE, alpha=0.6, label="chance")] if chance else []
    drawing.legend(handles=[*keys, *bands], loc="outside lower center", ncols=4, handlelength=1.8)
    caption = f"{own[0].mean} of every plan with its 95 % interval, in order. {_caption(own)}" + (
        " Grey: within chance." if chance else ""
    )
    return Figure(name, f"Ranking: {own[0].model}", " ".join(filter(None, (caption, note))), drawing)


def _filled(row: Mapping[str, Any]) -> bool:
    """Whether a plan's mark is filled: it is above chance, or without random plans at the top of the methods."""
    return str(row["status"]).startswith((ABOVE, BEST, TIED))


def _axes(axes: Axes, ranking: Ranking) -> None:
    scored = ranking.scored
    for chance in ranking.chance.values():
        low, high = chance.limits(ranking.compared)
        axes.axvspan(low, high, color=style.RULE, alpha=0.6, linewidth=0)
    if not np.isnan(ranking.unpruned):
        axes.axvline(ranking.unpruned, **style.DASHED)
    shown = records(scored.iloc[:DRAWN])
    for y, row in enumerate(shown):
        shade = style.colour(str(row["method"]))
        filled = _filled(row)
        axes.plot([row["low"], row["high"]], [y, y], color=shade, linewidth=1.5, alpha=0.7, solid_capstyle="butt")
        axes.plot(
            row["score"], y, marker="o", markersize=4, color=shade, markerfacecolor=shade if filled else style.SURFACE
        )
    style.ticks(axes.yaxis, range(len(shown)), [plan_name(row) for row in shown], labelsize=6.5)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    more = f", the best {DRAWN} of {len(scored)} plans" if len(scored) > DRAWN else ""
    axes.set_title(f"{ranking.pruned} pruned{more}", fontsize=8)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
