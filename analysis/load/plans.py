"""Costs, retained experts and channels, timings and searches of the pruned models in a store, as
tidy frames."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis.load.reader import Reader, stacked, step_kind
from moe_lab.result_files import PROFILES, TIMINGS

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

EQUAL_BUT_PRIOR = ["ratio", "criterion", "gate", "other_settings"]
"""Plans of a calibration set with equal values in these columns of cells and `priors` differ in the
prior alone."""
FIRST_ORDER_PRIOR = "ala1"
"""The default prior of allocation=coverage, for plans that do not name their prior."""

SEARCHES = (
    "search_set",
    "samples",
    "fitness",
    "population",
    "generations",
    "candidates",
    "seconds",
)
"""Columns of `searches`:

- search_set: the text on which candidates were compared
- samples: rows of the search set; NaN if unknown
- fitness, population, generations: settings of the search
- candidates: number of evaluated schedules
- seconds: time of the whole search in one process
"""

CONDITIONS = ("device", "dtype", "threads", "load", "weight_bytes")
"""Fields of timing.json that have one value for all requests to a model."""


def costs(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Costs of models, one row per cell whose cost was counted; index cell, columns bits and
    COSTS."""
    costs = _read_documents(cells, "cost", reader)
    return _by_cell(costs, ["bits", *COSTS]).astype(float)


_SHARES = ("layer", "expert", "share", "constant", "merged")
"""Columns of `retained_shares`, besides cell."""


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
    plans = _read_documents(cells, "plan", reader)
    shares = {cell: _shares(plan) for cell, plan in plans.items()}
    return _stack_by_cell(shares, _SHARES)


def removed_shares(cells: pd.DataFrame, reader: Reader) -> pd.Series:
    """Share of the experts that the plan of each cell removes, or of the experts' channels if the
    plan removes channels; NaN if the plan is missing."""
    removed = {
        cell: 1 - np.concatenate(list(map(_layer_shares, plan["layers"].values()))).mean()
        for cell, plan in _read_documents(cells, "plan", reader).items()
    }
    return pd.Series(removed, cells.index, dtype=float)


def _layer_shares(layer: Mapping[str, Any]) -> np.ndarray:
    """The retained share of each expert of a layer of plan.json."""
    shares = np.zeros(layer["experts"])
    # one hexadecimal mask of channels per expert that the router can choose; a mask can be empty
    masks = layer.get("channels")
    shares[np.asarray(layer["retained"], int)] = (
        1.0 if masks is None else [int(mask, 16).bit_count() / layer["width"] for mask in masks]
    )
    return shares


def profiles(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Profiles of hidden states, one row per cell and layer. Columns: cell and PROFILES."""
    return _read_tables(cells, "profile", PROFILES, reader)


def timings(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Durations of requests, one row per cell and request. Columns: cell, TIMINGS and
    CONDITIONS."""
    requests = _read_tables(cells, "timing", TIMINGS, reader)
    documents = _read_documents(cells, "timing", reader)
    conditions = _by_cell(documents, CONDITIONS).reset_index()
    return requests.merge(conditions, on="cell")


def channel_rounding(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """How plans round the number of channels that each expert retains. One row per cell whose
    allocation has the setting "align". Index cell, columns:

    - block: every retained expert's number of channels is a multiple of this number
    - smallest: smallest number of channels that a retained expert may have, None if it is not set
    """
    rows = {}
    for cell, plan in _read_documents(cells, "plan", reader).items():
        if align := (allocation_of(plan).get("parameters") or {}).get("align"):
            rows[cell] = {"block": align.get("block"), "smallest": align.get("min_channels")}
    return _by_cell(rows, ["block", "smallest"])


def allocation_of(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name and parameters of the allocation that made a plan, {} if unknown.

    plan: content of plan.json.
    """
    return (plan.get("provenance") or {}).get("allocation") or {}


def priors(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """The prior by which the allocation "coverage" divides a layer's budget among its experts. One
    row per cell whose plan uses such a prior.

    Index cell, columns prior and other_settings (the allocation without the prior, as JSON).
    """
    rows = {}
    for cell, plan in _read_documents(cells, "plan", reader).items():
        allocation = dict(allocation_of(plan))
        parameters = dict(allocation.pop("parameters", None) or {})
        prior = parameters.pop("prior", FIRST_ORDER_PRIOR)
        # `intra` is the rule of the division
        uses_prior = parameters.get("intra", "coverage") in ("coverage", "proportional")
        if allocation.get("name") == "coverage" and uses_prior:
            settings = json.dumps({**allocation, "parameters": parameters}, sort_keys=True)
            rows[cell] = {"prior": prior, "other_settings": settings}
    return _by_cell(rows, ["prior", "other_settings"])


def searches(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Settings and costs of searches, one row per cell with a searched allocation; index cell,
    columns SEARCHES."""
    rows = {}
    # a plan with a searched allocation is in the folder of the search
    plans = cells["plan_folder"]
    searches = plans.where(plans.map(step_kind, na_action="ignore") == "search")
    for cell, document in _read_documents(
        cells.assign(search_folder=searches), "search", reader
    ).items():
        folder = reader.folder(searches[cell])
        plan = reader.json(folder, "plan.json") or {}
        settings = reader.step_document(folder).get("settings", {})
        rows[cell] = {
            **(document.get("settings") or {}),
            **(document.get("cost") or {}),
            "search_set": (plan.get("provenance") or {}).get("search"),
            "samples": float(settings.get("text", {}).get("rows", np.nan)),
        }
    return _by_cell(rows, SEARCHES)


def _by_cell(rows: Mapping[int, Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A frame with index cell. rows: cell -> column -> value."""
    frame = pd.DataFrame(list(rows.values()), list(rows), columns=list(columns))
    return frame.rename_axis("cell")


def _read_tables(
    cells: pd.DataFrame, kind: str, columns: Sequence[str], reader: Reader
) -> pd.DataFrame:
    """Concatenate the tables KIND.parquet of all cells. Columns: "cell" and `columns`."""
    frames = {
        cell: reader.frame(reader.folder(name), f"{kind}.parquet", columns)
        for cell, name in _folders(cells, kind).items()
    }
    return _stack_by_cell(frames, columns)


def _read_documents(cells: pd.DataFrame, kind: str, reader: Reader) -> dict[int, dict[str, Any]]:
    """Cell -> the JSON document KIND.json of the cell."""
    folders = _folders(cells, kind)
    documents = {
        name: reader.json(reader.folder(name), f"{kind}.json")
        for name in dict.fromkeys(folders.values())
    }
    return {
        cell: document
        for cell, name in folders.items()
        if (document := documents[name]) is not None
    }


def _folders(cells: pd.DataFrame, kind: str) -> dict[int, str]:
    """Cell -> name of the folder of the cell's step of this kind."""
    folders: Any = cells[f"{kind}_folder"].dropna().to_dict()
    return dict(folders)


def _shares(plan: Mapping[str, Any]) -> pd.DataFrame:
    """The frame of `retained_shares` for one plan, without the column "cell".

    plan: content of plan.json.
    """
    layers = []
    for index, layer in plan["layers"].items():
        experts = np.arange(layer["experts"])
        # the experts that the router can choose
        is_routed = np.isin(experts, layer["retained"])
        share = _layer_shares(layer)
        # the representative is in its group, but is not dropped
        members = []
        for representative, group in layer.get("merged", {}).items():
            members += [int(member) for member in group if member != representative]
        is_merged = np.isin(experts, members)
        is_constant = is_routed & (share == 0) & ~is_merged & ("constants" in layer)
        layers.append((np.full_like(experts, int(index)), experts, share, is_constant, is_merged))
    # one frame for all layers, as making a frame takes most of the time
    columns = map(np.concatenate, zip(*layers, strict=True))
    return pd.DataFrame(dict(zip(_SHARES, columns, strict=True)))


def _stack_by_cell(
    frames: Mapping[int, pd.DataFrame | None], columns: Sequence[str]
) -> pd.DataFrame:
    """Concatenate the frames that are not None. The first column, "cell", has their keys."""
    parts = [frame.assign(cell=cell) for cell, frame in frames.items() if frame is not None]
    return stacked(parts, ["cell", *columns])
