"""Load a study from a store as a `Study` of tidy frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import names
from analysis.load import passes, plans, studies
from analysis.load.evaluations import Entries, evaluations, remarks
from analysis.load.reader import Gap, Reader, groups, records
from analysis.load.settings import AXES, labels, removed_words, replaces
from moe_lab.results import STEPS


def _of_cells(
    read: Callable[[pd.DataFrame, Reader], pd.DataFrame],
) -> cached_property[pd.DataFrame]:
    """A property of a study: the frame that `read` makes from its cells, at the first access."""
    return cached_property(lambda study: read(study.cells, study.reader))


def _of_passes(
    read: Callable[[pd.DataFrame, passes.Reports, Reader], pd.DataFrame],
) -> cached_property[pd.DataFrame]:
    """A property of a study: the frame that `read` makes from its cells and the reports of its
    calibration passes, at the first access."""
    return cached_property(lambda study: read(study.cells, study.calibrations, study.reader))


@dataclass(frozen=True, eq=False)
class Study:
    """The results of a study, from which all tables and figures are made.

    Frames list their columns; a column `cell` refers to the index of `cells`."""

    name: str
    store: Path
    document: Mapping[str, Any]
    """The study's record as the run wrote it, including provenance."""
    cells: pd.DataFrame
    """One row per cell, with index `cell`. Columns:

    - AXES: ratio is the requested one
    - removed: share of experts or channels that the plan removes
    - removed_words: text with the removed shares of all cells with the same model and ratio
    - method: key of the method, see `names.key`
    - protocol: name of the protocol by which benchmarks are run, None in older records
    - <step>_folder for each of STEPS: folder of the step, None where the cell lacks the step
    """
    results: pd.DataFrame
    """cell, task, benchmark, metric, score, scale, unit, stderr, n, expected, folder: see
    `moe_lab.results.Result`."""
    samples: pd.DataFrame
    """cell, benchmark, item, outcome (0..1), answer_loss (bits per byte of the right answer; NaN if
    not measured)."""
    family: pd.DataFrame
    """model, calibration, layer, expert, b, alpha, beta, score: every S(b, alpha, beta)."""
    damage: pd.DataFrame
    """model, calibration, layer, expert, score: the exact damage of removing one expert."""
    coverage: pd.DataFrame
    """model, calibration, layer, expert, tokens. In this frame, `family` and `damage`, each model
    and calibration set has one gate and seed, see `passes.shown_passes`."""
    calibrations: passes.Reports
    """"calibration@model" -> the report of the calibration pass."""
    contaminations: passes.Reports
    """"calibration@model" -> benchmark -> numbers of items `comparable` and `found`, see
    `passes.contaminations`."""
    models: Mapping[str, Mapping[str, Any]]
    """Model -> layers, experts and parameters."""
    origins: pd.DataFrame
    """One row per evaluation: folder, seconds, host, machine, python, moe_lab, commit, and versions
    of libraries."""
    reader: Reader
    """Reader of the store, which also holds the gaps."""
    notes: Sequence[str] = field(default=())
    """Remarks about the results, such as different versions of a library."""

    @property
    def gaps(self) -> list[Gap]:
        """Missing results in the files that have been read so far."""
        return list(self.reader.gaps.values())

    # Frames that are read at the first access; the functions' docstrings list their columns.
    costs = _of_cells(plans.costs)
    retained = _of_cells(plans.retained)
    profiles = _of_cells(plans.profiles)
    timings = _of_cells(plans.timings)
    searches = _of_cells(plans.searches)
    experts = _of_passes(passes.experts)
    raw_statistics = _of_passes(passes.raw_statistics)
    router_entropies = _of_passes(passes.router_entropies)
    layer_losses = _of_passes(passes.layer_losses)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """Loading memory before and after pruning, see `plans.loading_memory`."""
        return plans.loading_memory(self.cells, self.costs)


def load(store: Path, name: str) -> Study:
    """Read the study `name`. Several names separated by commas, or `all`, give one combined study.
    Missing and damaged files are recorded in the study's `gaps`.

    Raises UserError for an unknown or unreadable study.
    """
    document = studies.document(store, studies.requested_studies(store, name))
    reader = Reader(store)
    cells, entries = _cells(document, reader)
    results, samples, origins = evaluations(entries, labels(cells), reader)
    coverage, calibrations = passes.coverage(cells, reader)
    contaminations = passes.contaminations(document, cells, reader)
    models = _models(cells, reader)
    return Study(
        name=str(document.get("study") or name),
        store=store,
        document=document,
        cells=cells,
        results=results,
        samples=samples,
        family=passes.family(document, cells, reader),
        damage=passes.damage(document, cells, reader),
        coverage=coverage,
        calibrations=calibrations,
        contaminations=contaminations,
        models=models,
        origins=origins,
        reader=reader,
        notes=[*remarks(results, origins, cells, reader), *_contamination_remarks(contaminations)],
    )


REMARKABLE = 0.01
"""A remark names a benchmark if a calibration set contains more than this share of the benchmark's
items that are long enough to be looked for."""


def _contamination_remarks(contaminations: passes.Reports) -> list[str]:
    """A sentence for every calibration set that contains more than the share REMARKABLE of a
    benchmark's items."""
    items_in_set: dict[str, dict[str, None]] = {}
    for key, counts in contaminations.items():
        for benchmark, count in counts.items():
            if count["found"] > REMARKABLE * count["comparable"]:
                items = (
                    f"{count['found']} of {count['comparable']} items of "
                    f"{names.benchmark(benchmark)}"
                )
                items_in_set.setdefault(key.partition("@")[0], {})[items] = None
    return [
        (
            f"Calibration set {calibration} contains 13 consecutive words of "
            f"{names.listing(items)}: these scores may be too good."
        )
        for calibration, items in items_in_set.items()
    ]


def _cells(document: Mapping[str, Any], reader: Reader) -> tuple[pd.DataFrame, Entries]:
    """`Study.cells` from a study's record, and cell -> the cell's entry in the record.

    A cell that the record lists twice counts once; a cell that lacks an axis is left out. Each of
    these is a gap, and so is a cell that simultaneous runs have with different settings.
    """
    entries = dict(enumerate(document["cells"]))
    cells = pd.DataFrame(
        [entry["cell"] for entry in entries.values()], columns=list(AXES)
    ).rename_axis("cell")
    cells["allocation"] = [_allocation(entry["cell"]) for entry in entries.values()]
    has_all = cells.notna().all(axis=1)
    for criterion in cells.loc[~has_all, "criterion"]:
        reader.gap("the record lacks an axis of it: left out", str(criterion))
    cells = cells[has_all].copy()
    cells["method"] = _methods(cells)
    label_of = labels(cells)
    repeated = cells.duplicated(list(AXES))
    differing = document.get("differing", [])
    for cell in cells.index:
        if entries[cell]["cell"] in differing:
            reader.gap(
                "runs at the same time have it with different settings: the later run counts",
                label_of[cell],
            )
        if repeated[cell]:
            reader.gap("listed twice, counted once", label_of[cell])
    return _one_row_per_plan(cells[~repeated], entries, reader)


def _one_row_per_plan(
    cells: pd.DataFrame, entries: Entries, reader: Reader
) -> tuple[pd.DataFrame, Entries]:
    """Merge ratios of a model that give the same plans, and add the columns removed, removed_words,
    protocol and `<step>_folder`.

    Rounding to whole experts can give the same plan for two ratios. If it does so for all cells of
    the model (see `_lowest_equal_ratio`), cells that differ only in these ratios become one row,
    with the lower ratio and the results of all these cells. Returns the rows and new entries, cell
    -> entry, without changing `entries`.
    """
    cells = cells.join(plans.removed_shares(_with_folders(cells, entries), reader))
    cells["requested"] = cells["ratio"]
    cells["ratio"] = _lowest_equal_ratio(cells)
    for _, same_ratio in groups(cells, ["model", "ratio"]):
        requested = sorted(set(same_ratio["requested"]))
        cells.loc[same_ratio.index, "removed_words"] = removed_words(
            same_ratio["removed"], requested
        )
    merged: dict[int, Mapping[str, Any]] = {}
    by_axes = cells.sort_values("requested", kind="stable").groupby(list(AXES), sort=False)
    for members in by_axes.groups.values():
        merged[int(members[0])] = studies.joined_entry([entries[member] for member in members])
    rows = _with_folders(cells.loc[sorted(merged)], merged)
    rows = rows.assign(removed=rows["removed"].fillna(rows["ratio"]))
    return rows.drop(columns=["plan", "requested"]), merged


def _lowest_equal_ratio(cells: pd.DataFrame) -> pd.Series:
    """For each cell, the lowest ratio that gives the same plans as the cell's own ratio.

    Two ratios of a model give the same plans if both have the same cells apart from the ratio, with
    equal plans. A ratio at which the plan of a cell is missing equals no other ratio.
    """
    other_axes = [axis for axis in AXES if axis != "ratio"]
    lowest = cells["ratio"].copy()
    lowest_with_plans: dict[frozenset[Any], float] = {}
    for key, same_ratio in groups(cells.sort_values("ratio"), ["model", "ratio"]):
        if same_ratio["plan"].notna().all():
            rows = same_ratio[[*other_axes, "plan"]].itertuples(index=False, name=None)
            lowest[same_ratio.index] = lowest_with_plans.setdefault(frozenset(rows), key["ratio"])
    return lowest


def _with_folders(cells: pd.DataFrame, entries: Entries) -> pd.DataFrame:
    """Add the columns protocol and `<step>_folder`."""
    rows = [entries[cell] for cell in cells.index]
    columns: dict[str, Any] = {f"{kind}_folder": [row.get(kind) for row in rows] for kind in STEPS}
    columns["protocol"] = [row.get("protocol") for row in rows]
    return cells.assign(**columns)


def _allocation(cell: Mapping[str, Any]) -> str | None:
    """The allocation of a cell in the record as one text, its name and then the settings
    replacement and protect: `uniform, replacement=mean_output`. None if the record lacks the
    allocation."""
    replacement = cell.get("replacement", "none")
    protect = cell.get("protect")
    settings = [
        f"replacement={replacement}" if replacement != "none" else "",
        f"protect={protect}" if protect else "",
    ]
    name = cell.get("allocation")
    return ", ".join([name, *filter(None, settings)]) if name else name


def _methods(cells: pd.DataFrame) -> list[str]:
    """The key of each cell's method, see `names.key`.

    The recovery is in the key if the study has several recoveries and the cell is recovered. The
    allocation is in the key if the study has several allocations and this one is not the default
    (see `_is_default`), or if it replaces dropped experts, since a criterion's name alone means
    that experts are dropped.
    """
    pruned = cells[cells["criterion"] != "none"]
    several_allocations = pruned["allocation"].nunique() > 1
    several_recoveries = pruned["recovery"].nunique() > 1
    keys = []
    for row in records(cells):
        allocation = recovery = ""
        if (several_allocations and not _is_default(row)) or replaces(row["allocation"]):
            allocation = row["allocation"]
        if several_recoveries and row["recovery"] != "none":
            recovery = row["recovery"]
        keys.append(names.key(row["criterion"], allocation, recovery))
    return keys


def _is_default(row: Mapping[str, Any]) -> bool:
    """Whether the cell is unpruned, or has the default allocation of experts, `uniform`; channels
    have no default allocation."""
    return bool(
        row["criterion"] == "none"
        or (row["allocation"] == "uniform" and row["granularity"] != "channel")
    )


def _models(cells: pd.DataFrame, reader: Reader) -> dict[str, Mapping[str, Any]]:
    """Model -> the numbers of its layers, experts and parameters, from facts.json of its step."""
    models: dict[str, Mapping[str, Any]] = {}
    for row in records(cells.drop_duplicates("model")):
        folder = reader.folder(row["model_folder"]) if row["model_folder"] else None
        facts = reader.json(folder, "facts.json")
        if facts is not None:
            models[row["model"]] = facts
    return models
