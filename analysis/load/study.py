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
    """The same, read from its cells and the reports of its calibration passes."""
    return cached_property(lambda study: read(study.cells, study.calibrations, study.reader))


@dataclass(frozen=True, eq=False)
class Study:
    """The results of a study, from which all tables and figures are made. `cell` is the row label
    of `cells`."""

    name: str
    store: Path
    document: Mapping[str, Any]
    """The study's record as the run wrote it, including provenance."""
    cells: pd.DataFrame
    """Index cell; columns AXES (ratio: as requested), removed (share of experts or channels that
    the plan removes), removed_words (that of all cells of a model and ratio, in words), method (a
    key of `names`, with the allocation and recovery only where they differ in this study), protocol
    (how its benchmarks are run, None in older records) and `<artefact>_folder` for each of STEPS,
    None where there is none."""
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
    """model, calibration, layer, expert, tokens; of one gate and seed like the two above, see
    `passes.shown_passes`."""
    calibrations: passes.Reports
    """"calibration@model" -> the report of the calibration pass."""
    contaminations: passes.Reports
    """"calibration@model" -> task -> how many of its items are comparable with the text, and found
    in it."""
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
        """Missing results among what was read so far."""
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
    """Read the study `name`, or several separated by commas, or `all`, as one. What cannot be read
    is in `gaps`.

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
"""Share of a benchmark's items from which on it is said that a calibration set has them."""


def _contaminated(contaminations: passes.Reports) -> list[str]:
    """A sentence for every calibration set that has more than REMARKABLE of the items of a
    benchmark."""
    of_sets: dict[str, dict[str, None]] = {}
    for key, counts in contaminations.items():
        for benchmark, count in counts.items():
            if count["found"] > REMARKABLE * count["comparable"]:
                text_of = (
                    f"{count['found']} of {count['comparable']} items of "
                    f"{names.benchmark(benchmark)}"
                )
                of_sets.setdefault(key.partition("@")[0], {})[text_of] = None
    return [
        (
            f"Calibration set {text} contains 13 consecutive words of {names.listing(text_of)}: "
            "these scores may be too good."
        )
        for text, text_of in of_sets.items()
    ]


def _cells(document: Mapping[str, Any], reader: Reader) -> tuple[pd.DataFrame, Entries]:
    """One row per cell, and the entries; a cell that is listed twice counts once."""
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
    texts = labels(cells)
    twice = cells.duplicated(list(AXES))
    differing = document.get("differing", [])
    for cell in cells.index:
        if entries[cell]["cell"] in differing:
            reader.gap(
                "runs at the same time have it with different settings: the later run counts",
                texts[cell],
            )
        if twice[cell]:
            reader.gap("listed twice, counted once", texts[cell])
    return _one_row_per_plan(cells[~twice], entries, reader)


def _one_row_per_plan(
    cells: pd.DataFrame, entries: Entries, reader: Reader
) -> tuple[pd.DataFrame, Entries]:
    """Merge the ratios of a model at which all of its cells have the same plans, and add the
    columns of results.

    Rounding to whole experts can make the same plans of two ratios. They are one row then, of the
    lower ratio, with the results of both. Both stay where the plans of any cell differ or cannot be
    read, or where a cell has one of the ratios alone. The entries are those of the rows; the ones
    that were given are not changed.
    """
    cells = cells.join(plans.removed(_with_folders(cells, entries), reader))
    cells["requested"] = cells["ratio"]
    cells["ratio"] = _lowest_equal_ratio(cells)
    for _, same_ratio in groups(cells, ["model", "ratio"]):
        requested = sorted(set(same_ratio["requested"]))
        cells.loc[same_ratio.index, "removed_words"] = removed_words(
            same_ratio["removed"], requested
        )
    merged: dict[int, Mapping[str, Any]] = {}
    for members in (
        cells.sort_values("requested", kind="stable")
        .groupby(list(AXES), sort=False)
        .groups.values()
    ):
        merged[int(members[0])] = studies.joined_entry([entries[member] for member in members])
    rows = _with_folders(cells.loc[sorted(merged)], merged)
    return rows.assign(removed=rows["removed"].fillna(rows["ratio"])).drop(
        columns=["plan", "requested"]
    ), merged


def _lowest_equal_ratio(cells: pd.DataFrame) -> pd.Series:
    """Cell -> the lowest ratio at which all cells of its model have the plans that they have at its
    ratio."""
    other_axes = [axis for axis in AXES if axis != "ratio"]
    lowest = cells["ratio"].copy()
    ratio_of: dict[frozenset[Any], float] = {}
    for key, same_ratio in groups(cells.sort_values("ratio"), ["model", "ratio"]):
        if same_ratio["plan"].notna().all():
            plans_of_cells = same_ratio[[*other_axes, "plan"]].itertuples(index=False, name=None)
            lowest[same_ratio.index] = ratio_of.setdefault(frozenset(plans_of_cells), key["ratio"])
    return lowest


def _with_folders(cells: pd.DataFrame, entries: Entries) -> pd.DataFrame:
    """Add the columns protocol and `<artefact>_folder`."""
    rows = [entries[cell] for cell in cells.index]
    columns: dict[str, Any] = {f"{kind}_folder": [row.get(kind) for row in rows] for kind in STEPS}
    columns["protocol"] = [row.get("protocol") for row in rows]
    return cells.assign(**columns)


def _allocation(cell: Mapping[str, Any]) -> str | None:
    """Words for an allocation: its name, what replaces dropped experts, and what is protected."""
    replacement = cell.get("replacement", "none")
    protect = cell.get("protect")
    settings = [
        f"replacement={replacement}" if replacement != "none" else "",
        f"protect={protect}" if protect else "",
    ]
    name = cell.get("allocation")
    return ", ".join([name, *filter(None, settings)]) if name else name


def _methods(cells: pd.DataFrame) -> list[str]:
    """The key of each cell's method: allocation and recovery are part of it when the study has
    several of them.

    For experts, the default allocation `uniform` is not part of the key; for channels there is no
    default. An allocation that replaces dropped experts is always part of it: with a criterion's
    name alone, experts are dropped.
    """
    pruned = cells[cells["criterion"] != "none"]
    several_allocations, several_recoveries = (
        pruned[axis].nunique() > 1 for axis in ("allocation", "recovery")
    )
    return [
        names.key(
            row["criterion"],
            row["allocation"]
            if (several_allocations and _tells(row)) or replaces(row["allocation"])
            else "",
            row["recovery"] if several_recoveries and row["recovery"] != "none" else "",
        )
        for row in records(cells)
    ]


def _tells(row: Mapping[str, Any]) -> bool:
    """Whether the cell's allocation differs from the default (see `_methods`)."""
    return bool(
        row["criterion"] != "none"
        and (row["allocation"] != "uniform" or row["granularity"] == "channel")
    )


def _models(cells: pd.DataFrame, reader: Reader) -> dict[str, Mapping[str, Any]]:
    models: dict[str, Mapping[str, Any]] = {}
    for row in records(cells.drop_duplicates("model")):
        folder = reader.folder(row["model_folder"]) if row["model_folder"] else None
        facts = reader.json(folder, "facts.json")
        if facts is not None:
            models[row["model"]] = facts
    return models
