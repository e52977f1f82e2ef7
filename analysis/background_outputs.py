"""What a study is made of, by name: architectures, formulas, what criteria read, and what its steps took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis.load.study import Study
from analysis.made import Made
from analysis.outputs import criteria, models
from analysis.render.table import Table
from analysis.stats.comparison import Comparison

Maker = Callable[[Study, Sequence[Comparison]], Made]


def _table(make: Callable[..., Table], name: str) -> Maker:
    def made(study: Study, comparisons: Sequence[Comparison]) -> Made:
        table = make(study, name=name)
        return [table] if len(table.frame) else []

    return made


_TABLES = {
    "unified.table4": models.architecture_table,
    "unified.table6": criteria.formula_table,
    "aimer.table1": criteria.signal_table,
    "aimer.table4": criteria.scoring_table,
    "coverage.table1": criteria.allocation_table,
}

OUTPUTS: Mapping[str, Maker] = {name: _table(make, name) for name, make in _TABLES.items()}
"""Name -> what makes its table; an empty list when the store does not tell."""
