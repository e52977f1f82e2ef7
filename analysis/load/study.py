"""Load a study from a store as a `Study` of tidy frames."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import passes, plans, studies
from moe_lab.analysis.load.evaluations import (
    Entries,
    evaluations,
    remarks,
    versions_of_libraries,
)
from moe_lab.analysis.load.reader import Gap, Reader, groups, records
from moe_lab.analysis.load.settings import AXES, labels, removed_text
from moe_lab.result_files import CONTAMINATION, OWN, STEPS


def _property_from_cells(
    read: Callable[[pd.DataFrame, Reader], pd.DataFrame],
) -> cached_property[pd.DataFrame]:
    return cached_property(lambda study: read(study.cells, study.reader))


@dataclass(frozen=True, eq=False)
class Study:
    """The results of a study, from which all tables and figures are made.

    The text below a frame lists the columns of the frame. The values in a column "cell" are index
    values of `cells`.
    """

    name: str
    store: Path
    document: Mapping[str, Any]
    """The study's record as the run wrote it, including provenance."""
    cells: pd.DataFrame
    """One row per cell, with index `cell`. Columns:

    - AXES: ratio is the requested one
    - removed: share of experts or channels that the plan removes
    - removed_text: text with the removed shares of all cells with the same model and ratio
    - method: key of the method, see `names.method_key`
    - <step>_folder for each of STEPS: folder of the step, None where the cell lacks the step
    """
    results: pd.DataFrame
    """cell, task, benchmark, metric, score, scale, unit, stderr, n, expected, folder and shareable:
    see `moe_lab.result_files.Result`."""
    samples: pd.DataFrame
    """cell, benchmark, item, outcome (0..1), answer_loss (bits per byte of the right answer; NaN if
    not measured), units (weight of the item in the score; NaN if all weights are equal), and those
    of `moe_lab.result_files.TextMeasures` (NaN if no text was generated). Values of an item are
    means over its answers."""
    family: pd.DataFrame
    """model, calibration, layer, expert, b, alpha, beta, score: every S(b, alpha, beta), see
    `moe_lab.criteria.experts`."""
    damage: pd.DataFrame
    """model, calibration, layer, expert, score: the exact damage of removing one expert.

    The frames `family` and `damage` have one gate and seed for each model and calibration set, see
    `passes.shown_passes`."""
    calibrations: passes.Reports
    """Model and calibration set -> the report of the calibration pass."""
    models: Mapping[str, Mapping[str, Any]]
    """Model -> the numbers of its layers, experts and parameters, see facts.json."""
    origins: pd.DataFrame
    """One row per evaluation: folder, host, machine, python, moe_lab (its version),
    commit, sandbox, too_long and unfinished_thoughts (numbers of items without an answer, for these
    two reasons), and protocol (settings of the evaluation, see result.json)."""
    libraries: Mapping[str, list[str]]
    """Library -> all its versions with which the results, and the steps behind them, were made."""
    reader: Reader
    notes: Sequence[str] = ()
    """Remarks about the results, such as different versions of a library."""

    @cached_property
    def pruned_cells(self) -> pd.DataFrame:
        """The rows of `cells`, without those of unpruned models."""
        return self.cells[self.cells["criterion"] != "none"]

    @property
    def gaps(self) -> list[Gap]:
        """Missing results in the files that have been read so far."""
        return list(self.reader.gaps)

    # Frames that are read at the first access; the functions' docstrings list their columns.
    costs = _property_from_cells(plans.costs)
    retained = _property_from_cells(plans.retained_shares)
    profiles = _property_from_cells(plans.profiles)
    timings = _property_from_cells(plans.timings)
    searches = _property_from_cells(plans.searches)
    experts = _property_from_cells(passes.experts)
    raw_statistics = _property_from_cells(passes.raw_statistics)
    router_entropies = _property_from_cells(passes.router_entropies)
    layer_losses = _property_from_cells(passes.layer_losses)


PURPOSES = {
    "families": "family of",
    "damages": "scores of",
    "contaminations": "items of benchmarks in",
}
"""Entry of FIGURE_STEPS in a record -> words for its steps in gaps, before the name of a pass."""


def load(store: Path, name: str) -> Study:
    """Read a study from the folder `store`. Missing and damaged files are recorded in the study's
    `gaps`.

    name: name of the study. Several names separated by commas, or `all` for all studies of the
    store, give one combined study.

    Raises UserError for a study that does not exist or whose record cannot be read.
    """
    document = studies.combined_record(store, studies.requested_studies(store, name))
    reader = Reader(store)
    cells, entries = _cells(document, reader)
    results, samples, origins = evaluations(entries, labels(cells), reader)
    libraries = versions_of_libraries(origins, cells, reader)
    pass_folders = passes.folders_of_passes(cells, reader)
    figures = {
        figure: passes.folders_of_steps(document[figure], purpose, cells, reader)
        for figure, purpose in PURPOSES.items()
    }
    contaminations = passes.documents(figures["contaminations"], CONTAMINATION, reader)
    return Study(
        name=str(document.get("study") or name),
        store=store,
        document=document,
        cells=cells,
        results=results,
        samples=samples,
        family=passes.tables(figures["families"], "family.parquet", reader),
        damage=passes.tables(figures["damages"], "scores.parquet", reader),
        calibrations=passes.documents(pass_folders, "calibration.json", reader),
        models=_models(cells, reader),
        origins=origins,
        libraries=libraries,
        reader=reader,
        notes=[
            *remarks(results, origins, cells, libraries),
            *_difference_remarks(entries, cells),
            *_contamination_remarks(contaminations),
        ],
    )


def _difference_remarks(entries: Entries, cells: pd.DataFrame) -> list[str]:
    """Sentences about cells that several runs or studies have with different settings."""
    label_of_cell = labels(cells)
    labels_of_fields = defaultdict(list)
    for cell, entry in entries.items():
        if fields := entry.get("differing"):
            labels_of_fields[tuple(fields)].append(label_of_cell[cell])
    return [
        f"{names.enumeration(fields)} of {names.count(len(cell_labels), 'cell')} "
        f"({cell_labels[0]}{', ...' * (len(cell_labels) > 1)}) had different settings in several "
        "runs: the latest results count."
        for fields, cell_labels in labels_of_fields.items()
    ]


REMARKABLE = 0.01
"""A remark names a benchmark if a calibration set contains more than this share of the benchmark's
items that are long enough to be looked for."""


def _contamination_remarks(contaminations: passes.Reports) -> list[str]:
    """A sentence for every calibration set that contains more than the share REMARKABLE of some
    benchmark's items.

    contaminations: model and calibration set -> benchmark -> {"comparable": number of items that
        are long enough to be looked for in the calibration text, "found": number of items that
        share a phrase with it}.
    """
    sentences = []
    for (_, calibration), counts_of_benchmark in contaminations.items():
        phrases = [
            f"{counts['found']} of {counts['comparable']} items of {names.benchmark(benchmark)}"
            for benchmark, counts in counts_of_benchmark.items()
            if counts["found"] > REMARKABLE * counts["comparable"]
        ]
        if phrases:
            sentences.append(
                f"Calibration set {calibration} contains 13 consecutive words of "
                f"{names.enumeration(phrases)}: these scores may be too good."
            )
    return list(dict.fromkeys(sentences))  # several models can give the same sentence


def _cells(document: Mapping[str, Any], reader: Reader) -> tuple[pd.DataFrame, Entries]:
    """(cells, entries): the frame `Study.cells`, and cell -> entry of the cell in `document`, the
    study's record."""
    # results of other programs come last, as the first unpruned cell of a model is its reference
    entries = dict(
        enumerate(sorted(document["cells"], key=lambda entry: "source" in entry["cell"]))
    )
    cells = pd.DataFrame(
        [{"source": OWN, **entry["cell"]} for entry in entries.values()], columns=list(AXES)
    ).rename_axis("cell")
    cells["allocation"] = [allocation_text(entry["cell"]) for entry in entries.values()]
    cells["method"] = _method_keys(cells)
    for kind in STEPS:
        cells[f"{kind}_folder"] = [entry.get(kind) for entry in entries.values()]
    label_of_cell = labels(cells)
    is_repeated = cells.duplicated(list(AXES))
    for cell in cells.index[is_repeated]:
        reader.record_gap("listed twice, counted once", label_of_cell[cell])
    rows = cells[~is_repeated].copy()
    rows["removed"] = plans.removed_shares(rows, reader)
    for key, plans_of_ratio in groups(rows, ["model", "ratio"]):
        text = removed_text(plans_of_ratio["removed"], key["ratio"])
        rows.loc[plans_of_ratio.index, "removed_text"] = text
    # a cell whose plan is missing counts as one that removes the requested ratio
    rows["removed"] = rows["removed"].fillna(rows["ratio"])
    return rows, {cell: entries[cell] for cell in rows.index}


def allocation_text(cell: Mapping[str, Any]) -> str:
    """Text of a cell's allocation: `uniform, replacement=mean_output`.

    cell: axes and settings of a cell, as in the record.
    """
    replacement = cell.get("replacement", "none")
    protect = cell.get("protect")
    return names.comma_joined(
        cell["allocation"],
        f"replacement={replacement}" if replacement != "none" else "",
        f"protect={protect}" if protect else "",
    )


def _method_keys(cells: pd.DataFrame) -> list[str]:
    """The key of each cell's method, see `names.method_key`.

    An allocation that replaces dropped experts is always in the key, because the name of a
    criterion alone means that experts are dropped. Results of other programs have their name in the
    key, after the recovery.
    """
    pruned = cells[cells["criterion"] != "none"]
    has_several_allocations = pruned["allocation"].nunique() > 1
    has_several_recoveries = pruned["recovery"].nunique() > 1
    keys = []
    for row in records(cells):
        allocation = recovery = ""
        _, replacement = names.split_replacement(row["allocation"])
        # the pruning of channels has no default allocation
        is_default = row["allocation"] == "uniform" and row["granularity"] != "channel"
        is_named = has_several_allocations and row["criterion"] != "none" and not is_default
        if replacement or is_named:
            allocation = row["allocation"]
        if has_several_recoveries and row["recovery"] != "none":
            recovery = row["recovery"]
        if row["source"] != OWN:
            recovery = names.comma_joined(names.recovery_name(recovery), row["source"])
        keys.append(names.method_key(row["criterion"], allocation, recovery))
    return keys


def _models(cells: pd.DataFrame, reader: Reader) -> dict[str, Mapping[str, Any]]:
    """Model -> content of facts.json."""
    models: dict[str, Mapping[str, Any]] = {}
    for row in records(cells.drop_duplicates("model").dropna(subset=["model_folder"])):
        facts = reader.json(reader.folder(row["model_folder"]), "facts.json")
        if facts is not None:
            models[row["model"]] = facts
    return models
