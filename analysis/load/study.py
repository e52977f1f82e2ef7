"""A study in a store as tidy frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import names
from analysis.load import attributions, plans, studies
from analysis.load.evaluations import evaluations, labels
from analysis.load.reader import Gap, Reader, records
from analysis.load.settings import of_passes, passes, remarks, shown

AXES = ("model", "criterion", "granularity", "calibration", "ratio", "allocation", "recovery", "gate", "seed")
"""What a cell is made of; `none` and 0 for the unpruned model.

granularity: what the criterion scores, expert or channel. allocation and recovery: the words of the study's record.
"""

ARTEFACTS = ("model", "statistics", "scores", "plan", "finetune", "export", "cost", "profile", "timing")
"""Steps of a cell besides its evaluations; their columns end in `_folder`."""


@dataclass(frozen=True)
class Study:
    """Everything the tables and figures read. Frames are tidy; `cell` is the row label of `cells`."""

    name: str
    store: Path
    document: Mapping[str, Any]
    """The study as the run wrote it, provenance included."""
    cells: pd.DataFrame
    """Index cell; columns AXES, method (a key of `names`, with the allocation and recovery only where they differ in
    this study), protocol (how its benchmarks are asked, None in older records) and `<artefact>_folder` for each of
    ARTEFACTS, None where there is none."""
    results: pd.DataFrame
    """cell, task, benchmark, metric, score, stderr, n, expected, folder."""
    samples: pd.DataFrame
    """cell, benchmark, item, outcome (0..1), answer_loss (bits per byte of the right answer; NaN: there is none)."""
    family: pd.DataFrame
    """model, calibration, layer, expert, b, alpha, beta, score: every S(b, alpha, beta)."""
    damage: pd.DataFrame
    """model, calibration, layer, expert, score: the exact damage of removing one expert."""
    coverage: pd.DataFrame
    """model, calibration, layer, expert, tokens; like the two above of one gate and seed, see `settings.passes`."""
    calibrations: Mapping[str, Mapping[str, Any]]
    """"calibration@model" -> the report of the calibration pass."""
    models: Mapping[str, Mapping[str, Any]]
    """Model -> layers, experts and parameters."""
    origins: pd.DataFrame
    """One row per evaluation: folder, seconds, host, machine, python, moe_lab, commit, and versions of libraries."""
    reader: Reader
    """Reads the frames below when they are first asked for."""
    notes: Sequence[str] = field(default=())
    """What a reader should know, though nothing is missing."""

    @property
    def gaps(self) -> list[Gap]:
        """What is missing, as far as it was read."""
        return list(self.reader.gaps.values())

    @cached_property
    def costs(self) -> pd.DataFrame:
        """cell, bits, parameters, parameters_kept, routed_kept, storage_bytes, ...: see `plans.costs`."""
        return plans.costs(self.cells, self.reader)

    @cached_property
    def kept(self) -> pd.DataFrame:
        """cell, layer, expert, share of its channels, null: see `plans.kept`."""
        return plans.kept(self.cells, self.reader)

    @cached_property
    def profiles(self) -> pd.DataFrame:
        """cell, layer, variance, router_entropy, ...: see `plans.profiles`."""
        return plans.profiles(self.cells, self.reader)

    @cached_property
    def timings(self) -> pd.DataFrame:
        """cell, batch_size, prompt_length, ..., prefill_seconds, ..., device, ...: see `plans.timings`."""
        return plans.timings(self.cells, self.reader)

    @cached_property
    def experts(self) -> pd.DataFrame:
        """model, calibration, layer, expert, tokens, gate, first, ablation, ...: see `attributions.experts`."""
        return attributions.experts(self.cells, self.calibrations, self.reader)

    @cached_property
    def raw_statistics(self) -> pd.DataFrame:
        """model, calibration, layer, expert, statistic, mean, ...: see `attributions.raw_statistics`."""
        return attributions.raw_statistics(self.cells, self.calibrations, self.reader)

    @cached_property
    def router_entropies(self) -> pd.DataFrame:
        """model, calibration, layer, entropy, tokens: see `attributions.router_entropies`."""
        return attributions.router_entropies(self.cells, self.calibrations, self.reader)

    @cached_property
    def layer_losses(self) -> pd.DataFrame:
        """model, calibration, layer, loss: see `attributions.layer_losses`."""
        return attributions.layer_losses(self.cells, self.calibrations, self.reader)

    @cached_property
    def convergence(self) -> pd.DataFrame:
        """model, calibration, criterion, tokens, layer, expert, score: scores from parts of the calibration sets."""
        steps, usual = self.document.get("convergences"), shown(self.cells)
        return _per_calibration(steps, "convergence.parquet", _CONVERGENCE, self.reader, usual)

    @cached_property
    def channel_convergence(self) -> pd.DataFrame:
        """model, calibration, criterion, tokens, whole (all tokens), layer, channels (how many the layer has), kept
        (the share of them that is kept), same (the part of those kept in the end that is kept after `tokens`)."""
        by_criterion: dict[str, dict[str, str | None]] = {}
        for key, step in (self.document.get("channel_convergences") or {}).items():
            criterion, _, of = key.partition("@")
            by_criterion.setdefault(criterion, {})[of] = step
        columns, usual = _CHANNEL_CONVERGENCE, shown(self.cells)
        frames = [
            _per_calibration(steps, "convergence.parquet", columns, self.reader, usual)
            for steps in by_criterion.values()
        ]
        return _stack(frames, _CHANNEL_CONVERGENCE)

    @cached_property
    def history(self) -> pd.DataFrame:
        """cell, generation, schedule, origin, fitness, ...: see `plans.history`."""
        return plans.history(self.cells, self.reader)

    @cached_property
    def searches(self) -> pd.DataFrame:
        """cell, layers, best, best_fitness, uniform_fitness, seconds, ...: see `plans.searches`."""
        return plans.searches(self.cells, self.reader)


def load(store: Path, name: str) -> Study:
    """Read study `name`, or several with commas between, or `all`, as one. What cannot be read is listed in `gaps`.

    UserError for an unknown or unreadable study.
    """
    document = studies.document(store, studies.chosen(store, name))
    reader = Reader(store)
    cells = _cells(document, reader)
    results, samples, origins = evaluations(document, cells, reader)
    coverage, calibrations = _coverage(cells, reader)
    models = _models(cells, reader)
    usual = shown(cells)
    families = _per_calibration(document.get("families"), "family.parquet", _FAMILY, reader, usual)
    damages = _per_calibration(document.get("damages"), "scores.parquet", _DAMAGE, reader, usual)
    return Study(
        name=str(document.get("study") or name),
        store=store,
        document=document,
        cells=cells,
        results=results,
        samples=samples,
        family=families,
        damage=damages,
        coverage=coverage,
        calibrations=calibrations,
        models=models,
        origins=origins,
        reader=reader,
        notes=remarks(results, origins, cells),
    )


_FAMILY = ("layer", "expert", "b", "alpha", "beta", "score")
_DAMAGE = ("layer", "expert", "score")
_CONVERGENCE = ("criterion", "tokens", "layer", "expert", "score")
_CHANNEL_CONVERGENCE = ("criterion", "tokens", "whole", "layer", "channels", "kept", "same")


def _cells(document: Mapping[str, Any], reader: Reader) -> pd.DataFrame:
    """One row a cell; a cell listed twice counts once."""
    rows = [
        {
            **entry["cell"],
            "protocol": entry.get("protocol"),
            **{f"{kind}_folder": entry.get(kind) for kind in ARTEFACTS},
        }
        for entry in document["cells"]
    ]
    cells = pd.DataFrame(rows, columns=[*AXES, "protocol", *(f"{kind}_folder" for kind in ARTEFACTS)])
    cells.index.name = "cell"
    cells = _whole(cells, reader)
    cells["method"] = _methods(cells)
    twice = cells.duplicated(list(AXES))
    words = labels(cells)
    for cell in cells.index[twice]:
        reader.gap("listed twice, counted once", words[cell])
    return cells[~twice]


def _whole(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Cells whose record says all their axes, and a gap for every other one."""
    lacking = cells[list(AXES)].isna()
    for row, missing in zip(records(cells), lacking.to_numpy(), strict=True):
        if missing.any():
            unsaid = names.listing(axis for axis, gone in zip(AXES, missing, strict=True) if gone)
            words = (row[axis] for axis in ("model", "criterion", "calibration", "ratio") if pd.notna(row[axis]))
            reader.gap(f"the record does not say its {unsaid}: left out", " ".join(map(str, words)))
    return cells[~lacking.any(axis=1)].copy()


def _methods(cells: pd.DataFrame) -> list[str]:
    """The key of each cell's method: allocation and recovery are part of it where the study has several of them.

    Experts removed uniformly are what the word for a criterion alone means; channels have no such usual allocation.
    """
    pruned = cells[cells["criterion"] != "none"]
    places, repairs = (pruned[axis].nunique() > 1 for axis in ("allocation", "recovery"))
    return [
        names.key(
            row["criterion"],
            row["allocation"] if places and _tells(row) else "",
            row["recovery"] if repairs and row["recovery"] != "none" else "",
        )
        for row in records(cells)
    ]


def _tells(row: Mapping[str, Any]) -> bool:
    """Whether the allocation is no matter of course."""
    return bool(row["criterion"] != "none" and (row["allocation"] != "uniform" or row["granularity"] == "channel"))


def _models(cells: pd.DataFrame, reader: Reader) -> dict[str, Mapping[str, Any]]:
    models: dict[str, Mapping[str, Any]] = {}
    for row in records(cells.drop_duplicates("model")):
        folder = reader.folder(row["model_folder"]) if row["model_folder"] else None
        facts = reader.json(folder, "facts.json") if folder else None
        if facts is not None:
            models[row["model"]] = facts
    return models


def _coverage(cells: pd.DataFrame, reader: Reader) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    frames: list[pd.DataFrame] = []
    reports: dict[str, dict[str, Any]] = {}
    for row in records(passes(cells)):
        folder = reader.folder(row["statistics_folder"])
        if folder is None:
            continue
        table = reader.table(folder, "coverage.parquet", ("layer", "expert", "tokens"))
        if table is not None:
            frames.append(table.to_pandas().assign(model=row["model"], calibration=row["calibration"]))
        report = reader.json(folder, "calibration.json")
        if report is not None:
            reports[f"{row['calibration']}@{row['model']}"] = report
    return _stack(frames, ("layer", "expert", "tokens")), reports


def _per_calibration(
    steps: Mapping[str, str | None] | None,
    file: str,
    columns: Sequence[str],
    reader: Reader,
    usual: Mapping[str, tuple[Any, Any]],
) -> pd.DataFrame:
    """One frame of the same file from the steps of every calibration set and model, of one gate and seed."""
    frames: list[pd.DataFrame] = []
    for (calibration, model), name in of_passes(steps, usual).items():
        folder = reader.step(name, f"{file.removesuffix('.parquet')} of {calibration}@{model}")
        table = reader.table(folder, file, columns) if folder else None
        if table is not None:
            frames.append(table.to_pandas().assign(model=model, calibration=calibration))
    return _stack(frames, columns)


def _stack(frames: list[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*columns, "model", "calibration"])
