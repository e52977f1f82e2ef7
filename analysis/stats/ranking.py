"""Rank the plans of each model, ratio and gate by their average: intervals, the group that no test separates from the
best, and the band of chance.

A plan counts once, however many calibration sets it is compared under. Random plans of several seeds give the band of
chance: the interval in which the score of a further random plan lies with 95 % probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from analysis import names
from analysis.load import settings
from analysis.load.reader import records
from analysis.stats import uncertainty
from analysis.stats.comparison import RANDOM, Comparison, Target, chance_bands, group_targets, overall
from analysis.stats.quantity import Quantity
from analysis.stats.uncertainty import LEVEL, Estimate

ALL_MODELS = "all models"
COLUMNS = (
    "method", "calibration", "granularity", "seeds", "score", "low", "high", "spread", "share",
    "behind", "behind_low", "behind_high", "p", "p_holm", "verdict",
)  # fmt: skip
BEST, TIED, SEPARATED, UNTESTED = "best", "not separated", "separated", "not tested"
"""Verdicts on a plan beside the best one."""
ABOVE, WITHIN, BELOW = "above", "within", "below"
"""Where a plan lies beside the band of chance; above is better, also of a loss."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """The plans of one model, ratio and gate, best first, then those without a score."""

    model: str
    pruned: str
    """Ratio and gate in words."""
    quantity: Quantity
    """What is ranked by."""
    rows: pd.DataFrame
    """Index cell; columns COLUMNS. spread: standard deviation of the scores of its seeds; share: of the unpruned
    model's score; behind: how much worse than the best; p_holm: corrected over the ranking."""
    unpruned: float
    chance: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What a plan removes -> ends of the band of chance, if there are random plans of two seeds."""
    places: pd.DataFrame = field(default_factory=pd.DataFrame)
    """(plans, averages such as Code, and `mean`) where the plan lies beside the band of chance; "" where unknown."""

    @property
    def mean(self) -> str:
        """Name of what is ranked by, such as Avg."""
        return self.quantity.mean

    @property
    def scored(self) -> pd.DataFrame:
        """The plans that have a score."""
        return self.rows[self.rows["score"].notna()]

    @property
    def tied(self) -> pd.DataFrame:
        """The plans that no test separates from the best."""
        return self.scored[self.scored["verdict"].isin((TIED, UNTESTED))]

    @property
    def of_methods(self) -> bool:
        """Whether the plans have several seeds, so that verdicts are about methods."""
        return bool((self.scored["seeds"] > 1).all())


def rankings(comparisons: Sequence[Comparison]) -> list[Ranking]:
    """The rankings of all models by ratio and gate, then those of all models together."""
    found = [ranking for comparison in comparisons for ranking in _of_model(comparison)]
    return [*found, *_over_models(found)]


def _of_model(comparison: Comparison) -> Iterator[Ranking]:
    pruned = comparison.cells[(comparison.cells["criterion"] != "none") & (comparison.cells["ratio"] > 0)]
    words = settings.pruned(pruned)
    for _, cells in pruned.groupby(["ratio", "gate"], sort=True):
        target = overall(comparison, list(cells.index))
        if target and comparison.score(target)[cells.index].notna().any():
            yield _ranking(comparison, cells, words[cells.index[0]], target)


def _ranking(comparison: Comparison, cells: pd.DataFrame, words: str, target: Target) -> Ranking:
    """target: what is ranked by."""
    groups, quantity = group_targets(comparison, list(cells.index)), comparison.quantity(target)
    score, (low, high), by_seed = comparison.score(target), comparison.interval(target), comparison.by_seed(target)
    lower = quantity.lower_is_better
    order = list(score[cells.index].sort_values(ascending=lower, na_position="last", kind="stable").index)
    full = np.nan if comparison.unpruned is None else float(score[comparison.unpruned])
    plans = [by_seed[list(comparison.seeds[cell].values())].dropna() for cell in order]
    rows = cells.loc[order, ["method", "calibration", "granularity"]].assign(
        seeds=list(map(len, plans)),
        score=score[order],
        low=low[order],
        high=high[order],
        spread=[quantity.shown(own).std(ddof=1) for own in plans],
        share=quantity.shown(score[order]) / quantity.shown(full),
    )
    leads = [comparison.difference(target, order[0], cell) for cell in order[1:]]
    rows = _beside_the_best(rows, leads, quantity)
    bands = {name: chance_bands(comparison, cells, each) for name, each in groups.items()}
    places = {name: _places(comparison, rows, each, bands[name]) for name, each in groups.items()}
    chance = {name: quantity.shown(np.array(band)) for name, band in bands[quantity.mean].items()}
    chances = {name: (float(low), float(high)) for name, (low, high) in chance.items()}
    unpruned = float(quantity.shown(full))
    return Ranking(comparison.model, words, quantity, rows, unpruned, chances, pd.DataFrame(places, index=rows.index))


def _beside_the_best(rows: pd.DataFrame, leads: Sequence[Estimate], quantity: Quantity) -> pd.DataFrame:
    """Add how far the others are behind the first, the best: its score minus theirs, or the other way round where less
    is better; and the verdicts. Scores and differences, given as computed, become those that are shown."""
    sign = -1 if quantity.lower_is_better else 1
    behind = [Estimate(0.0), *(replace(lead, value=sign * lead.value) for lead in leads)]
    p_values = np.array([lead.p for lead in behind])
    p_holm = np.append(np.nan, uncertainty.holm(p_values[1:]))
    verdicts = np.select([np.isnan(p_holm), p_holm < LEVEL], [UNTESTED, SEPARATED], TIED)
    verdicts[0] = BEST
    best = rows["score"].iloc[0]
    ends = np.array([(lead.value, *lead.interval) for lead in behind])
    values, low, high = np.transpose(quantity.shown_difference(best, ends))
    values[np.abs(values) < 1e-9] = 0.0  # sums of equal outcomes differ by less, and -0 is none
    about = {"behind": values, "behind_low": low, "behind_high": high, "p": p_values, "p_holm": p_holm}
    shown = {column: quantity.shown(rows[column]) for column in ("score", "low", "high")}
    return rows.assign(**shown, **about, verdict=verdicts)[list(COLUMNS)]


def _places(
    comparison: Comparison, rows: pd.DataFrame, target: Target, bands: Mapping[str, tuple[float, float]]
) -> list[str]:
    """Where each plan lies beside the band of chance of what it removes; "" for random plans and without a band."""
    score, better = comparison.score(target), -1 if comparison.is_loss(target) else 1
    found = []
    for row in records(rows.reset_index()):
        value, band = score[row["cell"]], bands.get(row["granularity"])
        if band is None or np.isnan(value) or names.parts(row["method"])[0] in RANDOM.values():
            found.append("")
        else:
            outside = better * (int(value > band[1]) - int(value < band[0]))
            found.append((WITHIN, ABOVE, BELOW)[outside])
    return found


def _over_models(found: Sequence[Ranking]) -> Iterator[Ranking]:
    """Rankings of the plans that all models have, by the mean over models, with models as random effects."""
    for pruned in dict.fromkeys(ranking.pruned for ranking in found):
        own = [ranking for ranking in found if ranking.pruned == pruned]
        scores = [ranking.scored.set_index(["method", "calibration"])[["score", "granularity"]] for ranking in own]
        if len(own) < 2 or len({ranking.quantity for ranking in own}) > 1:
            continue
        columns = [own[0].quantity.computed(each["score"]) for each in scores]
        table = pd.concat(columns, axis=1, join="inner", keys=range(len(own)))
        if len(table) > 1:
            yield _of_models(own, table)


def _of_models(own: Sequence[Ranking], table: pd.DataFrame) -> Ranking:
    """table: (plans, models) scores as computed."""
    quantity = own[0].quantity
    table = table.loc[table.mean(axis=1).sort_values(ascending=quantity.lower_is_better, kind="stable").index]
    unpruned = quantity.shown(float(np.mean([quantity.computed(ranking.unpruned) for ranking in own])))
    scores = table.to_numpy(float)
    means = [uncertainty.mean_estimate(row) for row in scores]
    low, high = np.transpose([mean.interval for mean in means])
    rows = table.index.to_frame(index=False).assign(
        granularity="",
        seeds=len(own),
        score=[mean.value for mean in means],
        low=low,
        high=high,
        spread=quantity.shown(scores).std(axis=1, ddof=1),
        share=[quantity.shown(mean.value) / unpruned for mean in means],
    )
    leads = [uncertainty.mean_estimate(scores[0] - other) for other in scores[1:]]
    rows = _beside_the_best(rows, leads, quantity).rename_axis("cell")
    return Ranking(ALL_MODELS, own[0].pruned, quantity, rows, float(unpruned))


def plan_name(row: dict[str, object]) -> str:
    """`REAP on Code`; the name alone of a method that reads no text."""
    text = names.calibration(str(row["calibration"]))
    return names.method(str(row["method"])) + ("" if row["calibration"] == "none" else f" on {text}")


NAMED, SHOWN = 4, 8
"""Most plans that a sentence names; most plans of a ranking in a terminal, and most rankings there and in sentences."""


def headlines(found: Sequence[Ranking]) -> list[str]:
    """What the first SHOWN rankings say, and how many more there are."""
    more = f"The table has {len(found) - SHOWN} more rankings." if len(found) > SHOWN else ""
    return [*map(headline, found[:SHOWN]), *filter(None, [more])]


def headline(ranking: Ranking) -> str:
    """What a ranking says, in three sentences at most."""
    scored, tied = ranking.scored, ranking.tied
    best = records(scored)[0]
    mean = names.uncapitalised(ranking.mean)
    extreme = f"lowest {mean}" if ranking.quantity.lower_is_better else "best average"
    share = "" if np.isnan(best["share"]) else f", {names.share(best['share'])} of the unpruned model's"
    first = (
        f"{ranking.model}, {ranking.pruned} removed: of {names.count(len(scored), 'plan')}, {plan_name(best)} has the "
        f"{extreme}, {best['score']:.3f} ({best['low']:.3f} to {best['high']:.3f}){share}"
    )
    return " ".join(filter(None, (f"{first}; {_group(ranking, tied)}.", _about(ranking), _chance(ranking))))


def _group(ranking: Ranking, tied: pd.DataFrame) -> str:
    if len(ranking.scored) == 1:
        return "it is the only one"
    if tied.empty:
        return "paired tests separate all others from it"
    words = [plan_name(row) for row in records(tied)[:NAMED]]
    more = [f"{len(tied) - NAMED} more"] if len(tied) > NAMED else []
    return f"no paired test separates from it {names.listing([*words, *more])}"


def _about(ranking: Ranking) -> str:
    if ranking.model == ALL_MODELS:
        fewest = 2.0 ** (1 - int(ranking.rows["seeds"].iloc[0]))
        models = names.count(int(ranking.rows["seeds"].iloc[0]), "model")
        return f"A sign test over {models} cannot give p < {LEVEL}." if fewest > LEVEL else ""
    return "" if ranking.of_methods else "Plans of one seed stand for themselves, not for their method."


def _chance(ranking: Ranking) -> str:
    if not ranking.chance:
        return ""
    places = ranking.places[ranking.mean]
    counts = [f"{int((places == place).sum())} {place}" for place in (ABOVE, WITHIN, BELOW)]
    ends = [f"{low:.3f} to {high:.3f}" for low, high in ranking.chance.values()]
    return f"Random plans reach {names.listing(ends)}: {names.listing(counts)} that band of chance."


def ranking_text(found: Sequence[Ranking]) -> str:
    """The rankings as text for a terminal: the best plans of each, and those that no test separates from the best."""
    parts = []
    for ranking in found[:SHOWN]:
        what = f"{ranking.mean}, {ranking.quantity.direction}"
        lines = [f"{ranking.model}, {ranking.pruned} removed: {what} (unpruned {ranking.unpruned:.3f})"]
        rows = records(ranking.scored.reset_index())
        width = max(len(plan_name(row)) for row in rows[:SHOWN])
        for row in rows[:SHOWN]:
            place = ranking.places[ranking.mean][row["cell"]] if ranking.chance else ""
            words = [row["verdict"], f"{place} chance" if place in (ABOVE, BELOW) else f"{place} the band of chance"]
            numbers = f"{row['score']:.3f}  {row['low']:.3f} to {row['high']:.3f}"
            lines.append(f"  {plan_name(row):{width}}  {numbers}  {', '.join(words if place else words[:1])}")
        if len(rows) > SHOWN:
            lines.append(f"  and {len(rows) - SHOWN} more")
        parts.append("\n".join(lines))
    if len(found) > SHOWN:
        parts.append(f"and {len(found) - SHOWN} more rankings in the report")
    return "\n\n".join(parts)
