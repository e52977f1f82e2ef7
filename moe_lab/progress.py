"""Progress of the work of this process, in a small file for other processes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from moe_lab.json_files import Damaged, Number, read_json, write_json

FILE = "MOE_LAB_PROGRESS"
"""Environment variable with the path of the file."""
NAME = "progress.json"
INTERVAL = 2.0
"""Fewest seconds between two writes."""
_latest = (0.0, 0.0, "")
_last_write = 0.0


def update(done: float, total: float, unit: str) -> None:
    """Set the progress of this process to `done` of `total` units. It is also written to the file
    in the environment variable `FILE`, at most once in INTERVAL seconds. `unit`: name of the units,
    such as batches."""
    global _latest, _last_write
    _latest = (done, total, unit)
    if FILE in os.environ and time.monotonic() - _last_write >= INTERVAL:
        _last_write = time.monotonic()
        path = Path(os.environ[FILE])
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, _latest)


def add(units: float) -> None:
    """Add `units` to the number of units that are done."""
    done, total, unit = _latest
    update(done + units, total, unit)


def read(file: Path) -> tuple[float, str]:
    """(share of the work that is done, from 0 to 1; text such as "3 of 40 batches"). (0, "") if
    `file` is missing or damaged."""
    with suppress(OSError, Damaged, ZeroDivisionError):
        done, total, unit = read_json(file, (Number, Number, str))
        return min(1.0, done / total), f"{done:g} of {total:g} {unit}"
    return 0.0, ""
