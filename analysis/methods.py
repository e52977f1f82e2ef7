"""How methods are called: a criterion and the allocation it was used under, in the papers' words if they have one."""

from __future__ import annotations

import re

import pandas as pd

from analysis import names
from analysis.frames import records

METHOD = ["criterion", "allocation", "recovery", "calibration", "gate", "seed"]
"""Cells of one model that agree in these differ only in how much they remove."""

NAMED = {
    ("heapr", "global"): "HEAPr-G",
    ("heapr", "layerwise"): "HEAPr-L",
    ("camera", "layerwise"): "CAMERA-P",
}
"""Pairs of criterion and allocation that have a name of their own."""

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


def method(criterion_name: str, word: str, granularity: str) -> str:
    """A criterion with its allocation: HEAPr-G, REAP, Activation (coverage)."""
    if (criterion_name, word) in NAMED:
        return NAMED[criterion_name, word]
    usual = word in ("none", "uniform") and granularity != "channel"
    spelled = names.criterion(criterion_name)
    return spelled if usual else f"{spelled} ({word})"


def labels(cells: pd.DataFrame) -> pd.Series:
    """A label per cell that names its method: more than the criterion only where more differs between `cells`."""
    varying = [
        axis
        for axis in ("calibration", "gate", "seed")
        if cells.loc[cells["criterion"] != "none", axis].replace("none", None).nunique() > 1
    ]
    bits = {"nf4": "4 bits", "none": ""}
    found = []
    for row in records(cells):
        extra = [
            names.calibration(row["calibration"]) if axis == "calibration" else f"{axis} {row[axis]}"
            for axis in varying
            if row["criterion"] != "none" and row[axis] != "none"
        ]
        extra += [bits.get(row["recovery"], row["recovery"])]
        name = method(row["criterion"], row["allocation"], row["granularity"])
        found.append(", ".join(part for part in (name, *extra) if part))
    return pd.Series(found, cells.index, dtype=object)
