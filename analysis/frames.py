"""Walking through data frames: rows as dictionaries, groups with their keys by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, column -> value."""
    columns = [str(column) for column in frame.columns]
    return [dict(zip(columns, row, strict=True)) for row in frame.to_numpy(object).tolist()]


def groups(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Groups of rows with equal values in `columns`, in the order they first appear, with these values by name."""
    for key, group in frame.groupby(list(columns), sort=False):
        yield dict(zip(columns, key, strict=True)), group
