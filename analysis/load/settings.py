"""Describe cells in words: labels, gate and seed where a study has several of them, allocations and
protocols."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis import names
from analysis.load.reader import records


def removed(cells: pd.DataFrame) -> str:
    """The noun for what these cells remove: experts, channels, or experts or channels."""
    granularities = set(cells["granularity"]) & {"expert", "channel"}
    return {
        frozenset({"channel"}): "channels",
        frozenset({"expert", "channel"}): "experts or channels",
    }.get(frozenset(granularities), "experts")


def labels(cells: pd.DataFrame) -> dict[int, str]:
    """Cell -> its label for gaps: model, method, calibration set, ratio, and gate and seed where
    these vary."""
    varying = gate_and_seed(cells)
    rows = zip(cells.index, records(cells), varying, strict=True)
    return {
        int(str(cell)): " ".join(filter(None, (_label(row), varying_axes)))
        for cell, row, varying_axes in rows
    }


def _label(row: Mapping[str, Any]) -> str:
    criterion, *rest = names.parts(row["method"])
    if criterion == "none":
        return f"{row['model']} unpruned"
    return " ".join(
        [row["model"], criterion, row["calibration"], f"{row['ratio']:g}", *filter(None, rest)]
    )


AXES = (
    "model",
    "criterion",
    "granularity",
    "calibration",
    "ratio",
    "allocation",
    "recovery",
    "gate",
    "seed",
)
"""Axes of a cell; the unpruned model has `none` and 0 in them.

granularity: what the criterion scores, expert or channel. allocation and recovery: as spelled in
the study's record.
"""
WORDS = {"gate": "gate {}", "seed": "seed {}"}
"""Axis -> the words for its value."""


def gate_and_seed(cells: pd.DataFrame) -> pd.Series:
    """Gate and seed of each cell in words, where its model's pruned cells have several of them:
    `seed 43`, or ""."""
    texts = pd.Series("", cells.index, dtype=object)
    for _, of_model in cells[cells["criterion"] != "none"].groupby("model", sort=False):
        for axis, pattern in WORDS.items():
            # cells that are compared have no seed of their own
            if axis in of_model and of_model[axis].nunique() > 1:
                joined_texts = map(
                    joined, texts[of_model.index], of_model[axis].map(pattern.format)
                )
                texts.update(pd.Series(list(joined_texts), of_model.index, dtype=object))
    return texts


def pruned(cells: pd.DataFrame) -> pd.Series:
    """What is removed from each cell in words, with its gate and seed when there are several:
    `50 %, seed 43`."""
    return pd.Series(
        list(map(joined, cells["removed_words"], gate_and_seed(cells))), cells.index, dtype=object
    )


ROUNDING = 5e-4
"""A share that differs from the requested ratio by less than this is called by the ratio."""


def removed_words(shares: pd.Series, requested: Sequence[float]) -> str:
    """Removed shares in words, with the requested ratios where these differ:
    `28.1 % (30 % requested)`.

    Plans of one ratio can remove different shares, since allocations round in their own ways."""
    known = shares.dropna()
    ratios = names.listing(map(names.ratio, requested))
    if len(requested) == 1 and (known.sub(requested[0]).abs() < ROUNDING).all():
        return ratios
    ends = dict.fromkeys(f"{100 * share:.3g}" for share in (known.min(), known.max()))
    return f"{' to '.join(ends)} % ({ratios} requested)"


def joined(first: str, second: str) -> str:
    """Both texts joined by a comma, or the one that is not empty."""
    return ", ".join(filter(None, (first, second)))


def protocols(cells: pd.DataFrame) -> str:
    """The protocol of each model when protocols differ: `qwen by heapr, deepseek by heapr_norm`; ""
    otherwise."""
    if cells["protocol"].nunique() < 2:
        return ""
    by_protocol = cells.dropna(subset=["protocol"]).drop_duplicates(["model", "protocol"])
    return names.listing(f"{row.model} by {row.protocol}" for row in by_protocol.itertuples())


METHOD = ["method", "calibration", "gate"]
"""Cells of one model with equal values in these columns differ only in the ratio."""

_CALLED = re.compile(r"(?P<name>[^,(]+)(\((?P<inside>[^()]*)\))?(, (?P<after>.*))?")


def allocation(text: str) -> tuple[str, dict[str, str]]:
    """Parse an allocation of a study's record into its name and its settings.

    `coverage, prior usage` and `coverage(prior=usage)` both give ("coverage", {"prior": "usage"}),
    and `coverage(prior=usage), protect=super` has the setting protect too. A setting without a
    value, as in `coverage, aligned`, has the value "". A text of another form is a name without
    settings.
    """
    match = _CALLED.fullmatch(text)
    if match is None:
        return text, {}
    parts = [
        part.strip()
        for text in (match["inside"], match["after"])
        for part in (text or "").split(",")
    ]
    pairs = (part.partition("=" if "=" in part else " ") for part in parts if part)
    return match["name"], {key: value for key, _, value in pairs}


def replaces(text: str) -> bool:
    """Whether an allocation of a study's record puts something in the place of the experts that it
    drops."""
    return "replacement" in allocation(text)[1]


def method_labels(cells: pd.DataFrame) -> pd.Series:
    """A label per cell: its method, and the calibration set and gate where these differ between
    pruned cells."""
    pruned = cells[cells["criterion"] != "none"]
    varying = [axis for axis in METHOD[1:] if pruned[axis].replace("none", None).nunique() > 1]
    return pd.Series(
        [_method_label(row, varying) for row in records(cells)], cells.index, dtype=object
    )


def _method_label(row: dict[str, object], varying: list[str]) -> str:
    spelled = {"calibration": names.calibration(str(row["calibration"]))}
    extra = [spelled.get(axis, str(row[axis])) for axis in varying if row[axis] != "none"]
    return ", ".join(
        [names.method(str(row["method"])), *(extra if row["criterion"] != "none" else [])]
    )


SEARCHED = "evolutionary"
"""Prefix of the names of searched allocations; settings may follow."""


def is_searched(allocation: str) -> bool:
    """Whether an allocation of a study's record was found by a search."""
    return allocation.startswith(SEARCHED)
