"""Find the studies of a store, and read the record of one study or of several combined."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.analysis.load.reader import SCHEMA
from moe_lab.errors import UserError, unknown_name_error
from moe_lab.json_files import Damaged
from moe_lab.result_files import FIGURE_STEPS, ID_DIGITS, RECORD, read_record

EVERY = "all"
"""A request for this name means all studies of the store, unless a study has the name."""

MODEL_ID_DIGITS = 6
"""Number of first digits of the id of a model's step that distinguish models of the same name."""
_DICTIONARIES = ("evaluate", "errors")
"""Fields of a cell's entry in the record that are dictionaries: evaluate is task -> step, errors is
task or kind of step -> message."""


def studies(store: Path) -> list[str]:
    """Names of the studies in a store; the study with the newest run is first. Raises UserError
    when the store does not exist or has no study."""
    if not store.is_dir():
        raise UserError(
            f"store={store} does not exist: name the folder a run wrote to, such as store=store"
        )
    record_paths = sorted(
        store.glob(f"runs/*/*/{RECORD}"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    if not record_paths:
        raise UserError(
            f"store={store} holds no study yet: run one first, such as moe-lab run "
            "+experiment=task_agnostic"
        )
    return list(dict.fromkeys(path.parent.parent.name for path in record_paths))


def requested_studies(store: Path, name: str) -> list[str]:
    """Names of the studies that a user requests. Raises UserError for a study that does not exist.

    name: name of one study, several names separated by commas, or EVERY for all studies of the
    store.
    """
    names = studies(store)
    selected_studies = sorted(names) if name == EVERY and EVERY not in names else name.split(",")
    for study in selected_studies:
        if study not in names:
            raise unknown_name_error("study", study, [*names, EVERY])
    return list(dict.fromkeys(selected_studies))


def combined_record(store: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the record of one study, or combine the records of several studies into one record.
    Raises UserError when a record cannot be read.

    A cell that occurs in several studies is one cell of the combined record. The lists in the
    fields FIGURE_STEPS are concatenated. The field "study" has the names of all studies. The field
    "config" has the config of each study, under the name of the study. All other fields are copied
    from the newest record.
    """
    records = _with_distinct_models([_read(store, name) for name in names])
    if len(records) == 1:
        return records[0]
    newest_record = max(records, key=lambda record: float(record["created"]))
    configs = [record.get("config") for record in records]
    return {
        **newest_record,
        "study": "+".join(names),
        "config": dict(zip(names, configs, strict=True)),
        "cells": _join_cells(records),
        **{
            figure: [row for record in records for row in record[figure]] for figure in FIGURE_STEPS
        },
    }


def _read(store: Path, name: str) -> dict[str, Any]:
    """Read the record of one study. Raises UserError when the record cannot be used."""
    try:
        record = read_record(store, name)
    except (Damaged, OSError) as error:
        raise UserError(
            f"study={name} cannot be read: {error}, run the study again to rewrite its record"
        ) from None
    if record is None:
        raise UserError(f"study={name} has no record: run it again")
    if record["schema"] > SCHEMA:
        raise UserError(
            f"study={name} has schema {record['schema']}, written by a newer moe_lab; this version "
            f"reads schemas up to {SCHEMA}"
        )
    if not record["cells"]:
        raise UserError(f"study={name} has no cells")
    return record


def _with_distinct_models(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the records in which different models have different names, see
    `_rename_models`."""
    ids_of_name = defaultdict(set)
    for record in records:
        for entry in record["cells"]:
            ids_of_name[entry["cell"].get("model")].add(_model_id(entry))
    # an id "", of a missing step, does not count as another model
    ambiguous_names = {name for name, ids in ids_of_name.items() if len(ids - {""}) > 1}
    return [_rename_models(record, ambiguous_names) for record in records]


def _model_id(entry: Mapping[str, Any]) -> str:
    """First MODEL_ID_DIGITS digits of the id of the step that prepared the model of a cell, "" when
    the step is missing. entry: the cell's entry in a record."""
    return (entry.get("model") or "")[-ID_DIGITS:][:MODEL_ID_DIGITS]


def _rename_models(record: Mapping[str, Any], ambiguous_names: Collection[str]) -> dict[str, Any]:
    """A copy of the record in which ids are added to the names in `ambiguous_names`: `qwen_top2`
    becomes `qwen-3f2a91_top2`. Each cell's entry also gets the field "suite": all tasks that the
    study ran on any cell of the same model."""
    # name in the record -> name in the copy
    new_names: dict[str | None, str] = {}
    # name in the copy -> tasks, as keys so that each is listed once and in order
    suites: dict[str | None, dict[str, None]] = defaultdict(dict)
    cells = []
    for entry in record["cells"]:
        name = entry["cell"].get("model")
        if name in ambiguous_names and (model_id := _model_id(entry)):
            # the suffixes stay at the end: `_top2`, or ` (heapr)` with a name of a protocol
            suffixes = r"((_top\d+)?( \(.*\))?)$"
            new_names[name] = re.sub(suffixes, rf"-{model_id}\g<1>", name, count=1)
            entry = {**entry, "cell": {**entry["cell"], "model": new_names[name]}}
        suite = suites[entry["cell"].get("model")]
        suite |= dict.fromkeys(entry["evaluate"])
        cells.append({**entry, "suite": suite})
    figures = {
        figure: [
            {**row, "model": new_names.get(row["model"], row["model"])} for row in record[figure]
        ]
        for figure in FIGURE_STEPS
    }
    return {**record, "cells": cells, **figures}


def _join_cells(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries of all cells in the records. Entries of the same cell are joined."""
    # cell as JSON -> entries
    entries_of_cell: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for entry in record["cells"]:
            cell_text = json.dumps(entry["cell"], sort_keys=True)
            entries_of_cell.setdefault(cell_text, []).append(entry)
    return list(map(joined_entry, entries_of_cell.values()))


def joined_entry(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge entries of one cell. Each field is copied from the
    first entry in which the field is not empty. The fields _DICTIONARIES are merged key by key."""
    dictionaries = {
        name: _first_values([entry[name] for entry in entries]) for name in _DICTIONARIES
    }
    return {**_first_values(entries), **dictionaries}


def _first_values(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Key -> the first value of the key in `mappings` that is not empty."""
    first_values: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            if not first_values.get(key):
                first_values[key] = value
    return first_values
