"""Writing outputs into a folder: one that fails is a gap of the study with a log, and the others go on."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from analysis import names
from analysis.registry import Item, Results, find
from analysis.render import style, table
from analysis.render.style import Figure
from moe_lab.errors import DISK_FULL

T = TypeVar("T")
UNWRITABLE = (*DISK_FULL, errno.EROFS, errno.EACCES)
"""Error numbers of a folder that takes no file."""
FAILED = "failed"
"""Folder beside the tables and figures: NAME.log has the traceback of what could not be made."""


class Publisher:
    """Writes outputs of a study into `out`, figures in `figure_format`, and remembers what failed."""

    def __init__(self, results: Results, out: Path, figure_format: str = names.FIGURE_FORMATS[0]) -> None:
        self.results = results
        self.out = out
        self.figure_format = figure_format
        self.attempted: dict[str, Exception | None] = {}
        """What was attempted -> why it failed, if it did."""

    def attempt(self, name: str, make: Callable[[], T]) -> T | None:
        """What `make` gives. Where it raises: None, and a gap with the name and the reason. A disk that takes nothing
        is no matter of one output, and is raised."""
        self.attempted.setdefault(name, None)
        try:
            return make()
        except Exception as error:  # a bug in one output must not take the others with it
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            self.attempted[name] = error
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.results.study.reader.gap(f"could not be made ({reason}), traceback in {FAILED}/{name}.log", name)
            return None

    @property
    def failed(self) -> list[str]:
        """What could not be made."""
        return [name for name, error in self.attempted.items() if error]

    def publish(self, wanted: Iterable[str]) -> tuple[dict[str, list[Item]], list[Path]]:
        """Make the named outputs and write their files: name -> those that were written, and all files."""
        items_by_name: dict[str, list[Item]] = {}
        written: list[Path] = []
        for output in dict.fromkeys(map(find, wanted)):
            items_by_name[output.name] = []
            for item in self.attempt(output.name, partial(output.items, self.results)) or []:
                files = self.attempt(item.name, partial(write, [item], self.out, self.figure_format)) or []
                items_by_name[output.name] += [item] if files else []
                written += files
        return items_by_name, written

    def log_failures(self) -> None:
        """Write OUT/failed/NAME.log for what could not be made, and remove that of what could be made this time."""
        for name, error in self.attempted.items():
            log = self.out / FAILED / f"{name}.log"
            if error is None:
                log.unlink(missing_ok=True)
            else:
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def write(items: Iterable[Item], out: Path, figure_format: str = names.FIGURE_FORMATS[0]) -> list[Path]:
    """Write tables into OUT/tables and figures, in one of `names.FIGURE_FORMATS`, into OUT/figures."""
    written: list[Path] = []
    for item in items:
        if isinstance(item, Figure):
            written += style.write(item, out / "figures", figure_format)
        else:
            written += table.write(item, out / "tables")
    return written
