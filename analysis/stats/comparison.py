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
"""Granularity and recovery of a plan, in which random plans are like it."""
_NORMAL = 1.96
_ALIKE = [axis for axis in settings.AXES if axis not in ("model", "seed")]
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
        return comparison.evaluated(self.cells.values())

    def averaged(self, comparison: Comparison) -> Target:
        """The columns that Avg averages: see `Comparison.averaged`."""
        return comparison.averaged(self.columns(comparison))


@dataclass(frozen=True)
class Comparison:
    """Scores and outcomes of one model's cells. Rows of frames and matrices are in the order of
    `every`."""

    model: str
    every: pd.DataFrame
    """All cells, also those that differ from others in the seed alone."""
    results: pd.DataFrame
    """(every, benchmarks) scores, of a perplexity its loss; NaN is a gap."""
    parts: dict[str, tuple[str, ...]]
    """Displayed column -> its benchmarks."""
    quantities: Mapping[str, Quantity]
    """Benchmark -> what its numbers are; scores if it is not in it."""
    outcomes: dict[str, np.ndarray]
    """Benchmark -> outcomes (every, items), NaN where a cell did not get an item; only if their
    mean is the score."""
    standard_errors: pd.DataFrame
    """(every, benchmarks) as the harness reported them."""
    units: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> weights (items,) in the score; benchmarks whose items count alike are not in
    it."""

    @cached_property
    def _first(self) -> pd.Series:
        """The cell that stands for each cell of `every`: its replicate with the lowest seed."""
        ordered = self.every.sort_values("seed", kind="stable")
        labels = pd.Series(ordered.index, ordered.index)
        return (
            labels.groupby([ordered[axis] for axis in _ALIKE], sort=False)
            .transform("first")
            .loc[self.every.index]
        )

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The cells that are compared, one for each group of replicates, without their seed."""
        return self.every[self._first == self.every.index].drop(columns="seed")

    @cached_property
    def seeds(self) -> dict[int, dict[int, int]]:
        """Cell of `cells` -> seed -> the replicate with this seed."""
        found: dict[int, dict[int, int]] = {int(str(cell)): {} for cell in self.cells.index}
        for cell, first, seed in zip(
            self.every.index, self._first, self.every["seed"], strict=True
        ):
            found[int(first)][int(seed)] = int(str(cell))
        return found

    def _over_seeds(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.groupby(self._first, sort=False).mean().reindex(self.cells.index)

    @cached_property
    def benchmarks(self) -> pd.DataFrame:
        """(cells, benchmarks) scores, the mean over the seeds that have them; NaN is a gap."""
        return self._over_seeds(self.results)

    @cached_property
    def columns(self) -> pd.DataFrame:
        """(cells, displayed columns) scores, the mean over seeds."""
        return self._over_seeds(ranks.component_columns(self.results, self.parts))

    def removed(self, ratio: float) -> str:
        """What the cells of a requested ratio remove, in words."""
        return str(self.cells.loc[self.cells["ratio"] == ratio, "removed_words"].iloc[0])

    def evaluated(self, cells: Iterable[int]) -> Target:
        """Displayed columns on which at least one of these cells was evaluated; all of them when
        every cell failed."""
        run = self.columns.loc[list(cells)].notna().any()
        return tuple(str(name) for name in (run.index[run] if run.any() else run.index))

    @cached_property
    def unpruned(self) -> int | None:
        """The cell of the unpruned model."""
        cells = self.cells.index[self.cells["criterion"] == "none"]
        return int(cells[0]) if len(cells) else None

    def averaged(self, columns: Iterable[str]) -> Target:
        """Those of `columns` in which more is better, as a mean over both directions would be
        meaningless; if there are none, those in which less is better."""
        every = tuple(columns)
        better = tuple(
            name for name in every if not set(self.weights((name,))) & set(self.lower_is_better)
        )
        return better or tuple(name for name in every if self.is_loss((name,)))

    def quantity(self, target: Target) -> Quantity:
        """What the numbers of a target are."""
        return common(self.quantities.get(name, Quantity()) for name in self.weights(target))

    def is_loss(self, target: Target) -> bool:
        """Whether less is better of a target."""
        return self.quantity(target).lower_is_better

    @cached_property
    def lower_is_better(self) -> tuple[str, ...]:
        """Columns and benchmarks where less is better."""
        every = dict.fromkeys([*map(str, self.results), *self.parts])
        return tuple(name for name in every if self.is_loss((name,)))

    def by_seed(self, target: Target) -> pd.Series:
        """Score of every cell of `every`: the mean of the target's columns; NaN when one is a gap
        or there is none."""
        shares = self.weights(target)
        if not shares:
            return pd.Series(np.nan, self.every.index)
        return (self.results[list(shares)] * pd.Series(shares)).sum(axis=1, skipna=False)

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
        ends = pd.DataFrame(
            [self._ends(target, cell) for cell in self.seeds], list(self.seeds), dtype=float
        )
        centre = self.score(target)
        shares = self.weights(target)
        errors = self._over_seeds(self.standard_errors[list(shares)]).to_numpy(float) * np.array(
            list(shares.values())
        )
        half = _NORMAL * np.sqrt(np.square(errors).sum(axis=1))
        low = ends[0].fillna(centre - half)
        high = ends[1].fillna(centre + half)
        return (low, high) if self.is_loss(target) else (low.clip(lower=0), high.clip(upper=1))

    def _ends(self, target: Target, cell: int) -> tuple[float, float]:
        answers = self._right_or_wrong(target)
        plans = [self._place[plan] for plan in self.seeds[cell].values()]
        own = (
            None if answers is None or not np.isfinite(answers[plans]).any() else answers[plans[0]]
        )
        if own is None or len(plans) > 1:
            estimate = self.estimate(target, {cell: 1.0})
            if own is None or estimate.error != 0:
                return estimate.interval
        low, high = uncertainty.wilson(np.nansum(own), np.isfinite(own).sum())
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

        Plans are matched by their seed if two seeds are common to all cells that have several, else
        in their order.
        """
        scored = self._scored(target)
        plans = [
            {seed: cell for seed, cell in self.seeds[each].items() if scored[self._place[cell]]}
            for each in cells
        ]
        several = [own for own in plans if len(own) > 1]
        common = sorted(set.intersection(*map(set, several))) if several else []
        if len(common) > 1:
            columns = [
                [own[seed] for seed in common] if len(own) > 1 else list(own.values())
                for own in plans
            ]
        else:
            columns = [list(own.values()) for own in plans]
        rows = [len(column) for column in columns if len(column) != 1]
        count = min(rows, default=1)
        matched = [(column * count if len(column) == 1 else column)[:count] for column in columns]
        return np.array([[self._place[cell] for cell in column] for column in matched], int).T

    @cached_property
    def _place(self) -> dict[int, int]:
        """Cell of `every` -> its row number."""
        return {int(str(cell)): row for row, cell in enumerate(self.every.index)}

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
            shared = np.isfinite(values).all(axis=0)
            units = (
                self.units[benchmark][shared]
                if benchmark in self.units
                else np.ones(int(shared.sum()))
            )
            if not len(units):
                return []
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
        pair = answers[[self._place[cell], self._place[other]]]
        first, second = pair[:, np.isfinite(pair).all(axis=0)]
        return replace(estimate, exact=float(uncertainty.mcnemar(first, second)))

    def scored_plans(self, target: Target, cell: int) -> list[int]:
        """The replicates of a cell that have a score."""
        scored = self._scored(target)
        return [plan for plan in self.seeds[cell].values() if scored[self._place[plan]]]

    def leads(self, target: Target, cells: Sequence[int]) -> list[Estimate]:
        """Score of the first of `cells` minus that of each other, where the first is the best of
        them by these scores: see `uncertainty.best_of_many`. Scores are on the items that all of
        them got."""
        plans = [self.scored_plans(target, cell) for cell in cells]
        rows = [self._place[plan] for of_cell in plans for plan in of_cell]
        strata = self._strata(target, np.array(rows)[:, None], np.ones(1))
        pairs = [self.estimate(target, {cells[0]: 1.0, other: -1.0}) for other in cells[1:]]
        return uncertainty.best_of_many(
            pairs, strata, np.repeat(np.arange(len(cells)), list(map(len, plans)))
        )

    def weights(self, target: Target) -> dict[str, float]:
        """Benchmark -> its weight in the target; columns have equal weights, and so have the
        benchmarks of a column."""
        parts = {name: self.parts.get(name, (name,)) for name in target}
        return {
            benchmark: 1 / len(benchmarks) / len(target)
            for benchmarks in parts.values()
            for benchmark in benchmarks
        }

    def _right_or_wrong(self, target: Target) -> np.ndarray | None:
        """The target's outcomes if it is one benchmark whose items are right or wrong and count
        alike, else None."""
        benchmarks = list(self.weights(target))
        return (
            self.outcomes[benchmarks[0]]
            if len(benchmarks) == 1 and benchmarks[0] in self._binary
            else None
        )

    @cached_property
    def _binary(self) -> set[str]:
        alike = self.outcomes.keys() - self.units.keys()
        return {name for name in alike if evaluations.binary(self.outcomes[name])}

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
        own = cells[cells["model"] == model]
        own_results, own_samples = (
            frame[frame["cell"].isin(own.index)] for frame in (results, samples)
        )
        comparisons.append(_comparison(model, own, own_results, own_samples, reader))
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
    parts = ranks.displayed(order)
    words = settings.labels(cells)
    for cell, benchmark in answers.odd:
        reader.gap(
            f"the score of {benchmark} is not the mean of its items: it is not tested", words[cell]
        )
    return Comparison(
        model=model,
        every=cells,
        results=scores.astype(float),
        parts=parts,
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
    words = settings.pruned(pruned)
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
            yield Panel(model, ratio, gate, calibration, competitors, words[cells.index[0]])


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
    return comparison.averaged(displayed_targets(comparison, cells))


def means(comparisons: Iterable[Comparison]) -> dict[str, Quantity]:
    """Name of the mean over displayed columns -> what it is; several if models were measured
    differently."""
    quantities = [
        comparison.quantity(comparison.averaged(comparison.parts)) for comparison in comparisons
    ]
    return {quantity.mean: quantity for quantity in quantities}


def displayed_targets(comparison: Comparison, cells: Sequence[int]) -> dict[str, Target]:
    """The displayed columns that these cells were evaluated on."""
    run = comparison.columns.loc[list(cells)].notna().any()
    return {str(name): (str(name),) for name in run.index[run]}


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
