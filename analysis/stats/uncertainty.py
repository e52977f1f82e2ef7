"""Confidence intervals, paired tests, the best of many methods, and Holm's correction.

Scores are means over items. What a seed changes is in them, too: plans of one method that differ in
the seed are replicates, and all of them answer the same items, so seeds and items are crossed
random effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import bdtr, gammaincinv, ndtr, ndtri, stdtr, stdtrit

CONFIDENCE = 0.95
POWER = 0.8
"""Share of studies in which a difference of the size `Estimate.detectable` is found."""
LEVEL = 0.05
"""What has a smaller p-value, after correction, is beyond noise."""


@dataclass(frozen=True)
class Estimate:
    """An estimated score or difference with its standard error and degrees of freedom; NaN where
    one is not known."""

    value: float
    error: float = np.nan
    freedom: float = np.nan
    exact: float = np.nan
    """An exact p-value, in place of that of the t-test."""
    methods: int = 2
    """Number of methods, of which the data chose the two that differ by `value`; 2 for any other
    estimate, and then the studentised range is Student's t."""

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval, simultaneous for all pairs of the methods."""
        if self.methods > 2:
            reach = range_quantile(self.methods, self.freedom) / np.sqrt(2) * self.error
        else:
            reach = float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * self.error
        return self.value - reach, self.value + reach

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the true value is 0, or that all methods are
        equal."""
        if not np.isnan(self.exact):
            return self.exact
        if self.error <= 1e-9:  # all replicates and items agree
            return float(abs(self.value) <= 1e-9)
        ratio = abs(self.value) / self.error
        if self.methods > 2:
            return float(
                studentized_range(np.array(ratio * np.sqrt(2)), self.methods, self.freedom)
            )
        return float(2 * stdtr(self.freedom, -ratio))

    @property
    def detectable(self) -> float:
        """The true value that a study with this standard error would call different from 0 with
        probability POWER."""
        quantiles = stdtrit(self.freedom, (1 + CONFIDENCE) / 2) + stdtrit(self.freedom, POWER)
        return float(quantiles * self.error)


@dataclass(frozen=True)
class Stratum:
    """Items that were drawn together, such as those of one benchmark."""

    contributions: np.ndarray
    """(replicates, items); the score of a replicate is the sum of its contributions over all
    strata."""
    shares: np.ndarray
    """(items,), positive and with the sum 1: the weight of an item, such as its share of all
    tokens."""


def crossed(strata: Sequence[Stratum]) -> Estimate:
    """Mean score of the replicates, with the error of crossed random effects of seeds and items.

    The variance of the mean is V(seeds) + V(items) - V(seed x item), each from its mean square;
    degrees of freedom are Satterthwaite's, and at least 1. With one replicate it is that of items
    alone, of the plan rather than the method. Items are weighted by their shares, as in a ratio
    estimator. NaN for a stratum of one item.
    """
    totals = [stratum.contributions.sum(axis=1) for stratum in strata]
    of_seed = np.sum(totals, axis=0)
    seeds = len(of_seed)
    value = float(np.mean(of_seed))
    by_seed = ((of_seed - value) ** 2).sum() / (seeds - 1) / seeds if seeds > 1 else 0.0
    by_item = rest = squares = 0.0
    for stratum, total in zip(strata, totals, strict=True):
        items = len(stratum.shares)
        if items < 2:
            return Estimate(value)
        means = stratum.contributions.mean(axis=0) - stratum.shares * total.mean()
        items_part = items / (items - 1) * (means**2).sum()
        by_item = by_item + items_part
        squares = squares + items_part**2 / (items - 1)
        if seeds > 1:
            residuals = stratum.contributions - total[:, None] * stratum.shares - means
            rest_part = items / (items - 1) * (residuals**2).sum() / (seeds - 1) / seeds
            rest = rest + rest_part
            squares = squares + rest_part**2 / (items - 1) / (seeds - 1)
    squares += by_seed**2 / (seeds - 1) if seeds > 1 else 0.0
    difference = by_seed + by_item - rest
    variance = max(difference, by_seed, by_item)  # a variance of effects cannot be negative
    freedom = max(1.0, difference**2 / squares) if squares > 0 else 1.0
    return Estimate(value, float(np.sqrt(variance)), float(freedom))


def mean_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean of independent values, such as differences in several models, with n - 1 degrees of
    freedom."""
    numbers = np.asarray(values, float)
    if len(numbers) < 2:
        return Estimate(float(numbers.mean()) if len(numbers) else np.nan)
    return Estimate(
        float(numbers.mean()), float(numbers.std(ddof=1) / np.sqrt(len(numbers))), len(numbers) - 1
    )


def best_of_many(
    pairs: Sequence[Estimate], strata: Sequence[Stratum], methods: np.ndarray
) -> list[Estimate]:
    """Lead of the first method, the best of many by the same data, over each other one.

    pairs: its difference to each other one from their own plans. strata: outcomes of the plans of
    all methods, one replicate each. methods (replicates,): the number of the method of each plan;
    the best has 0.

    The error of a lead is the larger of its own and one whose variances are pooled over all
    methods, as the range of many means needs more degrees of freedom than two methods have. Its p
    is that of the studentised range (Tukey's procedure for all pairs), so that the best may be
    picked from the data. Only values are known without strata.
    """
    if not strata or any(len(stratum.shares) < 2 for stratum in strata):
        return [Estimate(pair.value) for pair in pairs]
    counts = np.bincount(methods)
    average = (methods == np.arange(len(counts))[:, None]) / counts[:, None]
    means = average @ np.sum([stratum.contributions.sum(axis=1) for stratum in strata], axis=0)
    variances, freedom = _pooled(strata, methods, average)
    errors = np.sqrt(variances[0] + variances[1:])
    return [
        Estimate(
            float(means[0] - mean), max(pair.error, float(error)), freedom, methods=len(counts)
        )
        for pair, mean, error in zip(pairs, means[1:], errors, strict=True)
    ]


def leads(table: np.ndarray, pairs: Sequence[Estimate]) -> list[Estimate]:
    """As `best_of_many`, from numbers (seeds, methods, blocks) of blocks with equal weights;
    the first method is the best."""
    seeds, methods, blocks = table.shape
    by_method = table.swapaxes(0, 1).reshape(methods * seeds, blocks)
    stratum = Stratum(by_method / blocks, np.full(blocks, 1 / blocks))
    return best_of_many(pairs, [stratum], np.repeat(np.arange(methods), seeds))


def _pooled(
    strata: Sequence[Stratum], methods: np.ndarray, average: np.ndarray
) -> tuple[np.ndarray, float]:
    """Variance of each method's mean score among those of the others, and its degrees of freedom.

    As in `crossed` it is V(seeds) + V(method x item) - V(rest), but each term is of all methods
    together. `average` (methods, plans): the weights of plans in the mean of their method."""
    others = len(average) - 1
    repeats = len(methods) - len(average)
    shares = (average**2).sum(axis=1)  # 1 / number of seeds
    of_plan = np.sum([stratum.contributions.sum(axis=1) for stratum in strata], axis=0)
    of_seed = ((of_plan - (average @ of_plan)[methods]) ** 2).sum() / max(repeats, 1)
    by_item = rest = squares = 0.0
    for stratum in strata:
        items = len(stratum.shares)
        centred = (
            stratum.contributions - stratum.contributions.sum(axis=1)[:, None] * stratum.shares
        )
        means = average @ centred
        part = items / (items - 1) * ((means - means.mean(axis=0)) ** 2).sum() / others
        by_item = by_item + part
        squares = squares + part**2 / others / (items - 1)
        rest += items / (items - 1) * ((centred - means[methods]) ** 2).sum() / max(repeats, 1)
    by_seed = of_seed * shares
    interaction = max(0.0, by_item - rest * shares.mean())
    variances = np.maximum(by_seed + interaction, by_item)
    squares += by_seed.mean() ** 2 / repeats if repeats else 0.0
    freedom = variances.mean() ** 2 / squares if squares > 0 else 1.0
    return variances, max(1.0, float(freedom))


@cache
def range_quantile(methods: int, freedom: float = np.inf) -> float:
    """The value that the studentised range of `methods` equal means exceeds with probability
    LEVEL."""
    low = 0.0
    high = 1e3
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if studentized_range(np.array(middle), methods, freedom) > LEVEL:
            low = middle
        else:
            high = middle
    return low


_DEVIATES, _STEP = np.linspace(-9, 9, 91, retstep=True)
_WEIGHTS = np.exp(-(_DEVIATES**2) / 2) / np.sqrt(2 * np.pi) * _STEP


def studentized_range(values: np.ndarray, methods: int, freedom: float = np.inf) -> np.ndarray:
    """P-value of each of `values` as the range of `methods` normal deviates, divided by a standard
    deviation that was estimated with `freedom` degrees of freedom, of which there should be at
    least two.

    Equal to scipy's `studentized_range.sf(values, methods, freedom)`; scipy.stats takes half a
    second to import. Sums over equal steps are exact to many decimals, as what is integrated and
    its derivatives vanish at both ends."""
    if np.isinf(freedom):
        others = ndtr(_DEVIATES) - ndtr(_DEVIATES - np.asarray(values, float)[..., None])
        return np.asarray(1 - methods * (_WEIGHTS * others ** (methods - 1)).sum(axis=-1))
    half = freedom / 2
    low, high = np.log(gammaincinv(half, [1e-10, 1 - 1e-13]) / half) / 2
    logs = np.linspace(low, high, 81)  # logarithms of the estimated standard deviation
    density = np.exp(freedom * logs + half * (1 - np.exp(2 * logs)))
    scaled = np.asarray(values, float)[..., None] * np.exp(logs)
    p_values = (studentized_range(scaled, methods) * density).sum(axis=-1) / density.sum()
    return np.asarray(np.maximum(p_values, 0))


def wilson(successes: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % Wilson interval of a share of successes among items (arrays of one shape): lower and
    upper ends.

    Equal to statsmodels' `proportion_confint(successes, items, method="wilson")`, which imports all
    of scipy.stats: a twentieth of the time of a report.
    """
    share = successes / items
    z = ndtri((1 + CONFIDENCE) / 2)
    centre = share + z**2 / (2 * items)
    reach = z * np.sqrt(share * (1 - share) / items + (z / (2 * items)) ** 2)
    low = (centre - reach) / (1 + z**2 / items)
    high = (centre + reach) / (1 + z**2 / items)
    answered = items > 0
    return np.where(answered & (successes == 0), 0.0, low), np.where(
        answered & (successes == items), 1.0, high
    )


def holm(p_values: np.ndarray) -> np.ndarray:
    """Holm's step-down adjustment of a family of p-values; NaN stays NaN and does not count.

    Equal to statsmodels' `multipletests(p_values, method="holm")`, which is slower: it runs the
    garbage collector at every call.
    """
    p_values = np.asarray(p_values, float)
    order = np.argsort(p_values)[: np.count_nonzero(~np.isnan(p_values))]  # NaN sorts last
    steps = p_values[order] * np.arange(len(order), 0, -1)
    adjusted = np.full(p_values.shape, np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted


def mcnemar(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Exact two-sided McNemar p-values for 0/1 outcomes of two plans on the same items (...,
    items).

    Equal to statsmodels' `mcnemar(table, exact=True)`, for many pairs at once. Under the null
    hypothesis, each discordant item favours either plan with probability 1/2.
    """
    only_first = ((first == 1) & (second == 0)).sum(axis=-1)
    only_second = ((first == 0) & (second == 1)).sum(axis=-1)
    tail = bdtr(np.minimum(only_first, only_second), only_first + only_second, 0.5)
    return np.asarray(np.minimum(1.0, 2 * tail))
