"""The tables of `items`, made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from analysis import calibration_outputs, channel_tables, search_tables, view_tables
from analysis.comparison import Comparison
from analysis.items import VIEWS, View
from analysis.load import Study
from analysis.made import Made, unless_empty
from analysis.tables import Table

ROWS: Mapping[str, Callable[..., Table]] = {
    "searched": search_tables.allocation_table,
    "searched, general": partial(search_tables.allocation_table, pairs=search_tables.general_pairs),
    "weights": channel_tables.group_table,
    "recovered": view_tables.recovered_table,
    "blocks": partial(calibration_outputs.block_size_table, words=calibration_outputs.ALIGNED),
    "smallest": partial(calibration_outputs.block_size_table, words=calibration_outputs.SMALLEST),
    "top-k": view_tables.top_k_table,
}
"""What stands in the rows -> what makes the table, given its name, columns and title."""


def _made(name: str, view: View) -> Callable[[Study, Sequence[Comparison]], Made]:
    def made(study: Study, comparisons: Sequence[Comparison]) -> Made:
        make = ROWS[view.rows]
        return unless_empty(make(study, comparisons, name=name, columns=view.columns, title=view.title))

    return made


OUTPUTS: Mapping[str, Callable[[Study, Sequence[Comparison]], Made]] = {
    name: _made(name, view) for name, view in VIEWS.items()
}
"""Name -> what makes its table; an empty list when the study has no cells for it."""
