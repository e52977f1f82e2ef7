"""Compare all cells of one model: scores and their intervals, and paired tests between cells.

Intervals use all items that a cell answered; paired tests use the items that all cells answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import pandas as pd

from analysis import names
from analysis.load import evaluations, settings
from analysis.load.reader import Reader
from analysis.stats import ranks, uncertainty
from moe_lab.results import is_lower_better

Target = tuple[str, ...]
"""Displayed columns or benchmarks, often a single one, whose mean is the score."""

_NORMAL = 1.96


@dataclass(frozen=True)
class Panel:
    """The methods that are compared with each other: those of one model, ratio, gate, seed and calibration set.

    Methods that read no data are in every panel. `cells` maps a method's key to its cell, in the order of tables.
    """

    model: str
    ratio: float
    gate: str
    seed: int
    calibration: str
    cells: dict[str, int]
    setting: str = ""
    """Gate and seed in words, when the model's cells have several."""

    @property
    def pruned(self) -> str:
        """Ratio, gate and seed in words, as panels of one calibration set differ in these: `50 %`, `50 %, seed 43`."""
        return settings.joined(names.ratio(self.ratio), self.setting)

    @property
    def settings(self) -> tuple[float, str, int]:
        """Ratio, gate and seed, by which panels of different calibration sets are matched."""
        return self.ratio, self.gate, self.seed

    def columns(self, comparison: Comparison) -> Target:
        """Displayed columns on which at least one of these cells was evaluated; all of them when every cell failed."""
        run = comparison.columns.loc[list(self.cells.values())].notna().any()
        return tuple(str(name) for name in (run.index[run] if run.any() else run.index))

    def averaged(self, comparison: Comparison) -> Target:
        """The columns that Avg averages: those of `columns` in which more is better."""
        return comparison.averaged(self.columns(comparison))


@dataclass(frozen=True)
class Comparison:
    """Scores and outcomes of one model's cells. Rows of all frames and matrices are in the order of `cells`."""

    model: str
    cells: pd.DataFrame
    benchmarks: pd.DataFrame
    """(cells, benchmarks) scores; NaN is a gap."""
    parts: dict[str, tuple[str, ...]]
    """Displayed column -> its benchmarks."""
    lower_is_better: tuple[str, ...]
    """Columns and benchmarks where less is better."""
    outcomes: dict[str, np.ndarray]
    """Benchmark -> outcomes (cells, items) on the items that all cells share; only where their mean is the score."""
    standard_errors: pd.DataFrame
    """(cells, benchmarks) as the harness reported them."""
    own: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> outcomes (cells, items) on all items, NaN where a cell did not get an item. Only benchmarks whose
    cells got different items."""

    @cached_property
    def columns(self) -> pd.DataFrame:
        """(cells, displayed columns) scores."""
        return ranks.component_columns(self.benchmarks, self.parts)

    @cached_property
    def unpruned(self) -> int | None:
        """The cell of the unpruned model."""
        cells = self.cells.index[self.cells["criterion"] == "none"]
        return int(cells[0]) if len(cells) else None

    def averaged(self, columns: Iterable[str]) -> Target:
        """Those of `columns` in which more is better; a mean over both directions would be meaningless."""
        return tuple(name for name in columns if not set(self.weights((name,))) & set(self.lower_is_better))

    # cached, as many tables and figures use the same targets
    @cached_property
    def score(self) -> Callable[[Target], pd.Series]:
        """Score of every cell: the mean of the target's columns; NaN when one is a gap or the target is empty."""
        return cache(self._score)

    def _score(self, target: Target) -> pd.Series:
        if not target:
            return pd.Series(np.nan, self.cells.index)
        columns = [self.columns[name] if name in self.parts else self.benchmarks[name] for name in target]
        return pd.concat(columns, axis=1).mean(axis=1, skipna=False)

    @cached_property
    def interval(self) -> Callable[[Target], tuple[pd.Series, pd.Series]]:
        """Ends of the 95 % interval of every cell's score, from all items that the cell answered.

        Wilson's interval for a benchmark of right-or-wrong items, bootstrap for graded items and means of benchmarks,
        the reported standard error for cells without outcomes.
        """
        return cache(self._interval)

    def _interval(self, target: Target) -> tuple[pd.Series, pd.Series]:
        answers = self._right_or_wrong(target, self._asked)
        shares = self.weights(target)
        errors = self.standard_errors[list(shares)].to_numpy(float) * np.array(list(shares.values()))
        centre, half = self.score(target), _NORMAL * np.sqrt(np.square(errors).sum(axis=1))
        if answers is not None:
            items = np.isfinite(answers).sum(axis=1)
            low, high = uncertainty.wilson(np.nansum(answers, axis=1), np.where(items > 0, items, np.nan))
        elif (draws := self.draws(target)) is not None:
            low, high = uncertainty.percentiles(draws)
        else:
            return centre - half, centre + half
        return pd.Series(low, centre.index).fillna(centre - half), pd.Series(high, centre.index).fillna(centre + half)

    def difference(self, target: Target, cell: int, other: int) -> float:
        """Score of `cell` minus that of `other`, on the items that all cells share when these have outcomes."""
        for score in (self._shared_score(target), self.score(target)):
            if not np.isnan(difference := float(score[cell] - score[other])):
                return difference
        return np.nan

    def _shared_score(self, target: Target) -> pd.Series:
        """Scores on the items that all cells share; NaN without outcomes, or when all cells got the same items."""
        shared = self._contributions(target) if set(self.weights(target)) & set(self.own) else {}
        total = sum((items.sum(axis=1) for items in shared.values()), np.zeros(len(self.cells)))
        return pd.Series(total if shared else np.nan, self.cells.index)

    def p_values(self, target: Target, cell: int, others: Sequence[int]) -> np.ndarray:
        """Two-sided paired p-values of `cell` against each of `others`; NaN where outcomes are missing.

        McNemar's test for one benchmark of right-or-wrong items, random sign flips otherwise."""
        first, rest = self.rows([cell]), self.rows(others)
        answers = self._right_or_wrong(target, self.outcomes)
        if answers is not None:
            p_values = uncertainty.mcnemar(answers[first], answers[rest])
            return np.where(np.isnan(answers[first] + answers[rest]).any(axis=1), np.nan, p_values)
        contributions = self._contributions(target)
        if not contributions:
            return np.full(len(others), np.nan)
        items = np.concatenate(list(contributions.values()), axis=1)
        differences = items[first] - items[rest]
        return np.where(np.isnan(differences).any(axis=1), np.nan, uncertainty.sign_flip(np.nan_to_num(differences)))

    def pairwise(self, target: Target, cells: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Differences (cells, cells), row minus column, on the items that all cells share, and two-sided p-values.

        McNemar's test for one benchmark of right-or-wrong items; paired t-tests stratified by benchmark otherwise.
        These resolve p-values small enough for Holm's correction over many pairs. NaN where outcomes are missing.
        """
        rows = self.rows(cells)
        strata = [items[rows] for items in self._contributions(target).values()]
        if not strata:
            return np.full((len(cells), len(cells)), np.nan), np.full((len(cells), len(cells)), np.nan)
        differences, p_values = uncertainty.paired_t(strata)
        answers = self._right_or_wrong(target, self.outcomes)
        if answers is not None:
            exact = [uncertainty.mcnemar(answers[[row]], answers[rows]) for row in rows]
            p_values = np.where(np.isnan(p_values), np.nan, exact)
        return differences, p_values

    def lead(self, target: Target, cell: int, other: int) -> tuple[float, float]:
        """95 % interval of the difference between two cells, from paired replicates."""
        draws = self.paired_draws(target)
        if draws is None:
            return np.nan, np.nan
        first, second = self.rows([cell, other])
        low, high = uncertainty.percentiles(draws[:, first] - draws[:, second])
        return float(low), float(high)

    @cached_property
    def draws(self) -> Callable[[Target], np.ndarray | None]:
        """Bootstrap replicates (replicates, cells) of the target's score, from all items that each cell answered.

        None when a benchmark has no outcomes.
        """
        return cache(self._draws)

    def _draws(self, target: Target) -> np.ndarray | None:
        if not set(self.weights(target)) & set(self.own):
            return self.paired_draws(target)
        return uncertainty.mean_draws(target, self._own_draws)

    @cached_property
    def paired_draws(self) -> Callable[[Target], np.ndarray | None]:
        """The same from the items that all cells share, for differences between cells."""
        return cache(lambda target: uncertainty.mean_draws(target, self._column_draws))

    def rows(self, cells: Sequence[int]) -> np.ndarray:
        """Row numbers of `cells` in matrices."""
        return np.asarray(self.cells.index.get_indexer(pd.Index(cells)))

    def weights(self, target: Target) -> dict[str, float]:
        """Benchmark -> its weight in the target; columns have equal weights, and so have the benchmarks of a column."""
        parts = {name: self.parts.get(name, (name,)) for name in target}
        return {
            benchmark: 1 / len(benchmarks) / len(target) for benchmarks in parts.values() for benchmark in benchmarks
        }

    @cached_property
    def _asked(self) -> dict[str, np.ndarray]:
        """Benchmark -> outcomes (cells, items) on all items, NaN where a cell did not get an item."""
        return {**self.outcomes, **self.own}

    def _right_or_wrong(self, target: Target, outcomes_of: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The target's outcomes in `outcomes_of` if it is one benchmark whose items are right or wrong; else None."""
        benchmarks = list(self.weights(target))
        answers = outcomes_of.get(benchmarks[0]) if len(benchmarks) == 1 else None
        return answers if answers is not None and evaluations.binary(answers) else None

    def _contributions(self, target: Target) -> dict[str, np.ndarray]:
        return uncertainty.contributions(self.weights(target), self.outcomes)

    @cached_property
    def _columns(self) -> dict[str, dict[str, float]]:
        """Every displayed column and benchmark -> the weights of its benchmarks."""
        return {column: self.weights((column,)) for column in dict.fromkeys([*self.parts, *self.benchmarks])}

    @cached_property
    def _column_draws(self) -> dict[str, np.ndarray]:
        return uncertainty.paired_draws(self._columns, self.outcomes)

    @cached_property
    def _own_draws(self) -> dict[str, np.ndarray]:
        return uncertainty.own_draws(self._columns, self._asked)

    @cached_property
    def panels(self) -> list[Panel]:
        """Panels in the order of ratio and calibration set."""
        return list(_panels(self.model, self.cells[self.cells["criterion"] != "none"]))


def compare(cells: pd.DataFrame, results: pd.DataFrame, samples: pd.DataFrame, reader: Reader) -> list[Comparison]:
    """Make one comparison per model, in the order of the study. Frames are as in `Study`; gaps go to its reader."""
    comparisons = []
    for model in dict.fromkeys(cells["model"]):
        own = cells[cells["model"] == model]
        own_results, own_samples = (frame[frame["cell"].isin(own.index)] for frame in (results, samples))
        comparisons.append(_comparison(model, own, own_results, own_samples, reader))
    return comparisons


def _comparison(
    model: str, cells: pd.DataFrame, results: pd.DataFrame, samples: pd.DataFrame, reader: Reader
) -> Comparison:
    order = names.in_order(results["benchmark"].astype(str), names.BENCHMARKS)
    scores = results.pivot(index="cell", columns="benchmark", values="score").reindex(index=cells.index, columns=order)
    errors = results.pivot(index="cell", columns="benchmark", values="stderr").reindex(index=cells.index, columns=order)
    answers = evaluations.outcome_matrices(samples, scores.astype(float))
    parts = ranks.displayed(order)
    words = settings.labels(cells)
    for cell, benchmark in answers.odd:
        reader.gap(f"the score of {benchmark} is not the mean of its items: it is not tested", words[cell])
    return Comparison(
        model=model,
        cells=cells,
        benchmarks=scores.astype(float),
        parts=parts,
        lower_is_better=_lower_is_better(results, parts),
        outcomes=answers.shared,
        standard_errors=errors.astype(float),
        own=answers.own,
    )


def _lower_is_better(results: pd.DataFrame, parts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Benchmarks whose metric is better when lower, and the displayed columns that only consist of such benchmarks."""
    first = results.drop_duplicates("benchmark")
    pairs = zip(first["benchmark"].astype(str), first["metric"].astype(str), strict=True)
    benchmarks = [name for name, metric in pairs if is_lower_better(metric)]
    return tuple(dict.fromkeys([*benchmarks, *(column for column, of in parts.items() if set(of) <= set(benchmarks))]))


def _panels(model: str, pruned: pd.DataFrame) -> Iterator[Panel]:
    axes = ["ratio", "gate", "seed"]
    setting_words = settings.gate_and_seed(pruned)
    for _, cells in pruned.groupby(axes, sort=True):
        ratio, gate, seed = cells[axes].iloc[0]
        sets = names.calibrations_in_order(set(cells["calibration"]) - {"none"}) or ["none"]
        for calibration in sets:
            competing = cells[cells["calibration"].isin([calibration, "none"])]
            by_key = dict(zip(competing["method"].astype(str), competing.index.astype(int), strict=True))
            order = names.methods_in_order(by_key)
            competitors = {key: by_key[key] for key in order}
            yield Panel(model, ratio, gate, seed, calibration, competitors, setting_words[cells.index[0]])
