"""Items of benchmarks with their prompts and right answers, and what models answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from moe_lab.analysis.load.reader import Reader, records, step_kind
from moe_lab.result_files import FOREIGN, ITEMS, SHAREABLE, Sample, document_keys

TEXTS = ("prompt", "right_answer", "thought", "output", "extracted")
"""Columns of `answers` that are empty if a benchmark is not shareable."""
_NO_STEP = "items/none"
"""Name of a step that no store has."""


def answers(evaluation: str, task: str, reader: Reader) -> pd.DataFrame:
    """The answers of an evaluation: the columns of `Sample`, key, prompt and right_answer. key is
    equal for answers to the same document. TEXTS are "" if the benchmark is not shareable, or the
    store does not have them. No rows for an evaluation that cannot be read.

    evaluation: name of the step. task: name of the benchmark in the record.
    """
    columns = list(Sample.__annotations__)
    folder = reader.folder(evaluation)
    result = reader.json(folder, "result.json")
    frame = reader.frame(folder, "samples.parquet", columns)
    if folder is None or result is None or frame is None:
        return pd.DataFrame(columns=[*columns, "key", "prompt", "right_answer"])
    frame = frame.merge(_items(folder, task, reader), on="item", how="left")
    if not result["protocol"].get(SHAREABLE, True):
        frame[list(TEXTS)] = ""
    frame["key"] = frame["key"].fillna(frame["item"])
    return frame.fillna(dict.fromkeys(TEXTS, ""))


def _items(folder: Path, task: str, reader: Reader) -> pd.DataFrame:
    """The items of the evaluation in `folder`: item, key (see `document_keys`; the item without a
    hash), prompt and right_answer. task: as in `answers`."""
    inputs = reader.step_document(folder).get("inputs", {})
    # an evaluation that grades generated texts has its items from the step that generated them
    if generate := reader.find_folder(inputs.get("generate", _NO_STEP)):
        inputs = reader.step_document(generate).get("inputs", {})
    items = reader.find_folder(inputs.get(f"items of {task}", _NO_STEP))
    if step_kind(str(folder.relative_to(reader.root))) == FOREIGN:
        items = folder
    content = reader.content(items, ITEMS) if items else None
    rows = []
    for line in gzip.decompress(content).splitlines() if content else ():
        item = json.loads(line)
        key = item["doc_hash"] or item["name"]
        rows.append((item["name"], key, _prompt(item["requests"][0]), item["right_answer"]))
    frame = pd.DataFrame(rows, columns=["item", "key", "prompt", "right_answer"])
    return frame.assign(key=document_keys(frame["key"]))


def with_own_names(samples: pd.DataFrame, results: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Rename items of other programs' results, whose names are `document_keys`, to the own items
    with the same documents. samples, results: see `Study`."""
    is_foreign = results["folder"].map(step_kind) == FOREIGN
    is_renamed = samples["cell"].isin(results.loc[is_foreign, "cell"])
    for benchmark in results.loc[is_foreign, "benchmark"].unique():
        name_of_key: dict[str, str] = {}
        for row in records(results[~is_foreign & (results["benchmark"] == benchmark)]):
            if folder := reader.find_folder(row["folder"]):
                items = _items(folder, row["task"], reader)
                name_of_key |= dict(zip(items["key"], items["item"], strict=True))
        rows = is_renamed & (samples["benchmark"] == benchmark)
        names = samples.loc[rows, "item"]
        samples.loc[rows, "item"] = names.map(name_of_key).fillna(names)
    return samples


def _prompt(request: Mapping[str, Any]) -> str:
    """The text of a request; the messages of a conversation, one per line."""
    text = request.get("prompt") or request.get("context") or request.get("text") or ""
    if isinstance(text, str):
        return text
    return "\n".join(f"{message['role']}: {message['content']}" for message in text)
