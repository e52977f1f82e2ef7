"""Bootstrap replicates of scores: benchmarks, displayed columns and means of them, all from the same draws of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis import names
from analysis.stats import uncertainty

Weights = Mapping[str, float]
"""Benchmark -> its share in a score."""


def contributions(weights: Weights, outcomes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stratum -> contributions (cells, items) that add up to the score; empty where a benchmark has no outcomes.

    Benchmarks that grade the same answers twice (HumanEval and HumanEval+) share a stratum: their items are drawn
    and flipped together.
    """
    found: dict[str, np.ndarray] = {}
    for benchmark, weight in weights.items():
        if benchmark not in outcomes:
            return {}
        shared = outcomes[benchmark]
        stratum = names.SAME_ITEMS.get(benchmark, benchmark)
        if stratum in found and found[stratum].shape != shared.shape:
            stratum = benchmark
        found[stratum] = found.get(stratum, 0) + shared * (weight / shared.shape[1])
    return found


def paired(columns: Mapping[str, Weights], outcomes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Column -> replicates (replicates, cells) of its score from `outcomes` (cells, items) on items all cells share."""
    strata: dict[str, dict[str, np.ndarray]] = {}
    for column, weights in columns.items():
        for stratum, found in contributions(weights, outcomes).items():
            strata.setdefault(f"{stratum}/{found.shape[1]}", {})[column] = found
    return uncertainty.bootstrap(strata)


def own(columns: Mapping[str, Weights], outcomes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same from the items each cell was asked; `outcomes` are NaN elsewhere."""
    strata: dict[str, dict[str, np.ndarray]] = {}
    for benchmark, found in outcomes.items():
        stratum = names.SAME_ITEMS.get(benchmark, benchmark)
        strata.setdefault(f"{stratum}/{found.shape[1]}", {})[benchmark] = found
    means = uncertainty.bootstrap_means(strata)
    return {
        column: np.sum([weight * means[name] for name, weight in weights.items()], axis=0)
        for column, weights in columns.items()
        if set(weights) <= set(means)
    }


def mean(target: Sequence[str], draws: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Replicates of the mean of a target's columns; None when one has none."""
    known = [draws[name] for name in target if name in draws]
    return np.mean(known, axis=0) if known and len(known) == len(target) else None
