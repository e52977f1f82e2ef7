"""Costs, retained experts and channels, timings and searches of the pruned models in a store, as
tidy frames."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.load.reader import Reader, stacked
from moe_lab.results import PROFILES, TIMINGS

BYTES = 2
"""Bytes of one parameter in bfloat16."""

COSTS = (
    "parameters",
    "parameters_unpruned",
    "parameters_kept",
    "routed_kept",
    "storage_bytes",
    "loading_bytes",
    "flops_ratio",
)
"""Numbers of cost.json: counts of parameters; kept shares of all parameters and of those of routed
experts; bytes as stored (4 bits where quantised) and as loaded in bf16; FLOPs per token as a share
of the unpruned model's."""

FIRST_ORDER = "ala1"
"""The default prior of allocation=coverage, for plans that do not name theirs."""


SEARCHES = ("samples", "fitness", "population", "generations", "candidates", "seconds")
"""Of a search: rows of the search set; name of the fitness; settings; schedules that were
evaluated; seconds of the whole search in one process."""

CONDITIONS = ("device", "dtype", "threads", "load", "weight_bytes")
"""Fields of timing.json that hold for all requests to a model."""


def costs(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """One row per cell whose cost was counted: cell, bits and COSTS."""
    columns = ["bits", *COSTS]
    rows = []
    for cell, cost in _documents(cells, "cost_folder", "cost.json", reader).items():
        rows.append({"cell": cell, **{name: cost.get(name) for name in columns}})
    return pd.DataFrame(rows, columns=["cell", *columns]).astype(dict.fromkeys(columns, float))


def loading_memory(cells: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Loading memory before and after pruning: model, ratio, removed_words, granularity,
    allocation, bytes, bytes_after and saved (a share). Models that are equal in all of these are
    one row."""
    axes = ["model", "ratio", "removed_words", "granularity", "allocation"]
    pruned = cells.loc[cells["criterion"] != "none", axes]
    sizes = costs.set_index("cell")[["parameters_unpruned", "loading_bytes"]].dropna().astype(int)
    rows = pruned.join(sizes, how="inner")
    before = BYTES * rows.pop("parameters_unpruned")
    after = rows.pop("loading_bytes")
    memory = rows.assign(bytes=before, bytes_after=after, saved=1 - after / before)
    return memory.drop_duplicates(ignore_index=True)


def retained(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What plans retain: cell, layer, expert, share of the expert's channels (0..1), constant,
    merged.

    All experts of the unpruned layer are listed. A dropped expert has share 0. So has one that
    retains no channel and is still routed to: its output is 0, a constant (`constant`), or that of
    the expert that it is `merged` into. An expert without a row of the router can be merged too.
    Whole experts have share 1. The unpruned model has no rows.
    """
    frames = {}
    for cell, document in _documents(cells, "plan_folder", "plan.json", reader).items():
        try:
            frames[cell] = _shares(document)
        except (KeyError, TypeError, ValueError):
            reader.gap("plan.json is damaged", str(cells.loc[cell, "plan_folder"]))
    return _by_cell(frames, ("layer", "expert", "share", "constant", "merged"))


def removed(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What plans remove, indexed like `cells`: `removed`, the share of the experts, of channels in
    plans of channels; and `plan`, a text that is equal for equal plans. NaN and None for a cell
    without a plan that can be read."""
    rows = {}
    for cell, document in _documents(cells, "plan_folder", "plan.json", reader).items():
        try:
            share = _removed(document["layers"])
            rows[cell] = {"removed": share, "plan": json.dumps(document["layers"])}
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
            reader.gap("plan.json is damaged", str(cells.loc[cell, "plan_folder"]))
    return pd.DataFrame.from_dict(rows, "index", columns=["removed", "plan"]).reindex(cells.index)


def _removed(layers: Mapping[str, Any]) -> float:
    total = 0
    retained_experts = 0.0
    for layer in layers.values():
        total += layer["experts"]
        if "channels" in layer:
            retained_experts += sum(map(_channels, layer["channels"])) / layer["width"]
        else:
            retained_experts += len(layer["retained"])
    return 1 - retained_experts / total


def _channels(mask: str) -> int:
    """Number of channels in a hexadecimal mask."""
    return int(mask, 16).bit_count()


def profiles(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Hidden states and routing of every pruned model by layer: cell and PROFILES."""
    return _tables(cells["profile_folder"].dropna(), "profile.parquet", PROFILES, reader)


def timings(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Durations of requests to every timed model: cell, TIMINGS and CONDITIONS."""
    requests = _tables(cells["timing_folder"].dropna(), "timing.parquet", TIMINGS, reader)
    documents = _documents(cells, "timing_folder", "timing.json", reader)
    rows = [
        {"cell": cell, **{name: timing.get(name) for name in CONDITIONS}}
        for cell, timing in documents.items()
    ]
    return requests.merge(pd.DataFrame(rows, columns=["cell", *CONDITIONS]), on="cell")


def blocks(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Rounding of channels per expert, for plans that round: cell, block (a multiple of so many
    channels) and smallest (the fewest channels of an expert)."""
    rows = []
    for cell, plan in _documents(cells, "plan_folder", "plan.json", reader).items():
        allocation = (plan.get("provenance") or {}).get("allocation") or {}
        if align := (allocation.get("parameters") or {}).get("align"):
            rows.append(
                {"cell": cell, "block": align.get("block"), "smallest": align.get("min_channels")}
            )
    return pd.DataFrame(rows, columns=["cell", "block", "smallest"])


def priors(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """The prior by which plans of allocation=coverage divide a layer's budget among experts: cell,
    prior, others.

    `others` is all other settings of the allocation as JSON, equal for plans that differ in the
    prior alone."""
    rows = []
    for cell, plan in _documents(cells, "plan_folder", "plan.json", reader).items():
        allocation = dict((plan.get("provenance") or {}).get("allocation") or {})
        parameters = dict(allocation.pop("parameters", None) or {})
        prior = parameters.pop("prior", FIRST_ORDER)
        reads_prior = parameters.get("intra", "coverage") in ("coverage", "proportional")
        if allocation.get("name") == "coverage" and reads_prior:
            others = json.dumps({**allocation, "parameters": parameters}, sort_keys=True)
            rows.append({"cell": cell, "prior": prior, "others": others})
    return pd.DataFrame(rows, columns=["cell", "prior", "others"])


def searches(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Searches, one row per cell whose allocation was searched for; columns cell and SEARCHES."""
    rows = []
    folders = cells["plan_folder"].dropna().astype(str)
    for cell, name in folders[folders.str.startswith("search/")].items():
        folder = reader.folder(name)
        document = reader.json(folder, "search.json")
        if document is not None:
            search = {
                **(document.get("settings") or {}),
                **(document.get("cost") or {}),
                "samples": _samples(folder, reader),
            }
            rows.append({"cell": cell, **{column: search.get(column) for column in SEARCHES}})
    return pd.DataFrame(rows, columns=["cell", *SEARCHES])


def _samples(folder: Path | None, reader: Reader) -> float:
    """Rows of the text that a step read; NaN when the step has no record of its settings
    (step.json)."""
    if folder is None or not reader.has(folder, "step.json"):
        return np.nan
    settings = (reader.json(folder, "step.json") or {}).get("settings", {})
    return float(settings.get("text", {}).get("rows", np.nan))


def _tables(folders: pd.Series, file: str, columns: Sequence[str], reader: Reader) -> pd.DataFrame:
    """Read `columns` of the table `file` in each cell's folder, with a column `cell`."""
    frames = {}
    for cell, name in folders.items():
        frame = reader.frame(reader.folder(str(name)), file, columns)
        if frame is not None:
            frames[int(str(cell))] = frame
    return _by_cell(frames, columns)


def _documents(
    cells: pd.DataFrame, column: str, file: str, reader: Reader
) -> dict[int, dict[str, Any]]:
    """Cell -> the JSON document in the folder named by `column`; cells that share a folder share
    the document."""
    by_folder: dict[str, dict[str, Any] | None] = {}
    documents = {}
    for cell, name in cells[column].dropna().items():
        if name not in by_folder:
            by_folder[name] = reader.json(reader.folder(name), file)
        document = by_folder[name]
        if document is not None:
            documents[int(str(cell))] = document
    return documents


def _shares(plan: Mapping[str, Any]) -> pd.DataFrame:
    """layer, expert, share, constant, merged of one plan."""
    frames = []
    for index, layer in plan["layers"].items():
        experts = np.arange(layer["experts"])
        routed = np.isin(experts, layer["retained"])
        share = routed.astype(float)
        if "channels" in layer:
            share[np.asarray(layer["retained"], int)] = list(map(_channels, layer["channels"]))
            share /= layer["width"]
        members = []
        for representative, group in layer.get("merged", {}).items():
            members += [int(member) for member in group if member != representative]
        merged = np.isin(experts, members)
        constant = routed & (share == 0) & ~merged & ("constants" in layer)
        columns = {"expert": experts, "share": share, "constant": constant, "merged": merged}
        frames.append(pd.DataFrame({"layer": int(index), **columns}))
    return pd.concat(frames, ignore_index=True)


def _by_cell(frames: Mapping[int, pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    return stacked([frame.assign(cell=cell) for cell, frame in frames.items()], ["cell", *columns])
