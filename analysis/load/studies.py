"""Find the studies of a store, and read the record of one study or of several combined."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.load.reader import ID, SCHEMA
from moe_lab.errors import UserError, unknown
from moe_lab.json_files import Damaged
from moe_lab.results import FIGURES, RECORD, read_record

EVERY = "all"
"""Stands for every study of a store, unless a study has this name."""

ID_DIGITS = 6
"""Digits of the id of a model's step that are added to its name when another model has the same
name."""
_BY_TASK = ("evaluate", "errors")
"""Fields of an entry that map benchmarks and other steps to results and errors."""


def studies(store: Path) -> list[str]:
    """Names of the studies in a store, newest first. Raises UserError when there is no store or no
    study in it."""
    if not store.is_dir():
        raise UserError(
            f"store={store} does not exist: name the folder a run wrote to, such as store=store"
        )
    records = sorted(
        store.glob(f"runs/*/*/{RECORD}"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    if not records:
        raise UserError(
            f"store={store} holds no study yet: run one first, such as python -m moe_lab "
            "+experiment=task_agnostic"
        )
    return list(dict.fromkeys(path.parent.parent.name for path in records))


def chosen(store: Path, name: str) -> list[str]:
    """The studies that `name` stands for: one, several separated by commas, or all of the store.

    Raises UserError when one does not exist.
    """
    names = studies(store)
    selected = sorted(names) if name == EVERY and EVERY not in names else name.split(",")
    for study in selected:
        if study not in names:
            raise unknown("study", study, [*names, EVERY])
    return list(dict.fromkeys(selected))


def document(store: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the record of one study, or of several combined into one. Raises UserError when one
    cannot be read.

    A cell that several studies have counts once, with the benchmarks of all of them.
    """
    by_name = {
        name: _with_suites(record)
        for name, record in _with_distinct_models({n: _read(store, n) for n in names}).items()
    }
    records = list(by_name.values())
    if len(records) == 1:
        return records[0]
    return {
        **max(records, key=lambda record: float(record["created"])),
        "study": "+".join(by_name),
        "config": {name: record.get("config") for name, record in by_name.items()},
        "cells": _joined_cells(records),
        **{kind: [row for record in records for row in record[kind]] for kind in FIGURES},
    }


def _read(store: Path, name: str) -> dict[str, Any]:
    try:
        record = read_record(store, name)
    except (Damaged, OSError) as error:
        raise UserError(
            f"study={name} cannot be read: {error}, run the study again to write it anew"
        ) from None
    if record is None:
        raise UserError(f"study={name} has no record: run it again")
    if record["schema"] > SCHEMA:
        raise UserError(
            f"study={name} has schema {record['schema']}, written by a newer moe_lab, and this one "
            f"reads up to {SCHEMA}"
        )
    if not record["cells"]:
        raise UserError(f"study={name} has no cells")
    return record


def _with_id(name: str, step_id: str) -> str:
    """The name of a model, extended by the start of its step's id to distinguish it from others of
    this name."""
    # top_k and the protocol stay at the end of the name
    return re.sub(r"((_top\d+)?( \(.*\))?)$", rf"-{step_id[:ID_DIGITS]}\g<1>", name, count=1)


def _with_distinct_models(records: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add the start of a model's id to its name where different models share a name, within one
    study or across several."""
    ids: dict[str, set[str]] = {}
    for record in records.values():
        for entry in record["cells"]:
            name, step_id = _name_and_id(entry)
            ids.setdefault(name, set()).update({step_id} - {""})
    ambiguous = {name for name, ids_of_name in ids.items() if len(ids_of_name) > 1}
    return {study: _renamed(record, ambiguous) for study, record in records.items()}


def _name_and_id(entry: Mapping[str, Any]) -> tuple[str, str]:
    """The name of a cell's model without its id, and the start of its id, or "" when its step is
    missing."""
    name = str(entry["cell"].get("model"))
    folder = entry.get("model")
    step_id = str(folder)[-ID:][:ID_DIGITS] if folder else ""
    return (name.replace(f"-{step_id}", "", 1) if step_id else name), step_id


def _renamed(record: dict[str, Any], ambiguous: Collection[str]) -> dict[str, Any]:
    """The record with ids in the names of exactly those models whose names are ambiguous."""
    new_names: dict[str, str] = {}
    cells = []
    for entry in record["cells"]:
        name, step_id = _name_and_id(entry)
        new_name = _with_id(name, step_id) if step_id and name in ambiguous else name
        if "model" in entry["cell"]:
            new_names[entry["cell"]["model"]] = new_name
            entry = {**entry, "cell": {**entry["cell"], "model": new_name}}
        cells.append(entry)
    figures = {
        kind: [{**row, "model": new_names.get(row["model"], row["model"])} for row in record[kind]]
        for kind in FIGURES
    }
    return {**record, "cells": cells, **figures}


def _with_suites(record: dict[str, Any]) -> dict[str, Any]:
    """Add to each cell its `suite`: the tasks that this study ran on any cell of the same model."""
    suites: dict[str, dict[str, None]] = {}
    for entry in record["cells"]:
        suites.setdefault(entry["cell"].get("model"), {}).update(
            dict.fromkeys(entry.get("evaluate") or {})
        )
    cells = [
        {**entry, "suite": list(suites[entry["cell"].get("model")])} for entry in record["cells"]
    ]
    return {**record, "cells": cells}


def _joined_cells(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cells of all records, each once."""
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for entry in record["cells"]:
            entries.setdefault(json.dumps(entry["cell"], sort_keys=True), []).append(entry)
    return [joined_entry(of_cell) for of_cell in entries.values()]


def joined_entry(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge entries of one cell: of every step, and of every benchmark, the first result that one
    of them has."""
    by_task = {
        name: _first_values([entry.get(name) or {} for entry in entries]) for name in _BY_TASK
    }
    return {**_first_values(entries), **by_task}


def _first_values(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Key -> its first value that is not empty; the value of the first mapping where all are."""
    merged: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            if not merged.get(key):
                merged[key] = value
    return merged
