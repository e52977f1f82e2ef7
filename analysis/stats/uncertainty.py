"""Confidence intervals, paired tests, the best of many methods, and Holm's correction.

Scores are means over items, and they also vary with the seed. Plans of one method that differ in
the seed alone are replicates. All replicates answer the same items, so seeds and items are crossed
random effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import gammaincinv, ndtr, ndtri, stdtr, stdtrit

CONFIDENCE = 0.95
LEVEL = 0.05
"""Significance level of corrected p-values."""


@dataclass(frozen=True)
class Estimate:
    """An estimated score or difference with its standard error and degrees of freedom. Unknown
    numbers are NaN."""

    value: float
    error: float = np.nan
    """Standard error of `value`."""
    degrees_of_freedom: float = np.nan
    methods: int = 2
    """Number of methods from which the data chose the two that `value` compares. With more than 2,
    interval and p come from the studentised range, otherwise from Student's t."""

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high end of the 95 % interval. With more than two `methods`, the intervals hold
        simultaneously for all pairs of methods."""
        if self.methods > 2:
            # The quantile counts standard errors of one mean. `error` is the standard error of a
            # difference of two means, and therefore sqrt(2) times as large.
            half_width = (
                range_quantile(self.methods, self.degrees_of_freedom) / np.sqrt(2) * self.error
            )
        else:
            half_width = float(stdtrit(self.degrees_of_freedom, (1 + CONFIDENCE) / 2)) * self.error
        return self.value - half_width, self.value + half_width

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the true value is 0. With more than two
        `methods`, the hypothesis is that all methods are equal."""
        if self.error <= 1e-9:  # 0 up to rounding: all replicates and items agree
            return float(abs(self.value) <= 1e-9)
        ratio = abs(self.value) / self.error
        if self.methods > 2:
            # sqrt(2) as in `interval`
            return float(
                studentized_range(ratio * np.sqrt(2), self.methods, self.degrees_of_freedom)
            )
        return float(2 * stdtr(self.degrees_of_freedom, -ratio))


@dataclass(frozen=True)
class Stratum:
    """Contributions of items that were drawn together, such as the items of one benchmark."""

    contributions: np.ndarray
    """(replicates, items): contributions of items to the score of each replicate, which is the sum
    of its contributions in all strata."""
    shares: np.ndarray
    """(items,): weights of the items, such as shares of all tokens; positive, with sum 1."""


def crossed_estimate(strata: Sequence[Stratum]) -> Estimate:
    """Mean score of the replicates. The standard error is from a model with crossed random effects
    of seeds and items; it is NaN if a stratum has only one item.

    The variance of the mean is V(seeds) + V(items) - V(seed x item), where each term is estimated
    from its mean square. With one replicate, it is V(items) alone. The degrees of freedom are
    Satterthwaite's. Items are weighted by their shares, as in a ratio estimator.
    """
    # for each stratum: its part of each replicate's score (replicates,)
    totals = [stratum.contributions.sum(axis=1) for stratum in strata]
    scores = np.sum(totals, axis=0)
    seeds = len(scores)
    value = float(np.mean(scores))
    seed_variance = ((scores - value) ** 2).sum() / (seeds - 1) / seeds if seeds > 1 else 0.0
    item_variance = 0.0
    interaction = 0.0  # V(seed x item)
    # Sum of the squared terms, each divided by the term's degrees of freedom (Satterthwaite).
    squares = 0.0
    for stratum, total in zip(strata, totals, strict=True):
        items = len(stratum.shares)
        if items < 2:
            return Estimate(value)
        item_effects = stratum.contributions.mean(axis=0) - stratum.shares * total.mean()
        item_part = items / (items - 1) * (item_effects**2).sum()
        item_variance += item_part
        squares += item_part**2 / (items - 1)
        if seeds > 1:
            residuals = stratum.contributions - total[:, None] * stratum.shares - item_effects
            interaction_part = items / (items - 1) * (residuals**2).sum() / (seeds - 1) / seeds
            interaction += interaction_part
            squares += interaction_part**2 / (items - 1) / (seeds - 1)
    squares += seed_variance**2 / (seeds - 1) if seeds > 1 else 0.0
    difference = seed_variance + item_variance - interaction
    # The three terms are estimates, so their sum can be too small, even negative.
    variance = max(difference, seed_variance, item_variance)
    degrees_of_freedom = max(1.0, difference**2 / squares) if squares > 0 else 1.0
    return Estimate(value, float(np.sqrt(variance)), float(degrees_of_freedom))


def leads_of_best(
    pairs: Sequence[Estimate], strata: Sequence[Stratum], methods: np.ndarray
) -> list[Estimate]:
    """Score of the best method minus the score of each other method, called a lead. p is from the
    studentised range (Tukey's procedure for all pairs), because the best method was chosen by the
    same data.

    The error of a lead is the error of the pair or an error from variances pooled over all methods,
    whichever is larger. It is NaN without strata, or if a stratum has only one item.

    - pairs: for each other method, the lead as estimated from the plans of the two methods alone
    - strata: outcomes of the plans of all methods; each plan is one replicate
    - methods: for each replicate, the number of its method; 0 is the best method
    """
    if not strata or any(len(stratum.shares) < 2 for stratum in strata):
        return [Estimate(pair.value) for pair in pairs]
    counts = np.bincount(methods)  # (methods,) number of plans
    # (methods, plans): weights of plans in the mean score of each method
    plan_weights = (methods == np.arange(len(counts))[:, None]) / counts[:, None]
    # the sum over strata is the score of each plan
    scores = np.sum([stratum.contributions.sum(axis=1) for stratum in strata], axis=0)
    means = plan_weights @ scores
    deviations = scores - means[methods]
    variances, degrees_of_freedom = _pooled_variances(strata, methods, plan_weights, deviations)
    errors = np.sqrt(variances[0] + variances[1:])
    return [
        Estimate(
            float(means[0] - mean),
            max(pair.error, float(error)),
            degrees_of_freedom,
            methods=len(counts),
        )
        for pair, mean, error in zip(pairs, means[1:], errors, strict=True)
    ]


def _pooled_variances(
    strata: Sequence[Stratum],
    methods: np.ndarray,
    plan_weights: np.ndarray,
    deviations: np.ndarray,
) -> tuple[np.ndarray, float]:
    """(variances of the methods' mean scores, degrees of freedom of all these variances), estimated
    from the plans of all methods together.

    A variance is V(seeds) + V(method x item) - V(seed x item), but not less than V(seeds) and not
    less than V(method x item).

    - methods: for each plan, the number of its method
    - plan_weights: weights of plans in the mean score of each method (methods, plans)
    - deviations: for each plan, its score minus the mean score of its method
    """
    method_freedom = len(plan_weights) - 1
    seed_freedom = len(methods) - len(plan_weights)
    # (methods,): 1 / n for a method with n seeds
    inverse_seeds = (plan_weights**2).sum(axis=1)
    # the maximum avoids a division by 0 if each method has one plan
    seed_variances = (deviations**2).sum() / max(seed_freedom, 1) * inverse_seeds
    item_variance = 0.0  # V(method x item)
    residual = 0.0  # V(seed x item) for a single plan
    # Sum of the squared terms, each divided by the term's degrees of freedom (Satterthwaite).
    squares = 0.0
    for stratum in strata:
        items = len(stratum.shares)
        scale = items / (items - 1)
        totals = stratum.contributions.sum(axis=1)[:, None]
        deviations_of_items = stratum.contributions - totals * stratum.shares
        means = plan_weights @ deviations_of_items  # (methods, items)
        item_part = scale * ((means - means.mean(axis=0)) ** 2).sum() / method_freedom
        item_variance += item_part
        squares += item_part**2 / method_freedom / (items - 1)
        residual += (
            scale * ((deviations_of_items - means[methods]) ** 2).sum() / max(seed_freedom, 1)
        )
    # V(method x item) - V(seed x item)
    interaction = max(0.0, item_variance - residual * inverse_seeds.mean())
    variances = np.maximum(seed_variances + interaction, item_variance)
    squares += seed_variances.mean() ** 2 / seed_freedom if seed_freedom else 0.0
    degrees_of_freedom = variances.mean() ** 2 / squares if squares > 0 else 1.0
    return variances, max(1.0, float(degrees_of_freedom))


@cache
def range_quantile(methods: int, degrees_of_freedom: float) -> float:
    """The value that the studentised range of `methods` means exceeds with probability LEVEL if the
    true means are equal."""
    from scipy.optimize import brentq  # takes a fifth of a second to import

    def excess(value: float) -> float:
        """Probability above LEVEL."""
        return float(studentized_range(value, methods, degrees_of_freedom)) - LEVEL

    return float(brentq(excess, 0.0, 1e3))


_DEVIATES, _STEP = np.linspace(-9, 9, 91, retstep=True)
_WEIGHTS = np.exp(-(_DEVIATES**2) / 2) / np.sqrt(2 * np.pi) * _STEP
"""Weights of _DEVIATES in an integral over the standard normal distribution."""


def studentized_range(
    values: float | np.ndarray, methods: int, degrees_of_freedom: float = np.inf
) -> np.ndarray:
    """For each of `values`, the probability that a studentised range exceeds the value.

    A studentised range is the range of `methods` normal deviates, divided by a standard deviation
    that was estimated with `degrees_of_freedom`. The result equals scipy's
    `studentized_range.sf(values, methods, degrees_of_freedom)` to at least five decimals, but
    scipy.stats takes half a second to import. Integrals are sums over equal steps, which are this
    exact because the integrand and its derivatives vanish at both ends.
    """
    if np.isinf(degrees_of_freedom):
        # The range is at most v if, for the largest deviate z, all others are between z - v and z.
        probabilities = ndtr(_DEVIATES) - ndtr(_DEVIATES - np.asarray(values, float)[..., None])
        return np.asarray(1 - methods * (_WEIGHTS * probabilities ** (methods - 1)).sum(axis=-1))
    half_freedom = degrees_of_freedom / 2
    # nearly all estimates of the standard deviation are between these limits
    low, high = np.log(gammaincinv(half_freedom, [1e-10, 1 - 1e-13]) / half_freedom) / 2
    logs = np.linspace(low, high, 81)  # logarithms of the estimated standard deviation
    # density of `logs`, up to a constant factor
    density = np.exp(degrees_of_freedom * logs + half_freedom * (1 - np.exp(2 * logs)))
    scaled_values = np.asarray(values, float)[..., None] * np.exp(logs)
    # mean over standard deviations; for a known one, the degrees of freedom are infinite
    p_values = (studentized_range(scaled_values, methods) * density).sum(axis=-1) / density.sum()
    return np.asarray(np.maximum(p_values, 0))


def wilson(successes: float, items: float) -> tuple[float, float]:
    """Lower and upper end of the 95 % Wilson interval of successes / items.

    The result equals statsmodels' `proportion_confint(successes, items, method="wilson")`, which
    imports all of scipy.stats.
    """
    share = successes / items
    z = ndtri((1 + CONFIDENCE) / 2)
    centre = share + z**2 / (2 * items)
    half_width = z * np.sqrt(share * (1 - share) / items + (z / (2 * items)) ** 2)
    low = (centre - half_width) / (1 + z**2 / items)
    high = (centre + half_width) / (1 + z**2 / items)
    # without rounding errors, the formula gives exactly 0 and 1 in these cases
    return (
        0.0 if successes == 0 else float(low),
        1.0 if successes == items else float(high),
    )


def holm(p_values: np.ndarray) -> np.ndarray:
    """Adjust a family of p-values by Holm's step-down method. NaN stays NaN and does not count as a
    member of the family.

    The result equals statsmodels' `multipletests(p_values, method="holm")`, which runs the
    garbage collector at every call.
    """
    p_values = np.asarray(p_values, float)
    order = np.argsort(p_values)[: np.count_nonzero(~np.isnan(p_values))]  # NaN sorts last
    steps = p_values[order] * np.arange(len(order), 0, -1)
    adjusted_p_values = np.full(p_values.shape, np.nan)
    adjusted_p_values[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted_p_values
