"""The tables of `items`, made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from analysis.items import VIEWS, View
from analysis.load.study import Study
from analysis.made import Made, unless_empty
from analysis.outputs import channels, recovery, search, weights
from analysis.render.table import Table
from analysis.stats.comparison import Comparison

ROWS: Mapping[str, Callable[..., Table]] = {
    "searched": search.allocation_table,
    "searched, general": partial(search.allocation_table, pairs=search.general_pairs),
    "weights": weights.group_table,
    "recovered": recovery.recovered_table,
    "blocks": partial(channels.block_size_table, words=channels.ALIGNED),
    "smallest": partial(channels.block_size_table, words=channels.SMALLEST),
    "top-k": recovery.top_k_table,
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
