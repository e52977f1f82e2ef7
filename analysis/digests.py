"""Small tables that steps write beside their large arrays: what figures need of those, as Parquet."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.reader import Reader

EXPERTS = (
    "layer",
    "expert",
    "tokens",
    "gate_sum",
    "norm_sum",
    "ala_first",
    "ala_second",
    "channel_square",
    "channel_max",
    "channels",
)
"""experts.parquet of a pass over a text: for each expert its tokens; over them, the sums of the gate, of the output's
norm and of its attributions of first and second order; the sum of its squared channels and the largest; channels."""
LOSSES = ("layer", "layer_loss")
"""layers.parquet of such a pass: the sum over tokens of ||m||^2 / (||y||^2 + eps), m the routed output of the layer, y
the residual stream after it."""
ABLATIONS = ("layer", "expert", "ablation")
"""ablation.parquet: what the model's loss gains without the expert, nats per token."""
CONCENTRATION = ("layer", "channels", "score")
"""concentration.parquet of scores: which share of the layer's score its highest channels hold, by their share."""
BUDGETS = ("layer", "coverage", "kept")
"""budgets.parquet of a plan of channels: the shares of the layer's score and of its channels that are kept."""
TABLES = {
    "experts.parquet": ("statistics.safetensors", EXPERTS),
    "layers.parquet": ("statistics.safetensors", LOSSES),
    "ablation.parquet": ("statistics.safetensors", ABLATIONS),
    "concentration.parquet": ("scores.safetensors", CONCENTRATION),
    "budgets.parquet": ("scores.safetensors", BUDGETS),
}
"""Table -> the arrays that it was made from, and its columns."""


def read(folder: Path | None, file: str, reader: Reader, arrays_in: Path | None = None) -> pd.DataFrame | None:
    """The table `file` of a step; None where there is none. `arrays_in`: the folder of its arrays, if another's.

    A store that holds results alone has neither arrays nor tables, and that is no gap; arrays without their table are
    of an older moe_lab, and the gap says what to do.
    """
    if folder is None:
        return None
    arrays, columns = TABLES[file]
    if (folder / file).is_file():
        table = reader.table(folder, file, columns)
        return None if table is None else table.to_pandas()
    if ((arrays_in or folder) / arrays).is_file():
        where = str(folder.relative_to(reader.root))
        reader.gap(f"{file} is missing, as an older moe_lab wrote none: remove this folder and run again", where)
    return None
