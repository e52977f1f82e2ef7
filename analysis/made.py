"""What the catalogue's functions give: tables and figures, and what those of one model among several are called."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats.comparison import Comparison

Output = Table | Figure
Made = list[Output]


def unless_empty(table: Table) -> Made:
    """The table, if it has a row."""
    return [table] if len(table.frame) else []


def of_model(comparisons: Sequence[Comparison], name: str, comparison: Comparison) -> str:
    """The name of an output about one model: with the model's, where there are several."""
    return name if len(comparisons) == 1 else f"{name}.{comparison.model}"
