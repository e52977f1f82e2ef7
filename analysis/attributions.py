"""What a pass over a text leaves of every expert, as tidy frames: routing, sizes of outputs, attributions, ablations.

The sums are read as the steps left them (statistics.safetensors), and only those named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import steps
from analysis.frames import records
from analysis.load import Study
from moe_lab.errors import UserError

FILE = "statistics.safetensors"
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
_SUMS = ("tokens", "sums_model", "ala_first", "ala_second", "channel_square", "channel_max")
_BESIDES = {"ablation": "ablation"}
"""Kind of step behind a plan -> the array of its file."""


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
        pd.DataFrame({**_of_experts(sums, report), "ablation": without.get(layer, {}).get("ablation", np.nan)}).assign(
            model=model, calibration=calibration, layer=layer, expert=np.arange(len(sums["tokens"]))
        )
        for model, calibration, layers, without, report in _passes(study)
        for layer, sums in layers.items()
    ]
    columns = [*KEYS, *MEASURES, *MAGNITUDES]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def layer_losses(study: Study) -> pd.DataFrame:
    """model, calibration, layer, loss: mean over calibration tokens of ||m||^2 / (||y||^2 + eps), m the routed output
    of the layer, y the residual stream after it."""
    rows = [
        (model, calibration, layer, float(sums["layer_loss"]) / _tokens(report))
        for model, calibration, layers, _, report in _passes(study, ("layer_loss",))
        for layer, sums in layers.items()
    ]
    return pd.DataFrame(rows, columns=["model", "calibration", "layer", "loss"])


def _of_experts(sums: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, np.ndarray]:
    tokens = np.asarray(sums["tokens"], float)
    seen = np.where(tokens > 0, tokens, np.nan)
    square = np.asarray(sums["channel_square"], float)
    return {
        "tokens": tokens,
        "gate": sums["sums_model"][:, 1, 0] / seen,
        "norm": sums["sums_model"][:, 0, 1] / seen,
        "first": sums["ala_first"] / _tokens(report),
        "second": sums["ala_second"] / _tokens(report),
        "size": np.sqrt(square.sum(axis=1) / (seen * square.shape[1])),
        "largest": np.where(tokens > 0, np.max(sums["channel_max"], axis=1), np.nan),
    }


def _tokens(report: Mapping[str, Any]) -> float:
    """Calibration tokens of a pass; NaN when its report does not say."""
    return float(sum((report.get("valid_tokens") or {}).values())) or np.nan


def _passes(
    study: Study, wanted: tuple[str, ...] = _SUMS
) -> Iterator[tuple[str, str, dict[int, dict[str, Any]], dict[int, dict[str, Any]], Mapping[str, Any]]]:
    """Model, calibration set, sums by layer, ablations by layer (empty without) and report of each pass there is."""
    cells = study.cells[study.cells["statistics_folder"].notna()]
    for (model, calibration), found in cells.groupby(["model", "calibration"], sort=False):
        folder = study.reader.find(found["statistics_folder"].iloc[0])
        layers = _sums(study, folder, wanted)
        if all(set(wanted) <= set(sums) for sums in layers.values()):
            report = study.calibrations.get(f"{calibration}@{model}", {})
            yield str(model), str(calibration), layers, _ablations(study, found), report


def _ablations(study: Study, cells: pd.DataFrame) -> dict[int, dict[str, Any]]:
    """The ablations that some plan among `cells` read."""
    for row in records(cells[cells["plan_folder"].notna()]):
        for name, folder in steps.behind(row["plan_folder"], study.reader).items():
            if steps.kind(name) in _BESIDES:
                return _sums(study, folder, tuple(_BESIDES.values()))
    return {}


def _sums(study: Study, folder: Path | None, wanted: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    """Arrays of a step by layer; a store that holds results only has none, a damaged file is a gap."""
    from moe_lab.statistics_file import read

    if folder is None or not (folder / FILE).is_file():
        return {}
    try:
        return read(folder / FILE, only=wanted)
    except UserError:
        study.reader.gap(f"{FILE} is damaged", str(folder.relative_to(study.reader.root)))
        return {}
