"""Compare all cells of one model: scores and their intervals, and paired tests between cells.

Intervals and tests are over seeds and items together; with one seed they are over items, and hold
for this plan only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TypeVar

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import evaluations, settings
from moe_lab.analysis.load.reader import groups, records
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.stats import uncertainty
from moe_lab.analysis.stats.quantity import Quantity, common_quantity
from moe_lab.analysis.stats.uncertainty import Estimate, Stratum
from moe_lab.result_files import RANDOM

Target = tuple[str, ...]
"""The displayed columns and benchmarks over which a score is averaged."""

Kind = tuple[str, str]
"""Granularity and recovery of a plan. Plans are compared with random plans of the same kind."""
NORMAL_QUANTILE = 1.96
"""Half the width of a 95 % interval, in standard errors of a normal distribution."""
_REPLICATE_AXES = [axis for axis in settings.AXES if axis not in ("model", "seed")]
"""Plans of one model with equal values on these axes are replicates."""


T = TypeVar("T")


def _cached_by_target(
    method: Callable[[Comparison, Target], T],
) -> cached_property[Callable[[Target], T]]:
    """Decorator of a method whose results are cached for each target, because many tables and
    figures use the same targets."""
    return cached_property(lambda comparison: cache(partial(method, comparison)))


@dataclass(frozen=True)
class Panel:
    """Methods that are compared with each other: those of one model, ratio, gate and calibration
    set, and those that read no data.
    """

    model: str
    ratio: float
    gate: str
    calibration: str
    cells: dict[str, int]
    """Key of a method -> cell of the method, in the order of tables."""
    columns: Target
    """The displayed columns on which at least one cell of the panel was evaluated; all displayed
    columns if there are none."""
    pruned_text: str
    """Removed share, and gate if the model's cells have several gates: `50 %, gate other`."""


@dataclass(frozen=True)
class Comparison:
    """Scores of one model's plans on benchmarks, and the plans' outcomes on single items (such as 1
    for a right answer).

    Plans that differ only in the seed are replicates: together they are one cell, which has the
    number of the replicate with the lowest seed. The fields with frames and matrices have a row for
    each plan, in the order of `all_cells`.
    """

    model: str
    all_cells: pd.DataFrame
    """The plans: the rows of `Study.cells` for this model."""
    results: pd.DataFrame
    """Scores (plans, benchmarks); losses in place of perplexities; NaN is a gap."""
    benchmarks_of: dict[str, tuple[str, ...]]
    """Displayed column -> its benchmarks."""
    quantities: Mapping[str, Quantity]
    """Benchmark -> kind of the benchmark's numbers; the kind is score for other benchmarks."""
    outcomes: dict[str, np.ndarray]
    """Benchmark -> outcomes (plans, items), NaN where a plan was not asked an item; for benchmarks
    whose scores are means of outcomes."""
    standard_errors: pd.DataFrame
    """Standard errors (plans, benchmarks) as the harness reported them."""
    item_weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> weights (items,), for benchmarks whose items have different weights."""

    @cached_property
    def representatives(self) -> pd.Series:
        """Number of a plan -> number of its cell."""
        replicates = self.all_cells.groupby(_REPLICATE_AXES, sort=False)
        # the index of `all_cells` is the numbers of the plans
        return replicates["seed"].transform("idxmin")

    @cached_property
    def cells(self) -> pd.DataFrame:
        """For each cell its row of `all_cells`, without the column `seed`."""
        return self.all_cells[self.representatives == self.all_cells.index].drop(columns="seed")

    @cached_property
    def pruned_cells(self) -> pd.DataFrame:
        """The rows of `cells`, without that of the unpruned model."""
        return self.cells[self.cells["criterion"] != "none"]

    @cached_property
    def plans_by_seed(self) -> dict[int, dict[int, int]]:
        """Cell -> seed -> row number of the cell's plan with this seed."""
        replicates: dict[int, dict[int, int]] = {cell: {} for cell in self.cells.index.tolist()}
        cells_and_seeds = zip(self.representatives, self.all_cells["seed"], strict=True)
        for row, (cell, seed) in enumerate(cells_and_seeds):
            replicates[cell][seed] = row
        return replicates

    def _seed_means(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Means (cells, columns) of `frame` (plans, columns) over the plans of each cell."""
        if len(self.cells) == len(self.all_cells):  # each cell is one plan
            return frame
        return frame.groupby(self.representatives, sort=False).mean().reindex(self.cells.index)

    def evaluated(self, columns: Iterable[str], cells: Iterable[int]) -> Target:
        """Those of `columns` (displayed columns or benchmarks) on which at least one of these cells
        was evaluated."""
        asked = set(cells)
        return tuple(
            column for column in columns if not asked.isdisjoint(self.scored_cells((column,)))
        )

    @_cached_by_target
    def scored_cells(self, target: Target) -> list[int]:
        """The cells with a score in the target."""
        return [int(cell) for cell in self.score(target).dropna().index]

    @cached_property
    def unpruned_cell(self) -> int | None:
        """The cell of the unpruned model, if the study has it."""
        cells = self.cells.index[self.cells["criterion"] == "none"]
        return int(cells[0]) if len(cells) else None

    def average_columns(self, columns: Iterable[str]) -> Target:
        """Select the columns over which a mean is taken: the entries of `columns` in which more is
        better or, if there are none, the entries in which less is better.

        columns: displayed columns or benchmarks. A displayed column is left out if more is better
        in some of its benchmarks and less in others.
        """
        loss_columns = []
        score_columns = []
        for column in columns:
            # the keys of `weights` are the benchmarks of the column
            benchmarks = list(self.weights((column,)))
            is_loss = [self.quantity((benchmark,)).lower_is_better for benchmark in benchmarks]
            if all(is_loss):
                loss_columns.append(column)
            elif not any(is_loss):
                score_columns.append(column)
        return tuple(score_columns or loss_columns)

    def quantity(self, target: Target) -> Quantity:
        """The kind of a target's numbers: score, loss or perplexity."""
        return common_quantity(
            self.quantities.get(benchmark, Quantity()) for benchmark in self.weights(target)
        )

    @_cached_by_target
    def plan_scores(self, target: Target) -> pd.Series:
        """Score of each plan: the mean of its scores in the target's columns; NaN when the plan
        lacks a benchmark of the target."""
        weights = self.weights(target)
        if not weights:
            return pd.Series(np.nan, self.all_cells.index)
        scores = self.results[list(weights)].to_numpy() * np.array(list(weights.values()))
        return pd.Series(scores.sum(axis=1), self.all_cells.index)

    @_cached_by_target
    def score(self, target: Target) -> pd.Series:
        """Score of each cell: the mean of `plan_scores` over the cell's plans with a score."""
        return self._seed_means(self.plan_scores(target).to_frame("score"))["score"]

    @_cached_by_target
    def displayed_scores(self, target: Target) -> pd.DataFrame:
        """Columns `score`, `low` and `high` (ends of the interval) of every cell, as tables and
        figures show them: with perplexities in place of their logarithms."""
        low, high = self.interval(target)
        scores = pd.DataFrame({"score": self.score(target), "low": low, "high": high})
        return pd.DataFrame(self.quantity(target).to_displayed(scores))

    @cached_property
    def binary_outcomes(self) -> dict[str, np.ndarray]:
        """The `outcomes` of benchmarks with right-or-wrong items of equal weights."""
        return {
            benchmark: outcomes
            for benchmark, outcomes in self.outcomes.items()
            if benchmark not in self.item_weights
            and np.isin(outcomes[~np.isnan(outcomes)], (0, 1)).all()
        }

    @_cached_by_target
    def interval(self, target: Target) -> tuple[pd.Series, pd.Series]:
        """The low and the high ends of the 95 % intervals of all cells' scores.

        The interval of a cell with outcomes is that of `estimate`. Exception: on a benchmark of
        right-or-wrong items, the interval is Wilson's if the cell has one plan, or if all outcomes
        of its plans are equal. The interval of a cell without outcomes is computed from the
        reported standard errors.
        """
        weights = self.weights(target)
        benchmarks = list(weights)
        outcomes = self.binary_outcomes.get(benchmarks[0]) if len(benchmarks) == 1 else None
        # arrays, because operations of pandas take most of the time for so few numbers
        ends = np.array(
            [self._interval_of_cell(target, cell, outcomes) for cell in self.plans_by_seed]
        )
        score = self.score(target)
        # for cells without outcomes: benchmarks count as independent samples
        errors = self._seed_means(self.standard_errors[benchmarks]).to_numpy()
        variance = ((errors * list(weights.values())) ** 2).sum(axis=1)
        half_width = NORMAL_QUANTILE * np.sqrt(variance)
        reported = np.column_stack([score - half_width, score + half_width])
        low, high = np.where(np.isnan(ends), reported, ends).T
        if not self.quantity(target).lower_is_better:
            low, high = low.clip(min=0), high.clip(max=1)
        return pd.Series(low, score.index), pd.Series(high, score.index)

    def _interval_of_cell(
        self, target: Target, cell: int, outcomes: np.ndarray | None
    ) -> tuple[float, float]:
        """Low and high end of a cell's interval, see `interval`; NaN without outcomes.

        outcomes: (plans, items) of all plans, if the target is a benchmark of right-or-wrong items.
        """
        if outcomes is not None:
            rows = outcomes[list(self.plans_by_seed[cell].values())]
            has_one_plan = len(rows) == 1
            rows = rows[np.isfinite(rows).any(axis=1)]
            # if all outcomes are equal, the standard error of `estimate` is 0: no interval
            if len(rows) and (has_one_plan or np.nanmin(rows) == np.nanmax(rows)):
                # one row is enough: there is only one plan, or the outcomes of all plans are equal
                return uncertainty.wilson(np.nansum(rows[0]), np.isfinite(rows[0]).sum())
        return self.estimate(target, {cell: 1.0}).interval

    def estimate(self, target: Target, weights: Mapping[int, float]) -> Estimate:
        """Weighted sum of the scores of cells, with the standard error of the sum over seeds and
        items.

        The scores are means over the items that all of these cells were asked. If outcomes are
        missing, the scores are those of `score`, and the error is NaN.

        weights: cell -> weight of its score, such as 1 and -1 for a difference.
        """
        rows = self._matched_rows(target, list(weights))
        cell_weights = np.array(list(weights.values()))
        strata = self._strata(target, rows, cell_weights) if rows.size else []
        if strata:
            return uncertainty.crossed_estimate(strata)
        scores = self.score(target)[list(weights)].to_numpy(float)
        return Estimate(float(scores @ cell_weights))

    def _matched_rows(self, target: Target, cells: Sequence[int]) -> np.ndarray:
        """Row numbers (replicates, cells) of plans: each replicate gets one scored plan of each
        cell.

        If the cells with several plans have at least two seeds in common, the plans of a replicate
        have the same seed. Otherwise the plans of a replicate have the same position among the
        plans of their cells.
        """
        # for each cell: seed -> row number
        rows_by_seed = [self._scored_rows(target, cell) for cell in cells]
        seeds_of_cells = [set(row_of_seed) for row_of_seed in rows_by_seed if len(row_of_seed) > 1]
        common_seeds = sorted(set.intersection(*seeds_of_cells)) if seeds_of_cells else []
        rows_of_cells = []  # for each cell: row numbers, in the order of the replicates
        for row_of_seed in rows_by_seed:
            if len(row_of_seed) > 1 and len(common_seeds) > 1:
                rows_of_cells.append([row_of_seed[seed] for seed in common_seeds])
            else:
                rows_of_cells.append(list(row_of_seed.values()))
        # a cell with one plan is in every replicate, so it does not limit the number of replicates
        replicates = min((len(rows) for rows in rows_of_cells if len(rows) != 1), default=1)
        columns = [np.array(rows[:replicates], int) for rows in rows_of_cells]
        return np.column_stack(np.broadcast_arrays(*columns))

    def _strata(self, target: Target, rows: np.ndarray, cell_weights: np.ndarray) -> list[Stratum]:
        """Split the score of each replicate into contributions of the items that all plans were
        asked.

        Benchmarks that grade the same answers (HumanEval and HumanEval+) share a stratum if they
        have equally many common items.

        - rows: array (replicates, cells) with the row numbers of the plans
        - cell_weights: (cells,), for each cell the weight of its plan in the sum
        """
        strata: dict[str, Stratum] = {}
        for benchmark, weight in self.weights(target).items():
            if benchmark not in self.outcomes:
                return []
            # sum outcomes (replicates, cells, items) over cells; NaN if a plan lacks the item
            values = cell_weights @ self.outcomes[benchmark][rows]
            is_common = np.asarray(np.isfinite(values).all(axis=0))
            if not is_common.any():
                return []
            item_weights = self.item_weights.get(benchmark, np.ones(len(is_common)))[is_common]
            shares = item_weights / item_weights.sum()
            stratum = Stratum(values[:, is_common] * shares * weight, shares)
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
        """Score of `cell` minus score of `other`, paired by seed and item."""
        return self.estimate(target, {cell: 1.0, other: -1.0})

    def _scored_rows(self, target: Target, cell: int) -> dict[int, int]:
        """Seed -> row number of a plan, for those of the cell's plans with a score."""
        scores = self.plan_scores(target).to_numpy()
        rows = self.plans_by_seed[cell]
        return {seed: row for seed, row in rows.items() if not np.isnan(scores[row])}

    def seed_scores(self, target: Target, cell: int) -> pd.Series:
        """Scores of those of the cell's plans that have one."""
        return self.plan_scores(target).iloc[list(self._scored_rows(target, cell).values())]

    def leads_of_best(self, target: Target, cells: Sequence[int]) -> list[Estimate]:
        """Score of the best cell minus the score of each other cell, on the items that all these
        cells were asked. Errors and p-values account for the choice of the best cell by the data.

        cells: one cell for each method; `cells[0]` is the best.
        """
        rows_of_cells = [list(self._scored_rows(target, cell).values()) for cell in cells]
        # each plan is a replicate of its own
        strata = self._strata(target, np.concatenate(rows_of_cells)[:, None], np.ones(1))
        # for each plan, the position of its cell
        positions = np.repeat(np.arange(len(cells)), list(map(len, rows_of_cells)))
        pairs = [self.difference(target, cells[0], other) for other in cells[1:]]
        return uncertainty.leads_of_best(pairs, strata, positions)

    def weights(self, target: Target) -> dict[str, float]:
        """Benchmark -> its weight in the mean that is the target's score."""
        weights: dict[str, float] = {}
        for column in target:
            benchmarks = self.benchmarks_of.get(column, (column,))
            weights |= dict.fromkeys(benchmarks, 1 / len(benchmarks) / len(target))
        return weights

    @cached_property
    def pruned_groups(self) -> list[tuple[float, str, pd.DataFrame]]:
        """(ratio, gate, pruned cells) in ascending order. The column "removed_text" of the cells
        has the gate, too, if the model's cells have several."""
        cells = self.pruned_cells
        cells = cells.assign(removed_text=settings.removed_share_texts(cells))
        cells = cells.sort_values(["ratio", "gate"], kind="stable")
        return [(key["ratio"], key["gate"], rows) for key, rows in groups(cells, ["ratio", "gate"])]

    @cached_property
    def panels(self) -> list[Panel]:
        """Panels of this model's pruned cells, ordered by ratio, gate and calibration set."""
        panels = []
        for ratio, gate, cells in self.pruned_groups:
            calibrations = names.calibrations_in_order(set(cells["calibration"]) - {"none"})
            for calibration in calibrations or ["none"]:
                # methods with calibration "none" are in all panels
                panel_cells = cells[cells["calibration"].isin([calibration, "none"])]
                cell_of_method: dict[str, int] = dict(
                    zip(panel_cells["method"], panel_cells.index.tolist(), strict=True)
                )
                methods = names.methods_in_order(cell_of_method)
                panel = Panel(
                    self.model,
                    ratio,
                    gate,
                    calibration,
                    cells={method: cell_of_method[method] for method in methods},
                    columns=self.evaluated(self.benchmarks_of, panel_cells.index)
                    or tuple(self.benchmarks_of),
                    pruned_text=cells["removed_text"].iloc[0],
                )
                panels.append(panel)
        return panels


def compare(study: Study) -> list[Comparison]:
    """Make one comparison for each model, in the order of the study's cells.

    A gap is recorded for each score that is not the mean of its items' outcomes.
    """
    return [_comparison(study, cells) for _, cells in study.cells.groupby("model", sort=False)]


def _comparison(study: Study, cells: pd.DataFrame) -> Comparison:
    """Make the comparison of one model. cells: its rows of `Study.cells`."""
    results = study.results[study.results["cell"].isin(cells.index)]
    samples = study.samples[study.samples["cell"].isin(cells.index)]
    # perplexities keep their kind, because tables display them as perplexities
    quantities = {
        str(row["benchmark"]): Quantity(row["scale"], row["unit"])
        for row in records(results.drop_duplicates("benchmark"))
    }
    results = _replace_perplexities(results)
    order = names.in_order(results["benchmark"].astype(str), names.BENCHMARKS)
    scores, errors = (
        results.pivot(index="cell", columns="benchmark", values=column)
        .reindex(index=cells.index, columns=order)
        .astype(float)
        for column in ("score", "stderr")
    )
    outcomes = evaluations.outcome_matrices(samples, scores)
    labels = settings.labels(cells) if outcomes.unexplained_scores else {}
    for cell, benchmark in outcomes.unexplained_scores:
        study.reader.record_gap(
            f"the score of {benchmark} is not the mean of its items: it is not tested", labels[cell]
        )
    return Comparison(
        model=cells["model"].iloc[0],
        all_cells=cells,
        results=scores,
        benchmarks_of=displayed_columns(order),
        quantities=quantities,
        outcomes=outcomes.matrices,
        standard_errors=errors,
        item_weights=outcomes.units,  # a unit is the weight of an item
    )


def _replace_perplexities(results: pd.DataFrame) -> pd.DataFrame:
    """Replace each perplexity in the results by the loss log(perplexity). The standard error of
    this loss is, to first order, the perplexity's standard error divided by the perplexity."""
    is_perplexity = results["scale"] == "perplexity"
    # 1 for other scales, so that the division below leaves their standard errors unchanged
    perplexities = results["score"].astype(float).where(is_perplexity, 1.0)
    return results.assign(
        score=results["score"].mask(is_perplexity, np.log(perplexities)),
        stderr=results["stderr"] / perplexities,
    )


def overall_columns(comparison: Comparison, cells: Sequence[int]) -> Target:
    """Displayed columns whose mean is the overall average (Avg) of these cells."""
    return comparison.average_columns(comparison.evaluated(comparison.benchmarks_of, cells))


def mean_quantities(comparisons: Iterable[Comparison]) -> dict[str, Quantity]:
    """Name of the mean over a model's displayed columns, such as Avg -> kind of its numbers."""
    quantities = [
        comparison.quantity(comparison.average_columns(comparison.benchmarks_of))
        for comparison in comparisons
    ]
    return {quantity.mean_name: quantity for quantity in quantities}


def random_scores(
    comparison: Comparison, cells: pd.DataFrame, target: Target
) -> dict[Kind, np.ndarray]:
    """Kind of plan (granularity, recovery) -> scores (plans,) of the random plans of this kind
    among `cells`.

    If a kind has several random cells, only the cell with the most scored plans is used.
    """
    scores: dict[Kind, np.ndarray] = {}
    random_cells = cells[cells["criterion"].isin(RANDOM)]
    for (granularity, recovery), kind_cells in random_cells.groupby(["granularity", "recovery"]):
        scores_of_cells = [
            comparison.seed_scores(target, cell).to_numpy() for cell in kind_cells.index
        ]
        largest_sample = max(scores_of_cells, key=len)
        # one score, or equal scores, would give no standard deviation of random plans
        if len(largest_sample) > 1 and np.ptp(largest_sample) > 0:
            scores[str(granularity), str(recovery)] = largest_sample
    return scores


def displayed_columns(evaluated_benchmarks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Displayed column -> the column's benchmarks that were run. Each benchmark that is in no
    column of `names.COLUMNS` is a column of its own."""
    columns = {
        column: tuple(name for name in benchmarks if name in evaluated_benchmarks)
        for column, benchmarks in names.COLUMNS.items()
    }
    other_benchmarks = set(evaluated_benchmarks).difference(*columns.values())
    return {
        **{column: benchmarks for column, benchmarks in columns.items() if benchmarks},
        **{name: (name,) for name in evaluated_benchmarks if name in other_benchmarks},
    }
