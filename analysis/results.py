"""A study, and what several of its tables, figures and sentences are made from."""

from __future__ import annotations

from functools import cached_property

import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.stats import answer_losses, overlap
from analysis.stats.comparison import Comparison, compare
from analysis.stats.winners import winner_map


class Results:
    """A study and what several outputs need of it, computed once."""

    def __init__(self, study: Study) -> None:
        self.study = study

    @cached_property
    def _models(self) -> list[Comparison]:
        return compare(self.study)

    @cached_property
    def measured(self) -> list[Comparison]:
        """Models with at least one result."""
        return [comparison for comparison in self._models if comparison.parts]

    @cached_property
    def pruned(self) -> list[Comparison]:
        """Models with at least one pruned cell, evaluated or not: for what is made without scores."""
        return [comparison for comparison in self._models if comparison.panels]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Models with at least one pruned cell and one result."""
        return [comparison for comparison in self.measured if comparison.panels]

    def per_model(self, name: str) -> list[tuple[Comparison, str]]:
        """Each of `comparisons` with the name of its output: NAME, or NAME.MODEL where there are several models."""
        return _named(self.comparisons, name)

    def per_pruned_model(self, name: str) -> list[tuple[Comparison, str]]:
        """As `per_model`, of each of `pruned`."""
        return _named(self.pruned, name)

    @cached_property
    def winners(self) -> pd.DataFrame:
        """The winner map of all criteria."""
        return winner_map(self.comparisons)

    @cached_property
    def by_answer_loss(self) -> Results:
        """The same study with the loss on right answers in place of scores; lower is better."""
        return Results(answer_losses.study_of_losses(self.study))

    @cached_property
    def decided_pairs(self) -> pd.DataFrame:
        """Pairs of criteria that are told apart, by scores and by answer losses: see `answer_losses.decided_pairs`."""
        return answer_losses.decided_pairs(self.comparisons, self.by_answer_loss.comparisons)

    @cached_property
    def baseline_winners(self) -> pd.DataFrame:
        """The winner map of the papers' five baselines; empty when none of them was run."""
        known = set(self.study.cells["method"]) & set(names.BASELINES)
        return winner_map(self.comparisons, names.BASELINES) if known else pd.DataFrame()

    @cached_property
    def overlaps(self) -> pd.DataFrame:
        """Overlap over calibration sets of every S(b, alpha, beta)."""
        return overlap.calibration_overlap(self.study.family)

    @cached_property
    def proxy(self) -> pd.DataFrame:
        """Overlap of proxy and exact damage."""
        return overlap.proxy_overlap(self.study.family, self.study.damage)


def _named(comparisons: list[Comparison], name: str) -> list[tuple[Comparison, str]]:
    return [(one, f"{name}.{one.model}" if len(comparisons) > 1 else name) for one in comparisons]
