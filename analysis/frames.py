"""Walking through data frames: rows as dictionaries, groups with their keys by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, column -> value."""
    return [{str(column): value for column, value in row.items()} for row in frame.to_dict("records")]


def groups(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Groups of rows with equal values in `columns`, in the order they first appear, with these values by name."""
    for _, group in frame.groupby(list(columns), sort=False):
        yield {column: group[column].iloc[0] for column in columns}, group
