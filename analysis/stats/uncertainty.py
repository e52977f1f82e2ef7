"""Confidence intervals, paired tests and Holm's correction.

Scores are means over items. What a seed changes is in them, too: plans of one method that differ in the seed are
replicates, and all of them answer the same items, so seeds and items are crossed random effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, ndtri, stdtr, stdtrit

CONFIDENCE = 0.95
POWER = 0.8
"""Share of studies in which a difference of the size `Estimate.detectable` is found."""
LEVEL = 0.05
"""What has a smaller p-value, after Holm's correction, is beyond noise."""


@dataclass(frozen=True)
class Estimate:
    """An estimated score or difference with its standard error and degrees of freedom; NaN where one is not known."""

    value: float
    error: float = np.nan
    freedom: float = np.nan
    exact: float = np.nan
    """An exact p-value, in place of that of the t-test."""

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of Student's t."""
        reach = float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * self.error
        return self.value - reach, self.value + reach

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the true value is 0."""
        if not np.isnan(self.exact):
            return self.exact
        if self.error <= 1e-9:  # all replicates and items agree
            return float(abs(self.value) <= 1e-9)
        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))

    @property
    def detectable(self) -> float:
        """The true value that a study with this standard error would call different from 0 with probability POWER."""
        quantiles = stdtrit(self.freedom, (1 + CONFIDENCE) / 2) + stdtrit(self.freedom, POWER)
        return float(quantiles * self.error)


@dataclass(frozen=True)
class Stratum:
    """Items that were drawn together, such as those of one benchmark."""

    contributions: np.ndarray
    """(replicates, items); the score of a replicate is the sum of its contributions over all strata."""
    shares: np.ndarray
    """(items,), positive and with the sum 1: the weight of an item, such as its share of all tokens."""


def crossed(strata: Sequence[Stratum]) -> Estimate:
    """Mean score of the replicates, with the error of crossed random effects of seeds and items.

    The variance of the mean is V(seeds) + V(items) - V(seed x item), each from its mean square; degrees of freedom are
    Satterthwaite's, and at least 1. With one replicate it is that of items alone, of the plan rather than the method.
    Items are weighted by their shares, as in a ratio estimator. NaN for a stratum of one item.
    """
    totals = [stratum.contributions.sum(axis=1) for stratum in strata]
    of_seed = np.sum(totals, axis=0)
    seeds, value = len(of_seed), float(np.mean(of_seed))
    by_seed = ((of_seed - value) ** 2).sum() / (seeds - 1) / seeds if seeds > 1 else 0.0
    by_item = rest = squares = 0.0
    for stratum, total in zip(strata, totals, strict=True):
        items = len(stratum.shares)
        if items < 2:
            return Estimate(value)
        means = stratum.contributions.mean(axis=0) - stratum.shares * total.mean()
        items_part = items / (items - 1) * (means**2).sum()
        by_item, squares = by_item + items_part, squares + items_part**2 / (items - 1)
        if seeds > 1:
            residuals = stratum.contributions - total[:, None] * stratum.shares - means
            rest_part = items / (items - 1) * (residuals**2).sum() / (seeds - 1) / seeds
            rest, squares = rest + rest_part, squares + rest_part**2 / (items - 1) / (seeds - 1)
    squares += by_seed**2 / (seeds - 1) if seeds > 1 else 0.0
    difference = by_seed + by_item - rest
    variance = max(difference, by_seed, by_item)  # a variance of effects cannot be negative
    freedom = max(1.0, difference**2 / squares) if squares > 0 else 1.0
    return Estimate(value, float(np.sqrt(variance)), float(freedom))


def mean_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean of independent values, such as differences in several models, with n - 1 degrees of freedom."""
    numbers = np.asarray(values, float)
    if len(numbers) < 2:
        return Estimate(float(numbers.mean()) if len(numbers) else np.nan)
    return Estimate(float(numbers.mean()), float(numbers.std(ddof=1) / np.sqrt(len(numbers))), len(numbers) - 1)


def prediction(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Ends of the interval in which a further value lies with 95 % probability, from values of a normal distribution.

    NaN for fewer than two values."""
    numbers = np.asarray(values, float)
    if len(numbers) < 2:
        return np.nan, np.nan
    reach = stdtrit(len(numbers) - 1, (1 + CONFIDENCE) / 2) * numbers.std(ddof=1) * np.sqrt(1 + 1 / len(numbers))
    return float(numbers.mean() - reach), float(numbers.mean() + reach)


def wilson(successes: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % Wilson interval of a share of successes among items (arrays of one shape): lower and upper ends.

    Equal to statsmodels' `proportion_confint(successes, items, method="wilson")`, which imports all of scipy.stats:
    a twentieth of the time of a report.
    """
    share, z = successes / items, ndtri((1 + CONFIDENCE) / 2)
    centre = share + z**2 / (2 * items)
    reach = z * np.sqrt(share * (1 - share) / items + (z / (2 * items)) ** 2)
    low, high = (centre - reach) / (1 + z**2 / items), (centre + reach) / (1 + z**2 / items)
    asked = items > 0
    return np.where(asked & (successes == 0), 0.0, low), np.where(asked & (successes == items), 1.0, high)


def holm(p_values: np.ndarray) -> np.ndarray:
    """Holm's step-down adjustment of a family of p-values; NaN stays NaN and does not count.

    Equal to statsmodels' `multipletests(p_values, method="holm")`, which is slower: it runs the garbage collector at
    every call.
    """
    p_values = np.asarray(p_values, float)
    order = np.argsort(p_values)[: np.count_nonzero(~np.isnan(p_values))]  # NaN sorts last
    steps = p_values[order] * np.arange(len(order), 0, -1)
    adjusted = np.full(p_values.shape, np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted


def mcnemar(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Exact two-sided McNemar p-values for 0/1 outcomes of two plans on the same items (..., items).

    Equal to statsmodels' `mcnemar(table, exact=True)`, for many pairs at once. Under the null hypothesis, each
    discordant item favours either plan with probability 1/2.
    """
    only_first = ((first == 1) & (second == 0)).sum(axis=-1)
    only_second = ((first == 0) & (second == 1)).sum(axis=-1)
    tail = bdtr(np.minimum(only_first, only_second), only_first + only_second, 0.5)
    return np.asarray(np.minimum(1.0, 2 * tail))
