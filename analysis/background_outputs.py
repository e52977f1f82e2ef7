"""What a study is made of, by name: architectures, formulas, what criteria read, and what its steps took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis import model_tables, step_tables
from analysis.comparison import Comparison
from analysis.load import Study
from analysis.made import Made
from analysis.tables import Table

Maker = Callable[[Study, Sequence[Comparison]], Made]


def _table(make: Callable[..., Table], name: str) -> Maker:
    def made(study: Study, comparisons: Sequence[Comparison]) -> Made:
        table = make(study, name=name)
        return [table] if len(table.frame) else []

    return made


_TABLES = {
    "unified.table4": model_tables.architecture_table,
    "unified.table6": model_tables.formula_table,
    "aimer.table1": model_tables.signal_table,
    "aimer.table4": step_tables.scoring_table,
    "coverage.table1": step_tables.allocation_table,
}

OUTPUTS: Mapping[str, Maker] = {name: _table(make, name) for name, make in _TABLES.items()}
"""Name -> what makes its table; an empty list when the store does not tell."""
