"""All cells of one model side by side on the same items: scores, intervals and paired tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis import names, ranks, uncertainty
from analysis.load import Study

AVG = "Avg"


@dataclass(frozen=True)
class Panel:
    """The criteria that compete with each other: one model, ratio, allocation, gate, seed and calibration set.

    Criteria that read no data compete in every panel. `cells` maps criterion -> cell.
    """

    model: str
    ratio: float
    allocation: str
    gate: str
    seed: int
    calibration: str
    cells: dict[str, int]


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
    items: pd.Series
    """Benchmark -> number of items all cells share."""
    outcomes: dict[str, np.ndarray]
    """Benchmark -> outcomes (cells, items) on the items all cells share; only where they add up to the score."""
    standard_errors: pd.DataFrame
    """(cells, benchmarks) as the harness reported them."""

    @cached_property
    def columns(self) -> pd.DataFrame:
        """(cells, displayed columns) scores."""
        return ranks.component_columns(self.benchmarks, self.parts)

    @cached_property
    def averages(self) -> pd.Series:
        """Avg of each cell over the displayed columns; NaN where one is a gap."""
        return ranks.average(self.columns)

    @cached_property
    def unpruned(self) -> int | None:
        """The cell of the unpruned model."""
        found = self.cells.index[self.cells["criterion"] == "none"]
        return int(found[0]) if len(found) else None

    def rows(self, cells: Sequence[int]) -> np.ndarray:
        """Positions of `cells` in matrices."""
        return np.asarray(self.cells.index.get_indexer(list(cells)))

    def benchmarks_of(self, column: str) -> tuple[str, ...]:
        """Benchmarks whose mean a displayed column (or a benchmark, or Avg) is."""
        if column == AVG:
            return tuple(self.benchmarks.columns)
        return self.parts.get(column, (column,))

    def weights(self, column: str) -> dict[str, float]:
        """Benchmark -> its share in a column; Avg weighs displayed columns equally."""
        columns = list(self.parts) if column == AVG else [column]
        return {
            benchmark: 1 / len(self.benchmarks_of(name)) / len(columns)
            for name in columns
            for benchmark in self.benchmarks_of(name)
        }

    def strata(self, column: str) -> dict[str, np.ndarray]:
        """Stratum -> contributions (cells, items) that add up to the column's score; empty without outcomes.

        Benchmarks that grade the same answers twice (HumanEval and HumanEval+) share a stratum: their items are drawn
        and flipped together.
        """
        found: dict[str, np.ndarray] = {}
        for benchmark, weight in self.weights(column).items():
            if benchmark not in self.outcomes:
                return {}
            contributions = self.outcomes[benchmark] * (weight / self.outcomes[benchmark].shape[1])
            stratum = names.SAME_ITEMS.get(benchmark, benchmark)
            if stratum in found and found[stratum].shape == contributions.shape:
                found[stratum] = found[stratum] + contributions
            else:
                found[stratum if stratum not in found else benchmark] = contributions
        return found

    @cached_property
    def draws(self) -> dict[str, np.ndarray]:
        """Displayed column -> bootstrap replicates (replicates, cells) of its score."""
        strata: dict[str, dict[str, np.ndarray]] = {}
        for column in self.parts:
            for stratum, contributions in self.strata(column).items():
                strata.setdefault(stratum, {})[column] = contributions
        return uncertainty.bootstrap(strata)

    @cached_property
    def average_draws(self) -> np.ndarray | None:
        """Bootstrap replicates (replicates, cells) of Avg; None when a column has no outcomes."""
        if set(self.draws) != set(self.parts):
            return None
        return np.mean([self.draws[column] for column in self.parts], axis=0)

    @cached_property
    def intervals(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Lower and upper ends of 95 % intervals (cells, benchmarks + displayed columns + Avg)."""
        low: dict[str, np.ndarray] = {}
        high: dict[str, np.ndarray] = {}
        for column in dict.fromkeys([*self.benchmarks, *self.parts, AVG]):
            low[column], high[column] = self._interval(column)
        return pd.DataFrame(low, index=self.cells.index), pd.DataFrame(high, index=self.cells.index)

    def _interval(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Wilson for a benchmark of right-or-wrong items, bootstrap for graded ones and means of benchmarks."""
        parts = self.benchmarks_of(column)
        outcomes = self.outcomes.get(parts[0]) if len(parts) == 1 else None
        if outcomes is not None and _binary(outcomes):
            return uncertainty.wilson(outcomes.sum(axis=1), np.full(len(outcomes), outcomes.shape[1]))
        draws = self._draws(column)
        if draws is not None:
            return uncertainty.percentiles(draws)
        half = 1.96 * np.sqrt(sum((self.standard_errors[name] * share) ** 2 for name, share in self.weights(column).items()))
        centre = self.averages if column == AVG else self.columns.get(column, self.benchmarks.get(column))
        return (centre - half).to_numpy(float), (centre + half).to_numpy(float)

    def _draws(self, column: str) -> np.ndarray | None:
        if column == AVG:
            return self.average_draws
        if column in self.draws:
            return self.draws[column]
        strata = {stratum: {column: values} for stratum, values in self.strata(column).items()}
        return uncertainty.bootstrap(strata)[column] if strata else None

    def p_values(self, column: str, cell: int, others: Sequence[int]) -> np.ndarray:
        """Two-sided paired p-values of `cell` against each of `others`: McNemar for one benchmark of right-or-wrong
        items, sign flips otherwise; NaN where outcomes are missing."""
        parts = self.benchmarks_of(column)
        first, rest = self.rows([cell]), self.rows(others)
        outcomes = self.outcomes.get(parts[0]) if len(parts) == 1 else None
        if outcomes is not None and _binary(outcomes):
            p_values = uncertainty.mcnemar(outcomes[first], outcomes[rest])
            untested = np.isnan(outcomes[rest]).any(axis=1) | np.isnan(outcomes[first]).any()
        else:
            strata = self.strata(column)
            if not strata:
                return np.full(len(others), np.nan)
            contributions = np.concatenate(list(strata.values()), axis=1)
            differences = contributions[first] - contributions[rest]
            untested = np.isnan(differences).any(axis=1)
            p_values = uncertainty.sign_flip(np.nan_to_num(differences))
        return np.where(untested, np.nan, p_values)

    def lead(self, column: str, cell: int, other: int) -> tuple[float, float]:
        """95 % interval of the difference between two cells in a column, from paired replicates."""
        draws = self._draws(column)
        if draws is None:
            return np.nan, np.nan
        first, second = self.rows([cell, other])
        low, high = uncertainty.percentiles(draws[:, first] - draws[:, second])
        return float(low), float(high)

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
    outcomes, items = _outcomes(study.samples[study.samples["cell"].isin(cells.index)], scores.astype(float))
    return Comparison(
        model=model,
        cells=cells,
        benchmarks=scores.astype(float),
        parts=ranks.displayed(order),
        lower_is_better=_lower_is_better(results),
        items=items,
        outcomes=outcomes,
        standard_errors=errors.astype(float),
    )


def _lower_is_better(results: pd.DataFrame) -> tuple[str, ...]:
    metrics = results.drop_duplicates("benchmark").set_index("benchmark")["metric"].astype(str)
    return tuple(name for name, metric in metrics.items() if metric.endswith(names.LOWER_IS_BETTER))


def _outcomes(samples: pd.DataFrame, scores: pd.DataFrame) -> tuple[dict[str, np.ndarray], pd.Series]:
    """Outcomes (cells, items) per benchmark on the items that all evaluated cells share, NaN rows for other cells."""
    found: dict[str, np.ndarray] = {}
    items: dict[str, int] = {}
    unique = samples.drop_duplicates(["cell", "benchmark", "item"])
    for name, rows in unique.groupby("benchmark", sort=False):
        if name not in scores.columns:
            continue
        wide = rows.pivot(index="cell", columns="item", values="outcome").reindex(index=scores.index).astype(float)
        evaluated = scores[name].notna() & wide.notna().any(axis=1)
        shared = wide.loc[evaluated].notna().all(axis=0)
        matrix = wide.loc[:, shared].to_numpy(float, copy=True)
        matrix[~evaluated.to_numpy()] = np.nan
        items[str(name)] = matrix.shape[1]
        if matrix.shape[1] and _adds_up(wide, scores[name]):
            found[str(name)] = matrix
    return found, pd.Series(items, dtype=int).reindex(scores.columns, fill_value=0)


def _adds_up(wide: pd.DataFrame, scores: pd.Series) -> bool:
    """Whether scores are the means of their outcomes (perplexity, say, is not)."""
    return bool(((wide.mean(axis=1) - scores).abs().dropna() < 1e-3).all())


def _binary(outcomes: np.ndarray) -> bool:
    return bool(np.isin(outcomes[~np.isnan(outcomes)], (0.0, 1.0)).all())


def _panels(model: str, pruned: pd.DataFrame) -> Iterator[Panel]:
    settings = ["ratio", "allocation", "gate", "seed"]
    for key, cells in pruned.groupby(settings, sort=True):
        ratio, allocation, gate, seed = key
        sets = names.calibrations_in_order(set(cells["calibration"]) - {"none"}) or ["none"]
        for calibration in sets:
            competing = cells[cells["calibration"].isin([calibration, "none"])]
            by_name = {str(name): int(cell) for cell, name in competing["criterion"].items()}
            order = names.in_order(by_name, names.CRITERIA)
            yield Panel(model, ratio, allocation, gate, seed, calibration, {name: by_name[name] for name in order})
