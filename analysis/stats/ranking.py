"""Rank the plans of each model, ratio and gate by their average: intervals, their status beside chance, and verdicts on
methods that have several seeds.

A plan counts once, however many calibration sets it is compared under. A plan is above chance if the best of as many
random plans is hardly ever that good (`analysis.stats.chance`). The best of the methods is compared with all others at
once (`uncertainty.best_of_many`). A method with one seed gets no verdict: its plan says nothing about the next seed.
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
from analysis.stats.chance import Chance, chances
from analysis.stats.comparison import Comparison, Kind, Target, overall, random_scores
from analysis.stats.quantity import Quantity
from analysis.stats.ranks import PRINTED_DECIMALS
from analysis.stats.uncertainty import LEVEL, Estimate
from moe_lab.results import RANDOM

ALL_MODELS = "all models"
BEST, TIED, SEPARATED, UNTESTED = "best", "not separated", "separated", "not tested"
"""Verdicts on a method with several seeds beside the best such method."""
ABOVE, WITHIN, BELOW = "above chance", "within chance", "below chance"
"""Where a plan lies beside random plans; above is better, also of a loss."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """The plans of one model, ratio and gate, best first, then those without a score."""

    model: str
    request: tuple[float, str]
    """Requested ratio, and gate."""
    pruned: str
    """What is removed, and the gate if there are several, in words."""
    quantity: Quantity
    """What is ranked by."""
    rows: pd.DataFrame
    """Index cell; columns criterion, method, calibration, seeds, score, low, high, and over: what the interval is over;
    place: equal for scores that are printed equal; spread: standard deviation of the scores of its seeds; share: of the
    unpruned model's score; behind, behind_low, behind_high, p: how much worse than the best method; chance: ABOVE,
    WITHIN or BELOW, "" if unknown; verdict: "" with one seed; status: chance, then the verdict unless the plan is
    within or below chance. Of one model also granularity and recovery."""
    unpruned: float
    compared: int = 0
    """Number of plans of the model that are compared with chance."""
    chance: dict[Kind, Chance] = field(default_factory=dict)
    """Kind of plan -> chance, if there are random plans of two seeds."""

    @property
    def mean(self) -> str:
        """Name of what is ranked by, such as Avg."""
        return self.quantity.mean

    @property
    def scored(self) -> pd.DataFrame:
        """The plans that have a score."""
        return self.rows[self.rows["score"].notna()]


@dataclass(frozen=True, eq=False)
class _Group:
    """Pruned cells of one model, ratio and gate."""

    comparison: Comparison
    cells: pd.DataFrame
    pruned: str
    target: Target
    """What is ranked by."""

    @property
    def request(self) -> tuple[float, str]:
        """Requested ratio, and gate, by which groups of different models are matched."""
        ratio, gate = self.cells[["ratio", "gate"]].iloc[0]
        return ratio, gate

    @property
    def alike(self) -> tuple[tuple[float, str], Target, Quantity]:
        """What groups have in common whose random plans differ equally much."""
        return self.request, self.target, self.comparison.quantity(self.target)


def rankings(comparisons: Sequence[Comparison]) -> list[Ranking]:
    """The rankings of all models by ratio and gate, then those of all models together."""
    groups = [group for comparison in comparisons for group in _groups(comparison)]
    found = [_ranking(group, groups) for group in groups]
    return [*found, *_over_models(found)]


def _groups(comparison: Comparison) -> Iterator[_Group]:
    pruned = comparison.cells[(comparison.cells["criterion"] != "none") & (comparison.cells["ratio"] > 0)]
    words = settings.pruned(pruned)
    for _, cells in pruned.groupby(["ratio", "gate"], sort=True):
        target = overall(comparison, list(cells.index))
        if target and comparison.score(target)[cells.index].notna().any():
            yield _Group(comparison, cells, words[cells.index[0]], target)


def _ranking(group: _Group, groups: Sequence[_Group]) -> Ranking:
    """groups: of all models; those with the same ratio and gate tell how much random plans differ."""
    comparison, target, quantity = group.comparison, group.target, group.comparison.quantity(group.target)
    score, (low, high), by_seed = comparison.score(target), comparison.interval(target), comparison.by_seed(target)
    lower = quantity.lower_is_better
    order = list(score[group.cells.index].sort_values(ascending=lower, na_position="last", kind="stable").index)
    full = np.nan if comparison.unpruned is None else float(score[comparison.unpruned])
    plans = [by_seed[comparison.scored_plans(target, cell)] for cell in order]
    rows = group.cells.loc[order, ["criterion", "method", "calibration", "granularity", "recovery"]].assign(
        seeds=list(map(len, plans)),
        over=[f"{len(scores)} seeds and items" if len(scores) > 1 else "items" for scores in plans],
        score=score[order],
        low=low[order],
        high=high[order],
        spread=[quantity.shown(scores).std(ddof=1) for scores in plans],
        share=quantity.shown(score[order]) / quantity.shown(full),
    )
    compared = sum(_compared(each) for each in groups if each.comparison is comparison)
    chance = _chance(group, groups)
    rows = rows.assign(chance=_beside_chance(rows, chance, compared, lower))
    methods = _with_seeds(rows)
    leads = comparison.leads(target, methods) if len(methods) > 1 else []
    rows = _with_status(_with_verdicts(rows, methods, leads, quantity))
    unpruned = float(quantity.shown(full))
    return Ranking(comparison.model, group.request, group.pruned, quantity, rows, unpruned, compared, chance)


def _compared(group: _Group) -> int:
    """Number of plans that have a score and are not random."""
    plans = group.cells.index[~group.cells["criterion"].isin(RANDOM)]
    return int(group.comparison.score(group.target)[plans].notna().sum())


def _with_seeds(rows: pd.DataFrame) -> list[int]:
    """The methods that can be compared, best first: those with several seeds, without random plans."""
    return list(rows.index[(rows["seeds"] > 1) & rows["score"].notna() & ~rows["criterion"].isin(RANDOM)])


def _with_verdicts(
    rows: pd.DataFrame, methods: Sequence[int], leads: Sequence[Estimate], quantity: Quantity
) -> pd.DataFrame:
    """Add places, how far `methods` are behind the first of them, the best, and verdicts. Scores and leads, given as
    computed, become those that are shown.

    leads: the score of the best minus theirs; where less is better, they are turned round."""
    shown = {column: quantity.shown(rows[column]) for column in ("score", "low", "high")}
    printed = shown["score"].round(PRINTED_DECIMALS)
    verdicts, tests = {}, {}
    for method, lead in zip(methods[1:], leads, strict=True):
        behind = replace(lead, value=0.0 if abs(lead.value) < 1e-9 else quantity.sign * lead.value)
        ends = quantity.shown_difference(rows.loc[methods[0], "score"], np.array([behind.value, *behind.interval]))
        tests[method] = [*ends, behind.p]
        verdicts[methods[0]] = BEST
        verdicts[method] = _verdict(behind, printed[method] == printed[methods[0]])
    columns = ["behind", "behind_low", "behind_high", "p"]
    return rows.assign(
        **shown,
        place=(-quantity.sign * printed).rank(method="min"),
        verdict=[verdicts.get(plan, "") for plan in rows.index],
        **pd.DataFrame.from_dict(tests, "index", float, columns).reindex(rows.index),
    )


def _verdict(behind: Estimate, equal: bool) -> str:
    if equal:
        return BEST
    if np.isnan(behind.p):
        return UNTESTED
    return SEPARATED if behind.p < LEVEL else TIED


def _with_status(rows: pd.DataFrame) -> pd.DataFrame:
    """Add one status a row: where it lies beside chance, and the verdict where that does not rule one out."""
    ruled_out = rows["chance"].isin((WITHIN, BELOW))
    both = rows["chance"].where(rows["verdict"] == "", rows["chance"] + ", " + rows["verdict"]).str.removeprefix(", ")
    status = rows["chance"].where(ruled_out, both).mask(rows["criterion"].isin(RANDOM), "random plans")
    return rows.assign(status=status)


def _chance(group: _Group, groups: Sequence[_Group]) -> dict[Kind, Chance]:
    """Kind of plan -> chance, with the spread of random plans of all models that have this ratio and average."""
    alike = [each for each in groups if each.alike == group.alike]
    random = {each.comparison.model: random_scores(each.comparison, each.cells, each.target) for each in alike}
    found = {}
    for kind in random[group.comparison.model]:
        samples = {model: scores[kind] for model, scores in random.items() if kind in scores}
        found[kind] = chances(samples)[group.comparison.model]
    return found


def _beside_chance(rows: pd.DataFrame, chance: Mapping[Kind, Chance], compared: int, lower: bool) -> list[str]:
    """Where each plan lies beside the random plans of its kind; "" for random plans and where there are none."""
    places = []
    for row in records(rows):
        kind = chance.get((row["granularity"], row["recovery"]))
        if kind is None or np.isnan(row["score"]) or row["criterion"] in RANDOM:
            places.append("")
            continue
        low, high = kind.limits(compared)
        side = int(row["score"] > high) - int(row["score"] < low)
        places.append((WITHIN, ABOVE, BELOW)[-side if lower else side])
    return places


def _over_models(found: Sequence[Ranking]) -> Iterator[Ranking]:
    """Rankings of the plans that all models have, by the mean over models, with models as random effects."""
    models = {ranking.model for ranking in found}
    for request in dict.fromkeys(ranking.request for ranking in found):
        own = [ranking for ranking in found if ranking.request == request]
        if len(own) < 2 or len({ranking.quantity for ranking in own}) > 1:
            continue
        plans = [ranking.scored.set_index(["criterion", "method", "calibration"]) for ranking in own]
        scores, seeds = (
            pd.concat([each[column] for each in plans], axis=1, join="inner", keys=range(len(own)))
            for column in ("score", "seeds")
        )
        if len(scores) > 1:
            label = ALL_MODELS if len(own) == len(models) else names.listing(ranking.model for ranking in own)
            yield replace(_of_models(own, own[0].quantity.computed(scores), seeds.min(axis=1)), model=label)


def _of_models(own: Sequence[Ranking], table: pd.DataFrame, seeds: pd.Series) -> Ranking:
    """table: (plans, models) scores as computed; seeds: of each plan, in the model where it has the fewest."""
    quantity = own[0].quantity
    table = table.loc[table.mean(axis=1).sort_values(ascending=quantity.lower_is_better, kind="stable").index]
    unpruned = quantity.shown(float(np.mean([quantity.computed(ranking.unpruned) for ranking in own])))
    scores = table.to_numpy(float)
    means = [uncertainty.mean_estimate(row) for row in scores]
    low, high = np.transpose([mean.interval for mean in means])
    rows = table.index.to_frame(index=False).assign(
        seeds=seeds[table.index].to_numpy(),
        over=names.count(len(own), "model"),
        score=[mean.value for mean in means],
        low=low,
        high=high,
        spread=quantity.shown(scores).std(axis=1, ddof=1),
        share=[quantity.shown(mean.value) / unpruned for mean in means],
        chance="",
    )
    methods = _with_seeds(rows)
    chosen = scores[methods]
    pairs = [uncertainty.mean_estimate(chosen[0] - other) for other in chosen[1:]]
    leads = uncertainty.leads(chosen[None], pairs) if pairs else []
    rows = _with_status(_with_verdicts(rows, methods, leads, quantity)).rename_axis("cell")
    pruned = " / ".join(dict.fromkeys(ranking.pruned for ranking in own))
    return Ranking(ALL_MODELS, own[0].request, pruned, quantity, rows, float(unpruned))


def plan_name(row: dict[str, object]) -> str:
    """`REAP on Code`; the name alone of a method that reads no text."""
    text = names.calibration(str(row["calibration"]))
    return names.method(str(row["method"])) + ("" if row["calibration"] == "none" else f" on {text}")


NAMED, SHOWN = 4, 8
"""Most plans that a sentence names; most plans of a ranking in a terminal, and most rankings there and in sentences."""


def headlines(found: Sequence[Ranking]) -> list[str]:
    """What all rankings say together, what each of the first SHOWN says, and how many more there are."""
    more = [f"The table has {len(found) - SHOWN} more rankings."] if len(found) > SHOWN else []
    return [*overview(found), *map(headline, found[:SHOWN]), *more]


def overview(found: Sequence[Ranking]) -> list[str]:
    """On how many models some plan is above chance, and that plans of one seed get no verdict; as far as it applies."""
    models = {ranking.model for ranking in found if ranking.chance}
    above = {ranking.model for ranking in found if (ranking.rows["chance"] == ABOVE).any()}
    sentences = []
    if models:
        which = f"On {len(above)} of {len(models)} models some" if len(models) > 1 else "Some"
        sentences.append(
            f"{which if above else 'No'} plan is above chance, corrected for the number of plans of each model."
        )
    plans = [ranking.scored[~ranking.scored["criterion"].isin(RANDOM)] for ranking in found]
    if any((of_model["seeds"] == 1).any() for of_model in plans):
        sentences.append(
            "Plans of one seed have an interval over items and get no verdict on their method: another seed may give "
            "another plan."
        )
    return sentences


def headline(ranking: Ranking) -> str:
    """What a ranking says in a few sentences."""
    scored = ranking.scored
    extreme = f"lowest mean {ranking.quantity.name}" if ranking.quantity.lower_is_better else "highest average"
    first = records(scored[scored["place"] == 1])
    best, verb = first[0], "have" if len(first) > 1 else "has"
    share = "" if np.isnan(best["share"]) else f", {names.share(best['share'])} of the unpruned model's"
    sentence = (
        f"{ranking.model}, {ranking.pruned} removed: {_named(first)} {verb} "
        f"the {extreme}, {best['score']:.3f} ({best['low']:.3f} to {best['high']:.3f} over {best['over']}){share}."
    )
    return " ".join([sentence, *remarks(ranking)])


def _named(plans: Sequence[dict[str, object]]) -> str:
    """The names of at most NAMED plans, and how many more there are."""
    more = [f"{len(plans) - NAMED} more"] if len(plans) > NAMED else []
    return names.listing([*map(plan_name, plans[:NAMED]), *more])


def remarks(ranking: Ranking) -> list[str]:
    """Sentences on how the plans of a ranking lie beside chance, and on the methods that have several seeds."""
    sentences = [_on_chance(ranking, kind, chance) for kind, chance in ranking.chance.items()]
    return [sentence for sentence in (*sentences, _verdicts(ranking)) if sentence]


def _on_chance(ranking: Ranking, kind: Kind, chance: Chance) -> str:
    """How many plans of a kind are above chance, or how many random plans it would take for the first one to be."""
    rows = ranking.scored[~ranking.scored["criterion"].isin(RANDOM)]
    rows = rows[(rows["granularity"] == kind[0]) & (rows["recovery"] == kind[1])]
    if rows.empty:
        return ""
    quantity, lower = ranking.quantity, ranking.quantity.lower_is_better
    limit = quantity.shown(chance.limits(ranking.compared)[0 if lower else 1])
    counts = [f"{count} {place}" for place, count in rows["chance"].value_counts().items() if place != WITHIN]
    spread = f"pooled over {names.count(chance.models, 'model')}" if chance.models > 1 else "of this model alone"
    if chance.differs:
        spread += ", as spreads differ between models"
    of = "of the loss " if quantity.scale == "perplexity" else ""
    first = (
        f"Of {names.count(len(rows), 'plan')}, {names.listing(counts) or f'none {ABOVE}'} "
        f"({'below' if lower else 'above'} {limit:.3f}; {names.count(chance.plans, 'random plan')} with mean "
        f"{quantity.shown(chance.mean):.3f}, standard deviation {of}{chance.spread:.3f} {spread})."
    )
    best = float(quantity.computed(rows["score"].iloc[0]))
    if (rows["chance"] == ABOVE).any() or (best > chance.mean) == lower:
        return first
    plans = chance.needed(best, ranking.compared)
    if plans is None:
        return f"{first} No number of random plans would put the first one above chance."
    of_each = " of each model" if chance.models > 1 else ""
    needed = f"{names.count(plans, 'random plan')}{of_each}"
    return f"{first} With {needed} like these, the first one would be above chance."


def _verdicts(ranking: Ranking) -> str:
    """What is said of the methods with several seeds; "" if there are not two."""
    if len(_with_seeds(ranking.rows)) < 2:
        return ""
    stated = ranking.scored[~ranking.scored["chance"].isin((WITHIN, BELOW))]
    groups = {verdict: records(rows) for verdict, rows in stated.groupby("verdict")}
    if BEST not in groups:
        return "The best of the methods with several seeds is not above chance."
    verb = "are" if len(groups[BEST]) > 1 else "is"
    sentence = f"Of the methods with several seeds, {_named(groups[BEST])} {verb} best"
    if TIED in groups:
        return f"{sentence}, not separated from {_named(groups[TIED])}."
    return f"{sentence}, separated from all others." if SEPARATED in groups else f"{sentence}."


def ranking_text(found: Sequence[Ranking]) -> str:
    """The rankings as text for a terminal: what all say of chance, the first plans of each, and remarks."""
    parts = ["\n".join(overview(found))] if overview(found) else []
    for ranking in found[:SHOWN]:
        what = f"{ranking.mean}, {ranking.quantity.direction}"
        lines = [f"{ranking.model}, {ranking.pruned} removed: {what} (unpruned {ranking.unpruned:.3f})"]
        rows = records(ranking.scored.reset_index())
        width = max(len(plan_name(row)) for row in rows[:SHOWN])
        for row in rows[:SHOWN]:
            numbers = f"{row['score']:.3f}  {row['low']:.3f} to {row['high']:.3f} over {row['over']}"
            lines.append(f"  {row['place']:2.0f}  {plan_name(row):{width}}  {numbers}  {row['status']}".rstrip())
        if len(rows) > SHOWN:
            lines.append(f"  and {len(rows) - SHOWN} more")
        parts.append("\n".join([*lines, *(f"  {remark}" for remark in remarks(ranking))]))
    if len(found) > SHOWN:
        parts.append(f"and {len(found) - SHOWN} more rankings in the report")
    return "\n\n".join(parts)
