"""Gate and seed: what tells cells of one model, ratio, calibration set and method apart, where a study has several.

Scores stand beside each other for every gate and seed. What a pass over a text leaves is shown for one of them: the
first that a model's cells have, if the pass was made with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
                said = map(joined, told[own.index], own[axis].map(words.format))
                told.update(pd.Series(list(said), own.index, dtype=object))
    return told


def pruned(cells: pd.DataFrame) -> pd.Series:
    """For each cell how much of the model is removed, with its setting where there are several: `50 %, seed 43`."""
    return pd.Series(list(map(joined, cells["ratio"].map(names.ratio), settings(cells))), cells.index, dtype=object)


def passes(cells: pd.DataFrame) -> pd.DataFrame:
    """Of the cells whose pass is known one for each model and calibration set, the shown gate and seed preferred."""
    known = cells[cells["statistics_folder"].notna()]
    usual = shown(cells)
    pairs = zip(known["model"], known["gate"], known["seed"], strict=True)
    other = pd.Series([usual.get(model) != (gate, seed) for model, gate, seed in pairs], known.index, dtype=bool)
    first = other.sort_values(kind="stable").index
    return known.loc[first].drop_duplicates(["model", "calibration"]).sort_index()


def shown(cells: pd.DataFrame) -> dict[str, tuple[Any, Any]]:
    """Model -> the gate and seed of its first pruned cell with a pass."""
    pruned = cells[(cells["criterion"] != "none") & cells["statistics_folder"].notna()].drop_duplicates("model")
    return {str(row.model): (row.gate, row.seed) for row in pruned.itertuples()}


def of_passes(
    steps: Mapping[str, str | None] | None, usual: Mapping[str, tuple[Any, Any]]
) -> dict[tuple[str, str], str | None]:
    """(Calibration, model) -> its step, from a record's steps by "calibration@model@gate@seed".

    Of several gates and seeds that of `usual` (of the model) is taken, or the first. Older records, by
    "calibration@model", kept one without saying which: it is taken where there is no other.
    """
    found: dict[tuple[str, str], tuple[int, str | None]] = {}
    for key, step in (steps or {}).items():
        calibration, model, *setting = key.split("@")
        gate, seed = usual.get(model, ("", ""))
        rank = 2 if not setting else 0 if setting == [str(gate), str(seed)] else 1
        if (calibration, model) not in found or rank < found[calibration, model][0]:
            found[calibration, model] = rank, step
    return {key: step for key, (_, step) in found.items()}


def joined(first: str, second: str) -> str:
    """Two words that say something, or the one that does."""
    return ", ".join(filter(None, (first, second)))
