"""Gate and seed: what tells cells of one model, ratio, calibration set and method apart, where a study has several."""

from __future__ import annotations

import pandas as pd

from analysis import names

WORDS = {"gate": "gate {}", "seed": "seed {}"}
"""Axis -> how its value is said."""


def settings(cells: pd.DataFrame) -> pd.Series:
    """For each cell its gate and seed in words, if its model's pruned cells have several of them: `seed 43`, or ""."""
    told = pd.Series("", cells.index, dtype=object)
    for _, own in cells[cells["criterion"] != "none"].groupby("model", sort=False):
        for axis, words in WORDS.items():
            if own[axis].nunique() > 1:
                told[own.index] = [joined(told[cell], words.format(value)) for cell, value in own[axis].items()]
    return told


def pruned(cells: pd.DataFrame) -> pd.Series:
    """For each cell how much of the model is removed, with its setting where there are several: `50 %, seed 43`."""
    return pd.Series(list(map(joined, cells["ratio"].map(names.ratio), settings(cells))), cells.index, dtype=object)


def joined(first: str, second: str) -> str:
    """Two words that say something, or the one that does."""
    return ", ".join(filter(None, (first, second)))
