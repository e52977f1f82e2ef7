"""Confidence intervals, paired tests and Holm's correction.

Scores are means over items, so all functions work on outcomes (plans, items): one row per plan, on the same items.
Libraries compute the statistics where one call handles many pairs. Resampling uses matrix products, for speed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import bdtr, ndtri, stdtr

from analysis import names

CONFIDENCE = 0.95
REPLICATES = 4000
SEED = 0
"""Seed of resampling, fixed so that the same study gives the same intervals and p-values."""
_CHUNK = 500


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


def sign_flip(differences: np.ndarray, *, replicates: int = REPLICATES) -> np.ndarray:
    """Two-sided p-values of paired differences (pairs, items) by random sign flips, for graded or averaged scores.

    If two plans are equally good, each item's difference has either sign with probability 1/2. The p-value is the
    share of random sign patterns whose total is at least as far from zero. Items keep their different weights.
    """
    sums = differences.sum(axis=-1)
    totals = np.abs(sums)
    tolerance = 1e-9 * np.abs(differences).sum(axis=-1)
    reached = np.zeros(len(differences))
    items = differences.shape[-1]
    for packed in _patterns(replicates, items):
        plus = np.unpackbits(packed, axis=1, count=items).astype(float)
        reached += (np.abs(2 * (plus @ differences.T) - sums) >= totals - tolerance).sum(axis=0)
    return np.asarray((reached + 1) / (replicates + 1))


def paired_t(strata: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Differences (plans, plans) between scores, row minus column, and their p-values by paired t-tests.

    strata: contributions (plans, items), whose sum over all items is a plan's score. Items are sampled within their
    stratum, so variances of strata add; degrees of freedom follow Welch and Satterthwaite. NaN for plans with NaN, and
    for strata of one item.
    """
    scores = np.sum([stratum.sum(axis=1) for stratum in strata], axis=0)
    differences = scores[:, None] - scores[None, :]
    variance, squares = np.zeros_like(differences), np.zeros_like(differences)
    for stratum in strata:
        items = stratum.shape[1]
        covariance = items * np.atleast_2d(np.cov(stratum, ddof=1)) if items > 1 else np.full_like(differences, np.nan)
        own = np.diag(covariance)
        spread = np.maximum(own[:, None] + own[None, :] - 2 * covariance, 0)
        variance, squares = variance + spread, squares + spread**2 / max(items - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values = 2 * stdtr(variance**2 / squares, -np.abs(differences) / np.sqrt(variance))
    same = np.isclose(variance, 0, atol=1e-18) & ~np.isnan(variance)
    p_values = np.where(same, np.isclose(differences, 0, atol=1e-9).astype(float), p_values)
    return differences, np.where(np.isnan(differences + variance), np.nan, p_values)


def bootstrap(strata: Mapping[str, Mapping[str, np.ndarray]], *, replicates: int = REPLICATES) -> dict[str, np.ndarray]:
    """Paired, stratified bootstrap of every column's score for all plans at once.

    strata: stratum -> column -> contributions (plans, items of the stratum); a column's score is the sum of its
    contributions over all strata. Items are drawn with replacement within their stratum, the same draw for all plans
    and columns. Returns column -> replicates (replicates, plans), float32.
    """
    drawn: dict[str, np.ndarray] = {}
    for stratum, columns in strata.items():
        items = next(iter(columns.values())).shape[1]
        for place, counts in _resamples(stratum, items, replicates):
            for column, contributions in columns.items():
                target = drawn.setdefault(column, np.zeros((replicates, len(contributions)), np.float32))
                target[place] += counts @ contributions.T.astype(np.float32)
    return drawn


def bootstrap_means(strata: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Paired bootstrap of the mean outcomes of plans that did not all get the same items.

    strata: stratum -> benchmark -> outcomes (plans, items of the stratum), NaN where a plan did not get an item. Items
    are drawn as in `bootstrap`. A plan's replicate is the mean over the drawn items that it got, or its score when it
    got none of them. Returns benchmark -> replicates (replicates, plans), float32; NaN for a plan without any item.
    """
    drawn: dict[str, np.ndarray] = {}
    for stratum, benchmarks in strata.items():
        items = next(iter(benchmarks.values())).shape[1]
        for place, counts in _resamples(stratum, items, REPLICATES):
            for benchmark, outcomes in benchmarks.items():
                answered = np.isfinite(outcomes).T.astype(np.float32)
                total, among = counts @ np.nan_to_num(outcomes).T.astype(np.float32), counts @ answered
                score = np.nansum(outcomes, axis=1) / np.maximum(answered.sum(axis=0), 1)
                mean = np.where(among > 0, total / np.maximum(among, 1), score)
                target = drawn.setdefault(benchmark, np.full((REPLICATES, len(outcomes)), np.nan, np.float32))
                target[place] = np.where(answered.any(axis=0), mean, np.nan)
    return drawn


def percentiles(draws: np.ndarray, confidence: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval over replicates (axis 0): lower and upper ends."""
    tail = (1 - confidence) / 2
    last = len(draws) - 1
    ends = [int(np.floor(tail * last)), int(np.ceil((1 - tail) * last))]
    ordered = np.partition(draws, ends, axis=0)
    return ordered[ends[0]], ordered[ends[1]]


@lru_cache(maxsize=8)
def _patterns(replicates: int, items: int) -> tuple[np.ndarray, ...]:
    """Random signs of items as bits, in chunks of replicates; the same for all tests with this number of items."""
    rng = np.random.default_rng(SEED)
    return tuple(
        np.packbits(rng.integers(0, 2, size=(rows, items)).astype(np.uint8), axis=1) for rows in _chunks(replicates)
    )


def _resamples(stratum: str, items: int, replicates: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield chunks of replicates: their slice, and how often each item of the stratum is drawn (same at every call)."""
    rng = np.random.default_rng([SEED, zlib.crc32(stratum.encode())])
    start = 0
    for rows in _chunks(replicates):
        yield slice(start, start + rows), _draw(rng, rows, items)
        start += rows


def _draw(rng: np.random.Generator, rows: int, items: int) -> np.ndarray:
    """How often each item is drawn in each of `rows` resamples: (rows, items) float32."""
    indices = rng.integers(0, items, size=(rows, items)) + np.arange(rows)[:, None] * items
    return np.bincount(indices.ravel(), minlength=rows * items).reshape(rows, items).astype(np.float32)


def _chunks(total: int) -> Iterator[int]:
    for start in range(0, total, _CHUNK):
        yield min(_CHUNK, total - start)


Weights = Mapping[str, float]
"""Benchmark -> its weight in a score."""


def contributions(weights: Weights, outcomes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stratum -> contributions (cells, items) whose sum is the score; empty when a benchmark has no outcomes.

    Benchmarks that grade the same answers twice (HumanEval and HumanEval+) share a stratum: their items are drawn
    and flipped together.
    """
    strata: dict[str, np.ndarray] = {}
    for benchmark, weight in weights.items():
        if benchmark not in outcomes:
            return {}
        shared = outcomes[benchmark]
        stratum = names.SAME_ITEMS.get(benchmark, benchmark)
        if stratum in strata and strata[stratum].shape != shared.shape:
            stratum = benchmark
        strata[stratum] = strata.get(stratum, 0) + shared * (weight / shared.shape[1])
    return strata


def paired_draws(columns: Mapping[str, Weights], outcomes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Bootstrap each column's score from `outcomes` (cells, items) on items that all cells share.

    Returns column -> replicates (replicates, cells)."""
    strata: dict[str, dict[str, np.ndarray]] = {}
    for column, weights in columns.items():
        for stratum, items in contributions(weights, outcomes).items():
            strata.setdefault(f"{stratum}/{items.shape[1]}", {})[column] = items
    return bootstrap(strata)


def own_draws(columns: Mapping[str, Weights], outcomes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same from all items that each cell got; `outcomes` are NaN elsewhere."""
    strata: dict[str, dict[str, np.ndarray]] = {}
    for benchmark, items in outcomes.items():
        stratum = names.SAME_ITEMS.get(benchmark, benchmark)
        strata.setdefault(f"{stratum}/{items.shape[1]}", {})[benchmark] = items
    means = bootstrap_means(strata)
    return {
        column: np.sum([weight * means[name] for name, weight in weights.items()], axis=0)
        for column, weights in columns.items()
        if set(weights) <= set(means)
    }


def mean_draws(target: Sequence[str], draws: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Replicates of the mean of a target's columns; None when a column has none."""
    drawn = [draws[name] for name in target if name in draws]
    return np.mean(drawn, axis=0) if drawn and len(drawn) == len(target) else None
