"""What pruned models cost and keep, and how their allocations were searched for, as tidy frames from a store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.load.reader import Reader, stacked
from moe_lab.results import PROFILES, TIMINGS

COSTS = (
    "parameters",
    "parameters_unpruned",
    "parameters_kept",
    "routed_kept",
    "storage_bytes",
    "loading_bytes",
    "flops_per_token",
    "flops_per_token_unpruned",
    "flops_ratio",
)
"""Numbers of cost.json: counts of parameters; shares of all parameters and of those of routed experts that are kept;
bytes as stored (4 bits where quantised) and as loaded in bf16; FLOPs of a token, and their share of the unpruned
model's."""

FIRST_ORDER = "ala1"
"""The prior of allocation=coverage where a plan names none."""

HISTORY = ("generation", "schedule", "origin", "parent", "screened", "evaluated", "fitness", "elite")
"""Columns of history.parquet."""

CONDITIONS = ("device", "dtype", "threads", "load", "weight_bytes")
"""What timing.json says of all requests of a model."""


def costs(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """One row per cell whose cost was counted: cell, bits and COSTS."""
    columns = ["cell", "bits", *COSTS]
    documents = _documents(cells, "cost_folder", "cost.json", reader)
    rows = [{"cell": cell, **{name: found.get(name) for name in columns[1:]}} for cell, found in documents.items()]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype(dict.fromkeys(columns[1:], float))


def kept(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What plans leave: cell, layer, expert, share of the expert's channels (0..1), null.

    All experts the layer had are listed: a dropped one has 0, and so has a null expert, which keeps no channel and is
    still routed to; `null` tells it from a dropped one. Whole experts have 1. The unpruned model has no rows.
    """
    columns = ("layer", "expert", "share", "null")
    frames = {}
    for cell, document in _documents(cells, "plan_folder", "plan.json", reader).items():
        try:
            frames[cell] = _shares(document)
        except (KeyError, TypeError, ValueError):
            reader.gap("plan.json is damaged", str(cells.loc[cell, "plan_folder"]))
    return _by_cell(frames, columns)


def profiles(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What a pass through every pruned model looks like, layer by layer: cell and PROFILES."""
    return _tables(cells["profile_folder"].dropna(), "profile.parquet", PROFILES, reader, newer="output_loss")


def timings(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """How long requests of every model took: cell, TIMINGS and CONDITIONS."""
    requests = _tables(cells["timing_folder"].dropna(), "timing.parquet", TIMINGS, reader)
    documents = _documents(cells, "timing_folder", "timing.json", reader)
    rows = [{"cell": cell, **{name: about.get(name) for name in CONDITIONS}} for cell, about in documents.items()]
    return requests.merge(pd.DataFrame(rows, columns=["cell", *CONDITIONS]), on="cell")


def blocks(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """How plans round the channels of experts: cell, block (channels) and smallest (fewest channels of an expert), of
    plans that do."""
    rows = []
    for cell, plan in _documents(cells, "plan_folder", "plan.json", reader).items():
        allocation = (plan.get("provenance") or {}).get("allocation") or {}
        if align := (allocation.get("parameters") or {}).get("align"):
            rows.append({"cell": cell, "block": align.get("block"), "smallest": align.get("min_channels")})
    return pd.DataFrame(rows, columns=["cell", "block", "smallest"])


def priors(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What plans of allocation=coverage divide a layer among its experts by: cell, prior, and `others`, the rest of
    the allocation's settings in one word, which is the same for plans that differ in the prior alone."""
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


def history(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Every schedule that searches made: cell and HISTORY. Schedules are arrays of experts removed, in the order of
    `layers` in `searches`; `fitness` is NaN for one that was never evaluated, higher is better."""
    return _tables(_searched(cells), "history.parquet", HISTORY, reader)


def searches(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """One row per cell whose allocation was searched for, with its cell and:

    layers            decoder layers, tuple; `best` and `uniform` are removed experts in their order, tuples
    budget            experts removed in all
    samples           rows of the search set
    fitness           name of the fitness; `best_fitness` and `uniform_fitness` are its values
    candidates        schedules that were evaluated
    forwards          what that cost, in full forwards of the search set; without reuse it would be `candidates`
    full, screening   the same for the unpruned model, and for ranking proposals that were not evaluated
    per_candidate     forwards for one candidate
    seconds           of the whole search in one process
    """
    rows = []
    for cell, name in _searched(cells).items():
        folder = reader.folder(name)
        document = reader.json(folder, "search.json")
        if document is not None:
            rows.append({"cell": cell, **_search(document), "samples": _samples(folder, reader)})
    return pd.DataFrame(rows, columns=["cell", *_search({}), "samples"])


def _samples(folder: Path | None, reader: Reader) -> float:
    """Rows of the text a step read; NaN where its identity is not written down."""
    if folder is None or not (folder / "step.json").is_file():
        return np.nan
    settings = (reader.json(folder, "step.json") or {}).get("settings", {})
    return float(settings.get("text", {}).get("rows", np.nan))


def _search(document: Mapping[str, Any]) -> dict[str, Any]:
    settings, cost = document.get("settings") or {}, document.get("cost") or {}
    best, uniform = document.get("best") or {}, document.get("uniform") or {}
    evolution = settings.get("evolution") or {}
    return {
        "layers": tuple(document.get("layers") or ()),
        "budget": document.get("budget"),
        "fitness": (settings.get("fitness") or {}).get("fitness"),
        "population": evolution.get("population"),
        "generations": evolution.get("generations"),
        "best": tuple(best.get("schedule") or ()),
        "best_fitness": best.get("fitness"),
        "uniform": tuple(uniform.get("schedule") or ()),
        "uniform_fitness": uniform.get("fitness", np.nan),
        **{
            name: cost.get(name, np.nan)
            for name in ("candidates", "forwards", "full", "screening", "per_candidate", "seconds")
        },
    }


def _searched(cells: pd.DataFrame) -> pd.Series:
    """Cell -> the folder of its search."""
    folders = cells["plan_folder"].dropna().astype(str)
    return folders[folders.str.startswith("search/")]


def _tables(folders: pd.Series, file: str, columns: Sequence[str], reader: Reader, newer: str = "") -> pd.DataFrame:
    """cell and these columns of a table in the folder of each cell."""
    frames = {}
    for cell, name in folders.items():
        frame = reader.frame(reader.folder(str(name)), file, columns, newer)
        if frame is not None:
            frames[int(str(cell))] = frame
    return _by_cell(frames, columns)


def _documents(cells: pd.DataFrame, column: str, file: str, reader: Reader) -> dict[int, dict[str, Any]]:
    """Cell -> the JSON document in one of its folders; cells that share a folder share the document."""
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
    """layer, expert, share, null of one plan."""
    frames = []
    for layer, about in plan["layers"].items():
        share = np.zeros(about["experts"])
        kept_experts = np.asarray(about["keep"], int)
        share[kept_experts] = 1.0
        if "channels" in about:
            share[kept_experts] = [int(mask, 16).bit_count() for mask in about["channels"]]
            share /= about["width"]
        null = np.zeros(len(share), bool)
        null[kept_experts] = share[kept_experts] == 0
        frames.append(
            pd.DataFrame({"layer": int(layer), "expert": np.arange(len(share)), "share": share, "null": null})
        )
    return pd.concat(frames, ignore_index=True)


def _by_cell(frames: Mapping[int, pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    return stacked([frame.assign(cell=cell) for cell, frame in frames.items()], ["cell", *columns])


BYTES = 2
"""Of one parameter in bfloat16."""


def removed_parameters(
    layers: Mapping[str, Mapping[str, int]], removed: Mapping[str, float], dropped: Mapping[str, int]
) -> int:
    """Parameters that go with what a plan removes: matrices of experts or channels, and rows of the router.

    layers: layer -> {expert_parameters, router_parameters_per_expert}; removed: layer -> experts removed, parts of one
    counted by their channels; dropped: layer -> experts that are not routed to any more. The papers leave the router
    rows out, which is less than 0.01 GiB for their models.
    """
    matrices = sum(count * layers[layer]["expert_parameters"] for layer, count in removed.items())
    rows = sum(count * layers[layer].get("router_parameters_per_expert", 0) for layer, count in dropped.items())
    return round(matrices + rows)


def loading_memory(cells: pd.DataFrame, kept: pd.DataFrame, models: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row per model, ratio, granularity and allocation: parameters and bytes before and after. Empty without facts
    about the models. Criteria that remove different numbers under one allocation have a row each."""
    rows = []
    for cell, plan in kept.groupby("cell", sort=False):
        axes = cells.loc[int(str(cell))]
        facts = models.get(str(axes["model"]))
        if facts is None:
            continue
        by_layer = plan.assign(gone=1 - plan["share"], dropped=(plan["share"] == 0) & ~plan["null"]).groupby("layer")
        removed = {str(layer): float(gone) for layer, gone in by_layer["gone"].sum().items()}
        dropped = {str(layer): int(count) for layer, count in by_layer["dropped"].sum().items()}
        before = int(facts["parameters"])
        after = before - removed_parameters(facts["layers"], removed, dropped)
        named = {name: axes[name] for name in ("model", "ratio", "granularity", "allocation")}
        found = {"parameters": before, "parameters_after": after, "bytes": before * BYTES, "bytes_after": after * BYTES}
        rows.append({**named, **found, "saved": 1 - after / before})
    return pd.DataFrame(rows).drop_duplicates(ignore_index=True) if rows else pd.DataFrame()
