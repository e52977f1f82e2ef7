"""Small tables that steps write beside their large arrays: what figures need of those, as Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.load.reader import Reader, records, step_kind, steps_behind
from analysis.load.settings import passes
from moe_lab.results import ABLATIONS, BUDGETS, CONCENTRATION, ENTROPIES, EXPERTS, GRADIENTS, LOSSES, WEIGHTS

ROOTS = "channel_root_sum"
"""A column that experts.parquet of an older moe_lab lacks."""
TABLES = {
    "experts.parquet": ("statistics.safetensors", EXPERTS),
    "layers.parquet": ("statistics.safetensors", LOSSES),
    "ablation.parquet": ("statistics.safetensors", ABLATIONS),
    "entropy.parquet": ("statistics.safetensors", ENTROPIES),
    "gradients.parquet": ("statistics.safetensors", GRADIENTS),
    "weights.parquet": ("statistics.safetensors", WEIGHTS),
    "expert_concentration.parquet": ("scores.safetensors", CONCENTRATION),
    "budgets.parquet": ("scores.safetensors", BUDGETS),
}
"""Table -> the arrays that it was made from, and its columns."""


OLDER = "as an older moe_lab wrote none: remove this folder and run again"


def read(folder: Path | None, file: str, reader: Reader, arrays_in: Path | None = None) -> pd.DataFrame | None:
    """The table `file` of a step; None where there is none. `arrays_in`: the folder of its arrays, if another's.

    A store that holds results alone has neither arrays nor tables, and that is no gap; arrays without their table are
    of an older moe_lab, and the gap says what to do.
    """
    if folder is None:
        return None
    arrays, columns = TABLES[file]
    where = str(folder.relative_to(reader.root))
    if (folder / file).is_file():
        required = [column for column in columns if column != ROOTS]
        table = reader.table(folder, file, required, optional=(ROOTS,))
        if table is not None and ROOTS in columns and ROOTS not in table.column_names:
            reader.gap(f"{file} lacks {ROOTS}, {OLDER}", where)
        return None if table is None else table.to_pandas()
    if ((arrays_in or folder) / arrays).is_file():
        reader.gap(f"{file} is missing, {OLDER}", where)
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
STATISTICS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
"""Raw statistics of an expert -> what they are."""
MAGNITUDES = {"size": "root mean square of channels", "largest": "largest channel"}
"""Measures of an expert's channels, the inputs of its down projection, over its tokens."""
ABLATION = "ablation"
"""Kind of step behind a plan that says what the loss gains without an expert."""


def experts(cells: pd.DataFrame, calibrations: Mapping[str, Mapping[str, Any]], reader: Reader) -> pd.DataFrame:
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
        .merge(_behind(own, ABLATION, reader), on=["layer", "expert"], how="left")
        .assign(model=model, calibration=calibration)
        for model, calibration, own, sums, report in _passes("experts.parquet", cells, calibrations, reader)
    ]
    columns = [*KEYS, *MEASURES, *MAGNITUDES]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def raw_statistics(cells: pd.DataFrame, calibrations: Mapping[str, Mapping[str, Any]], reader: Reader) -> pd.DataFrame:
    """One row per model, calibration set, layer, expert and statistic: KEYS, ablation, statistic, mean, std, count.

    weight       |w| over the expert's weights, where some criterion of the study reads weights of whole experts
    activation   sqrt(1/N sum_t phi^2) over its channels
    gradient     sqrt(1/N sum_t (dL/dphi)^2) over its channels, where some criterion reads gradients

    mean and std over `count` weights or channels. Only experts with an ablation; without a token there is no statistic.
    """
    frames = []
    for model, calibration, calibrated, sums, _ in _passes("experts.parquet", cells, calibrations, reader):
        ablations = _behind(calibrated, ABLATION, reader)
        if ablations.empty:
            continue
        own = cells[cells["model"] == model]
        weights = _behind(own, "weights", reader)
        gradients = _behind(own[own["calibration"] == calibration], "gradients", reader)
        roots = sums[ROOTS] if ROOTS in sums else pd.Series(np.nan, sums.index)
        by_statistic = [
            _moments(weights, weights["abs_sum"], weights["square_sum"], weights["count"]).assign(statistic="weight"),
            _moments(sums, roots, sums["channel_square"] / _seen(sums), sums["channels"]).assign(
                statistic="activation"
            ),
            _moments(
                gradients,
                gradients["gradient_root_sum"],
                gradients["gradient_square"] / _seen(gradients),
                gradients["channels"],
            ).assign(statistic="gradient"),
        ]
        both = pd.concat([one for one in by_statistic if len(one)], ignore_index=True)
        both = both.merge(ablations, on=["layer", "expert"]).assign(model=model, calibration=calibration)
        frames.append(both.dropna(subset=["mean"]))
    columns = [*KEYS, "ablation", "statistic", "mean", "std", "count"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def _seen(sums: pd.DataFrame) -> pd.Series:
    return sums["tokens"].where(sums["tokens"] > 0)


def _moments(experts: pd.DataFrame, total: pd.Series, squares: pd.Series, count: pd.Series) -> pd.DataFrame:
    """layer, expert, mean and std of `count` values from their sum and the sum of their squares."""
    mean = (total / count).where(squares.notna())
    std = np.sqrt((squares / count - mean**2).clip(lower=0))
    return experts[["layer", "expert"]].assign(mean=mean, std=std, count=count)


def router_entropies(
    cells: pd.DataFrame, calibrations: Mapping[str, Mapping[str, Any]], reader: Reader
) -> pd.DataFrame:
    """model, calibration, layer, entropy, tokens: how many tokens of each calibration set have a router entropy in the
    bin that ends at `entropy`, as a share of the logarithm of the number of experts."""
    frames = [
        counts.assign(model=model, calibration=calibration)
        for model, calibration, _, counts, _ in _passes("entropy.parquet", cells, calibrations, reader)
    ]
    columns = ["model", "calibration", *ENTROPIES]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def layer_losses(cells: pd.DataFrame, calibrations: Mapping[str, Mapping[str, Any]], reader: Reader) -> pd.DataFrame:
    """model, calibration, layer, loss: mean over calibration tokens of ||m||^2 / (||y||^2 + eps), m the routed output
    of the layer, y the residual stream after it."""
    frames = [
        sums.assign(model=model, calibration=calibration, loss=sums["layer_loss"] / _tokens(report))
        for model, calibration, _, sums, report in _passes("layers.parquet", cells, calibrations, reader)
    ]
    columns = ["model", "calibration", "layer", "loss"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def _measures(sums: pd.DataFrame, calibration_tokens: float) -> pd.DataFrame:
    """Means of experts from their sums."""
    seen = _seen(sums)
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


def _passes(
    file: str, cells: pd.DataFrame, calibrations: Mapping[str, Mapping[str, Any]], reader: Reader
) -> Iterator[tuple[str, str, pd.DataFrame, pd.DataFrame, Mapping[str, Any]]]:
    """Model, calibration set, cells, table `file` and report of each pass that left one."""
    cells = cells[cells["statistics_folder"].notna()].assign(shown=passes(cells)["statistics_folder"])
    for (model, calibration, *_), own in cells.groupby(["model", "calibration", "gate", "seed"], sort=False):
        shown = own["shown"].dropna()
        if shown.empty:
            continue
        folder: Path | None = reader.find(shown.iloc[0])
        sums = read(folder, file, reader)
        if sums is not None:
            report = calibrations.get(f"{calibration}@{model}", {})
            yield str(model), str(calibration), own.drop(columns="shown"), sums, report


_BEHIND = {"ablation": ABLATIONS, "gradients": GRADIENTS, "weights": WEIGHTS}
"""Kind of step -> the columns of the table that it leaves, which is called by the kind."""


def _behind(cells: pd.DataFrame, kind: str, reader: Reader) -> pd.DataFrame:
    """The table of the first step of this kind that some plan among `cells` rests on; empty when none does."""
    for row in records(cells[cells["plan_folder"].notna()]):
        for name, folder in steps_behind(row["plan_folder"], reader).items():
            table = read(folder, f"{kind}.parquet", reader) if step_kind(name) == kind else None
            if table is not None:
                return table
    return pd.DataFrame(columns=list(_BEHIND[kind]), dtype=float).astype({"layer": int, "expert": int})
