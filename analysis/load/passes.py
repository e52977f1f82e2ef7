"""Results of calibration passes: statistics of experts, the S family, exact damage and coverage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_lab import result_files
from moe_lab.analysis.load.reader import (
    Reader,
    groups,
    records,
    stacked,
    step_kind,
    steps_with_inputs,
)

Reports = Mapping[str, Mapping[str, Any]]
""""calibration@model" -> the report of the calibration pass."""


def shown_passes(cells: pd.DataFrame) -> pd.DataFrame:
    """Select the calibration pass that tables and figures show for each model and calibration set.

    Returns one row of `cells` per model and calibration set; its column "statistics_folder" has the
    folder of the pass. The row is the first with the gate and seed of `shown_gate_and_seed`,
    otherwise the first."""
    cells_with_pass = cells[cells["statistics_folder"].notna()]
    shown = shown_gate_and_seed(cells)
    has_other_settings = [
        shown.get(row["model"]) != (row["gate"], row["seed"]) for row in records(cells_with_pass)
    ]
    # False, for the shown gate and seed, sorts before True
    order = np.argsort(has_other_settings, kind="stable")
    return cells_with_pass.iloc[order].drop_duplicates(["model", "calibration"]).sort_index()


def shown_gate_and_seed(cells: pd.DataFrame) -> dict[str, tuple[Any, Any]]:
    """Model -> (gate, seed) of the model's first pruned cell that uses a calibration pass."""
    pruned = cells[
        (cells["criterion"] != "none") & cells["statistics_folder"].notna()
    ].drop_duplicates("model")
    return {str(row.model): (row.gate, row.seed) for row in pruned.itertuples()}


def steps_by_calibration(
    rows: Sequence[Mapping[str, Any]], cells: pd.DataFrame
) -> dict[tuple[str, str], str | None]:
    """Select one row for each calibration set and model. Returns (calibration, model) -> name of
    the row's step, which is None for a step that was not computed.

    rows: dictionaries with the fields calibration, model, gate, seed and step (name of the step).
    The first row with the gate and seed of `shown_gate_and_seed` is selected, otherwise the first
    row.
    """
    shown = shown_gate_and_seed(cells)
    steps: dict[tuple[str, str], str | None] = {}
    # False, for the preferred gate and seed, sorts before True
    for row in sorted(rows, key=lambda row: shown.get(row["model"]) != (row["gate"], row["seed"])):
        steps.setdefault((row["calibration"], row["model"]), row["step"])
    return steps


def coverage(cells: pd.DataFrame, reader: Reader) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    """Read two files of each pass in `shown_passes`. Returns (frame, reports):

    - frame: number of tokens that the router sent to each expert; columns model, calibration,
      layer, expert and tokens
    - reports: "calibration@model" -> report of the pass
    """
    frames: list[pd.DataFrame] = []
    reports: dict[str, dict[str, Any]] = {}
    for row in records(shown_passes(cells)):
        folder = reader.folder(row["statistics_folder"])
        frame = reader.frame(folder, "coverage.parquet", result_files.COVERAGE)
        if frame is not None:
            frames.append(frame.assign(model=row["model"], calibration=row["calibration"]))
        report = reader.json(folder, "calibration.json")
        if report is not None:
            reports[f"{row['calibration']}@{row['model']}"] = report
    return stacked(frames, [*result_files.COVERAGE, "model", "calibration"]), reports


def contaminations(document: Mapping[str, Any], cells: pd.DataFrame, reader: Reader) -> Reports:
    """Read how many items of each benchmark occur in each calibration text.

    document: the study's record.

    Returns "calibration@model" -> benchmark -> {"comparable": number of items that are long enough
    to be looked for, "found": number of items that share a phrase with the text}.
    """
    counts = {}
    steps = steps_by_calibration(document["contaminations"], cells)
    for (calibration, model), step_name in steps.items():
        calibration_at_model = f"{calibration}@{model}"
        folder = reader.step(step_name, f"items of benchmarks in {calibration_at_model}")
        counts_of_benchmark = reader.json(folder, result_files.CONTAMINATION)
        if counts_of_benchmark is not None:
            counts[calibration_at_model] = counts_of_benchmark
    return counts


def tables_by_calibration(
    rows: Sequence[Mapping[str, Any]], file: str, cells: pd.DataFrame, reader: Reader
) -> pd.DataFrame:
    """Read the table `file`, one of TABLES, of the steps that `steps_by_calibration` selects from
    `rows`. The result has the columns of the table, model and calibration."""
    columns = TABLES[file]
    frames: list[pd.DataFrame] = []
    for (calibration, model), step_name in steps_by_calibration(rows, cells).items():
        folder = reader.step(step_name, f"{file.removesuffix('.parquet')} of {calibration}@{model}")
        frame = reader.frame(folder, file, columns)
        if frame is not None:
            frames.append(frame.assign(model=model, calibration=calibration))
    return stacked(frames, [*columns, "model", "calibration"])


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


KEYS = ["model", "calibration", "layer", "expert"]
"""Columns that identify an expert in one calibration pass."""
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


def experts(cells: pd.DataFrame, calibrations: Reports, reader: Reader) -> pd.DataFrame:
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
    frames = []
    for cells_of_pass, sums, report in _passes("experts.parquet", cells, calibrations, reader):
        ablations = _input_table(cells_of_pass, ABLATION, reader)
        measures = _measures(sums, _tokens(report))
        frames.append(measures.merge(ablations, on=["layer", "expert"], how="left"))
    return stacked(frames, [*KEYS, *MEASURES, "size"])


def raw_statistics(cells: pd.DataFrame, calibrations: Reports, reader: Reader) -> pd.DataFrame:
    """Mean and standard deviation (std) of the weights, activations and gradients of each expert
    whose ablation was measured; one row per model, calibration set, layer, expert and statistic.

    Columns: KEYS, ablation, statistic, mean, std and count (number of values). The column
    "statistic" says of which values; N and phi are defined in `experts`, and L is the model's loss:

    - weight: |w| of each weight of the expert, if a criterion of the study reads weights of whole
      experts
    - activation: sqrt(1/N sum_t phi^2) of each channel
    - gradient: sqrt(1/N sum_t (dL/dphi)^2) of each channel, if a criterion of the study reads
      gradients
    """
    frames = []
    for cells_of_pass, sums, _ in _passes("experts.parquet", cells, calibrations, reader):
        ablations = _input_table(cells_of_pass, ABLATION, reader)
        if ablations.empty:
            continue
        model, calibration = cells_of_pass[["model", "calibration"]].iloc[0]
        cells_of_model = cells[cells["model"] == model]
        # weights do not depend on the calibration set
        weights = _input_table(cells_of_model, "weights", reader)
        gradients = _input_table(
            cells_of_model[cells_of_model["calibration"] == calibration], "gradients", reader
        )
        moments_of_statistics = [
            _moments(weights, weights["abs_sum"], weights["square_sum"], weights["count"]).assign(
                statistic="weight"
            ),
            _moments(
                sums,
                sums["channel_root_sum"],
                sums["channel_square"] / _routed_tokens(sums),
                sums["channels"],
            ).assign(statistic="activation"),
            _moments(
                gradients,
                gradients["gradient_root_sum"],
                gradients["gradient_square"] / _routed_tokens(gradients),
                gradients["channels"],
            ).assign(statistic="gradient"),
        ]
        frames_with_rows = [moments for moments in moments_of_statistics if len(moments)]
        statistics = pd.concat(frames_with_rows, ignore_index=True).merge(
            ablations, on=["layer", "expert"]
        )
        frames.append(
            # the mean is NaN for an expert with N = 0
            statistics.assign(model=model, calibration=calibration).dropna(subset=["mean"])
        )
    return stacked(frames, [*KEYS, "ablation", "statistic", "mean", "std", "count"])


def _routed_tokens(sums: pd.DataFrame) -> pd.Series:
    """Number of tokens that the router sent to each expert, NaN instead of 0."""
    return sums["tokens"].where(sums["tokens"] > 0)


def _moments(
    experts: pd.DataFrame, sums: pd.Series, square_sums: pd.Series, counts: pd.Series
) -> pd.DataFrame:
    """Mean and standard deviation of each expert's values; columns layer, expert, mean, std, count.

    sums, square_sums, counts: sum, sum of squares and number of the values of each row of
    `experts`. The sum of squares is NaN for an expert without values.
    """
    mean = (sums / counts).where(square_sums.notna())
    std = np.sqrt((square_sums / counts - mean**2).clip(lower=0))
    return experts[["layer", "expert"]].assign(mean=mean, std=std, count=counts)


def router_entropies(cells: pd.DataFrame, calibrations: Reports, reader: Reader) -> pd.DataFrame:
    """Histograms of the router's entropy; columns model, calibration, layer, entropy, tokens.

    - entropy: upper end of a bin, as a share of the logarithm of the number of experts
    - tokens: number of calibration tokens in the bin
    """
    passes = _passes("entropy.parquet", cells, calibrations, reader)
    columns = ["model", "calibration", *result_files.ENTROPIES]
    return stacked((counts for _, counts, _ in passes), columns)


def layer_losses(cells: pd.DataFrame, calibrations: Reports, reader: Reader) -> pd.DataFrame:
    """Losses of layers; columns model, calibration, layer, loss.

    loss: mean over calibration tokens of ||m||^2 / (||y||^2 + eps), with m, y and eps of `experts`.
    """
    frames = [
        sums.assign(loss=sums["layer_loss"] / _tokens(report))
        for _, sums, report in _passes("layers.parquet", cells, calibrations, reader)
    ]
    return stacked(frames, ["model", "calibration", "layer", "loss"])


def _measures(sums: pd.DataFrame, calibration_tokens: float) -> pd.DataFrame:
    """KEYS, size, and all MEASURES except ablation, as defined in `experts`.

    sums: the table experts.parquet of a pass.
    """
    tokens = _routed_tokens(sums)
    return sums[[*KEYS, "tokens"]].assign(
        gate=sums["gate_sum"] / tokens,
        norm=sums["norm_sum"] / tokens,
        first=sums["ala_first"] / calibration_tokens,
        second=sums["ala_second"] / calibration_tokens,
        size=np.sqrt(sums["channel_square"] / (tokens * sums["channels"])),
    )


def _tokens(report: Mapping[str, Any]) -> float:
    """Number of calibration tokens in the report of a pass; NaN if the report lacks it."""
    return float(sum((report.get("valid_tokens") or {}).values())) or np.nan


def _passes(
    file: str, cells: pd.DataFrame, calibrations: Reports, reader: Reader
) -> Iterator[tuple[pd.DataFrame, pd.DataFrame, Mapping[str, Any]]]:
    """For each pass in `shown_passes` that has the table `file`, yield (cells_of_pass, table,
    report):

    - cells_of_pass: the rows of `cells` that use the pass
    - table: with the columns model and calibration
    - report: the report of the pass in `calibrations`, {} if it is missing
    """
    cells = cells[cells["statistics_folder"].notna()]
    shown_folders = shown_passes(cells)["statistics_folder"]
    for key, cells_of_pass in groups(cells, ["model", "calibration", "gate", "seed"]):
        # empty if another gate and seed are shown
        folders = shown_folders[shown_folders.index.isin(cells_of_pass.index)]
        if folders.empty:
            continue
        table = read_table(reader.find_folder(folders.iloc[0]), file, reader)
        if table is not None:
            model, calibration = key["model"], key["calibration"]
            report = calibrations.get(f"{calibration}@{model}", {})
            yield cells_of_pass, table.assign(model=model, calibration=calibration), report


def _input_table(cells: pd.DataFrame, kind: str, reader: Reader) -> pd.DataFrame:
    """The first readable table KIND.parquet among the direct and indirect inputs of the plans of
    `cells`. If there is none, a frame without rows."""
    file = f"{kind}.parquet"
    for row in records(cells[cells["plan_folder"].notna()]):
        for name, folder in steps_with_inputs([row["plan_folder"]], reader).items():
            if step_kind(name) != kind:
                continue
            table = read_table(folder, file, reader)
            if table is not None:
                return table
    no_rows = pd.DataFrame(columns=list(TABLES[file]), dtype=float)
    return no_rows.astype({"layer": int, "expert": int})
