"""The steps that results rest on: which they are, how long each took and what memory, from the store alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from analysis.load.reader import Reader

COLUMNS = ("folder", "kind", "seconds", "peak", "gpu_peak", "machine")
TIMELESS = ("model",)
"""Steps that every study has and that read a configuration only."""


def behind(name: str | None, reader: Reader) -> dict[str, Path]:
    """The step called `name` and all steps it rests on: folder as its users call it -> where it is.

    Steps without a record of their inputs are taken to have none; what is gone from the store is left out.
    """
    found: dict[str, Path] = {}
    open_names = [name] if name else []
    while open_names:
        current = open_names.pop()
        folder = reader.find(current)
        if folder is None or current in found:
            continue
        found[current] = folder
        if (folder / "step.json").is_file():
            open_names += (reader.json(folder, "step.json") or {}).get("inputs", {}).values()
    return found


def kind(name: str) -> str:
    """What a step does, by the folder it is in."""
    return name.partition("/")[0]


def taken(names: Iterable[str], reader: Reader) -> pd.DataFrame:
    """One row per step that says what it took: folder, kind, seconds, peak memory of its process in bytes, that on
    GPUs (NaN for none), machine."""
    rows = []
    for name in names:
        folder = reader.find(name)
        if folder is None or not (folder / "provenance.json").is_file():
            continue
        about = reader.json(folder, "provenance.json") or {}
        measured = [about.get(key) for key in ("seconds", "peak_memory_bytes", "peak_gpu_memory_bytes")]
        rows.append((name, kind(name), *measured, str(about.get("machine", ""))))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS[2:5], float))
