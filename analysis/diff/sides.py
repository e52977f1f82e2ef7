"""Load two studies and match their cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.load.settings import labels
from analysis.load.studies import studies
from analysis.load.study import AXES, Study, load
from analysis.stats.comparison import Comparison, compare
from moe_lab.errors import UserError, nearest

CELL = ("Model", "Pruned", "Calibration", "Criterion")
"""Columns that identify a pair of cells."""
DIFFERENCE = "B − A"
BETTER, WORSE = "better beyond noise", "worse beyond noise"
OFFSET = 10**6
"""Added to the second study's cell numbers, so that both studies fit into one frame."""


@dataclass(frozen=True)
class Sides:
    """Two studies, and the pairs of cells (first, second) that correspond."""

    first: Study
    second: Study
    pairs: tuple[tuple[int, int], ...]
    differing: Mapping[str, tuple[str, str]]
    """Axis -> its value in each study, for axes with one value per study that differ: matching ignores these axes."""
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    """Labels of the cells without a counterpart: of the first study, of the second."""

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """Model -> comparison of the cells of both studies; the second study's cells are numbered from OFFSET."""
        comparisons = compare(
            pd.concat([self.first.cells, _moved(self.second.cells)]),
            _stacked(self.first.results, self.second.results),
            _stacked(self.first.samples, self.second.samples),
            self.first.reader,
        )
        return {comparison.model: comparison for comparison in comparisons}


def side(word: str, store: Path) -> Study:
    """Load the study that a word of the command line names: a study of `store`, STORE:STUDY, or a store (its newest).

    Raises UserError, with the nearest name, when it is none of these.
    """
    folder, colon, name = word.rpartition(":")
    if colon and (Path(folder) / "studies").is_dir():
        return load(Path(folder), name)
    if (Path(word) / "studies").is_dir():
        return load(Path(word), studies(Path(word))[0])
    names = studies(store) if store.is_dir() else []
    if word in names or "," in word or word == "all":
        return load(store, word)
    close = nearest(word, names)
    hint = f": did you mean {close}?" if close else ""
    listed = ", ".join(sorted(names)) or "none"
    raise UserError(
        f"diff {word} is no study of store={store}, no store and no plan.json{hint} (studies: {listed}; another "
        "store's study is STORE:STUDY)"
    )


def beside(first: Study, second: Study) -> Sides:
    """Match the cells of two studies by all axes except those with one value per study that differ."""
    differing = {axis: values for axis in AXES if axis != "model" and (values := _own(first, second, axis))}
    keys = [axis for axis in AXES if axis not in differing]
    one, other = _keyed(first.cells, keys), _keyed(second.cells, keys)
    common = [key for key in one if key in other]
    return Sides(
        first,
        second,
        tuple((one[key], other[key] + OFFSET) for key in common),
        differing,
        (_alone(first, one, set(common)), _alone(second, other, set(common))),
    )


def _own(first: Study, second: Study, axis: str) -> tuple[str, str] | None:
    """The value of an axis in each study, if each study has only one and they differ; else None.

    Unpruned cells do not count, nor does the calibration set of criteria that read none.
    """
    single_values = []
    for study in (first, second):
        pruned = study.cells[study.cells["criterion"] != "none"]
        values = set(pruned[axis]) - ({"none"} if axis == "calibration" else set())
        if len(values) != 1:
            return None
        single_values.append(str(values.pop()))
    return (single_values[0], single_values[1]) if single_values[0] != single_values[1] else None


def _keyed(cells: pd.DataFrame, keys: list[str]) -> dict[tuple[Any, ...], int]:
    """Key -> cell; the key of the unpruned model is its model alone."""
    frame = cells[keys].astype(object)
    return {
        (*(row if criterion != "none" else (model,)),): int(str(cell))
        for cell, model, criterion, row in zip(
            cells.index, cells["model"], cells["criterion"], frame.itertuples(index=False, name=None), strict=True
        )
    }


def _alone(study: Study, keyed: Mapping[tuple[Any, ...], int], common: set[tuple[Any, ...]]) -> tuple[str, ...]:
    words = labels(study.cells)
    return tuple(words[cell] for key, cell in keyed.items() if key not in common)


def _moved(cells: pd.DataFrame) -> pd.DataFrame:
    return cells.set_axis(pd.Index(cells.index + OFFSET, name=cells.index.name), axis=0)


def _stacked(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    moved = second.assign(cell=second["cell"].astype(np.int64) + OFFSET)
    return pd.concat([part for part in (first, moved) if len(part)] or [first], ignore_index=True)
