"""The ranking of all plans by average, with those that no test separates from the best and the band of chance."""

from __future__ import annotations

from dataclasses import replace

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
from analysis.stats.ranking import ALL_MODELS, BEST, TIED, UNTESTED, Ranking, plan_name
from analysis.stats.winners import CAPTION

DRAWN, PANELS = 40, 6
"""Most plans in a panel, and most panels of a model; the table has all."""


@output("ranking", chapter="ranking", filters="*Model|Pruned")
def ranking(results: Results, name: str) -> list[Item]:
    """All plans of a model and ratio by average, with intervals, tests against the best and the band of chance."""
    if not results.rankings:
        return []
    return [*_figures(results, name), ranking_table(results, name)]


@output("ranking.loss", chapter="ranks", filters="*Model|Pruned", needs=LOSSES)
def ranking_by_loss(results: Results, name: str) -> list[Item]:
    """All plans by their mean loss on right answers, where lower is better."""
    return [replace(item, caption=f"{CAPTION} {item.caption}") for item in ranking(results.by_answer_loss, name)]


def ranking_table(results: Results, name: str) -> Table:
    """Every ranking as rows: the average, its share of the unpruned model's, the distance to the best and its p."""
    found = results.rankings
    averages = list(dict.fromkeys(ranking.mean for ranking in found))
    places = [_places(ranking) for ranking in found]
    frame = pd.concat([_rows(ranking) for ranking in found], ignore_index=True)
    extra = pd.concat(places, ignore_index=True).fillna("")
    frame = pd.concat([frame, extra.loc[:, (extra != "").any()]], axis=1)
    rows = pd.concat([ranking.rows for ranking in found], ignore_index=True)
    numbers = {
        **dict.fromkeys(averages, SCORE),
        "Of unpruned": PERCENT,
        "Spread": SCORE,
        "Behind": SCORE,
        "p": "{:.4f}",
        "p (Holm)": SCORE,
    }
    mean = pd.Series([ranking.mean for ranking in found for _ in ranking.rows.index])
    low, high = (
        pd.DataFrame({name: rows[end].where(mean == name) for name in averages} | {"Behind": rows[f"behind_{end}"]})
        for end in ("low", "high")
    )
    several = "" if (rows["seeds"] > 1).all() else "Plans of one seed stand for themselves, not for their method. "
    chance = (
        "Chance: beside the interval in which a further random plan lies with 95 % probability, by what the plan "
        "removes. "
        if len(extra.columns)
        else ""
    )
    return Table(
        name=name,
        title="Plans by average",
        caption=f"{means_in_words(results.comparisons)} "
        f"Intervals are over seeds and items together, of all models over models. Behind: the best minus this "
        "plan, paired by seed and item; p is Holm-corrected over the ranking. Spread: standard deviation between "
        f"seeds, or models. {several}{chance}{setting(results.study)}",
        frame=frame,
        formats={column: form for column, form in numbers.items() if column in frame},
        best={each.mean: "min" if each.quantity.lower_is_better else "max" for each in found},
        blocks=("Model", "Pruned"),
        low=low,
        high=high,
        optional=("Of unpruned", "Spread", "Behind", "p", "p (Holm)"),
        footnotes=not_averaged(results.comparisons),
    )


def _rows(ranking: Ranking) -> pd.DataFrame:
    noun = "model" if ranking.model == ALL_MODELS else "seed"
    rows = ranking.rows.assign(
        model=ranking.model,
        pruned=ranking.pruned,
        of=[f"{count} {noun}{'s' if count != 1 else ''}" for count in ranking.rows["seeds"]],
    )
    rows.loc[rows.index[0], "behind"] = np.nan
    text = {"Model": "model", "Pruned": "pruned", "Criterion": "method", "Calibration": "calibration", "Of": "of"}
    numbers = {
        ranking.mean: "score",
        "Of unpruned": "share",
        "Spread": "spread",
        "Behind": "behind",
        "p": "p",
        "p (Holm)": "p_holm",
    }
    return spelled(rows, {**text, **numbers, "Beside the best": "verdict"})


def _places(ranking: Ranking) -> pd.DataFrame:
    """A column `Chance: Code` for each average, without an index; no columns where there is no band."""
    places = ranking.places if ranking.chance else pd.DataFrame(index=ranking.rows.index)
    named = {column: "Chance" if column == ranking.mean else f"Chance: {column}" for column in places}
    return places.rename(columns=named).reset_index(drop=True).reindex(range(len(ranking.rows)))


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
    keys = [
        style.key("best, or not separated from it", marker="o", linestyle="none", color=style.INK, markersize=4.5),
        style.key(
            "separated", marker="o", linestyle="none", color=style.INK, markersize=4.5, markerfacecolor=style.SURFACE
        ),
        style.key(f"unpruned {own[0].unpruned:.3f}", **style.DASHED),
    ]
    chance = any(ranking.chance for ranking in own)
    bands = [Patch(facecolor=style.RULE, alpha=0.6, label="band of chance")] if chance else []
    drawing.legend(handles=[*keys, *bands], loc="outside lower center", ncols=4, handlelength=1.8)
    caption = (
        f"{own[0].mean} of every plan with its 95 % interval, best first. Filled: no paired test separates it from the "
        "best, after Holm's correction."
        + (" Grey: where a further random plan lies with 95 % probability." if chance else "")
    )
    return Figure(name, f"Ranking: {own[0].model}", " ".join(filter(None, (caption, note))), drawing)


def _axes(axes: Axes, ranking: Ranking) -> None:
    scored = ranking.scored
    for low, high in ranking.chance.values():
        axes.axvspan(low, high, color=style.RULE, alpha=0.6, linewidth=0)
    if not np.isnan(ranking.unpruned):
        axes.axvline(ranking.unpruned, **style.DASHED)
    shown = records(scored.iloc[:DRAWN])
    for y, row in enumerate(shown):
        shade = style.colour(str(row["method"]))
        filled = row["verdict"] in (BEST, TIED, UNTESTED)
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
