"""Critical differences of average ranks: the smallest distance at which the ranks of two methods
differ significantly.

Methods with several seeds are ranked in each block, a displayed column or benchmark, once for each
seed. A seed moves the ranks of a method in all blocks together. Friedman's test and Nemenyi's
critical difference (Demšar 2006, JMLR 7) take blocks for independent, so they would find
differences of plans, not of methods. Here seeds and blocks are crossed random effects
(`uncertainty.leads_of_best`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis import names
from analysis.stats import ranks, uncertainty
from analysis.stats.comparison import Comparison, Panel, Target
from analysis.stats.uncertainty import Estimate
from moe_lab.results import RANDOM

COLUMNS, BENCHMARKS = "columns", "benchmarks"
"""Kinds of blocks in which methods are ranked. Columns give the papers' Avg Rank; benchmarks give
more blocks, and so a test with more power."""
MIN_COUNT = 3
"""Smallest number of methods, and of blocks, for a test."""


@dataclass(frozen=True, eq=False)
class RankTest:
    """Average ranks of the methods of one panel, and their critical difference."""

    panel: Panel
    block_kind: str
    """COLUMNS or BENCHMARKS."""
    blocks: int
    seeds: int
    """Number of seeds for which each method is ranked."""
    ranks: pd.Series
    """Method's key -> average rank over blocks and seeds, best first."""
    p_to_best: pd.Series
    """Method's key -> p-value of the method's difference to the best method; NaN for the best."""
    critical_difference: float
    """Average ranks that are further apart than this differ at the 5 % level,
    simultaneously for all pairs of methods."""
    incomplete_methods: tuple[str, ...]
    """Keys of methods without a result in some block."""


def rank_test(comparison: Comparison, panel: Panel, block_kind: str = COLUMNS) -> RankTest | None:
    """Test the average ranks of a panel's methods; None for fewer than MIN_COUNT ranked methods or
    blocks. A method is ranked if it is not random, and has several seeds and a score in every
    block.

    block_kind: COLUMNS or BENCHMARKS.
    """
    criteria = comparison.cells["criterion"]
    plans = {
        key: list(comparison.plans_by_seed[cell].values())
        for key, cell in panel.cells.items()
        if criteria[cell] not in RANDOM and comparison.all_have_several_seeds([cell])
    }
    seeds = min(map(len, plans.values()), default=0)
    scores = _block_scores(comparison, panel, block_kind)
    complete_methods = [
        key
        for key, method_plans in plans.items()
        if scores.loc[method_plans[:seeds]].notna().all(axis=None)
    ]
    if min(len(complete_methods), scores.shape[1]) < MIN_COUNT:
        return None
    ranks_by_seed = []
    for position in range(seeds):
        # one plan of each method; these plans can have different seeds
        seed_scores = scores.loc[[plans[key][position] for key in complete_methods]]
        ranks_by_seed.append(
            ranks.column_ranks(seed_scores, lower_is_better=comparison.lower_is_better).to_numpy(
                float
            )
        )
    table = np.array(ranks_by_seed)  # (seeds, methods, blocks)
    average_ranks = pd.Series(table.mean(axis=(0, 2)), complete_methods).sort_values(kind="stable")
    order = [complete_methods.index(key) for key in average_ranks.index]
    # `leads_from_table` uses the larger of two errors, the pair's own and the pooled one. With the
    # pair's own set to 0, all pairs have the same error.
    leads = uncertainty.leads_from_table(
        table[:, order], [Estimate(0.0, error=0.0)] * (len(order) - 1)
    )
    return RankTest(
        panel=panel,
        block_kind=block_kind,
        blocks=table.shape[2],
        seeds=seeds,
        ranks=average_ranks,
        p_to_best=pd.Series([np.nan, *(lead.p for lead in leads)], average_ranks.index),
        # half the width of an interval, which is the same for all pairs
        critical_difference=leads[0].interval[1] - leads[0].value,
        incomplete_methods=tuple(str(key) for key in plans if key not in complete_methods),
    )


def _block_scores(comparison: Comparison, panel: Panel, block_kind: str) -> pd.DataFrame:
    """Displayed scores (plans, blocks) of all plans. Benchmarks that grade the same answers are one
    block, whose score is their mean."""
    if block_kind == COLUMNS:
        targets: dict[str, Target] = {column: (column,) for column in panel.columns(comparison)}
    else:
        targets = {}
        for name in comparison.evaluated_benchmarks(panel.cells.values()):
            block = names.SAME_ITEMS.get(name, name)
            targets[block] = (*targets.get(block, ()), name)
    return pd.DataFrame(
        {
            block: comparison.quantity(target).to_displayed(comparison.plan_scores(target))
            for block, target in targets.items()
        }
    )


def rank_tests(comparison: Comparison, block_kind: str = COLUMNS) -> list[RankTest]:
    """The results of `rank_test` for all panels that have enough methods and blocks.
    `block_kind` is COLUMNS or BENCHMARKS."""
    tests = (rank_test(comparison, panel, block_kind) for panel in comparison.panels)
    return [test for test in tests if test is not None]
