"""Describe cells in words: labels, removed shares, gates and seeds, allocations and protocols."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis import names
from analysis.load.reader import records


def removed_noun(cells: pd.DataFrame) -> str:
    """The noun for what the plans of these cells remove: `experts`, `channels`, or `experts or
    channels`."""
    granularities = set(cells["granularity"])
    if "channel" not in granularities:
        return "experts"
    return "experts or channels" if "expert" in granularities else "channels"


def labels(cells: pd.DataFrame) -> dict[int, str]:
    """Cell -> label of the cell in gaps: its model, method, calibration set, ratio, and
    `gate_and_seed`."""
    rows = zip(cells.index, records(cells), gate_and_seed(cells), strict=True)
    return {
        # through str, because pandas' types allow any label in an index
        int(str(cell)): " ".join(filter(None, (_label(row), suffix)))
        for cell, row, suffix in rows
    }


def _label(row: Mapping[str, Any]) -> str:
    """The label of a cell without its gate and seed."""
    criterion, allocation, recovery = names.parts(row["method"])
    if criterion == "none":
        return f"{row['model']} unpruned"
    parts = (row["model"], criterion, row["calibration"], f"{row['ratio']:g}", allocation, recovery)
    return " ".join(filter(None, parts))


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
"""Axes of a cell. An unpruned model has the ratio 0, and `none` on all axes besides model and
ratio.

granularity: whether the criterion scores experts or channels, as `expert` or `channel`. allocation
and recovery are spelled as in the study's record.
"""
_AXIS_FORMATS = {"gate": "gate {}", "seed": "seed {}"}
"""Axis -> format of the axis's value in a text."""


def gate_and_seed(cells: pd.DataFrame) -> pd.Series:
    """Text with the gate and seed of each pruned cell: `gate raw, seed 43`; "" for unpruned cells.
    The text leaves out an axis that has one value for all pruned cells of the model."""
    texts = pd.Series("", cells.index, dtype=object)
    for _, model_cells in cells[cells["criterion"] != "none"].groupby("model", sort=False):
        for axis, pattern in _AXIS_FORMATS.items():
            # The cells of a comparison have no column seed.
            if axis in model_cells and model_cells[axis].nunique() > 1:
                values = model_cells[axis].map(pattern.format)
                longer_texts = list(map(comma_joined, texts[model_cells.index], values))
                texts.update(pd.Series(longer_texts, model_cells.index, dtype=object))
    return texts


def pruned_in_words(cells: pd.DataFrame) -> pd.Series:
    """Text with the share that each cell removes and its `gate_and_seed`: `50 %, seed 43`."""
    texts = list(map(comma_joined, cells["removed_words"], gate_and_seed(cells)))
    return pd.Series(texts, cells.index, dtype=object)


ROUNDING = 5e-4
"""Removed shares that differ from the requested ratio by less than this are printed as the
ratio."""


def removed_words(shares: pd.Series, requested: Sequence[float]) -> str:
    """Text with the range of the removed shares and the requested ratios: `28.1 % (30 %
    requested)`; the requested ratio alone if there is only one, and if all shares equal it up to
    ROUNDING.

    Plans of one ratio can remove different shares, since allocations round in different ways.
    """
    known_shares = shares.dropna()
    ratios = names.listing(map(names.ratio, requested))
    if len(requested) == 1 and (known_shares.sub(requested[0]).abs() < ROUNDING).all():
        return ratios
    # one text if the lowest and the highest share are printed alike
    limits = dict.fromkeys(
        f"{100 * share:.3g}" for share in (known_shares.min(), known_shares.max())
    )
    return f"{' to '.join(limits)} % ({ratios} requested)"


def comma_joined(first: str, second: str) -> str:
    """The two texts joined by a comma; if one text is empty, the other text alone."""
    return ", ".join(filter(None, (first, second)))


def protocols(cells: pd.DataFrame) -> str:
    """Text with the protocol by which each model was evaluated: `qwen by heapr, deepseek by
    heapr_norm`; "" when all cells have the same protocol."""
    if cells["protocol"].nunique() < 2:
        return ""
    cells_of_protocols = cells.dropna(subset=["protocol"]).drop_duplicates(["model", "protocol"])
    return names.listing(
        f"{row.model} by {row.protocol}" for row in cells_of_protocols.itertuples()
    )


METHOD = ["method", "calibration", "gate"]
"""Columns that identify the method of a cell of a comparison. Cells of one model with equal values
in these columns differ only in the ratio."""

_ALLOCATION = re.compile(
    r"(?P<name>[^,(]+)(\((?P<in_parentheses>[^()]*)\))?(, (?P<after_comma>.*))?"
)


def allocation(text: str) -> tuple[str, dict[str, str]]:
    """Parse an allocation of a study's record into its name and its settings.

    `coverage, prior usage` and `coverage(prior=usage)` both give ("coverage", {"prior": "usage"}),
    and `coverage(prior=usage), protect=super` has the setting protect too. A setting without a
    value, as in `coverage, aligned`, has the value "". A text of another form is returned whole as
    the name, with no settings.
    """
    match = _ALLOCATION.fullmatch(text)
    if match is None:
        return text, {}
    settings = {}
    for part in f"{match['in_parentheses'] or ''},{match['after_comma'] or ''}".split(","):
        key, _, value = part.strip().partition("=" if "=" in part else " ")
        settings[key] = value
    settings.pop("", None)  # empty parts are no settings
    return match["name"], settings


def replaces(text: str) -> bool:
    """Whether an allocation of a study's record replaces dropped experts by constants or merged
    experts."""
    _, settings = allocation(text)
    return "replacement" in settings


def method_labels(cells: pd.DataFrame) -> pd.Series:
    """Label of each cell: its method, then its calibration set if the pruned cells have several
    calibration sets, and its gate if they have several gates."""
    pruned = cells[cells["criterion"] != "none"]
    # the value none, of methods that read no data, is not counted
    varying_axes = [
        axis for axis in ("calibration", "gate") if pruned[axis].replace("none", None).nunique() > 1
    ]
    return pd.Series(
        [_method_label(row, varying_axes) for row in records(cells)], cells.index, dtype=object
    )


def _method_label(row: dict[str, object], varying_axes: list[str]) -> str:
    """Label of one cell: display name of its method, then, if the cell is pruned, its values on the
    axes `varying_axes`, except none."""
    parts = [names.method(str(row["method"]))]
    if row["criterion"] != "none":
        for axis in varying_axes:
            if row[axis] != "none":
                value = str(row[axis])
                parts.append(names.calibration(value) if axis == "calibration" else value)
    return ", ".join(parts)


SEARCHED = "evolutionary"
"""Beginning of a searched allocation in a study's record; settings may follow."""


def is_searched(allocation: str) -> bool:
    """Whether an allocation of a study's record was found by a search."""
    return allocation.startswith(SEARCHED)
