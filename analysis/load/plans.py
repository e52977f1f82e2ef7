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
"""Numbers of cost.json, about the pruned model unless the name says unpruned:

- parameters, parameters_unpruned: number of parameters
- parameters_kept, routed_kept: retained share of all parameters, and of those of routed experts
- storage_bytes: bytes on disk, where quantised parameters have 4 bits
- loading_bytes: bytes of the model loaded in bf16
- flops_ratio: FLOPs per token as a share of the unpruned model's
"""

FIRST_ORDER_PRIOR = "ala1"
"""The default prior of allocation=coverage, for plans that do not name their prior."""

SEARCHES = ("samples", "fitness", "population", "generations", "candidates", "seconds")
"""Columns of `searches`, besides cell:

- samples: rows of the search set
- fitness, population, generations: settings of the search
- candidates: number of evaluated schedules
- seconds: time of the whole search in one process
"""

CONDITIONS = ("device", "dtype", "threads", "load", "weight_bytes")
"""Fields of timing.json that have one value for all requests to a model."""


def costs(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Costs of models, one row per cell whose cost was counted; columns cell, bits and COSTS."""
    columns = ["bits", *COSTS]
    rows = []
    for cell, cost in _read_documents(cells, "cost_folder", "cost.json", reader).items():
        rows.append({"cell": cell, **{name: cost.get(name) for name in columns}})
    return pd.DataFrame(rows, columns=["cell", *columns]).astype(dict.fromkeys(columns, float))


def loading_memory(cells: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Bytes of the loaded model before and after pruning. Equal rows of several cells occur once.

    Columns: model, ratio, removed_text, granularity, allocation (see `Study.cells`), bytes
    (unpruned), bytes_after (pruned) and saved (the share of `bytes` that pruning saves).
    """
    cell_columns = ["model", "ratio", "removed_text", "granularity", "allocation"]
    pruned = cells.loc[cells["criterion"] != "none", cell_columns]
    sizes = costs.set_index("cell")[["parameters_unpruned", "loading_bytes"]].dropna().astype(int)
    rows = pruned.join(sizes, how="inner")
    unpruned_bytes = BYTES * rows.pop("parameters_unpruned")
    pruned_bytes = rows.pop("loading_bytes")
    memory = rows.assign(
        bytes=unpruned_bytes, bytes_after=pruned_bytes, saved=1 - pruned_bytes / unpruned_bytes
    )
    return memory.drop_duplicates(ignore_index=True)


def retained_shares(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Which share of each expert of the unpruned model a cell's plan retains; one row per cell and
    expert.

    Columns: cell, layer, expert and

    - share: retained share of the expert's channels, 1 for a whole expert, 0 for a dropped expert
    - constant: True for a dropped expert that the router can still choose, if a constant replaces
      the output of the expert
    - merged: True for a dropped expert that is merged into another expert

    If constant and merged are False, a dropped expert that the router can still choose outputs 0.
    """
    frames = {}
    for cell, document in _read_documents(cells, "plan_folder", "plan.json", reader).items():
        try:
            frames[cell] = _shares(document)
        except (KeyError, TypeError, ValueError):
            reader.record_gap("plan.json is damaged", str(cells.loc[cell, "plan_folder"]))
    return _stack_by_cell(frames, ("layer", "expert", "share", "constant", "merged"))


def removed_shares(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What the plan of each cell removes; NaN if the plan is missing or damaged. The frame has the
    index of `cells`. Columns:

    - removed: share of the experts, or of the experts' channels if the plan removes channels
    - plan: the plan's layers as JSON
    """
    rows = {}
    for cell, document in _read_documents(cells, "plan_folder", "plan.json", reader).items():
        try:
            layers = document["layers"]
            rows[cell] = {"removed": _removed_share(layers), "plan": json.dumps(layers)}
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
            reader.record_gap("plan.json is damaged", str(cells.loc[cell, "plan_folder"]))
    return pd.DataFrame.from_dict(rows, "index", columns=["removed", "plan"]).reindex(cells.index)


def _removed_share(layers: Mapping[str, Any]) -> float:
    """Share of the experts, or of their channels, that a plan removes.

    layers: the entry "layers" of plan.json.
    """
    all_experts = 0
    retained_experts = 0.0
    for layer in layers.values():
        all_experts += layer["experts"]
        # one mask per retained expert
        if "channels" in layer:
            retained_experts += sum(map(_channel_count, layer["channels"])) / layer["width"]
        else:
            retained_experts += len(layer["retained"])
    return 1 - retained_experts / all_experts


def _channel_count(mask: str) -> int:
    """Number of retained channels in an expert's hexadecimal mask."""
    return int(mask, 16).bit_count()


def profiles(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Profiles of hidden states and routing, one row per cell and layer. Columns: cell and
    PROFILES."""
    return _read_tables(cells["profile_folder"].dropna(), "profile.parquet", PROFILES, reader)


def timings(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Durations of requests, one row per cell and request. Columns: cell, TIMINGS and
    CONDITIONS."""
    requests = _read_tables(cells["timing_folder"].dropna(), "timing.parquet", TIMINGS, reader)
    documents = _read_documents(cells, "timing_folder", "timing.json", reader)
    rows = [
        {"cell": cell, **{name: timing.get(name) for name in CONDITIONS}}
        for cell, timing in documents.items()
    ]
    return requests.merge(pd.DataFrame(rows, columns=["cell", *CONDITIONS]), on="cell")


def channel_rounding(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """How plans round the number of channels that each expert retains. One row per cell whose
    allocation has the setting "align".

    Columns: cell and

    - block: every retained expert's number of channels is a multiple of this number
    - smallest: smallest number of channels that a retained expert may have, None if it is not set
    """
    rows = []
    for cell, plan in _read_documents(cells, "plan_folder", "plan.json", reader).items():
        allocation = (plan.get("provenance") or {}).get("allocation") or {}
        if align := (allocation.get("parameters") or {}).get("align"):
            rows.append(
                {"cell": cell, "block": align.get("block"), "smallest": align.get("min_channels")}
            )
    return pd.DataFrame(rows, columns=["cell", "block", "smallest"])


def priors(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """The prior by which the allocation "coverage" divides a layer's budget among its experts. One
    row per cell whose plan uses such a prior.

    Columns: cell, prior, and other_settings (the allocation without the prior, as JSON).
    """
    rows = []
    for cell, plan in _read_documents(cells, "plan_folder", "plan.json", reader).items():
        allocation = dict((plan.get("provenance") or {}).get("allocation") or {})
        parameters = dict(allocation.pop("parameters", None) or {})
        prior = parameters.pop("prior", FIRST_ORDER_PRIOR)
        # `intra` is the rule of the division
        uses_prior = parameters.get("intra", "coverage") in ("coverage", "proportional")
        if allocation.get("name") == "coverage" and uses_prior:
            settings = json.dumps({**allocation, "parameters": parameters}, sort_keys=True)
            rows.append({"cell": cell, "prior": prior, "other_settings": settings})
    return pd.DataFrame(rows, columns=["cell", "prior", "other_settings"])


def searches(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Settings and costs of searches, one row per cell with a searched allocation; columns cell and
    SEARCHES."""
    rows = []
    # a plan with a searched allocation is in the folder of the search
    folders = cells["plan_folder"].dropna().astype(str)
    for cell, name in folders[folders.str.startswith("search/")].items():
        folder = reader.folder(name)
        document = reader.json(folder, "search.json")
        if document is not None:
            search = {
                **(document.get("settings") or {}),
                **(document.get("cost") or {}),
                "samples": _sample_count(folder, reader),
            }
            rows.append({"cell": cell, **{column: search.get(column) for column in SEARCHES}})
    return pd.DataFrame(rows, columns=["cell", *SEARCHES])


def _sample_count(folder: Path | None, reader: Reader) -> float:
    """Number of rows of the text on which a search evaluated its candidates, NaN if unknown.

    folder: folder of the search.
    """
    if folder is None or not reader.has(folder, "step.json"):
        return np.nan
    settings = (reader.json(folder, "step.json") or {}).get("settings", {})
    return float(settings.get("text", {}).get("rows", np.nan))


def _read_tables(
    folders: pd.Series, file: str, columns: Sequence[str], reader: Reader
) -> pd.DataFrame:
    """Concatenate the tables `file` of all cells. Columns: "cell" and `columns`.

    folders: name of the folder with the table, indexed by cell.
    """
    frames = {}
    for cell, name in folders.items():
        frame = reader.frame(reader.folder(str(name)), file, columns)
        if frame is not None:
            # through str, because pandas' types allow any label in an index
            frames[int(str(cell))] = frame
    return _stack_by_cell(frames, columns)


def _read_documents(
    cells: pd.DataFrame, column: str, file: str, reader: Reader
) -> dict[int, dict[str, Any]]:
    """Cell -> the JSON document `file` of the cell.

    column: column of `cells` with the name of the document's folder.
    """
    document_of_folder: dict[str, dict[str, Any] | None] = {}
    documents = {}
    for cell, name in cells[column].dropna().items():
        if name not in document_of_folder:
            document_of_folder[name] = reader.json(reader.folder(name), file)
        document = document_of_folder[name]
        if document is not None:
            # through str, because pandas' types allow any label in an index
            documents[int(str(cell))] = document
    return documents


def _shares(plan: Mapping[str, Any]) -> pd.DataFrame:
    """The frame of `retained_shares` for one plan, without the column "cell".

    plan: content of plan.json.
    """
    frames = []
    for index, layer in plan["layers"].items():
        experts = np.arange(layer["experts"])
        # the experts that the router can choose
        is_routed = np.isin(experts, layer["retained"])
        share = is_routed.astype(float)
        # one mask per routed expert; a mask can be empty
        if "channels" in layer:
            share[np.asarray(layer["retained"], int)] = list(map(_channel_count, layer["channels"]))
            share /= layer["width"]
        # the representative is in its group, but is not dropped
        members = []
        for representative, group in layer.get("merged", {}).items():
            members += [int(member) for member in group if member != representative]
        is_merged = np.isin(experts, members)
        is_constant = is_routed & (share == 0) & ~is_merged & ("constants" in layer)
        columns = {"expert": experts, "share": share, "constant": is_constant, "merged": is_merged}
        frames.append(pd.DataFrame({"layer": int(index), **columns}))
    return pd.concat(frames, ignore_index=True)


def _stack_by_cell(frames: Mapping[int, pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """Concatenate the frames. The first column, "cell", has the keys of `frames`."""
    return stacked([frame.assign(cell=cell) for cell, frame in frames.items()], ["cell", *columns])
