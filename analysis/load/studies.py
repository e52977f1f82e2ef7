"""Find the studies of a store, and read the record of one study or of several combined."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.analysis.load.reader import ID, SCHEMA
from moe_lab.errors import UserError, unknown_name_error
from moe_lab.json_files import Damaged
from moe_lab.result_files import FIGURE_STEPS, RECORD, read_record

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
    record_of_study = _distinguish_models({name: _read(store, name) for name in names})
    records = [_add_suites(record) for record in record_of_study.values()]
    if len(records) == 1:
        return records[0]
    newest_record = max(records, key=lambda record: float(record["created"]))
    return {
        **newest_record,
        "study": "+".join(record_of_study),
        "config": {name: record.get("config") for name, record in record_of_study.items()},
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


def _add_id(name: str, step_id: str) -> str:
    """Add the first digits of `step_id` to the name of a model: `qwen_top2` becomes
    `qwen-3f2a91_top2`. step_id: id of the step that prepared the model."""
    # the suffixes stay at the end of the name: `_top2`, or ` (heapr)` with a name of a protocol
    return re.sub(r"((_top\d+)?( \(.*\))?)$", rf"-{step_id[:MODEL_ID_DIGITS]}\g<1>", name, count=1)


def _distinguish_models(records: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add ids to the names of models if different models have the same name.

    records: name of a study -> record.
    """
    ids_by_name: dict[str, set[str]] = {}
    for record in records.values():
        for entry in record["cells"]:
            name, step_id = _name_and_id(entry)
            # an id "", of a missing step, does not count as another model
            ids_by_name.setdefault(name, set()).update({step_id} - {""})
    ambiguous_names = {name for name, ids in ids_by_name.items() if len(ids) > 1}
    return {study: _add_ids(record, ambiguous_names) for study, record in records.items()}


def _name_and_id(entry: Mapping[str, Any]) -> tuple[str, str]:
    """(name, id) of the model in `entry`, a cell's entry in a record.

    - name: without the id that `_add_id` adds
    - id: first MODEL_ID_DIGITS digits of the id of the model's step, "" when the step is missing
    """
    name = str(entry["cell"].get("model"))
    folder = entry.get("model")
    step_id = str(folder)[-ID:][:MODEL_ID_DIGITS] if folder else ""
    return (name.replace(f"-{step_id}", "", 1) if step_id else name), step_id


def _add_ids(record: dict[str, Any], ambiguous_names: Collection[str]) -> dict[str, Any]:
    """A copy of the record in which exactly the names in `ambiguous_names` have ids."""
    # name in the record -> name in the copy
    new_names: dict[str, str] = {}
    cells = []
    for entry in record["cells"]:
        name, step_id = _name_and_id(entry)
        new_name = _add_id(name, step_id) if step_id and name in ambiguous_names else name
        if "model" in entry["cell"]:
            new_names[entry["cell"]["model"]] = new_name
            entry = {**entry, "cell": {**entry["cell"], "model": new_name}}
        cells.append(entry)
    figures = {
        figure: [
            {**row, "model": new_names.get(row["model"], row["model"])} for row in record[figure]
        ]
        for figure in FIGURE_STEPS
    }
    return {**record, "cells": cells, **figures}


def _add_suites(record: dict[str, Any]) -> dict[str, Any]:
    """A copy of the record, with the field "suite" in each cell's entry: all tasks that the study
    ran on any cell of the same model."""
    # model -> tasks, as keys so that each is listed once and in order
    suites: dict[str, dict[str, None]] = {}
    for entry in record["cells"]:
        suites.setdefault(entry["cell"].get("model"), {}).update(
            dict.fromkeys(entry.get("evaluate") or {})
        )
    cells = [
        {**entry, "suite": list(suites[entry["cell"].get("model")])} for entry in record["cells"]
    ]
    return {**record, "cells": cells}


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
    """Merge entries of one cell, or of cells with equal results. Each field is copied from the
    first entry in which the field is not empty. The fields _DICTIONARIES are merged key by key."""
    dictionaries = {
        name: _first_values([entry.get(name) or {} for entry in entries]) for name in _DICTIONARIES
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
