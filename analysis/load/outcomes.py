"""Outcomes of items as matrices: what each cell was asked, and what all cells were asked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

ROUNDING = 1e-3
"""A score this close to the mean of its outcomes is that mean."""


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of one model's cells, rows in their order; NaN rows are cells without any that add up to their score."""

    shared: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> outcomes (cells, items) on the items that all evaluated cells were asked."""
    own: dict[str, np.ndarray] = field(default_factory=dict)
    """The same on all items, NaN where a cell was not asked; only of benchmarks of which some cell was asked others."""
    odd: list[tuple[int, str]] = field(default_factory=list)
    """(cell, benchmark) whose score is not the mean of its outcomes, though those of other cells are."""


def read(samples: pd.DataFrame, scores: pd.DataFrame) -> Outcomes:
    """The outcomes of cells from `Study.samples` and their scores (cells, benchmarks).

    A benchmark of which most scores are no means of outcomes (perplexity, say) has none.
    """
    found = Outcomes()
    unique = samples.drop_duplicates(["cell", "benchmark", "item"])
    for benchmark, rows in unique.groupby("benchmark", sort=False):
        if benchmark not in scores.columns:
            continue
        name = str(benchmark)
        wide = rows.pivot(index="cell", columns="item", values="outcome").reindex(index=scores.index).astype(float)
        evaluated = scores[name].notna() & wide.notna().any(axis=1)
        explained = (wide.mean(axis=1) - scores[name]).abs() < ROUNDING
        if not explained.any() or 2 * explained.sum() < evaluated.sum():
            continue
        found.odd.extend((int(str(cell)), name) for cell in scores.index[evaluated & ~explained])
        matrix = wide.to_numpy(float, copy=True)
        matrix[~explained.to_numpy()] = np.nan
        asked = ~np.isnan(matrix[explained.to_numpy()])
        if asked.all(axis=0).any():
            found.shared[name] = matrix[:, asked.all(axis=0)]
        if not asked.all():
            found.own[name] = matrix
    return found


def binary(outcomes: np.ndarray) -> bool:
    """Whether items are right or wrong, none of them graded."""
    return bool(np.isin(outcomes[~np.isnan(outcomes)], (0.0, 1.0)).all())
