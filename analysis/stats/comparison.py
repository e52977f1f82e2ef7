"""Compare all cells of one model: scores and their intervals, and paired tests between cells.

Plans that differ in the seed alone are replicates of one method. They are one cell of a comparison,
whose score is the mean of theirs. Intervals and tests are over seeds and items together; with one
seed they are over items, for this plan.
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
"""The displayed columns or benchmarks over which a score is averaged, often only one."""

Kind = tuple[str, str]
"""Granularity and recovery of a plan: random plans are compared with plans of their kind."""
_NORMAL = 1.96
"""Half the width of a 95 % interval, in standard errors of a normal distribution."""
_REPLICATE_AXES = [axis for axis in settings.AXES if axis not in ("model", "seed")]
"""Plans of one model with equal values on these axes are replicates."""


@dataclass(frozen=True)
class Panel:
    """The methods of one model, ratio, gate and calibration set, which are compared with each
    other.

    Methods that read no data are in the panels of all calibration sets. `cells` maps a method's key
    to its cell, in the order of tables.
    """

    model: str
    ratio: float
    gate: str
    calibration: str
    cells: dict[str, int]
    pruned: str = ""
    """Text with the removed share, and with the gate when the model's cells have several gates:
    `50 %, gate other`."""

    @property
    def settings(self) -> tuple[float, str]:
        """Ratio and gate, by which panels of different calibration sets are matched."""
        return self.ratio, self.gate

    def columns(self, comparison: Comparison) -> Target:
        """Displayed columns on which at least one cell of the panel was evaluated; all displayed
        columns when every cell failed."""
        return comparison.evaluated(self.cells.values()) or tuple(map(str, comparison.columns))

    def averaged(self, comparison: Comparison) -> Target:
        """The columns over which Avg is the mean: see `Comparison.averaged`."""
        return comparison.averaged(self.columns(comparison))


@dataclass(frozen=True)
class Comparison:
    """Scores and outcomes of one model's plans. The rows of frames and matrices are plans, in the
    order of `all_cells`."""

    model: str
    all_cells: pd.DataFrame
    """The plans: the rows of `Study.cells` for this model, replicates included."""
    results: pd.DataFrame
    """Scores (plans, benchmarks); of a perplexity, the loss; NaN is a gap."""
    benchmarks_of: dict[str, tuple[str, ...]]
    """Displayed column -> its benchmarks."""
    quantities: Mapping[str, Quantity]
    """Benchmark -> the kind of its numbers; a benchmark that is missing here has scores."""
    outcomes: dict[str, np.ndarray]
    """Benchmark -> outcomes (plans, items), NaN where a plan did not get an item. Only benchmarks
    whose scores are the means of outcomes."""
    standard_errors: pd.DataFrame
    """Standard errors (plans, benchmarks) as the harness reported them."""
    units: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> weights (items,); without benchmarks whose items have equal weights."""

    @cached_property
    def _representative(self) -> pd.Series:
        """Plan -> its replicate with the lowest seed, which is the cell of all its replicates."""
        ordered = self.all_cells.sort_values("seed", kind="stable")
        labels = pd.Series(ordered.index, ordered.index)
        replicates = labels.groupby([ordered[axis] for axis in _REPLICATE_AXES], sort=False)
        return replicates.transform("first").loc[self.all_cells.index]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The cells that are compared, one for each group of replicates; without column seed."""
        return self.all_cells[self._representative == self.all_cells.index].drop(columns="seed")

    @cached_property
    def plans_by_seed(self) -> dict[int, dict[int, int]]:
        """Cell of `cells` -> seed -> the plan with this seed."""
        replicates: dict[int, dict[int, int]] = {int(str(cell)): {} for cell in self.cells.index}
        for plan, cell, seed in zip(
            self.all_cells.index, self._representative, self.all_cells["seed"], strict=True
        ):
            replicates[int(cell)][int(seed)] = int(str(plan))
        return replicates

    def have_several_seeds(self, cells: Iterable[int]) -> bool:
        """Whether each of these cells has several seeds; differences are tested only between such
        cells."""
        return all(len(self.plans_by_seed[cell]) > 1 for cell in cells)

    def _over_seeds(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Average numbers of plans (rows) over the plans of each cell; missing ones are skipped."""
        return frame.groupby(self._representative, sort=False).mean().reindex(self.cells.index)

    @cached_property
    def benchmarks(self) -> pd.DataFrame:
        """Scores (cells, benchmarks), the mean over the seeds with a result; NaN is a gap."""
        return self._over_seeds(self.results)

    @cached_property
    def columns(self) -> pd.DataFrame:
        """Scores (cells, displayed columns), the mean over the seeds with a result."""
        return self._over_seeds(ranks.component_columns(self.results, self.benchmarks_of))

    def removed(self, ratio: float) -> str:
        """Text with the share that the cells of a requested ratio remove."""
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
        """Those of `columns` in which more is better, or, if there are none, those in which less is
        better: a mean over both directions would be meaningless."""
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
        """The kind of a target's numbers: score, loss or perplexity."""
        return common(self.quantities.get(name, Quantity()) for name in self.weights(target))

    @cached_property
    def lower_is_better(self) -> tuple[str, ...]:
        """Columns and benchmarks where less is better."""
        columns = dict.fromkeys([*map(str, self.results), *self.benchmarks_of])
        return tuple(name for name in columns if self.quantity((name,)).lower_is_better)

    def plan_scores(self, target: Target) -> pd.Series:
        """Score of each plan: the mean of the target's columns; NaN when a column is a gap or the
        target is empty."""
        weights = self.weights(target)
        if not weights:
            return pd.Series(np.nan, self.all_cells.index)
        return (self.results[list(weights)] * pd.Series(weights)).sum(axis=1, skipna=False)

    # cached, as many tables and figures use the same targets
    @cached_property
    def score(self) -> Callable[[Target], pd.Series]:
        """Function of a target: the score of every cell, the mean of `plan_scores` over the seeds
        with a score."""
        return cache(
            lambda target: self._over_seeds(self.plan_scores(target).to_frame("score"))["score"]
        )

    def displayed(self, target: Target) -> tuple[pd.Series, pd.Series, pd.Series]:
        """Score, low and high end of the interval of every cell, in the unit of tables and
        figures."""
        display = self.quantity(target).displayed
        low, high = self.interval(target)
        return display(self.score(target)), display(low), display(high)

    @cached_property
    def interval(self) -> Callable[[Target], tuple[pd.Series, pd.Series]]:
        """Function of a target: low and high ends of the 95 % interval of every cell's score.

        For one plan on a benchmark of right-or-wrong items it is Wilson's interval; otherwise the
        interval of `estimate`, over seeds and items; for cells without outcomes, it is computed
        from the reported standard error."""
        return cache(self._interval)

    def _interval(self, target: Target) -> tuple[pd.Series, pd.Series]:
        cells = list(self.plans_by_seed)
        from_items = [self._interval_from_items(target, cell) for cell in cells]
        ends = pd.DataFrame(from_items, cells, dtype=float)
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
        plans = [self._row_number[plan] for plan in self.plans_by_seed[cell].values()]
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
        """Weighted sum of cells' scores, on the items that all of these cells got, with its
        standard error over seeds and items.

        weights: cell -> its weight, such as 1 and -1 for a difference. Plans of different cells are
        matched by seed; the plan of a cell with one seed is matched with all seeds. Without
        outcomes only the value is known."""
        rows = self._replicates(target, list(weights))
        factors = np.array(list(weights.values()))
        strata = self._strata(target, rows, factors) if rows.size else []
        if strata:
            return uncertainty.crossed(strata)
        scores = self.score(target)[list(weights)].to_numpy(float)
        return Estimate(float(scores @ factors))

    def _replicates(self, target: Target, cells: Sequence[int]) -> np.ndarray:
        """Row numbers (replicates, cells) of matched plans; of size 0 if a cell has no result.

        If the cells with several plans share at least two seeds, plans are matched by seed;
        otherwise by position. The plan of a cell with one plan is repeated.
        """
        scored = self._scored(target)
        rows_by_seed = []
        for cell in cells:
            rows = {seed: self._row_number[plan] for seed, plan in self.plans_by_seed[cell].items()}
            rows_by_seed.append({seed: row for seed, row in rows.items() if scored[row]})
        seeds_of_cells = [set(by_seed) for by_seed in rows_by_seed if len(by_seed) > 1]
        common_seeds = sorted(set.intersection(*seeds_of_cells)) if seeds_of_cells else []
        rows_of_cells = []
        for by_seed in rows_by_seed:
            if len(by_seed) > 1 and len(common_seeds) > 1:
                rows_of_cells.append([by_seed[seed] for seed in common_seeds])
            else:
                rows_of_cells.append(list(by_seed.values()))
        count = min((len(rows) for rows in rows_of_cells if len(rows) != 1), default=1)
        repeated = [(rows * count if len(rows) == 1 else rows)[:count] for rows in rows_of_cells]
        return np.array(repeated, int).T

    @cached_property
    def _row_number(self) -> dict[int, int]:
        """Plan -> its row number in `all_cells`."""
        return {int(str(cell)): row for row, cell in enumerate(self.all_cells.index)}

    @cached_property
    def _scored(self) -> Callable[[Target], np.ndarray]:
        """Function of a target: booleans (plans,), whether a plan has a score."""
        return cache(lambda target: self.plan_scores(target).notna().to_numpy())

    def _strata(self, target: Target, rows: np.ndarray, factors: np.ndarray) -> list[Stratum]:
        """A stratum with the weighted outcomes of each benchmark of a target.

        rows: row numbers (replicates, cells) of plans; factors (cells,): the weights of cells.
        Empty when a benchmark has no outcomes, or no item that all plans got. Benchmarks that grade
        the same answers (HumanEval and HumanEval+) share a stratum."""
        strata: dict[str, Stratum] = {}
        for benchmark, weight in self.weights(target).items():
            if benchmark not in self.outcomes:
                return []
            values = np.tensordot(self.outcomes[benchmark][rows], factors, (1, 0))
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
            or max(len(self.plans_by_seed[cell]), len(self.plans_by_seed[other])) > 1
            or np.isnan(estimate.error)
        ):
            return estimate
        pair = answers[[self._row_number[cell], self._row_number[other]]]
        first, second = pair[:, np.isfinite(pair).all(axis=0)]
        return replace(estimate, exact=float(uncertainty.mcnemar(first, second)))

    def scored_plans(self, target: Target, cell: int) -> list[int]:
        """The plans of a cell that have a score."""
        scored = self._scored(target)
        plans = self.plans_by_seed[cell].values()
        return [plan for plan in plans if scored[self._row_number[plan]]]

    def leads(self, target: Target, cells: Sequence[int]) -> list[Estimate]:
        """Score of `cells[0]`, which is the best of `cells`, minus the score of each other cell:
        see `uncertainty.best_of_many`. Scores are on the items that all of `cells` got."""
        rows = []
        methods = []
        for number, cell in enumerate(cells):
            for plan in self.scored_plans(target, cell):
                rows.append(self._row_number[plan])
                methods.append(number)
        strata = self._strata(target, np.array(rows)[:, None], np.ones(1))
        pairs = [self.estimate(target, {cells[0]: 1.0, other: -1.0}) for other in cells[1:]]
        return uncertainty.best_of_many(pairs, strata, np.array(methods))

    def weights(self, target: Target) -> dict[str, float]:
        """Benchmark -> its weight in the target. The columns of a target have equal weights, and
        the benchmarks of a column too."""
        weights: dict[str, float] = {}
        for column in target:
            benchmarks = self.benchmarks_of.get(column, (column,))
            weights |= dict.fromkeys(benchmarks, 1 / len(benchmarks) / len(target))
        return weights

    def _right_or_wrong(self, target: Target) -> np.ndarray | None:
        """Outcomes (plans, items) of a target that is one benchmark in `_binary`; None for other
        targets."""
        benchmarks = list(self.weights(target))
        if len(benchmarks) == 1 and benchmarks[0] in self._binary:
            return self.outcomes[benchmarks[0]]
        return None

    @cached_property
    def _binary(self) -> set[str]:
        """Benchmarks whose items are right or wrong and have equal weights."""
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
        results_of_model = results[results["cell"].isin(of_model.index)]
        samples_of_model = samples[samples["cell"].isin(of_model.index)]
        comparisons.append(_comparison(model, of_model, results_of_model, samples_of_model, reader))
    return comparisons


def _comparison(
    model: str, cells: pd.DataFrame, results: pd.DataFrame, samples: pd.DataFrame, reader: Reader
) -> Comparison:
    """The comparison of one model, from its rows of the frames of a study."""
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
    outcomes = evaluations.outcome_matrices(samples, scores.astype(float))
    labels = settings.labels(cells)
    for cell, benchmark in outcomes.unexplained:
        reader.gap(
            f"the score of {benchmark} is not the mean of its items: it is not tested", labels[cell]
        )
    return Comparison(
        model=model,
        all_cells=cells,
        results=scores.astype(float),
        benchmarks_of=ranks.displayed(order),
        quantities=quantities,
        outcomes=outcomes.matrices,
        standard_errors=errors.astype(float),
        units=outcomes.units,
    )


def _losses(results: pd.DataFrame) -> pd.DataFrame:
    """The results with each perplexity replaced by its loss, log(perplexity), and the standard
    error by that of the loss."""
    is_perplexity = results["scale"] == "perplexity"
    scores = results["score"].astype(float).where(is_perplexity, 1.0)
    return results.assign(
        score=results["score"].mask(is_perplexity, np.log(scores)),
        stderr=results["stderr"] / scores,
    )


def _panels(model: str, pruned: pd.DataFrame) -> Iterator[Panel]:
    """Yield the panels of a model's pruned cells, ordered by ratio, gate and calibration set."""
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
    """Name -> target of the papers' averages on which these cells were evaluated: MC Avg, Code,
    Math, WildBench, and last the mean of `overall`.

    Code and Math are each the mean of two displayed columns.
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
    """The displayed columns of these cells over which Avg is the mean: see
    `Comparison.averaged`."""
    return comparison.averaged(comparison.evaluated(cells))


def means(comparisons: Iterable[Comparison]) -> dict[str, Quantity]:
    """Name of the mean over displayed columns -> its kind; several when models were measured by
    scores and by losses."""
    quantities = [comparison.quantity(comparison.average) for comparison in comparisons]
    return {quantity.mean: quantity for quantity in quantities}


def random_scores(
    comparison: Comparison, cells: pd.DataFrame, target: Target
) -> dict[Kind, np.ndarray]:
    """Kind -> scores (plans,) of the random plans among `cells`, for kinds with at least two such
    plans. If a kind has several cells, the cell with most seeds counts."""
    plan_scores = comparison.plan_scores(target)
    scores: dict[Kind, np.ndarray] = {}
    random = cells[cells["criterion"].isin(RANDOM)]
    for (granularity, recovery), of_kind in random.groupby(["granularity", "recovery"]):
        scores_of_cells = [
            plan_scores[comparison.scored_plans(target, cell)].to_numpy(float)
            for cell in of_kind.index
        ]
        most = max(scores_of_cells, key=len)
        if len(most) > 1 and np.ptp(most) > 0:  # equal scores do not say how much plans differ
            scores[str(granularity), str(recovery)] = most
    return scores
