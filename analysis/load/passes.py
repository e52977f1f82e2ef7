"""Results of calibration passes: statistics of experts, the S family and exact damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_lab import result_files
from moe_lab.analysis.load.reader import (
    Reader,
    groups,
    records,
    step_kind,
    steps_with_inputs,
)

Reports = Mapping[tuple[str, str], Mapping[str, Any]]
"""Model and calibration set -> the report of the calibration pass."""
Folders = Mapping[tuple[str, str], Path | None]
"""Model and calibration set -> folder of a step, None if the store does not have it."""
PASS = ["model", "calibration"]
"""Columns that identify one of `shown_passes`."""
KEY_TYPES = {"model": str, "calibration": str, "layer": int, "expert": int}
KEYS = list(KEY_TYPES)
"""Columns that identify an expert in one calibration pass."""


def shown_passes(cells: pd.DataFrame) -> pd.DataFrame:
    """Select the calibration pass that tables and figures show for each model and calibration set.

    Returns one row of `cells` per model and calibration set; its column "statistics_folder" has the
    folder of the pass. The row is selected by `_shown`."""
    return _shown(cells[cells["statistics_folder"].notna()], cells)


def _shown(rows: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Select one of `rows` for each model and calibration set: the first with the gate and seed of
    the model's first pruned cell that uses a calibration pass, otherwise the first.

    rows: a frame with the columns model, calibration, gate and seed.
    """
    axes = ["model", "gate", "seed"]
    pruned = cells[(cells["criterion"] != "none") & cells["statistics_folder"].notna()]
    shown = set(pruned.drop_duplicates("model")[axes].itertuples(index=False, name=None))
    is_other = [key not in shown for key in rows[axes].itertuples(index=False, name=None)]
    # False sorts before True
    order = np.argsort(is_other, kind="stable")
    return rows.iloc[order].drop_duplicates(PASS).sort_index()


def folders_of_passes(cells: pd.DataFrame, reader: Reader) -> Folders:
    """The folders of `shown_passes`."""
    steps = shown_passes(cells).rename(columns={"statistics_folder": "step"})
    return _folders(steps, "calibration on", reader)


def folders_of_steps(
    steps: Sequence[Mapping[str, Any]], purpose: str, cells: pd.DataFrame, reader: Reader
) -> Folders:
    """The folder of one step for each model and calibration set, selected by `_shown`. A gap is
    recorded for a step that was not computed.

    steps: dictionaries with the fields model, calibration, gate, seed and step (name of the step,
    None if it was not computed).
    purpose: what the steps are for, such as `family of`.
    """
    # object, because None would become NaN in a column of strings
    rows = pd.DataFrame(steps, columns=[*PASS, "gate", "seed", "step"], dtype=object)
    return _folders(_shown(rows, cells), purpose, reader)


def _folders(steps: pd.DataFrame, purpose: str, reader: Reader) -> Folders:
    """The folders of steps, each of another pass. steps: a frame with the columns PASS and step."""
    return {
        (row["model"], row["calibration"]): reader.step(
            row["step"], f"{purpose} {row['calibration']}@{row['model']}"
        )
        for row in records(steps)
    }


def documents(folders: Folders, file: str, reader: Reader) -> Reports:
    """Read the JSON document `file` in each folder; without those that cannot be read."""
    contents = {key: reader.json(folder, file) for key, folder in folders.items()}
    return {key: content for key, content in contents.items() if content is not None}


def tables(folders: Folders, file: str, reader: Reader) -> pd.DataFrame:
    """`read_table` of each folder. The result has the columns PASS and those of the table."""
    frames = {key: read_table(folder, file, reader) for key, folder in folders.items()}
    return _stack_tables(frames, PASS, file)


def _stack_tables(
    tables: Mapping[Any, pd.DataFrame | None], by: Sequence[str], file: str
) -> pd.DataFrame:
    """Concatenate the tables `file` of several keys. The result has the columns `by`, with the
    parts of a table's key, and those of the table."""
    frames = [
        table.assign(**dict(zip(by, key, strict=True)))
        for key, table in tables.items()
        if table is not None
    ]
    columns = [*by, *TABLES[file]]
    # without rows, the columns have the same types, so that frames can be merged
    types = {column: type_ for column, type_ in KEY_TYPES.items() if column in columns}
    no_rows = pd.DataFrame(columns=columns, dtype=float).astype(types)
    return pd.concat(frames or [no_rows], ignore_index=True)[columns]


TABLES = {
    "experts.parquet": result_files.EXPERTS,
    "layers.parquet": result_files.LOSSES,
    "ablation.parquet": result_files.ABLATIONS,
    "entropy.parquet": result_files.ENTROPIES,
    "gradients.parquet": result_files.GRADIENTS,
    "weights.parquet": result_files.WEIGHTS,
    "expert_concentration.parquet": result_files.CONCENTRATION,
    "budgets.parquet": result_files.BUDGETS,
    "family.parquet": result_files.FAMILY,
    "scores.parquet": result_files.SCORES,
}
"""Name of a file that holds a table -> the table's columns."""


def read_table(folder: Path | None, file: str, reader: Reader) -> pd.DataFrame | None:
    """Read the table `file`, one of TABLES, of the step in `folder`. Returns None, with a gap, when
    the table cannot be read.

    Returns None without a gap when the step lacks the file, as in a store from which all but the
    results were removed.
    """
    if folder is None or not reader.has(folder, file):
        return None
    return reader.frame(folder, file, TABLES[file])


MEASURES = {
    "tokens": "tokens routed to the expert",
    "gate": "mean router weight",
    "norm": "mean output norm",
    "first": "attribution, first order",
    "second": "attribution, second order",
    "ablation": "rise of the loss without it",
}
"""Measure of an expert -> its description."""
STATISTICS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
"""Raw statistic of an expert -> display name of the statistic."""
ABLATION = "ablation"
"""Kind of the steps that measure how much the loss rises when one expert is removed."""


def experts(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Measures of experts in the passes of `shown_passes`, one row per model, calibration set,
    layer and expert; columns KEYS, MEASURES and size.

    Sums are over the N tokens t that the router sends to the expert. g is the router weight of the
    expert, and f is the expert's output. m is the sum of the layer's weighted routed outputs, and y
    is the residual stream after the layer. eps is a small constant against divisions by 0.

    - tokens: N
    - gate: 1/N sum_t g, NaN for N = 0
    - norm: 1/N sum_t ||f||, NaN for N = 0
    - first: sum_t g <f, m> / (||y||^2 + eps), divided by the number of calibration tokens
    - second: sum_t g^2 ||f||^2 / (||y||^2 + eps), divided by the number of calibration tokens. Each
      term equals ||m - m'||^2 / (||y||^2 + eps), where m' is m without the expert's output
    - ablation: rise of the model's loss without the expert, in nats per token; NaN if no cell that
      uses the pass has a plan that was computed from ablations
    - size: sqrt(sum_t,c phi^2 / (N I)), where phi is the value of the expert's channel c, of I
      channels, before the down projection; NaN for N = 0
    """
    sums = _pass_tables("experts.parquet", cells, reader)
    tokens = _routed_tokens(sums)
    calibration_tokens = _calibration_tokens(sums, cells, reader)
    measures = sums[[*KEYS, "tokens"]].assign(
        gate=sums["gate_sum"] / tokens,
        norm=sums["norm_sum"] / tokens,
        first=sums["ala_first"] / calibration_tokens,
        second=sums["ala_second"] / calibration_tokens,
        size=np.sqrt(sums["channel_square"] / (tokens * sums["channels"])),
    )
    rows = measures.merge(_ablations(cells, reader), on=KEYS, how="left")
    return rows[[*KEYS, *MEASURES, "size"]]


def raw_statistics(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Sums of the weights, activations and gradients of each expert whose ablation was measured;
    one row per model, calibration set, layer, expert and statistic.

    Columns: KEYS, ablation, statistic, sum, square (sum of squares) and count (number of values).
    The column "statistic" says of which values; N and phi are defined in `experts`, and L is the
    model's loss:

    - weight: |w| of each weight of the expert, if a criterion of the study reads weights of whole
      experts
    - activation: sqrt(1/N sum_t phi^2) of each channel
    - gradient: sqrt(1/N sum_t (dL/dphi)^2) of each channel, if a criterion of the study reads
      gradients
    """
    sums = _pass_tables("experts.parquet", cells, reader)
    # weights do not depend on the calibration set
    weights = _input_tables("weights", ["model"], cells, reader)
    gradients = _input_tables("gradients", PASS, cells, reader)
    statistics = {
        "weight": weights.assign(sum=weights["abs_sum"], square=weights["square_sum"]),
        "activation": sums.assign(
            sum=sums["channel_root_sum"],
            square=sums["channel_square"] / _routed_tokens(sums),
            count=sums["channels"],
        ),
        "gradient": gradients.assign(
            sum=gradients["gradient_root_sum"],
            square=gradients["gradient_square"] / _routed_tokens(gradients),
            count=gradients["channels"],
        ),
    }
    ablations = _ablations(cells, reader)
    # a statistic of weights lacks some of KEYS
    columns = [*KEYS, "sum", "square", "count"]
    frames = [
        ablations.merge(frame[frame.columns.intersection(columns)]).assign(statistic=name)
        for name, frame in statistics.items()
    ]
    rows = pd.concat(frames, ignore_index=True)
    # the sum of squares is NaN for an expert with N = 0
    return rows.dropna(subset=["square"], ignore_index=True)


def _routed_tokens(sums: pd.DataFrame) -> pd.Series:
    """Number of tokens that the router sent to each expert, NaN instead of 0."""
    return sums["tokens"].where(sums["tokens"] > 0)


def router_entropies(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Histograms of the router's entropy; columns model, calibration, layer, entropy, tokens.

    - entropy: upper end of a bin, as a share of the logarithm of the number of experts
    - tokens: number of calibration tokens in the bin
    """
    return _pass_tables("entropy.parquet", cells, reader)


def layer_losses(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Losses of layers; columns model, calibration, layer, loss.

    loss: mean over calibration tokens of ||m||^2 / (||y||^2 + eps), with m, y and eps of `experts`.
    """
    sums = _pass_tables("layers.parquet", cells, reader)
    losses = sums["layer_loss"] / _calibration_tokens(sums, cells, reader)
    return sums[[*PASS, "layer"]].assign(loss=losses)


def valid_tokens(report: Mapping[str, Any]) -> int:
    """Number of tokens that a calibration pass read, of all sources of its set."""
    return sum((report.get("valid_tokens") or {}).values())


def _calibration_tokens(rows: pd.DataFrame, cells: pd.DataFrame, reader: Reader) -> pd.Series:
    """For each row, the number of calibration tokens of the row's pass; NaN if the report of the
    pass lacks it."""
    reports = documents(folders_of_passes(cells, reader), "calibration.json", reader)
    tokens = {key: float(valid_tokens(report)) or np.nan for key, report in reports.items()}
    keys = zip(rows["model"], rows["calibration"], strict=True)
    return pd.Series([tokens.get(key, np.nan) for key in keys], rows.index, dtype=float)


def _pass_tables(file: str, cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """`tables` of `shown_passes`."""
    return tables(folders_of_passes(cells, reader), file, reader)


def _ablations(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Ablations of experts, from the plans of the cells that use `shown_passes`. Columns KEYS and
    ablation."""
    cells_of_passes = cells.merge(shown_passes(cells)[[*PASS, "gate", "seed"]])
    return _input_tables(ABLATION, PASS, cells_of_passes, reader)


def _input_tables(
    kind: str, by: Sequence[str], cells: pd.DataFrame, reader: Reader
) -> pd.DataFrame:
    """The tables KIND.parquet from which plans were computed, one for all cells with equal values
    in the columns `by`. The result has the columns `by` and those of the table."""
    tables = {
        tuple(key.values()): _input_table(rows, kind, reader)
        for key, rows in groups(cells[cells["plan_folder"].notna()], by)
    }
    return _stack_tables(tables, by, f"{kind}.parquet")


def _input_table(cells: pd.DataFrame, kind: str, reader: Reader) -> pd.DataFrame | None:
    """The first readable table KIND.parquet among the direct and indirect inputs of the plans of
    `cells`."""
    for plan in cells["plan_folder"]:
        for name, folder in steps_with_inputs([plan], reader).items():
            if step_kind(name) == kind:
                table = read_table(folder, f"{kind}.parquet", reader)
                if table is not None:
                    return table
    return None
