"""Tables and figures about how sure rankings are, and about what passes over a text show, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis import rank_outputs
from analysis.comparison import Comparison
from analysis.load import Study
from analysis.rank_tests import BENCHMARKS, COLUMNS
from analysis.style import Figure
from analysis.tables import Table

Made = list[Table | Figure]


def _rank_differences(study: Study, comparisons: Sequence[Comparison]) -> Made:
    name = "ranks.cd"
    drawn = [
        rank_outputs.rank_figure(comparison, over, name=_of(comparisons, stem, comparison))
        for comparison in comparisons
        for over, stem in ((COLUMNS, name), (BENCHMARKS, f"{name}.benchmarks"))
    ]
    table = rank_outputs.rank_test_table(study, comparisons, name=name)
    return [*(figure for figure in drawn if figure), *_unless_empty(table)]


def _unless_empty(table: Table) -> Made:
    return [table] if len(table.frame) else []


def _of(comparisons: Sequence[Comparison], name: str, comparison: Comparison) -> str:
    return name if len(comparisons) == 1 else f"{name}.{comparison.model}"


OUTPUTS: Mapping[str, Callable[[Study, Sequence[Comparison]], Made]] = {
    "ranks.cd": _rank_differences,
}
"""Name -> what makes its tables and figures; an empty list when the study has no data for them."""
