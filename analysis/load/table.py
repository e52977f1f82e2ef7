"""All results of a study as one table, for notebooks and other programs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from moe_lab.analysis.load.settings import AXES
from moe_lab.analysis.load.studies import studies
from moe_lab.analysis.load.study import load
from moe_lab.errors import UserError, check_known
from moe_lab.paths import store_folder

ROWS = ("item", "cell")
"""What a row of a table of results is about."""
ENDINGS = (".parquet", ".csv")
"""Endings of files to which a table is written."""


def table(store: str | Path, study: str | None = None, rows: str = "item") -> pd.DataFrame:
    """The results of a study, with the columns AXES and `removed` of `Study.cells`, and

    - with rows="item", for each cell and item: benchmark, metric, scale, score (of the cell on the
      benchmark), item, outcome, loss (bits per byte of the right answer), units and the measures of
      the generated text. Columns of items are empty for a score without items.
    - with rows="cell", for each cell: bits and COSTS, see `plans.costs`

    study: one study, several separated by commas, or all; None for the newest. Raises UserError for
    a study that the store does not have.
    """
    check_known("rows", rows, ROWS)
    folder = store_folder(str(store))
    data = load(folder, study or studies(folder)[0])
    cells = data.cells[[*AXES, "removed"]]
    if rows == "cell":
        return cells.join(data.costs).reset_index(drop=True)
    scores = data.results[["cell", "benchmark", "metric", "scale", "score"]]
    items = scores.merge(data.samples, on=["cell", "benchmark"], how="left")
    items = items.rename(columns={"answer_loss": "loss"})
    return cells.merge(items, left_index=True, right_on="cell").drop(columns="cell")


def write_table(frame: pd.DataFrame, file: Path) -> None:
    """Write a table to a file with one of ENDINGS. Raises UserError for another ending."""
    if file.suffix == ".parquet":
        frame.to_parquet(file, index=False)
    elif file.suffix == ".csv":
        frame.to_csv(file, index=False)
    else:
        raise UserError(f"out={file}: expected a file that ends in {' or '.join(ENDINGS)}")
