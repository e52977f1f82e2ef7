"""Compare all cells of one model: scores and their intervals, and paired tests between cells.

Cells that differ in the seed alone are replicates of one method: one row with the mean of their
scores. Intervals and tests are over seeds and items together; with one seed they are over items,
for these plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import pandas as pd

from analysis import names
from analysis.load import evaluations, settings
from analysis.load.reader import Reader, records
from analysis.stats import ranks, uncertainty
from analysis.stats.quantity import Quantity, common
from analysis.stats.uncertainty import Estimate, Stratum
from moe_lab.results import RANDOM

Target = tuple[str, ...]
"""Displayed columns or benchmarks, often a single one, whose mean is the score."""

Kind = tuple[str, str]
"""Granularity and recovery of a plan: random plans are compared with plans of their kind."""
_NORMAL = 1.96
_REPLICATE_AXES = [axis for axis in settings.AXES if axis not in ("model", "seed")]
"""Cells of one model that are equal in these are replicates."""


@dataclass(frozen=True)
class Panel:
    """The methods that are compared with each other: those of one model, ratio, gate and
    calibration set.

    Methods that read no data are in every panel. `cells` maps a method's key to its cell, in the
    order of tables.
    """

    model: str
    ratio: float
    gate: str
    calibration: str
    cells: dict[str, int]
    pruned: str = ""
    """What is removed, and the gate when the model's cells have several, in words:
    `50 %, gate other`."""

    @property
    def settings(self) -> tuple[float, str]:
        """Ratio and gate, by which panels of different calibration sets are matched."""
        return self.ratio, self.gate

    def columns(self, comparison: Comparison) -> Target:
        """Displayed columns on which at least one of these cells was evaluated; all of them when
        every cell failed."""
        return comparison.evaluated(self.cells.values()) or tuple(map(str, comparison.columns))

    def averaged(self, comparison: Comparison) -> Target:
        """The columns that Avg averages: see `Comparison.averaged`."""
        return comparison.averaged(self.columns(comparison))


@dataclass(frozen=True)
class Comparison:
    """Scores and outcomes of one model's cells. Rows of frames and matrices are in the order of
    `all_cells`."""

    model: str
    all_cells: pd.DataFrame
    """All cells, also those that differ from others in the seed alone."""
    results: pd.DataFrame
    """(all_cells, benchmarks) scores, of a perplexity its loss; NaN is a gap."""
    benchmarks_of: dict[str, tuple[str, ...]]
    """Displayed column -> its benchmarks."""
    quantities: Mapping[str, Quantity]
    """Benchmark -> what its numbers are; scores if it is not in it."""
    outcomes: dict[str, np.ndarray]
    """Benchmark -> outcomes (all_cells, items), NaN where a cell did not get an item; only if their
    mean is the score.
    """
    standard_errors: pd.DataFrame
    """(all_cells, benchmarks) as the harness reported them."""
    units: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> weights (items,) in the score; benchmarks whose items have equal weights are not
    in it."""

    @cached_property
    def _representative(self) -> pd.Series:
        """Cell of `all_cells` -> its replicate with the lowest seed, which stands for all
        replicates."""
        ordered = self.all_cells.sort_values("seed", kind="stable")
        labels = pd.Series(ordered.index, ordered.index)
        replicates = labels.groupby([ordered[axis] for axis in _REPLICATE_AXES], sort=False)
        return replicates.transform("first").loc[self.all_cells.index]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The cells that are compared, one for each group of replicates, without their seed."""
        return self.all_cells[self._representative == self.all_cells.index].drop(columns="seed")

    @cached_property
    def seeds(self) -> dict[int, dict[int, int]]:
        """Cell of `cells` -> seed -> the replicate with this seed."""
        replicates: dict[int, dict[int, int]] = {int(str(cell)): {} for cell in self.cells.index}
        for plan, cell, seed in zip(
            self.all_cells.index, self._representative, self.all_cells["seed"], strict=True
        ):
            replicates[int(cell)][int(seed)] = int(str(plan))
        return replicates

    def have_several_seeds(self, cells: Iterable[int]) -> bool:
        """Whether each of these methods has several seeds, without which it is not tested."""
        return all(len(self.seeds[cell]) > 1 for cell in cells)

    def _over_seeds(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.groupby(self._representative, sort=False).mean().reindex(self.cells.index)

    @cached_property
    def benchmarks(self) -> pd.DataFrame:
        """(cells, benchmarks) scores, the mean over the seeds that have them; NaN is a gap."""
        return self._over_seeds(self.results)

    @cached_property
    def columns(self) -> pd.DataFrame:
        """(cells, displayed columns) scores, the mean over seeds."""
        return self._over_seeds(ranks.component_columns(self.results, self.benchmarks_of))

    def removed(self, ratio: float) -> str:
        """What the cells of a requested ratio remove, in words."""
        return str(self.cells.loc[self.cells["ratio"] == ratio, "removed_words"].iloc[0])

    def evaluated(self, cells: Iterable[int]) -> Target:
        """Displayed columns on which at least one of these cells was evaluated."""
        run = self.columns.loc[list(cells)].notna().any()
        return tuple(str(name) for name in run.index[run])

    @cached_property
    def unpruned(self) -> int | None:
        """The cell of the unpruned model."""
        cells = self.cells.index[self.cells["criterion"] == "none"]
        return int(cells[0]) if len(cells) else None

    def averaged(self, columns: Iterable[str]) -> Target:
        """Those of `columns` in which more is better, as a mean over both directions would be
        meaningless; if there are none, those in which less is better."""
        losses = []
        scores = []
        for column in columns:
            if self.quantity((column,)).lower_is_better:
                losses.append(column)
            elif not set(self.weights((column,))) & set(self.lower_is_better):
                scores.append(column)
        return tuple(scores or losses)

    @cached_property
    def average(self) -> Target:
        """`averaged` of all displayed columns."""
        return self.averaged(self.benchmarks_of)

    def quantity(self, target: Target) -> Quantity:
        """What the numbers of a target are."""
        return common(self.quantities.get(name, Quantity()) for name in self.weights(target))

    @cached_property
    def lower_is_better(self) -> tuple[str, ...]:
        """Columns and benchmarks where less is better."""
        names_of_both = dict.fromkeys([*map(str, self.results), *self.benchmarks_of])
        return tuple(name for name in names_of_both if self.quantity((name,)).lower_is_better)

    def by_seed(self, target: Target) -> pd.Series:
        """Score of each of `all_cells`: the mean of the target's columns; NaN when one is a gap or
        there is none."""
        weights = self.weights(target)
        if not weights:
            return pd.Series(np.nan, self.all_cells.index)
        return (self.results[list(weights)] * pd.Series(weights)).sum(axis=1, skipna=False)

    # cached, as many tables and figures use the same targets
    @cached_property
    def score(self) -> Callable[[Target], pd.Series]:
        """Score of every cell of `cells`: the mean of `by_seed` over the seeds that have it."""
        return cache(
            lambda target: self._over_seeds(self.by_seed(target).to_frame("score"))["score"]
        )

    def shown(self, target: Target) -> tuple[pd.Series, pd.Series, pd.Series]:
        """Score of every cell and the ends of its interval, as tables and figures show them."""
        quantity, (low, high) = self.quantity(target), self.interval(target)
        return quantity.shown(self.score(target)), quantity.shown(low), quantity.shown(high)

    @cached_property
    def interval(self) -> Callable[[Target], tuple[pd.Series, pd.Series]]:
        """Ends of the 95 % interval of every cell's score, from its seeds and all items that these
        got.

        Wilson's interval for one plan on a benchmark of right-or-wrong items, otherwise that of
        `estimate`; from the reported standard error for cells without outcomes.
        """
        return cache(self._interval)

    def _interval(self, target: Target) -> tuple[pd.Series, pd.Series]:
        from_items = [self._interval_from_items(target, cell) for cell in self.seeds]
        ends = pd.DataFrame(from_items, list(self.seeds), dtype=float)
        score = self.score(target)
        weights = pd.Series(self.weights(target))
        errors = self._over_seeds(self.standard_errors[list(weights.index)]) * weights
        reach = _NORMAL * np.sqrt(errors.pow(2).sum(axis=1, skipna=False))
        low = ends[0].fillna(score - reach)
        high = ends[1].fillna(score + reach)
        if self.quantity(target).lower_is_better:
            return low, high
        return low.clip(lower=0), high.clip(upper=1)

    def _interval_from_items(self, target: Target, cell: int) -> tuple[float, float]:
        """Ends of a cell's interval from the outcomes of its items; NaN without outcomes."""
        answers = self._right_or_wrong(target)
        plans = [self._row[plan] for plan in self.seeds[cell].values()]
        if answers is None or np.isnan(answers[plans]).all():
            return self.estimate(target, {cell: 1.0}).interval
        if len(plans) > 1:
            estimate = self.estimate(target, {cell: 1.0})
            if estimate.error != 0:
                return estimate.interval
        of_plan = answers[plans[0]]
        low, high = uncertainty.wilson(np.nansum(of_plan), np.isfinite(of_plan).sum())
        return float(low), float(high)

    def estimate(self, target: Target, weights: Mapping[int, float]) -> Estimate:
        """Weighted sum of cells' scores, on the items that all of them got, with its error over
        seeds and items.

        weights: cell -> its weight, such as 1 and -1 for a difference. Plans with the same seed are
        taken together; a cell with a single seed goes with all seeds of the others. Without
        outcomes only the value is known.
        """
        plans = self._replicates(target, list(weights))
        factors = np.array(list(weights.values()))
        strata = self._strata(target, plans, factors) if plans.size else []
        if strata:
            return uncertainty.crossed(strata)
        scores = self.score(target)[list(weights)].to_numpy(float)
        return Estimate(float(scores @ factors))

    def _replicates(self, target: Target, cells: Sequence[int]) -> np.ndarray:
        """Row numbers (replicates, cells) of the plans that are taken together; of size 0 if a cell
        has no result.

        If the cells with several plans share at least two seeds, plans are matched by seed;
        otherwise by position. A cell with one plan is repeated.
        """
        scored = self._scored(target)
        rows_by_seed = [
            {
                seed: self._row[plan]
                for seed, plan in self.seeds[cell].items()
                if scored[self._row[plan]]
            }
            for cell in cells
        ]
        several = [set(by_seed) for by_seed in rows_by_seed if len(by_seed) > 1]
        common_seeds = sorted(set.intersection(*several)) if several else []
        rows_of_cells = []
        for by_seed in rows_by_seed:
            matched = len(by_seed) > 1 and len(common_seeds) > 1
            rows_of_cells.append(
                [by_seed[seed] for seed in common_seeds] if matched else list(by_seed.values())
            )
        count = min((len(rows) for rows in rows_of_cells if len(rows) != 1), default=1)
        repeated = [(rows * count if len(rows) == 1 else rows)[:count] for rows in rows_of_cells]
        return np.array(repeated, int).T

    @cached_property
    def _row(self) -> dict[int, int]:
        """Cell of `all_cells` -> its row number."""
        return {int(str(cell)): row for row, cell in enumerate(self.all_cells.index)}

    @cached_property
    def _scored(self) -> Callable[[Target], np.ndarray]:
        return cache(lambda target: self.by_seed(target).notna().to_numpy())

    def _strata(self, target: Target, plans: np.ndarray, factors: np.ndarray) -> list[Stratum]:
        """The weighted outcomes of each benchmark; empty when one has none, or no item that all
        plans got.

        Benchmarks that grade the same answers twice (HumanEval and HumanEval+) share a stratum."""
        strata: dict[str, Stratum] = {}
        for benchmark, weight in self.weights(target).items():
            if benchmark not in self.outcomes:
                return []
            values = np.tensordot(self.outcomes[benchmark][plans], factors, (1, 0))
            shared = np.asarray(np.isfinite(values).all(axis=0))
            if not shared.any():
                return []
            units = self.units.get(benchmark, np.ones(len(shared)))[shared]
            shares = units / units.sum()
            stratum = Stratum(values[:, shared] * shares * weight, shares)
            name = names.SAME_ITEMS.get(benchmark, benchmark)
            if name in strata and len(strata[name].shares) == len(shares):
                stratum = replace(
                    stratum, contributions=strata[name].contributions + stratum.contributions
                )
            elif name in strata:
                name = benchmark
            strata[name] = stratum
        return list(strata.values())

    def difference(self, target: Target, cell: int, other: int) -> Estimate:
        """Score of `cell` minus that of `other`, paired by seed and item: see `estimate`.

        Between two plans on one benchmark of right-or-wrong items, p is that of McNemar's exact
        test."""
        estimate = self.estimate(target, {cell: 1.0, other: -1.0})
        answers = self._right_or_wrong(target)
        if (
            answers is None
            or max(len(self.seeds[cell]), len(self.seeds[other])) > 1
            or np.isnan(estimate.error)
        ):
            return estimate
        pair = answers[[self._row[cell], self._row[other]]]
        first, second = pair[:, np.isfinite(pair).all(axis=0)]
        return replace(estimate, exact=float(uncertainty.mcnemar(first, second)))

    def scored_plans(self, target: Target, cell: int) -> list[int]:
        """The replicates of a cell that have a score."""
        scored = self._scored(target)
        return [plan for plan in self.seeds[cell].values() if scored[self._row[plan]]]

    def leads(self, target: Target, cells: Sequence[int]) -> list[Estimate]:
        """Score of the first of `cells` minus that of each other, where the first is the best of
        them by these scores: see `uncertainty.best_of_many`. Scores are on the items that all of
        them got."""
        plans = [self.scored_plans(target, cell) for cell in cells]
        rows = [self._row[plan] for of_cell in plans for plan in of_cell]
        strata = self._strata(target, np.array(rows)[:, None], np.ones(1))
        pairs = [self.estimate(target, {cells[0]: 1.0, other: -1.0}) for other in cells[1:]]
        return uncertainty.best_of_many(
            pairs, strata, np.repeat(np.arange(len(cells)), list(map(len, plans)))
        )

    def weights(self, target: Target) -> dict[str, float]:
        """Benchmark -> its weight in the target; columns have equal weights, and so have the
        benchmarks of a column."""
        weights: dict[str, float] = {}
        for column in target:
            benchmarks = self.benchmarks_of.get(column, (column,))
            weights |= dict.fromkeys(benchmarks, 1 / len(benchmarks) / len(target))
        return weights

    def _right_or_wrong(self, target: Target) -> np.ndarray | None:
        """The target's outcomes if it is one benchmark of right-or-wrong items with equal weights,
        else None."""
        benchmarks = list(self.weights(target))
        return (
            self.outcomes[benchmarks[0]]
            if len(benchmarks) == 1 and benchmarks[0] in self._binary
            else None
        )

    @cached_property
    def _binary(self) -> set[str]:
        equal_weights = self.outcomes.keys() - self.units.keys()
        return {name for name in equal_weights if evaluations.binary(self.outcomes[name])}

    @cached_property
    def panels(self) -> list[Panel]:
        """Panels in the order of ratio and calibration set."""
        return list(_panels(self.model, self.cells[self.cells["criterion"] != "none"]))


def compare(
    cells: pd.DataFrame, results: pd.DataFrame, samples: pd.DataFrame, reader: Reader
) -> list[Comparison]:
    """Make one comparison per model, in the order of the study. Frames are as in `Study`; gaps go
    to its reader."""
    comparisons = []
    for model in dict.fromkeys(cells["model"]):
        of_model = cells[cells["model"] == model]
        has_result, has_sample = (
            frame["cell"].isin(of_model.index) for frame in (results, samples)
        )
        comparisons.append(
            _comparison(model, of_model, results[has_result], samples[has_sample], reader)
        )
    return comparisons


def _comparison(
    model: str, cells: pd.DataFrame, results: pd.DataFrame, samples: pd.DataFrame, reader: Reader
) -> Comparison:
    quantities = {
        str(row["benchmark"]): Quantity(row["scale"], row["unit"])
        for row in records(results.drop_duplicates("benchmark"))
    }
    results = _losses(results)
    order = names.in_order(results["benchmark"].astype(str), names.BENCHMARKS)
    scores = results.pivot(index="cell", columns="benchmark", values="score").reindex(
        index=cells.index, columns=order
    )
    errors = results.pivot(index="cell", columns="benchmark", values="stderr").reindex(
        index=cells.index, columns=order
    )
    answers = evaluations.outcome_matrices(samples, scores.astype(float))
    labels = settings.labels(cells)
    for cell, benchmark in answers.unexplained:
        reader.gap(
            f"the score of {benchmark} is not the mean of its items: it is not tested", labels[cell]
        )
    return Comparison(
        model=model,
        all_cells=cells,
        results=scores.astype(float),
        benchmarks_of=ranks.displayed(order),
        quantities=quantities,
        outcomes=answers.matrices,
        standard_errors=errors.astype(float),
        units=answers.units,
    )


def _losses(results: pd.DataFrame) -> pd.DataFrame:
    """The results with perplexities as their losses, and standard errors of these."""
    is_perplexity = results["scale"] == "perplexity"
    scores = results["score"].astype(float).where(is_perplexity, 1.0)
    return results.assign(
        score=results["score"].mask(is_perplexity, np.log(scores)),
        stderr=results["stderr"] / scores,
    )


def _panels(model: str, pruned: pd.DataFrame) -> Iterator[Panel]:
    axes = ["ratio", "gate"]
    pruned_texts = settings.pruned_in_words(pruned)
    for _, cells in pruned.groupby(axes, sort=True):
        ratio, gate = cells[axes].iloc[0]
        sets = names.calibrations_in_order(set(cells["calibration"]) - {"none"}) or ["none"]
        for calibration in sets:
            competing = cells[cells["calibration"].isin([calibration, "none"])]
            by_key = dict(
                zip(competing["method"].astype(str), competing.index.astype(int), strict=True)
            )
            order = names.methods_in_order(by_key)
            competitors = {key: by_key[key] for key in order}
            yield Panel(model, ratio, gate, calibration, competitors, pruned_texts[cells.index[0]])


def group_targets(comparison: Comparison, cells: Sequence[int]) -> dict[str, Target]:
    """The papers' averages that these cells were evaluated on, by name: MC Avg, Code, Math,
    WildBench, and last the mean of `overall`.

    Code and Math are means of their two displayed columns.
    """
    displayed = overall(comparison, cells)
    groups: dict[str, Target] = {
        "MC Avg": ("MC Avg",),
        "Code": names.CODE_COLUMNS,
        "Math": names.MATH_COLUMNS,
        "WildBench": ("WildBench",),
    }
    targets = {name: target for name, target in groups.items() if set(target) <= set(displayed)}
    return {**targets, comparison.quantity(displayed).mean: displayed} if displayed else targets


def overall(comparison: Comparison, cells: Sequence[int]) -> Target:
    """The displayed columns of these cells in which more is better; where there are losses alone,
    these."""
    return comparison.averaged(comparison.evaluated(cells))


def means(comparisons: Iterable[Comparison]) -> dict[str, Quantity]:
    """Name of the mean over displayed columns -> what it is; several if models were measured
    differently."""
    quantities = [comparison.quantity(comparison.average) for comparison in comparisons]
    return {quantity.mean: quantity for quantity in quantities}


def random_scores(
    comparison: Comparison, cells: pd.DataFrame, target: Target
) -> dict[Kind, np.ndarray]:
    """Scores of the random plans among `cells`, where there are at least two of a kind. Of several
    cells of a kind, the one with most seeds counts."""
    by_seed = comparison.by_seed(target)
    scores: dict[Kind, np.ndarray] = {}
    random = cells[cells["criterion"].isin(RANDOM)]
    for (granularity, recovery), of_kind in random.groupby(["granularity", "recovery"]):
        plans = [
            by_seed[comparison.scored_plans(target, cell)].to_numpy(float) for cell in of_kind.index
        ]
        most = max(plans, key=len)
        if len(most) > 1 and np.ptp(most) > 0:  # equal scores do not say how much plans differ
            scores[str(granularity), str(recovery)] = most
    return scores
