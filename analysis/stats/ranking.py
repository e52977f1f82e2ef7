"""Rank the plans of each model, ratio and gate by their average, with intervals, a comparison with
random plans, and verdicts on methods that have several seeds.

A plan is above chance if, among as many random plans as there are plans, the best one is hardly
ever that good (`moe_lab.analysis.stats.chance`). A method with one seed gets no verdict, because
its plan says nothing about plans of other seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.stats.chance import Chance, chance_by_model
from moe_lab.analysis.stats.comparison import (
    Comparison,
    Kind,
    Target,
    overall_columns,
    random_scores,
)
from moe_lab.analysis.stats.quantity import PRINTED_DECIMALS, Quantity
from moe_lab.analysis.stats.uncertainty import LEVEL, Estimate
from moe_lab.result_files import RANDOM

BEST, TIED, SEPARATED, UNTESTED = "best", "not separated", "separated", "not tested"
"""Verdicts on methods with several seeds, from their comparison with the best such method."""
ABOVE_CHANCE, WITHIN_CHANCE, BELOW_CHANCE = "above chance", "within chance", "below chance"
"""Results of comparing a plan with random plans. ABOVE_CHANCE means better, also for losses."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """The plans of one model, ratio and gate, sorted from the best to the worst."""

    comparison: Comparison
    pruned_text: str
    """Text with the removed share, and with the gate if the model has several."""
    quantity: Quantity
    rows: pd.DataFrame
    """One row per plan, with index cell. Columns:

    - criterion, method, calibration, granularity and recovery
    - seeds: number of seeds
    - score, low, high: displayed score and the ends of its interval
    - over: text that names what the interval is over, `items` or `3 seeds and items`
    - rank: 1 for the best; plans whose scores are equal when printed have the same rank
    - spread: standard deviation of the scores of the plan's seeds
    - share: score as a share of the unpruned model's score
    - behind, behind_low, behind_high, p: how much worse than the best method, with the ends of the
      interval and the p-value
    - chance: ABOVE_CHANCE, WITHIN_CHANCE or BELOW_CHANCE, "" if unknown
    - chance_low, chance_high: displayed ends of the band of random plans
    - verdict: BEST, TIED, SEPARATED or UNTESTED, "" for a method with one seed
    - status: chance, then the verdict unless the plan is within or below chance
    """
    unpruned_score: float
    plans_tested: int
    """Number of plans of the model that are compared with chance."""
    chance: dict[Kind, Chance]
    """Kind of plan -> chance, for kinds with random plans of at least two seeds whose scores
    differ."""

    @property
    def scored_rows(self) -> pd.DataFrame:
        """The plans that have a score."""
        return self.rows[self.rows["score"].notna()]

    @property
    def competing_rows(self) -> pd.DataFrame:
        """The plans that have a score and are not random."""
        return self.scored_rows[~self.scored_rows["criterion"].isin(RANDOM)]


AVERAGE = "Average"
"""Metric of the rows of `scored_plans` with averages."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Pruned cells of one model, ratio and gate."""

    comparison: Comparison
    request: tuple[float, str]
    """Requested ratio, and gate."""
    cells: pd.DataFrame
    target: Target
    """The columns over which the average is taken."""

    @property
    def quantity(self) -> Quantity:
        return self.comparison.quantity(self.target)

    @cached_property
    def plans_tested(self) -> int:
        """Number of cells that have a score and are not random."""
        tested_cells = self.cells.index[~self.cells["criterion"].isin(RANDOM)]
        return int(self.comparison.score(self.target)[tested_cells].notna().sum())


def rankings(comparisons: Sequence[Comparison]) -> list[Ranking]:
    """A ranking for each model, ratio and gate."""
    groups = [group for comparison in comparisons for group in _groups(comparison)]
    return [_ranking(group, groups) for group in groups]


def _groups(comparison: Comparison) -> Iterator[_Group]:
    """Yield a group for each ratio above 0 and gate at which at least one pruned cell has a
    score."""
    for ratio, gate, cells in comparison.pruned_groups:
        target = overall_columns(comparison, list(cells.index))
        if ratio > 0 and target and comparison.score(target)[cells.index].notna().any():
            yield _Group(comparison, (ratio, gate), cells, target)


def _ranking(group: _Group, groups: Sequence[_Group]) -> Ranking:
    """Rank the plans of `group`.

    groups: the groups of all models.
    """
    comparison = group.comparison
    target = group.target
    quantity = group.quantity
    scores = comparison.displayed_scores(target)
    order = quantity.sort_best_first(scores["score"][group.cells.index]).index
    scores_of_seeds = [comparison.seed_scores(target, cell) for cell in order]
    unpruned_score = float(scores["score"].get(comparison.unpruned_cell, np.nan))
    columns = ["criterion", "method", "calibration", "granularity", "recovery"]
    rows = group.cells.loc[order, columns].join(scores)
    rows = rows.assign(
        seeds=list(map(len, scores_of_seeds)),
        over=[
            f"{len(of_cell)} seeds and items" if len(of_cell) > 1 else "items"
            for of_cell in scores_of_seeds
        ],
        spread=[quantity.to_displayed(of_cell).std() for of_cell in scores_of_seeds],
        share=rows["score"] / unpruned_score,
    )
    # a comparison with chance is corrected for the number of plans in all groups of the model
    plans_tested = sum(other.plans_tested for other in groups if other.comparison is comparison)
    plans_tested = max(plans_tested, 1)  # 0 if all plans are random
    chance = _chance(group, groups)
    rows = _add_chance(rows, chance, plans_tested, quantity)
    methods = _comparable_methods(rows)
    leads = comparison.leads_of_best(target, methods) if len(methods) > 1 else []
    rows = _add_verdicts(rows, methods, leads, quantity)
    return Ranking(
        comparison,
        group.cells["removed_text"].iloc[0],
        quantity,
        rows,
        unpruned_score,
        plans_tested,
        chance,
    )


def _comparable_methods(rows: pd.DataFrame) -> list[int]:
    """Labels of the rows that can be tested against each other."""
    return list(
        rows.index[(rows["seeds"] > 1) & rows["score"].notna() & ~rows["criterion"].isin(RANDOM)]
    )


def _add_verdicts(
    rows: pd.DataFrame, methods: list[int], leads: Sequence[Estimate], quantity: Quantity
) -> pd.DataFrame:
    """Add the columns `rank`, `verdict`, `behind`, `behind_low`, `behind_high`, `p` and `status`,
    see `Ranking.rows`.

    - methods: labels of the rows to compare, best first
    - leads: for each method but the first, the first method's score minus this method's score,
      before conversion
    """
    printed_scores = rows["score"].round(PRINTED_DECIMALS)
    verdict = pd.Series("", rows.index)
    tests = pd.DataFrame(index=rows.index, columns=_TEST_COLUMNS, dtype=float)
    for method, lead in zip(methods[1:], leads, strict=True):
        # A gap is positive for a method that is worse than the best, even if less is better.
        gap_to_best = replace(
            lead, value=0.0 if abs(lead.value) < 1e-9 else quantity.sign * lead.value
        )
        best_score = quantity.to_computed(rows["score"][methods[0]])
        displayed_gap = quantity.displayed_estimate(best_score, gap_to_best)
        tests.loc[method] = [*displayed_gap, gap_to_best.p]
    if leads:  # a method without others to compare it with gets no verdict
        is_best = printed_scores[methods] == printed_scores[methods[0]]
        p = tests["p"][methods]
        verdict[methods] = np.select(
            [is_best, p.isna(), p < LEVEL], [BEST, UNTESTED, SEPARATED], TIED
        )
    stated_verdict = verdict.mask(rows["chance"].isin((WITHIN_CHANCE, BELOW_CHANCE)), "")
    status = pd.Series(map(names.comma_joined, rows["chance"], stated_verdict), rows.index)
    return rows.assign(
        rank=(-quantity.sign * printed_scores).rank(method="min"),
        verdict=verdict,
        **tests,
        status=status.mask(rows["criterion"].isin(RANDOM), "random plans"),
    )


_TEST_COLUMNS = ["behind", "behind_low", "behind_high", "p"]
"""Columns of `Ranking.rows` with the comparison of a method with the best one."""


def _chance(group: _Group, groups: Sequence[_Group]) -> dict[Kind, Chance]:
    """Kind of plan -> `Chance` from the random plans of this kind in `group`. The spread of
    random plans can be pooled over all models with a group of the same ratio, gate and average."""
    scores_by_kind: dict[Kind, dict[str, np.ndarray]] = {}
    request_and_average = (group.request, group.target, group.quantity)
    for other in groups:  # `group` itself is among them
        if (other.request, other.target, other.quantity) == request_and_average:
            for kind, scores in random_scores(other.comparison, other.cells, other.target).items():
                scores_by_kind.setdefault(kind, {})[other.comparison.model] = scores
    model = group.comparison.model
    return {
        kind: chance_by_model(scores)[model]
        for kind, scores in scores_by_kind.items()
        if model in scores
    }


def _add_chance(
    rows: pd.DataFrame, chance: Mapping[Kind, Chance], plans_tested: int, quantity: Quantity
) -> pd.DataFrame:
    """Add the columns `chance`, `chance_low` and `chance_high`, see `Ranking.rows`."""
    limits = {kind: chance_of_kind.limits(plans_tested) for kind, chance_of_kind in chance.items()}
    kinds = zip(rows["granularity"], rows["recovery"], strict=True)
    limits_of_rows = [limits.get(kind, (np.nan, np.nan)) for kind in kinds]
    low, high = quantity.to_displayed(np.transpose(limits_of_rows))
    score = rows["score"]
    is_unknown = np.isnan(low) | score.isna() | rows["criterion"].isin(RANDOM)
    is_better, is_worse = score > high, score < low
    if quantity.lower_is_better:
        is_better, is_worse = is_worse, is_better
    chance_texts = np.select(
        [is_unknown, is_better, is_worse], ["", ABOVE_CHANCE, BELOW_CHANCE], WITHIN_CHANCE
    )
    return rows.assign(chance=chance_texts, chance_low=low, chance_high=high)


def plan_name(row: Mapping[str, object]) -> str:
    """Name of a plan: `REAP on Code`, or `Magnitude` for a method without calibration data."""
    method = names.method(str(row["method"]))
    if row["calibration"] == "none":
        return method
    return f"{method} on {names.calibration(str(row['calibration']))}"


MAX_ENTRIES = 8
"""Largest number of rankings, and of plans of a ranking, in a terminal."""


def overview(rankings: Sequence[Ranking]) -> list[str]:
    """A sentence on methods with one seed, if there are any."""
    if any((ranking.competing_rows["seeds"] == 1).any() for ranking in rankings):
        return [
            "Methods with one seed have an interval over items and no verdict, as another seed may "
            "give another plan."
        ]
    return []


def remarks(ranking: Ranking) -> Iterator[str]:
    """Yield a sentence on the limit of chance for each kind of plans."""
    quantity = ranking.quantity
    for (granularity, recovery), chance in ranking.chance.items():
        rows = ranking.competing_rows
        if rows[(rows["granularity"] == granularity) & (rows["recovery"] == recovery)].empty:
            continue
        limit = chance.mean + quantity.sign * chance.margin(ranking.plans_tested)
        pooling = (
            f"pooled over {names.count(chance.models, 'model')}"
            if chance.models > 1
            else "of this model alone"
        )
        if chance.spreads_differ:
            pooling += ", as spreads differ between models"
        loss_phrase = "of the loss " if quantity.scale == "perplexity" else ""
        yield (
            f"Limit of chance {quantity.to_displayed(limit):.3f}, from "
            f"{names.count(chance.plans, 'random plan')} with mean "
            f"{quantity.to_displayed(chance.mean):.3f}, standard deviation {loss_phrase}"
            f"{chance.spread:.3f} {pooling}."
        )


def scored_plans(rankings: Sequence[Ranking]) -> pd.DataFrame:
    """The scores of all plans that are ranked, a row per plan and metric. Metrics are the AVERAGE
    and the displayed columns; columns of the result:

    - Model, Pruned, Calibration, Criterion, Allocation, Recovery, Metric: display names
    - score, low, high: displayed score and its interval; unpruned: the unpruned model's score
    - kept: share of the unpruned model's score (its inverse if less is better)
    - chance_low, chance_high: ends of the band of random plans, for averages
    - status: see `Ranking.rows`; is_open: whether the plan is neither above chance nor among the
      best methods; panel: title of the ranking; method: the method's key
    """
    return pd.concat(map(_scored_plans, rankings), ignore_index=True)


def _scored_plans(ranking: Ranking) -> pd.DataFrame:
    """The rows of `scored_plans` for one ranking."""
    comparison = ranking.comparison
    plans = ranking.scored_rows
    parts = plans["method"].map(names.method_parts)
    texts: dict[str, Any] = {
        "panel": f"{comparison.model}, {ranking.pruned_text} pruned",
        "Model": comparison.model,
        "Pruned": ranking.pruned_text,
        "Calibration": plans["calibration"].map(names.calibration),
        "Criterion": plans["method"].map(names.method),
        "Allocation": parts.str[1].map(names.allocation_name),
        "Recovery": parts.str[2].map(names.recovery_name),
        "method": plans["method"],
    }
    average = plans[["score", "low", "high", "status", "chance_low", "chance_high"]]
    frames = [
        average.assign(
            is_open=~plans["status"].str.startswith((ABOVE_CHANCE, BEST, TIED)),
            Metric=AVERAGE,
            unpruned=ranking.unpruned_score,
            sign=ranking.quantity.sign,
        )
    ]
    for column in comparison.benchmarks_of:
        scores = comparison.displayed_scores((column,))
        frames.append(
            scores.loc[plans.index].assign(
                Metric=names.benchmark(column),
                unpruned=scores["score"].get(comparison.unpruned_cell, np.nan),
                sign=comparison.quantity((column,)).sign,
                # only averages are compared with chance and tested
                status="",
                is_open=True,
            )
        )
    rows = pd.concat([frame.assign(**texts) for frame in frames])
    kept = (rows["score"] / rows["unpruned"]) ** rows.pop("sign")
    return rows.assign(kept=kept.replace(np.inf, np.nan)).dropna(subset=["score"])


def headline(rankings: Sequence[Ranking]) -> str:
    """The main finding in one sentence: on how many models a plan is above chance, or the best plan
    of each model where nothing is compared with chance."""
    compared = [ranking for ranking in rankings if ranking.chance]
    if not compared:
        best = [
            f"{plan_name(records(ranking.scored_rows)[0])} on {ranking.comparison.model} "
            f"({ranking.pruned_text} pruned)"
            for ranking in rankings[:MAX_ENTRIES]
        ]
        return f"First by average: {names.enumeration(best)}." if best else "No plan was scored."
    above: dict[str, list[str]] = {}  # model -> criteria above chance
    for ranking in compared:
        plans = ranking.scored_rows[ranking.scored_rows["chance"] == ABOVE_CHANCE]
        above.setdefault(ranking.comparison.model, []).extend(plans["method"].map(names.method))
    winners = {model: list(dict.fromkeys(methods)) for model, methods in above.items() if methods}
    models = names.count(len(above), "model")
    if not winners:
        return f"No criterion is separated from random pruning, on any of {models}."
    found = "; ".join(f"{model}: {names.enumeration(won)}" for model, won in winners.items())
    rest = len(above) - len(winners)
    others = f" On the other {rest}, no plan is separated from random pruning." if rest else ""
    return f"A criterion is above chance on {len(winners)} of {models} ({found}).{others}"


def ranking_text(rankings: Sequence[Ranking]) -> str:
    """The rankings as text for a terminal: the main finding, then the first MAX_ENTRIES
    rankings."""
    parts = ["\n".join([headline(rankings), *overview(rankings)])] if rankings else []
    for ranking in rankings[:MAX_ENTRIES]:
        quantity = f"{ranking.quantity.mean_name}, {ranking.quantity.direction}"
        lines = [
            (
                f"{ranking.comparison.model}, {ranking.pruned_text} removed: {quantity} (unpruned "
                f"{ranking.unpruned_score:.3f})"
            )
        ]
        rows = records(ranking.scored_rows)
        width = max(len(plan_name(row)) for row in rows[:MAX_ENTRIES])
        for row in rows[:MAX_ENTRIES]:
            numbers = (
                f"{row['score']:.3f}  {row['low']:.3f} to {row['high']:.3f} over {row['over']}"
            )
            line = f"  {row['rank']:2.0f}  {plan_name(row):{width}}  {numbers}  {row['status']}"
            lines.append(line.rstrip())
        if len(rows) > MAX_ENTRIES:
            lines.append(f"  and {len(rows) - MAX_ENTRIES} more")
        parts.append("\n".join([*lines, *(f"  {remark}" for remark in remarks(ranking))]))
    if len(rankings) > MAX_ENTRIES:
        parts.append(f"and {len(rankings) - MAX_ENTRIES} more rankings in the report")
    return "\n\n".join(parts)
