"""Critical differences of average ranks: the distance from which the ranks of two methods differ
significantly.

Methods with several seeds are ranked in blocks, displayed columns or benchmarks, once for each
seed. A seed moves the ranks of a method in all blocks together, so Friedman's test and Nemenyi's
critical difference (Demšar 2006, JMLR 7), which take blocks for independent, would find plans to
differ, not methods. Here seeds and blocks are crossed random effects (`uncertainty.best_of_many`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis import names
from analysis.stats import ranks, uncertainty
from analysis.stats.comparison import Comparison, Panel, Target
from analysis.stats.uncertainty import LEVEL, Estimate
from moe_lab.results import RANDOM

COLUMNS, BENCHMARKS = "columns", "benchmarks"
"""Kinds of blocks in which methods are ranked. Columns give the papers' Avg Rank; benchmarks are
more blocks, and so give the test more power."""
FEWEST = 3
"""Least number of methods, and of blocks, for a test."""


@dataclass(frozen=True, eq=False)
class RankTest:
    """Average ranks of the methods of one panel, and their critical difference."""

    panel: Panel
    over: str
    """Kind of the blocks: COLUMNS or BENCHMARKS."""
    blocks: int
    """Number of blocks."""
    seeds: int
    """Number of seeds of each method that are ranked."""
    ranks: pd.Series
    """Method's key -> average rank over blocks and seeds, best first."""
    p_to_best: pd.Series
    """Method's key -> p of its difference to the best method; NaN for the best method."""
    difference: float
    """Critical difference: average ranks that are further apart differ at the 5 % level,
    simultaneously for all pairs of methods."""
    incomplete: tuple[str, ...]
    """Keys of methods without a result in some block, which are not ranked."""

    @property
    def significant(self) -> bool:
        """Whether some method differs from the best one."""
        return bool((self.p_to_best < LEVEL).any())


def rank_test(comparison: Comparison, panel: Panel, over: str = COLUMNS) -> RankTest | None:
    """Test the average ranks of the methods of one panel that have several seeds and a result in
    every block; None with fewer than three such methods or three blocks. Random plans are left out.

    Scores are ranked as for Avg Rank: rounded to three decimals, ties sharing the mean of their
    ranks.
    """
    criteria = comparison.cells["criterion"]
    plans = {
        key: list(comparison.plans_by_seed[cell].values())
        for key, cell in panel.cells.items()
        if criteria[cell] not in RANDOM
    }
    plans = {key: of_method for key, of_method in plans.items() if len(of_method) > 1}
    seeds = min(map(len, plans.values()), default=0)
    scores = _block_scores(comparison, panel, over)
    complete = [
        key
        for key, of_method in plans.items()
        if scores.loc[of_method[:seeds]].notna().all(axis=None)
    ]
    if min(len(complete), scores.shape[1]) < FEWEST:
        return None
    ranks_by_seed = []
    for seed in range(seeds):
        of_seed = scores.loc[[plans[key][seed] for key in complete]]
        ranks_by_seed.append(
            ranks.column_ranks(of_seed, lower_is_better=comparison.lower_is_better).to_numpy(float)
        )
    table = np.array(ranks_by_seed)  # (seeds, methods, blocks)
    average = pd.Series(table.mean(axis=(0, 2)), complete).sort_values(kind="stable")
    order = [complete.index(key) for key in average.index]
    # pairs have no error of their own, so that the critical difference is the same for all pairs
    leads = uncertainty.leads(table[:, order], [Estimate(0.0, 0.0)] * (len(order) - 1))
    return RankTest(
        panel=panel,
        over=over,
        blocks=table.shape[2],
        seeds=seeds,
        ranks=average,
        p_to_best=pd.Series([np.nan, *(lead.p for lead in leads)], average.index),
        difference=leads[0].interval[1] - leads[0].value,
        incomplete=tuple(str(key) for key in plans if key not in complete),
    )


def _block_scores(comparison: Comparison, panel: Panel, over: str) -> pd.DataFrame:
    """Displayed scores (plans, blocks). Benchmarks that grade the same answers form one block with
    their mean."""
    if over == COLUMNS:
        targets: dict[str, Target] = {column: (column,) for column in panel.columns(comparison)}
    else:
        run = comparison.benchmarks.reindex(list(panel.cells.values())).notna().any()
        targets = {}
        for name in map(str, run.index[run]):
            block = names.SAME_ITEMS.get(name, name)
            targets[block] = (*targets.get(block, ()), name)
    return pd.DataFrame(
        {
            block: comparison.quantity(target).displayed(comparison.plan_scores(target))
            for block, target in targets.items()
        }
    )


def rank_tests(comparison: Comparison, over: str = COLUMNS) -> list[RankTest]:
    """The tests of all panels that have enough methods and blocks: see `rank_test`."""
    tests = (rank_test(comparison, panel, over) for panel in comparison.panels)
    return [test for test in tests if test is not None]
