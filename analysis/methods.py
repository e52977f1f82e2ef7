"""Labels of cells by their method, and what the word for an allocation says."""

from __future__ import annotations

import re

import pandas as pd

from analysis import names
from analysis.frames import records

METHOD = ["method", "calibration", "gate", "seed"]
"""Cells of one model that agree in these differ only in how much they remove."""

_CALLED = re.compile(r"(?P<name>[^,(]+)(\((?P<inside>.*)\)|, (?P<after>.*))?")


def allocation(word: str) -> tuple[str, dict[str, str]]:
    """The allocation's name and its settings from the word of a study's record.

    `coverage, prior usage` and `coverage(prior=usage)` are both ("coverage", {"prior": "usage"}); a setting without a
    value, such as `coverage, aligned`, has "". A word of another form is a name without settings.
    """
    found = _CALLED.fullmatch(word)
    if found is None:
        return word, {}
    separator, text = ("=", found["inside"]) if found["inside"] else (" ", found["after"] or "")
    parts = (part.strip().partition(separator) for part in text.split(",") if part.strip())
    return found["name"], {key: value for key, _, value in parts}


def labels(cells: pd.DataFrame) -> pd.Series:
    """A label per cell: its method, and the calibration set, gate and seed where these differ between pruned cells."""
    pruned = cells[cells["criterion"] != "none"]
    varying = [axis for axis in METHOD[1:] if pruned[axis].replace("none", None).nunique() > 1]
    return pd.Series([_label(row, varying) for row in records(cells)], cells.index, dtype=object)


def _label(row: dict[str, object], varying: list[str]) -> str:
    spelled = {"calibration": names.calibration(str(row["calibration"])), "seed": f"seed {row['seed']}"}
    extra = [spelled.get(axis, str(row[axis])) for axis in varying if row[axis] != "none"]
    return ", ".join([names.method(str(row["method"])), *(extra if row["criterion"] != "none" else [])])
