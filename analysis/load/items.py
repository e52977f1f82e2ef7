"""Items of benchmarks with their prompts and right answers, and what models answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa

from moe_lab.analysis.load.reader import Reader, records, step_kind
from moe_lab.result_files import FOREIGN, ITEMS, SHAREABLE, Sample, document_keys

TEXTS = ("prompt", "right_answer", "thought", "output", "extracted", "answer")
"""Columns of `answers` that are empty if a benchmark is not shareable."""


def answers(
    evaluations: pd.DataFrame,
    reader: Reader,
    columns: Sequence[str] = tuple(Sample.__annotations__),
) -> pd.DataFrame:
    """The answers of evaluations, without evaluations that cannot be read.

    evaluations: rows of `Study.results`. columns: those of `Sample` to read, with item, output and
    extracted; NaN if a file lacks them.

    Returns `columns`, and folder (name of the evaluation's step), key (equal for answers to the
    same document), prompt, right_answer, and answer (the choice that the model took, or else its
    output). TEXTS are "" if the benchmark is not shareable, or the store does not have them.
    """
    samples = []
    texts = []
    for row in records(evaluations.drop_duplicates("folder")):
        folder = reader.folder(row["folder"])
        if folder is None:
            continue
        is_shareable = row[SHAREABLE]
        shown = [name for name in columns if is_shareable or name not in TEXTS]
        table = reader.table(folder, "samples.parquet", shown)
        if table is None:
            continue
        samples.append(table)
        items = _items(_items_folder(folder, row["task"], reader), reader)
        for name in table["item"].to_pylist():
            item = items.get(name, _Item(name))
            texts.append((row["folder"], *(item if is_shareable else _Item(item.key))))
    if not samples:
        return pd.DataFrame(columns=[*columns, "folder", "key", *TEXTS])
    frame: pd.DataFrame = pa.concat_tables(samples, promote_options="permissive").to_pandas()
    frame = frame.reindex(columns=list(columns)).fillna(dict.fromkeys(TEXTS, ""))
    frame = frame.join(pd.DataFrame(texts, columns=["folder", *_Item._fields]))
    frame["answer"] = [
        _choice(extracted, choices) or output
        for output, extracted, choices in zip(
            frame["output"], frame["extracted"], frame.pop("choices"), strict=True
        )
    ]
    return frame


class _Item(NamedTuple):
    """An item of a benchmark. The texts of an unknown item are empty."""

    key: str
    """See `document_keys`; the item's name without a hash."""
    prompt: str = ""
    right_answer: str = ""
    choices: Sequence[str] = ()
    """One if a text is asked for."""


def _choice(extracted: str, choices: Sequence[str]) -> str:
    """The choice that the model took; "" if it had none. choices: those of the item."""
    return choices[int(extracted)] if len(choices) > 1 and extracted.isdigit() else ""


def _items_folder(folder: Path, task: str, reader: Reader) -> Path | None:
    """The folder with the items of the evaluation in `folder`. task: name of the benchmark in the
    record."""
    if step_kind(str(folder.relative_to(reader.root))) == FOREIGN:
        return folder
    inputs = reader.step_document(folder).get("inputs", {})
    # an evaluation that grades generated texts has its items from the step that generated them
    if "generate" in inputs:
        inputs = reader.step_document(reader.find_folder(inputs["generate"])).get("inputs", {})
    name = inputs.get(f"items of {task}")
    return reader.find_folder(name) if name else None


# evaluations of a benchmark are read one after the other
@lru_cache(maxsize=1)
def _items(folder: Path | None, reader: Reader) -> dict[str, _Item]:
    """Name of an item -> item, for those in a folder. None has no items."""
    content = reader.content(folder, ITEMS) if folder else None
    items = {}
    for line in gzip.decompress(content).splitlines() if content else ():
        item = json.loads(line)
        prompts = [_prompt(request) for request in item["requests"]]
        choices = [request.get("continuation", "").strip() for request in item["requests"]]
        # the choices of Winogrande are beginnings with one continuation
        if len(set(choices)) == 1:
            choices = prompts
        key = item["doc_hash"] or item["name"]
        items[item["name"]] = _Item(key, prompts[0], item["right_answer"], choices)
    keys = document_keys(item.key for item in items.values())
    return {name: items[name]._replace(key=key) for name, key in zip(items, keys, strict=True)}


def with_own_names(samples: pd.DataFrame, results: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Rename items of other programs' results, whose names are `document_keys`, to the own items
    with the same documents. samples, results: see `Study`."""
    is_foreign = results["folder"].map(step_kind) == FOREIGN
    is_renamed = samples["cell"].isin(results.loc[is_foreign, "cell"])
    for benchmark in results.loc[is_foreign, "benchmark"].unique():
        name_of_key: dict[str, str] = {}
        for row in records(results[~is_foreign & (results["benchmark"] == benchmark)]):
            if folder := reader.find_folder(row["folder"]):
                items = _items(_items_folder(folder, row["task"], reader), reader)
                name_of_key |= {item.key: name for name, item in items.items()}
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
