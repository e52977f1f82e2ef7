"""Costs, kept experts and channels, timings and searches of the pruned models in a store, as tidy
frames."""

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
"""Numbers of cost.json: counts of parameters; kept shares of all parameters and of those of routed
experts; bytes as stored (4 bits where quantised) and as loaded in bf16; FLOPs per token, and their
share of the unpruned model's."""

FIRST_ORDER = "ala1"
"""The default prior of allocation=coverage, for plans that do not name theirs."""

HISTORY = ("generation", "schedule", "origin", "parent", "evaluated", "fitness", "elite")
"""Columns of history.parquet."""

CONDITIONS = ("device", "dtype", "threads", "load", "weight_bytes")
"""Fields of timing.json that hold for all requests to a model."""


def costs(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """One row per cell whose cost was counted: cell, bits and COSTS."""
    columns = ["cell", "bits", *COSTS]
    documents = _documents(cells, "cost_folder", "cost.json", reader)
    rows = [
        {"cell": cell, **{name: found.get(name) for name in columns[1:]}}
        for cell, found in documents.items()
    ]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype(dict.fromkeys(columns[1:], float))


def kept(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What plans keep: cell, layer, expert, share of the expert's channels (0..1), null, constant,
    merged.

    All experts of the unpruned layer are listed. A dropped expert has share 0. So has one that
    keeps no channel and is still routed to, which the column `null` marks: it puts out 0, or a
    constant (`constant`), or what the expert puts out that it is `merged` into. One without a row
    of the router can be merged too. Whole experts have 1. The unpruned model has no rows.
    """
    columns = ("layer", "expert", "share", "null", "constant", "merged")
    frames = {}
    for cell, document in _documents(cells, "plan_folder", "plan.json", reader).items():
        try:
            frames[cell] = _shares(document)
        except (KeyError, TypeError, ValueError):
            reader.gap("plan.json is damaged", str(cells.loc[cell, "plan_folder"]))
    return _by_cell(frames, columns)


def removed(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """What plans remove, indexed like `cells`: `removed`, the share of the experts, of channels in
    plans of channels; and `plan`, a text that is equal for equal plans. NaN and None for a cell
    without a plan that can be read."""
    rows = {}
    for cell, document in _documents(cells, "plan_folder", "plan.json", reader).items():
        try:
            rows[cell] = {
                "removed": _removed(document["layers"]),
                "plan": json.dumps(document["layers"]),
            }
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
            reader.gap("plan.json is damaged", str(cells.loc[cell, "plan_folder"]))
    return pd.DataFrame.from_dict(rows, "index", columns=["removed", "plan"]).reindex(cells.index)


def _removed(layers: Mapping[str, Any]) -> float:
    retained = 0.0
    every = 0
    for about in layers.values():
        every += about["experts"]
        if "channels" in about:
            retained += (
                sum(int(mask, 16).bit_count() for mask in about["channels"]) / about["width"]
            )
        else:
            retained += len(about["keep"])
    return 1 - retained / every


def profiles(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Hidden states and routing of every pruned model by layer: cell and PROFILES."""
    return _tables(cells["profile_folder"].dropna(), "profile.parquet", PROFILES, reader)


def timings(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Durations of requests to every timed model: cell, TIMINGS and CONDITIONS."""
    requests = _tables(cells["timing_folder"].dropna(), "timing.parquet", TIMINGS, reader)
    documents = _documents(cells, "timing_folder", "timing.json", reader)
    rows = [
        {"cell": cell, **{name: about.get(name) for name in CONDITIONS}}
        for cell, about in documents.items()
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


def history(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Every schedule that searches proposed: cell and HISTORY.

    A schedule is an array of experts removed per layer, in the order of `layers` in `searches`.
    `fitness` is NaN for a schedule that was never evaluated; higher is better."""
    return _tables(_searched(cells), "history.parquet", HISTORY, reader)


def searches(cells: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Searches, one row per cell whose allocation was searched for, with its cell and:

    layers            decoder layers, tuple; `best` and `uniform` are removed experts of these
    layers, tuples
    budget            experts removed in all
    samples           rows of the search set
    fitness           name of the fitness; `best_fitness` and `uniform_fitness` are its values
    candidates        schedules that were evaluated
    forwards          cost of their evaluation in full forwards of the search set; equal to
    `candidates` without reuse full              the same for the unpruned model
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
    """Rows of the text that a step read; NaN when the step has no record of its settings
    (step.json)."""
    if folder is None or not reader.has(folder, "step.json"):
        return np.nan
    settings = (reader.json(folder, "step.json") or {}).get("settings", {})
    return float(settings.get("text", {}).get("rows", np.nan))


def _search(document: Mapping[str, Any]) -> dict[str, Any]:
    settings = document.get("settings") or {}
    cost = document.get("cost") or {}
    best = document.get("best") or {}
    uniform = document.get("uniform") or {}
    return {
        "layers": tuple(document.get("layers") or ()),
        "budget": document.get("budget"),
        "fitness": settings.get("fitness"),
        "population": settings.get("population"),
        "generations": settings.get("generations"),
        "best": tuple(best.get("schedule") or ()),
        "best_fitness": best.get("fitness"),
        "uniform": tuple(uniform.get("schedule") or ()),
        "uniform_fitness": uniform.get("fitness", np.nan),
        **{
            name: cost.get(name, np.nan)
            for name in ("candidates", "forwards", "full", "per_candidate", "seconds")
        },
    }


def _searched(cells: pd.DataFrame) -> pd.Series:
    """Cell -> the folder of its search."""
    folders = cells["plan_folder"].dropna().astype(str)
    return folders[folders.str.startswith("search/")]


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
    """layer, expert, share, null, constant, merged of one plan."""
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
        merged = np.zeros(len(share), bool)
        for owner, group in about.get("merged", {}).items():
            merged[[int(member) for member in group if member != owner]] = True
        constant = null & ~merged & ("constants" in about)
        columns = {
            "expert": np.arange(len(share)),
            "share": share,
            "null": null,
            "constant": constant,
            "merged": merged,
        }
        frames.append(pd.DataFrame({"layer": int(layer), **columns}))
    return pd.concat(frames, ignore_index=True)


def _by_cell(frames: Mapping[int, pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    return stacked([frame.assign(cell=cell) for cell, frame in frames.items()], ["cell", *columns])


BYTES = 2
"""Bytes of one parameter in bfloat16."""


def removed_parameters(
    layers: Mapping[str, Mapping[str, int]],
    removed: Mapping[str, float],
    dropped: Mapping[str, int],
    constants: Mapping[str, int],
) -> int:
    """Count the parameters that a plan removes: matrices of experts or channels, and rows of the
    router.

    layers: layer -> {expert_parameters, router_parameters_per_expert, hidden}; removed: layer ->
    experts removed, counting parts of experts by their channels; dropped: layer -> experts that are
    no longer routed to; constants: layer -> experts replaced by a constant, which has a number for
    each hidden unit. The papers leave out the router's rows, which are less than 0.01 GiB for their
    models.
    """
    matrices = sum(count * layers[layer]["expert_parameters"] for layer, count in removed.items())
    rows = sum(
        count * layers[layer].get("router_parameters_per_expert", 0)
        for layer, count in dropped.items()
    )
    added = sum(count * layers[layer]["hidden"] for layer, count in constants.items() if count)
    return round(matrices + rows - added)


def loading_memory(
    cells: pd.DataFrame, kept: pd.DataFrame, models: Mapping[str, Mapping[str, Any]]
) -> pd.DataFrame:
    """Parameters and bytes before and after pruning, one row per model, ratio, granularity and
    allocation.

    Empty without facts about the models. Criteria that remove different numbers under one
    allocation have a row each.
    """
    rows = []
    for cell, plan in kept.groupby("cell", sort=False):
        axes = cells.loc[int(str(cell))]
        facts = models.get(str(axes["model"]))
        if facts is None:
            continue
        by_layer = plan.assign(
            gone=1 - plan["share"], dropped=(plan["share"] == 0) & ~plan["null"]
        ).groupby("layer")
        removed = {str(layer): float(gone) for layer, gone in by_layer["gone"].sum().items()}
        dropped = {str(layer): int(count) for layer, count in by_layer["dropped"].sum().items()}
        constants = {str(layer): int(count) for layer, count in by_layer["constant"].sum().items()}
        before = int(facts["parameters"])
        after = before - removed_parameters(facts["layers"], removed, dropped, constants)
        named = {
            name: axes[name]
            for name in ("model", "ratio", "removed_words", "granularity", "allocation")
        }
        found = {
            "parameters": before,
            "parameters_after": after,
            "bytes": before * BYTES,
            "bytes_after": after * BYTES,
        }
        rows.append({**named, **found, "saved": 1 - after / before})
    return pd.DataFrame(rows).drop_duplicates(ignore_index=True) if rows else pd.DataFrame()
