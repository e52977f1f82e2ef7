"""Progress of the work of this process, in a small file for other processes, or as a bar."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_lab.json_files import Damaged, Number, read_json, write_json

FILE = "MOE_LAB_PROGRESS"
"""Environment variable with the path of the file."""
NAME = "progress.json"
INTERVAL = 2.0
"""Fewest seconds between two writes."""
_latest = (0.0, 0.0, "")
_last_write = 0.0
_bar: Any = None
"""The bar of tqdm that is shown."""


@contextmanager
def shown() -> Iterator[None]:
    """A context in which a bar shows the progress, in a notebook as a widget."""
    global _bar
    from tqdm.auto import tqdm

    with tqdm(leave=False, delay=1) as _bar:
        yield
    _bar = None


def update(done: float, total: float, unit: str) -> None:
    """Set the progress of this process to `done` of `total` units. It is also written to the file
    in the environment variable `FILE`, at most once in INTERVAL seconds. `unit`: name of the units,
    such as batches."""
    global _latest, _last_write
    _latest = (done, total, unit)
    if _bar is not None:
        if (_bar.total, _bar.unit) != (total, unit):
            _bar.reset(total)
            _bar.unit = unit
        _bar.update(done - _bar.n)
    if FILE in os.environ and time.monotonic() - _last_write >= INTERVAL:
        _last_write = time.monotonic()
        path = Path(os.environ[FILE])
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"done": done, "total": total, "unit": unit})


def add(units: float) -> None:
    """Add `units` to the number of units that are done."""
    done, total, unit = _latest
    update(done + units, total, unit)


def read(file: Path) -> tuple[float, str]:
    """(share of the work that is done, from 0 to 1; text such as "3 of 40 batches"). (0, "") if
    `file` is missing or damaged."""
    with suppress(OSError, Damaged, ZeroDivisionError):
        document = read_json(file, {"done": Number, "total": Number, "unit": str})
        done, total = document["done"], document["total"]
        return min(1.0, done / total), f"{done:g} of {total:g} {document['unit']}"
    return 0.0, ""
