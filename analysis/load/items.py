"""Items of benchmarks with their prompts and right answers, and what models answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from moe_lab.analysis.load.reader import Reader
from moe_lab.result_files import ITEMS, SHAREABLE, Sample

TEXTS = ("prompt", "right_answer", "thought", "output", "extracted")
"""Columns of `answers` that are empty if a benchmark is not shareable."""
_NO_STEP = "items/none"
"""Name of a step that no store has."""


def answers(evaluation: str, task: str, reader: Reader) -> pd.DataFrame:
    """The answers of an evaluation: the columns of `Sample`, prompt and right_answer. TEXTS are ""
    if the benchmark is not shareable, or the store does not have them. No rows for an evaluation
    that cannot be read.

    evaluation: name of the step. task: name of the benchmark in the record.
    """
    columns = list(Sample.__annotations__)
    folder = reader.folder(evaluation)
    result = reader.json(folder, "result.json")
    frame = reader.frame(folder, "samples.parquet", columns)
    if folder is None or result is None or frame is None:
        return pd.DataFrame(columns=[*columns, "prompt", "right_answer"])
    frame = frame.merge(_items(folder, task, reader), on="item", how="left")
    if not result["protocol"].get(SHAREABLE, True):
        frame[list(TEXTS)] = ""
    return frame.fillna(dict.fromkeys(TEXTS, ""))


def _items(folder: Path, task: str, reader: Reader) -> pd.DataFrame:
    """The items of the evaluation in `folder`: item, prompt and right_answer. task: as in
    `answers`."""
    inputs = reader.step_document(folder).get("inputs", {})
    # an evaluation that grades generated texts has its items from the step that generated them
    if generate := reader.find_folder(inputs.get("generate", _NO_STEP)):
        inputs = reader.step_document(generate).get("inputs", {})
    items = reader.find_folder(inputs.get(f"items of {task}", _NO_STEP))
    content = reader.content(items, ITEMS) if items else None
    rows = []
    for line in gzip.decompress(content).splitlines() if content else ():
        item = json.loads(line)
        rows.append((item["name"], _prompt(item["requests"][0]), item["right_answer"]))
    return pd.DataFrame(rows, columns=["item", "prompt", "right_answer"])


def _prompt(request: Mapping[str, Any]) -> str:
    """The text of a request; the messages of a conversation, one per line."""
    text = request.get("prompt") or request.get("context") or request.get("text") or ""
    if isinstance(text, str):
        return text
    return "\n".join(f"{message['role']}: {message['content']}" for message in text)
