"""Critical differences of average ranks: Friedman's test, then Nemenyi's critical difference (Demšar 2006, JMLR 7).

Methods are ranked in blocks: displayed columns, or benchmarks. Two methods differ at the 5 % level when Friedman's test
is significant and their average ranks are further apart than the critical difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from scipy.special import chdtrc, ndtr

from analysis import names
from analysis.stats import ranks
from analysis.stats.comparison import Comparison, Panel, Target
from analysis.stats.uncertainty import LEVEL

COLUMNS, BENCHMARKS = "columns", "benchmarks"
"""Blocks in which methods are ranked: columns give the papers' Avg Rank; benchmarks are more blocks, so more power."""
FEWEST = 3
"""Least number of methods, and of blocks, for a test."""


@dataclass(frozen=True, eq=False)
class RankTest:
    """Average ranks of the methods of one panel, with Friedman's test and Nemenyi's critical difference."""

    panel: Panel
    over: str
    """COLUMNS or BENCHMARKS."""
    blocks: int
    ranks: pd.Series
    """Method's key -> average rank, best first."""
    incomplete: tuple[str, ...]
    """Methods that lack a result in some block, and so have no average rank."""
    statistic: float
    p: float
    """p-value of Friedman's chi-squared `statistic`; both are NaN when all methods tie in every block."""

    @property
    def difference(self) -> float:
        """Nemenyi's critical difference at the 5 % level."""
        return critical_difference(len(self.ranks), self.blocks)

    @property
    def significant(self) -> bool:
        """Whether Friedman's test finds any difference at the 5 % level."""
        return bool(self.p < LEVEL)

    def p_to_best(self) -> pd.Series:
        """Nemenyi's p-value of each method against the first; NaN for the first itself."""
        p_values = pd.Series(nemenyi(self.ranks.to_numpy() - self.ranks.iloc[0], len(self.ranks), self.blocks))
        return p_values.set_axis(self.ranks.index).where(np.arange(len(self.ranks)) > 0)

    def cliques(self) -> list[tuple[int, int]]:
        """First and last position of each maximal run of methods that do not differ significantly."""
        values = self.ranks.to_numpy()
        reach = self.difference if self.significant else np.inf
        ends = [int(np.flatnonzero(values < value + reach).max()) for value in values]
        return [
            (first, last) for first, last in enumerate(ends) if last > first and (first == 0 or ends[first - 1] < last)
        ]


@cache
def critical_difference(methods: int, blocks: int) -> float:
    """Nemenyi's critical difference q sqrt(k (k + 1) / 6 N) of average ranks, for k methods in N blocks.

    q is the quantile of the studentized range of k methods with infinite degrees of freedom, divided by sqrt(2)."""
    low, high = 0.0, 20.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if studentized_range(np.array(middle), methods) > LEVEL else (low, middle)
    return float(low / np.sqrt(2) * _spread(methods, blocks))


def nemenyi(differences: np.ndarray, methods: int, blocks: int) -> np.ndarray:
    """Nemenyi's p-values of differences between average ranks of `methods` ranked in `blocks`."""
    scaled = np.abs(differences) / _spread(methods, blocks) * np.sqrt(2)
    return studentized_range(scaled, methods)


_DEVIATES, _STEP = np.linspace(-9, 9, 241, retstep=True)
_WEIGHTS = np.exp(-(_DEVIATES**2) / 2) / np.sqrt(2 * np.pi) * _STEP


def studentized_range(values: np.ndarray, methods: int) -> np.ndarray:
    """P-value of each of `values` as a range of `methods` standard normal deviates.

    Equal to scipy's `studentized_range.sf(values, methods, np.inf)`; scipy.stats takes half a second to import. The sum
    over equal steps is exact to 14 decimals, as what is integrated and its derivatives vanish at both ends."""
    others = ndtr(_DEVIATES) - ndtr(_DEVIATES - np.asarray(values, float)[..., None])
    return np.asarray(1 - methods * (_WEIGHTS * others ** (methods - 1)).sum(axis=-1))


def friedman(scores: np.ndarray) -> tuple[float, float]:
    """Friedman's chi-squared of scores (methods, blocks), and its p-value; NaN when all methods tie in every block.

    Equal to scipy's `friedmanchisquare(*scores)`."""
    deviations = pd.DataFrame(scores).rank().to_numpy() - (len(scores) + 1) / 2
    squares = (deviations**2).sum()
    statistic = (len(scores) - 1) * (deviations.sum(axis=1) ** 2).sum() / squares if squares else np.nan
    return float(statistic), float(chdtrc(len(scores) - 1, statistic))


def _spread(methods: int, blocks: int) -> float:
    return float(np.sqrt(methods * (methods + 1) / (6 * blocks)))


def rank_test(comparison: Comparison, panel: Panel, over: str = COLUMNS) -> RankTest | None:
    """Test the average ranks of one panel; None with fewer than three complete methods or three blocks.

    Values are ranked as for Avg Rank: rounded to three decimals, ties sharing the mean of their ranks.
    """
    values = _blocks(comparison, panel, over).reindex(list(panel.cells.values())).set_axis(list(panel.cells), axis=0)
    complete = values.notna().all(axis=1)
    kept = values[complete].round(ranks.PRINTED_DECIMALS)
    if min(kept.shape) < FEWEST:
        return None
    average = ranks.average_rank(kept, lower_is_better=comparison.lower_is_better)
    statistic, p = friedman(kept.to_numpy())
    return RankTest(
        panel=panel,
        over=over,
        blocks=kept.shape[1],
        ranks=average.sort_values(kind="stable"),
        incomplete=tuple(str(key) for key in values.index[~complete]),
        statistic=statistic,
        p=p,
    )


def _blocks(comparison: Comparison, panel: Panel, over: str) -> pd.DataFrame:
    """Scores (cells, blocks) as shown. Benchmarks that grade the same answers form one block with their mean."""
    if over == COLUMNS:
        groups: dict[str, Target] = {column: (column,) for column in panel.columns(comparison)}
    else:
        run = comparison.benchmarks.reindex(list(panel.cells.values())).notna().any()
        evaluated = [str(name) for name in run.index[run]]
        stems = {name: names.SAME_ITEMS.get(name, name) for name in evaluated}
        groups = {stem: tuple(name for name in evaluated if stems[name] == stem) for stem in stems.values()}
    return pd.DataFrame(
        {name: comparison.quantity(target).shown(comparison.score(target)) for name, target in groups.items()}
    )


def rank_tests(comparison: Comparison, over: str = COLUMNS) -> list[RankTest]:
    """Test all panels that have enough methods and blocks."""
    tests = (rank_test(comparison, panel, over) for panel in comparison.panels)
    return [test for test in tests if test is not None]
