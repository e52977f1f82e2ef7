"""Find the studies of a store, and read the record of one study or of several combined."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.analysis.load.reader import SCHEMA
from moe_lab.errors import UserError, unknown_name_error
from moe_lab.json_files import Damaged
from moe_lab.result_files import FIGURE_STEPS, ID_DIGITS, RECORD, join_records, read_record

EVERY = "all"
"""A request for this name means all studies of the store, unless a study has the name."""

MODEL_ID_DIGITS = 6
"""Number of first digits of the id of a model's step that distinguish models of the same name."""


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

    A cell that occurs in several studies is one cell of the combined record, see `join_records`;
    the last study is the one with the newest record. The field "study" has the names of all
    studies. The field "config" has the config of each study, under the name of the study.
    """
    records = _with_distinct_models({name: _read(store, name) for name in names})
    if len(records) == 1:
        return records[names[0]]
    configs = {name: record.get("config") for name, record in records.items()}
    by_age = sorted(records.items(), key=lambda item: float(item[1]["created"]))
    return {**join_records(dict(by_age)), "study": "+".join(names), "config": configs}


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


def _with_distinct_models(records: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copies of the records in which different models have different names, see
    `_rename_models`."""
    models: Models = defaultdict(dict)
    for record in records.values():
        for entry in record["cells"]:
            if entry.get("model"):
                models[entry["cell"].get("model")][_model_id(entry)] = entry["model"]
    return {name: _rename_models(record, models) for name, record in records.items()}


Models = Mapping[str | None, dict[str, str]]
"""Name of a model -> `_model_id` -> folder of the step that prepared the model."""


def _model_id(entry: Mapping[str, Any]) -> str:
    """First MODEL_ID_DIGITS digits of the id of the step that prepared the model of a cell, "" when
    the step is missing. entry: the cell's entry in a record."""
    return (entry.get("model") or "")[-ID_DIGITS:][:MODEL_ID_DIGITS]


def _rename_models(record: Mapping[str, Any], models: Models) -> dict[str, Any]:
    """A copy of the record in which ids are added to names of several models: `qwen_top2` becomes
    `qwen-3f2a91_top2`. Where the step of the only model of a name is missing, it is added. Each
    cell's entry also gets the field "suite": all tasks that the study ran on any cell of the same
    model."""
    # name in the record -> name in the copy
    new_names: dict[str | None, str] = {}
    # name in the copy -> tasks, as keys so that each is listed once and in order
    suites: dict[str | None, dict[str, None]] = defaultdict(dict)
    cells = []
    for entry in record["cells"]:
        name = entry["cell"].get("model")
        if len(models[name]) == 1:
            entry = {**entry, "model": next(iter(models[name].values()))}
        elif model_id := _model_id(entry):
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
