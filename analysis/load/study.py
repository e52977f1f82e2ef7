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
    """A frame of a study that is read from its cells when it is first accessed."""
    return cached_property(lambda study: read(study.cells, study.reader))


def _of_passes(
    read: Callable[[pd.DataFrame, passes.Reports, Reader], pd.DataFrame],
) -> cached_property[pd.DataFrame]:
    """A frame of a study that is read from its cells and the reports of its calibration passes when
    it is first accessed."""
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
    """One row per cell, with index `cell`. Columns: AXES (ratio: as requested); removed, the share
    of experts or channels that the plan removes; removed_words, a text with this share for all
    cells of the model and ratio; method, a key of `names.key`, with allocation and recovery only
    where they differ in this study; protocol, by which benchmarks are run (None in older records);
    and `<step>_folder` for each of STEPS, None where the cell lacks the step."""
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
    """model, calibration, layer, expert, tokens. This frame, `family` and `damage` have one gate
    and seed per model and calibration set: see `passes.shown_passes`."""
    calibrations: passes.Reports
    """"calibration@model" -> the report of the calibration pass."""
    contaminations: passes.Reports
    """"calibration@model" -> task -> numbers of items that are long enough to be looked for in the
    calibration text (comparable), and that are found in it (found)."""
    models: Mapping[str, Mapping[str, Any]]
    """Model -> layers, experts and parameters."""
    origins: pd.DataFrame
    """One row per evaluation: folder, seconds, host, machine, python, moe_lab, commit, and versions
    of libraries."""
    reader: Reader
    """Reads the frames below when they are first accessed."""
    notes: Sequence[str] = field(default=())
    """Remarks about the results, such as different versions of a library."""

    @property
    def gaps(self) -> list[Gap]:
        """Missing results, of everything that was read so far."""
        return list(self.reader.gaps.values())

    # the functions' docstrings list the columns of these frames
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
        """model, ratio, removed_words, granularity, allocation, bytes, ...: see
        `plans.loading_memory`."""
        return plans.loading_memory(self.cells, self.costs)


def load(store: Path, name: str) -> Study:
    """Read the study `name`; several names separated by commas, or `all`, are combined into one
    study. Missing and damaged files are recorded in its `gaps`.

    Raises UserError for an unknown or unreadable study.
    """
    document = studies.document(store, studies.chosen(store, name))
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
        notes=[*remarks(results, origins, cells, reader), *_contaminated(contaminations)],
    )


REMARKABLE = 0.01
"""A benchmark is named in a remark if a calibration set contains more than this share of its
items."""


def _contaminated(contaminations: passes.Reports) -> list[str]:
    """A sentence for every calibration set that contains more than REMARKABLE of the items of a
    benchmark."""
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
    """`Study.cells` from a study's record, and cell -> entry of the record. A cell that the record
    lists twice counts once."""
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
    """Merge the ratios of a model at which all of its cells have the same plans, and add the
    columns removed, removed_words, protocol and `<step>_folder`.

    Rounding to whole experts can give the same plan for two ratios. Cells that differ only in such
    ratios become one row, with the lower ratio and the results of all of them. Two ratios of a
    model are not merged if a plan differs or cannot be read, or if a cell has only one of them.
    Returns the rows and new entries, cell -> entry, without changing `entries`.
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
    """For each cell, the lowest ratio of its model with exactly the same plans as the cell's own
    ratio, compared over all cells of the model; the own ratio if a plan is missing."""
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
    """The allocation of a cell in the record as one text: its name, then the settings replacement
    and protect, as `uniform, replacement=mean_output`."""
    replacement = cell.get("replacement", "none")
    protect = cell.get("protect")
    settings = [
        f"replacement={replacement}" if replacement != "none" else "",
        f"protect={protect}" if protect else "",
    ]
    name = cell.get("allocation")
    return ", ".join([name, *filter(None, settings)]) if name else name


def _methods(cells: pd.DataFrame) -> list[str]:
    """The key of each cell's method (see `names.key`). Its allocation and recovery are in the key
    only if the study has several of them.

    For experts, the default allocation `uniform` is not in the key; for channels there is no
    default. An allocation that replaces dropped experts is always in the key, since a criterion's
    name alone means that experts are dropped.
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
    """Whether the cell is unpruned, or has the default allocation of experts."""
    return bool(
        row["criterion"] == "none"
        or (row["allocation"] == "uniform" and row["granularity"] != "channel")
    )


def _models(cells: pd.DataFrame, reader: Reader) -> dict[str, Mapping[str, Any]]:
    """Model -> its layers, experts and parameters, from the facts.json of its step."""
    models: dict[str, Mapping[str, Any]] = {}
    for row in records(cells.drop_duplicates("model")):
        folder = reader.folder(row["model_folder"]) if row["model_folder"] else None
        facts = reader.json(folder, "facts.json")
        if facts is not None:
            models[row["model"]] = facts
    return models
