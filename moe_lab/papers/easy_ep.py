"""EASY-EP (arXiv 2504.06792): scores for several domains. `criterion=easy_ep` has those of one."""

from __future__ import annotations

from collections.abc import Iterable

import pandas


def mean_over_domains(scores: Iterable[pandas.DataFrame]) -> pandas.DataFrame:
    """The mean of scores of several domains, after the scores of each layer are divided by their
    sum, as in the released code. Each table, and the result, has the columns layer, expert and
    score."""
    shares = [
        table.assign(score=table["score"] / table.groupby("layer")["score"].transform("sum"))
        for table in scores
    ]
    return pandas.concat(shares).groupby(["layer", "expert"])["score"].mean().reset_index()
