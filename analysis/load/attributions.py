"""Small tables that steps write beside their large arrays: what figures need of those, as Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.frames import records
from analysis.load import steps
from analysis.load.reader import Reader
from analysis.load.settings import passes
from analysis.load.study import Study

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


KEYS = ["model", "calibration", "layer", "expert"]
MEASURES = {
    "tokens": "tokens routed to the expert",
    "gate": "mean router weight",
    "norm": "mean output norm",
    "first": "attribution, first order",
    "second": "attribution, second order",
    "ablation": "rise of the loss without it",
}
"""Measure of an expert -> what it is."""
MAGNITUDES = {"size": "root mean square of channels", "largest": "largest channel"}
"""Measures of an expert's channels, the inputs of its down projection, over its tokens."""
ABLATION = "ablation"
"""Kind of step behind a plan that says what the loss gains without an expert."""


def experts(study: Study) -> pd.DataFrame:
    """One row per model, calibration set, layer and expert: KEYS, MEASURES and MAGNITUDES.

    tokens       N, tokens that the router sent to the expert
    gate, norm   1/N sum_t g and 1/N sum_t ||f||, NaN for N = 0
    first        sum_t g <f, m> / (||y||^2 + eps), m the routed output, y the residual stream, per calibration token
    second       sum_t g^2 ||f||^2 / (||y||^2 + eps), per calibration token: for the loss ||m||^2 / (||y||^2 + eps)
                 exactly what changes when the expert alone falls silent
    ablation     what the model's loss gains without the expert, nats per token; NaN where no plan read that
    size         sqrt(sum_t,c phi^2 / (N I)), NaN for N = 0; `largest`: max_t,c |phi|
    """
    frames = [
        _measures(sums, _tokens(report))
        .merge(_ablations(study, cells), on=["layer", "expert"], how="left")
        .assign(model=model, calibration=calibration)
        for model, calibration, cells, sums, report in _passes(study, "experts.parquet")
    ]
    columns = [*KEYS, *MEASURES, *MAGNITUDES]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def layer_losses(study: Study) -> pd.DataFrame:
    """model, calibration, layer, loss: mean over calibration tokens of ||m||^2 / (||y||^2 + eps), m the routed output
    of the layer, y the residual stream after it."""
    frames = [
        sums.assign(model=model, calibration=calibration, loss=sums["layer_loss"] / _tokens(report))
        for model, calibration, _, sums, report in _passes(study, "layers.parquet")
    ]
    columns = ["model", "calibration", "layer", "loss"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def _measures(sums: pd.DataFrame, calibration_tokens: float) -> pd.DataFrame:
    """Means of experts from their sums."""
    seen = sums["tokens"].where(sums["tokens"] > 0)
    return pd.DataFrame(
        {
            "layer": sums["layer"],
            "expert": sums["expert"],
            "tokens": sums["tokens"],
            "gate": sums["gate_sum"] / seen,
            "norm": sums["norm_sum"] / seen,
            "first": sums["ala_first"] / calibration_tokens,
            "second": sums["ala_second"] / calibration_tokens,
            "size": np.sqrt(sums["channel_square"] / (seen * sums["channels"])),
            "largest": sums["channel_max"].where(seen.notna()),
        }
    )


def _tokens(report: Mapping[str, Any]) -> float:
    """Calibration tokens of a pass; NaN when its report does not say."""
    return float(sum((report.get("valid_tokens") or {}).values())) or np.nan


def _passes(study: Study, file: str) -> Iterator[tuple[str, str, pd.DataFrame, pd.DataFrame, Mapping[str, Any]]]:
    """Model, calibration set, cells, table `file` and report of each pass that left one."""
    cells = study.cells[study.cells["statistics_folder"].notna()].assign(shown=passes(study.cells)["statistics_folder"])
    for (model, calibration, *_), found in cells.groupby(["model", "calibration", "gate", "seed"], sort=False):
        shown = found["shown"].dropna()
        if shown.empty:
            continue
        folder: Path | None = study.reader.find(shown.iloc[0])
        sums = read(folder, file, study.reader)
        if sums is not None:
            report = study.calibrations.get(f"{calibration}@{model}", {})
            yield str(model), str(calibration), found.drop(columns="shown"), sums, report


def _ablations(study: Study, cells: pd.DataFrame) -> pd.DataFrame:
    """The ablations that some plan among `cells` read: layer, expert, ablation; empty when none did."""
    for row in records(cells[cells["plan_folder"].notna()]):
        for name, folder in steps.behind(row["plan_folder"], study.reader).items():
            found = read(folder, "ablation.parquet", study.reader) if steps.kind(name) == ABLATION else None
            if found is not None:
                return found
    return pd.DataFrame(columns=list(ABLATIONS)).astype({"layer": int, "expert": int, "ablation": float})
