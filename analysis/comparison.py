"""All cells of one model side by side on the same items: scores, intervals and paired tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis import names, ranks, settings, uncertainty
from analysis.load import Study

Target = tuple[str, ...]
"""What is scored: the mean of these displayed columns or benchmarks, often a single one."""

_NORMAL = 1.96


@dataclass(frozen=True)
class Panel:
    """The methods that compete with each other: one model, ratio, gate, seed and calibration set.

    Methods that read no data compete in every panel. `cells` maps a method's key -> cell, in their usual order.
    """

    model: str
    ratio: float
    gate: str
    seed: int
    calibration: str
    cells: dict[str, int]
    told: str = ""
    """Gate and seed in words, where the model's cells have several."""

    @property
    def pruned(self) -> str:
        """What panels of one calibration set are told apart by: `50 %`, or `50 %, seed 43`."""
        return settings.joined(names.ratio(self.ratio), self.told)

    @property
    def settings(self) -> tuple[float, str, int]:
        """What panels of different calibration sets may share."""
        return self.ratio, self.gate, self.seed

    def columns(self, comparison: Comparison) -> Target:
        """Displayed columns that at least one of these cells was evaluated on; all of them where every cell failed."""
        found = comparison.columns.loc[list(self.cells.values())].notna().any()
        return tuple(str(name) for name in (found.index[found] if found.any() else found.index))


@dataclass(frozen=True)
class Comparison:
    """Cells of one model. Rows of all frames and matrices are `cells` in their order."""

    model: str
    cells: pd.DataFrame
    benchmarks: pd.DataFrame
    """(cells, benchmarks) scores; NaN is a gap."""
    parts: dict[str, tuple[str, ...]]
    """Displayed column -> its benchmarks."""
    lower_is_better: tuple[str, ...]
    """Columns and benchmarks where less is better."""
    outcomes: dict[str, np.ndarray]
    """Benchmark -> outcomes (cells, items) on the items all cells share; only where they add up to the score."""
    standard_errors: pd.DataFrame
    """(cells, benchmarks) as the harness reported them."""

    @cached_property
    def columns(self) -> pd.DataFrame:
        """(cells, displayed columns) scores."""
        return ranks.component_columns(self.benchmarks, self.parts)

    @cached_property
    def unpruned(self) -> int | None:
        """The cell of the unpruned model."""
        found = self.cells.index[self.cells["criterion"] == "none"]
        return int(found[0]) if len(found) else None

    def score(self, target: Target) -> pd.Series:
        """Score of every cell: the mean of the target's columns, NaN where one is a gap or there are none."""
        if target not in self._scores:
            self._scores[target] = self._score(target)
        return self._scores[target]

    @cached_property
    def _scores(self) -> dict[Target, pd.Series]:
        """Scores that were asked for already: they are looked up cell by cell."""
        return {}

    def _score(self, target: Target) -> pd.Series:
        if not target:
            return pd.Series(np.nan, self.cells.index)
        columns = [self.columns[name] if name in self.parts else self.benchmarks[name] for name in target]
        return pd.concat(columns, axis=1).mean(axis=1, skipna=False)

    def interval(self, target: Target) -> tuple[pd.Series, pd.Series]:
        """Ends of the 95 % interval of every cell's score.

        Wilson for a benchmark of right-or-wrong items, bootstrap for graded ones and means of benchmarks, the reported
        standard error where there are no outcomes.
        """
        if target not in self._intervals:
            self._intervals[target] = self._interval(target)
        return self._intervals[target]

    @cached_property
    def _intervals(self) -> dict[Target, tuple[pd.Series, pd.Series]]:
        """Intervals that were asked for already: several tables and figures show the same ones."""
        return {}

    def _interval(self, target: Target) -> tuple[pd.Series, pd.Series]:
        outcomes = self._right_or_wrong(target)
        draws = None if outcomes is not None else self.draws(target)
        if outcomes is not None:
            low, high = uncertainty.wilson(outcomes.sum(axis=1), np.full(len(outcomes), outcomes.shape[1]))
        elif draws is not None:
            low, high = uncertainty.percentiles(draws)
        else:
            shares = self.weights(target)
            errors = self.standard_errors[list(shares)].to_numpy(float) * np.array(list(shares.values()))
            centre, half = self.score(target).to_numpy(float), _NORMAL * np.sqrt(np.square(errors).sum(axis=1))
            low, high = centre - half, centre + half
        return pd.Series(low, self.cells.index), pd.Series(high, self.cells.index)

    def p_values(self, target: Target, cell: int, others: Sequence[int]) -> np.ndarray:
        """Two-sided paired p-values of `cell` against each of `others`: McNemar for one benchmark of right-or-wrong
        items, sign flips otherwise; NaN where outcomes are missing."""
        first, rest = self.rows([cell]), self.rows(others)
        outcomes = self._right_or_wrong(target)
        if outcomes is not None:
            p_values = uncertainty.mcnemar(outcomes[first], outcomes[rest])
            return np.where(np.isnan(outcomes[first] + outcomes[rest]).any(axis=1), np.nan, p_values)
        contributions = self._contributions(target)
        if not contributions:
            return np.full(len(others), np.nan)
        items = np.concatenate(list(contributions.values()), axis=1)
        differences = items[first] - items[rest]
        return np.where(np.isnan(differences).any(axis=1), np.nan, uncertainty.sign_flip(np.nan_to_num(differences)))

    def lead(self, target: Target, cell: int, other: int) -> tuple[float, float]:
        """95 % interval of the difference between two cells, from paired replicates."""
        draws = self.draws(target)
        if draws is None:
            return np.nan, np.nan
        first, second = self.rows([cell, other])
        low, high = uncertainty.percentiles(draws[:, first] - draws[:, second])
        return float(low), float(high)

    def draws(self, target: Target) -> np.ndarray | None:
        """Bootstrap replicates (replicates, cells) of the target's score; None when a benchmark has no outcomes."""
        if target not in self._target_draws:
            found = [self._column_draws.get(name) for name in target]
            known = [draws for draws in found if draws is not None]
            self._target_draws[target] = np.mean(known, axis=0) if known and len(known) == len(target) else None
        return self._target_draws[target]

    @cached_property
    def _target_draws(self) -> dict[Target, np.ndarray | None]:
        """Replicates that were asked for already: a table measures many cells against the same one."""
        return {}

    def rows(self, cells: Sequence[int]) -> np.ndarray:
        """Positions of `cells` in matrices."""
        return np.asarray(self.cells.index.get_indexer(pd.Index(cells)))

    def weights(self, target: Target) -> dict[str, float]:
        """Benchmark -> its share in the target; columns weigh alike, and so do the benchmarks in a column."""
        parts = {name: self.parts.get(name, (name,)) for name in target}
        return {
            benchmark: 1 / len(benchmarks) / len(target) for benchmarks in parts.values() for benchmark in benchmarks
        }

    def _right_or_wrong(self, target: Target) -> np.ndarray | None:
        """Outcomes (cells, items) if the target is one benchmark whose items are right or wrong."""
        benchmarks = list(self.weights(target))
        outcomes = self.outcomes.get(benchmarks[0]) if len(benchmarks) == 1 else None
        return outcomes if outcomes is not None and _binary(outcomes) else None

    def _contributions(self, target: Target) -> dict[str, np.ndarray]:
        """Stratum -> contributions (cells, items) that add up to the target's score; empty without outcomes.

        Benchmarks that grade the same answers twice (HumanEval and HumanEval+) share a stratum: their items are drawn
        and flipped together.
        """
        found: dict[str, np.ndarray] = {}
        for benchmark, weight in self.weights(target).items():
            if benchmark not in self.outcomes:
                return {}
            outcomes = self.outcomes[benchmark]
            stratum = names.SAME_ITEMS.get(benchmark, benchmark)
            if stratum in found and found[stratum].shape != outcomes.shape:
                stratum = benchmark
            found[stratum] = found.get(stratum, 0) + outcomes * (weight / outcomes.shape[1])
        return found

    @cached_property
    def _column_draws(self) -> dict[str, np.ndarray]:
        """Replicates of every displayed column and benchmark, all from the same draws of items."""
        strata: dict[str, dict[str, np.ndarray]] = {}
        for column in dict.fromkeys([*self.parts, *self.benchmarks]):
            for stratum, contributions in self._contributions((column,)).items():
                strata.setdefault(f"{stratum}/{contributions.shape[1]}", {})[column] = contributions
        return uncertainty.bootstrap(strata)

    @cached_property
    def panels(self) -> list[Panel]:
        """Panels in the order of ratio and calibration set."""
        return list(_panels(self.model, self.cells[self.cells["criterion"] != "none"]))


def compare(study: Study) -> list[Comparison]:
    """One comparison per model, in the order of the study."""
    return [_comparison(study, model) for model in dict.fromkeys(study.cells["model"])]


def _comparison(study: Study, model: str) -> Comparison:
    cells = study.cells[study.cells["model"] == model]
    results = study.results[study.results["cell"].isin(cells.index)]
    order = names.in_order(results["benchmark"].astype(str), names.BENCHMARKS)
    scores = results.pivot(index="cell", columns="benchmark", values="score").reindex(index=cells.index, columns=order)
    errors = results.pivot(index="cell", columns="benchmark", values="stderr").reindex(index=cells.index, columns=order)
    outcomes = _outcomes(study.samples[study.samples["cell"].isin(cells.index)], scores.astype(float))
    return Comparison(
        model=model,
        cells=cells,
        benchmarks=scores.astype(float),
        parts=ranks.displayed(order),
        lower_is_better=_lower_is_better(results),
        outcomes=outcomes,
        standard_errors=errors.astype(float),
    )


def _lower_is_better(results: pd.DataFrame) -> tuple[str, ...]:
    first = results.drop_duplicates("benchmark")
    pairs = zip(first["benchmark"].astype(str), first["metric"].astype(str), strict=True)
    return tuple(name for name, metric in pairs if metric.endswith(names.LOWER_IS_BETTER))


def _outcomes(samples: pd.DataFrame, scores: pd.DataFrame) -> dict[str, np.ndarray]:
    """Outcomes (cells, items) per benchmark on the items that all evaluated cells share, NaN rows for other cells."""
    found: dict[str, np.ndarray] = {}
    unique = samples.drop_duplicates(["cell", "benchmark", "item"])
    for name, rows in unique.groupby("benchmark", sort=False):
        if name not in scores.columns:
            continue
        wide = rows.pivot(index="cell", columns="item", values="outcome").reindex(index=scores.index).astype(float)
        evaluated = scores[name].notna() & wide.notna().any(axis=1)
        shared = wide.loc[evaluated].notna().all(axis=0)
        matrix = wide.loc[:, shared].to_numpy(float, copy=True)
        matrix[~evaluated.to_numpy()] = np.nan
        if matrix.shape[1] and _adds_up(wide, scores[name]):
            found[str(name)] = matrix
    return found


def _adds_up(wide: pd.DataFrame, scores: pd.Series) -> bool:
    """Whether scores are the means of their outcomes (perplexity, say, is not)."""
    return bool(((wide.mean(axis=1) - scores).abs().dropna() < 1e-3).all())


def _binary(outcomes: np.ndarray) -> bool:
    return bool(np.isin(outcomes[~np.isnan(outcomes)], (0.0, 1.0)).all())


def _panels(model: str, pruned: pd.DataFrame) -> Iterator[Panel]:
    axes = ["ratio", "gate", "seed"]
    told = settings.settings(pruned)
    for _, cells in pruned.groupby(axes, sort=True):
        ratio, gate, seed = cells[axes].iloc[0]
        sets = names.calibrations_in_order(set(cells["calibration"]) - {"none"}) or ["none"]
        for calibration in sets:
            competing = cells[cells["calibration"].isin([calibration, "none"])]
            by_key = dict(zip(competing["method"].astype(str), competing.index.astype(int), strict=True))
            order = names.methods_in_order(by_key)
            competitors = {key: by_key[key] for key in order}
            yield Panel(model, ratio, gate, seed, calibration, competitors, told[cells.index[0]])
