"""Critical differences of average ranks: how far two methods must be apart for their ranks to
differ.

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
"""Blocks in which methods are ranked: columns give the papers' Avg Rank; benchmarks are more
blocks, so more power."""
FEWEST = 3
"""Least number of methods, and of blocks, for a test."""


@dataclass(frozen=True, eq=False)
class RankTest:
    """Average ranks of the methods of one panel, and their critical difference."""

    panel: Panel
    over: str
    """COLUMNS or BENCHMARKS."""
    blocks: int
    seeds: int
    """Number of seeds of each method that are ranked."""
    ranks: pd.Series
    """Method's key -> average rank over blocks and seeds, best first."""
    p_to_best: pd.Series
    """Method's key -> p of its difference to the first; NaN for the first itself."""
    difference: float
    """Average ranks that are further apart differ at the 5 % level, for all pairs of methods
    together."""
    incomplete: tuple[str, ...]
    """Methods that lack a result in some block, and so have no average rank."""

    @property
    def significant(self) -> bool:
        """Whether some methods differ."""
        return bool((self.p_to_best < LEVEL).any())


def rank_test(comparison: Comparison, panel: Panel, over: str = COLUMNS) -> RankTest | None:
    """Test the average ranks of one panel; None with fewer than three complete methods with several
    seeds or three blocks. Random plans do not compete.

    Values are ranked as for Avg Rank: rounded to three decimals, ties sharing the mean of their
    ranks.
    """
    criteria = comparison.cells["criterion"]
    plans = {
        key: list(comparison.seeds[cell].values())
        for key, cell in panel.cells.items()
        if criteria[cell] not in RANDOM
    }
    plans = {key: of_method for key, of_method in plans.items() if len(of_method) > 1}
    seeds = min(map(len, plans.values()), default=0)
    values = _blocks(comparison, panel, over)
    complete = [
        key
        for key, of_method in plans.items()
        if values.loc[of_method[:seeds]].notna().all(axis=None)
    ]
    if min(len(complete), values.shape[1]) < FEWEST:
        return None
    ranked = []
    for seed in range(seeds):
        scores = values.loc[[plans[key][seed] for key in complete]]
        ranked.append(
            ranks.column_ranks(scores, lower_is_better=comparison.lower_is_better).to_numpy(float)
        )
    table = np.array(ranked)
    average = pd.Series(table.mean(axis=(0, 2)), complete).sort_values(kind="stable")
    order = [complete.index(key) for key in average.index]
    # One error for all pairs, as one length is drawn.
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


def _blocks(comparison: Comparison, panel: Panel, over: str) -> pd.DataFrame:
    """Scores (plans, blocks) as shown. Benchmarks that grade the same answers form one block with
    their mean."""
    if over == COLUMNS:
        groups: dict[str, Target] = {column: (column,) for column in panel.columns(comparison)}
    else:
        run = comparison.benchmarks.reindex(list(panel.cells.values())).notna().any()
        evaluated = [str(name) for name in run.index[run]]
        stems = {name: names.SAME_ITEMS.get(name, name) for name in evaluated}
        groups = {
            stem: tuple(name for name in evaluated if stems[name] == stem)
            for stem in stems.values()
        }
    return pd.DataFrame(
        {
            name: comparison.quantity(target).shown(comparison.by_seed(target))
            for name, target in groups.items()
        }
    )


def rank_tests(comparison: Comparison, over: str = COLUMNS) -> list[RankTest]:
    """Test all panels that have enough methods and blocks."""
    tests = (rank_test(comparison, panel, over) for panel in comparison.panels)
    return [test for test in tests if test is not None]
