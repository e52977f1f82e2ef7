"""Describe cells in words: labels, removed shares, gates and seeds, and allocations."""

from __future__ import annotations

from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import records


def removed_noun(cells: pd.DataFrame) -> str:
    """The noun for what the plans of these cells remove."""
    granularities = set(cells["granularity"])
    if "channel" not in granularities:
        return "experts"
    return "experts or channels" if "expert" in granularities else "channels"


def labels(cells: pd.DataFrame) -> dict[int, str]:
    """Cell -> label that identifies the cell in gaps."""
    labels = {}
    rows = zip(cells.index.tolist(), records(cells), gate_and_seed(cells), strict=True)
    for cell, row, text in rows:
        criterion, *others = names.method_parts(row["method"])
        plan = ["unpruned"]
        if criterion != "none":
            plan = [criterion, row["calibration"], f"{row['ratio']:g}"]
        labels[cell] = " ".join(filter(None, (row["model"], *plan, *others, text)))
    return labels


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
    "source",
)
"""Axes of a cell. An unpruned model has the ratio 0, and `none` on all axes besides model, ratio
and source.

source: the program that measured the results, OWN for this one. granularity: what the criterion
scores, `expert` or `channel`. allocation and recovery are spelled as in the study's record.
"""


def gate_and_seed(cells: pd.DataFrame) -> pd.Series:
    """For each cell, text with the gate and the seed: `gate raw, seed 43`. A value that all pruned
    cells of the model have is left out."""
    texts: dict[Any, str] = dict.fromkeys(cells.index, "")
    pruned = cells[cells["criterion"] != "none"]
    for axis in ("gate", "seed"):
        if axis in pruned:  # `Comparison.cells` has no column `seed`
            is_varied = pruned.groupby("model")[axis].transform("nunique") > 1
            for cell, value in pruned.loc[is_varied, axis].items():
                texts[cell] = names.comma_joined(texts[cell], f"{axis} {value}")
    return pd.Series(texts, cells.index, dtype=object)


def removed_share_texts(cells: pd.DataFrame) -> pd.Series:
    """For each cell, the column "removed_text" with the text of `gate_and_seed`: `50 %, seed
    43`."""
    texts = list(map(names.comma_joined, cells["removed_text"], gate_and_seed(cells)))
    return pd.Series(texts, cells.index, dtype=object)


ROUNDING = 5e-4
"""Removed shares that differ from the requested ratio by less than this are printed as the
ratio."""


def removed_text(shares: pd.Series, requested: float) -> str:
    """Text with the range of the removed shares and with the requested ratio: `28.1 to 29 % (30 %
    requested)`. If all shares equal the requested ratio up to ROUNDING, the text is this ratio:
    `30 %`.

    shares: share that each plan removes, NaN if unknown.
    """
    known_shares = shares.dropna()
    if (known_shares.sub(requested).abs() < ROUNDING).all():
        return names.ratio(requested)
    return f"{names.limits(100 * known_shares, '{:.3g}')} % ({names.ratio(requested)} requested)"


METHOD = ["method", "calibration", "gate"]
"""Columns that identify the method of a cell of a comparison."""


def method_labels(cells: pd.DataFrame) -> pd.Series:
    """Label of each cell: the display name of the cell's method. The calibration set and the gate
    are added if they differ between pruned cells."""
    is_pruned = cells["criterion"] != "none"
    labels = cells["method"].map(names.method)
    for axis, display_name in (("calibration", names.calibration), ("gate", str)):
        # a method that reads no data has the calibration "none"
        values = cells[axis].mask(cells[axis] == "none")
        if values[is_pruned].nunique() > 1:
            labels += (", " + values.map(display_name, na_action="ignore")).fillna("")
    return labels


SEARCHED = "evolutionary"
"""Beginning of a searched allocation in a study's record."""


ALL_BUT_ALLOCATION = ["ratio", "criterion", "calibration", "recovery", "gate"]
"""Cells of a model with equal values in these columns differ only in their allocation, which
includes the settings of a search."""
