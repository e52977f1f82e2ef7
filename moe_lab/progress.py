"""How far the work of this process is, in a small file for those who wait for it. No result depends
on it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from moe_lab.json_files import Damaged, Number, read_json, write_json

FILE = "MOE_LAB_PROGRESS"
"""Environment variable with the name of the file."""
NAME = "progress.json"
EVERY = 2.0
"""Least seconds between two writings, so that they take no time."""
_told = (0.0, 0.0, "")
_last = 0.0


def tell(done: float, total: float, what: str) -> None:
    """Tell that `done` of `total` parts of the work are done."""
    global _told, _last
    _told = (done, total, what)
    if FILE in os.environ and time.monotonic() - _last >= EVERY:
        _last = time.monotonic()
        with suppress(OSError):
            Path(os.environ[FILE]).parent.mkdir(parents=True, exist_ok=True)
            write_json(Path(os.environ[FILE]), _told)


def add(parts: float) -> None:
    """Tell that so many more parts are done than was told last."""
    tell(_told[0] + parts, *_told[1:])


def read(file: Path) -> tuple[float, str]:
    """The share that is done, and that in words; 0 and "" when nothing was told."""
    with suppress(OSError, Damaged, ZeroDivisionError):
        done, total, what = read_json(file, [Number | str])
        return min(1.0, done / total), f"{done:g} of {total:g} {what}"
    return 0.0, ""
