"""Files of a store, read one by one; what is missing or damaged becomes a gap with its reason, never a crash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = 1
"""The newest layout this code reads."""


@dataclass(frozen=True)
class Gap:
    """Something that should be in the tables and is not: what happened, and where."""

    what: str
    where: str


class Reader:
    """Reads the folders of a store. Each file that cannot be read is noted once in `gaps`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gaps: dict[tuple[str, str], Gap] = {}
        self._failures: dict[str, str] | None = None
        self._by_id: dict[str, dict[str, Path]] = {}

    def gap(self, what: str, where: str) -> None:
        self.gaps.setdefault((what, where), Gap(what, where))

    def folder(self, name: str) -> Path | None:
        """The folder of a step, by name or (the label may differ between runs) by the id at its end."""
        path = self.root / name
        if path.is_dir():
            return path
        kind = path.parent
        if kind.name not in self._by_id:
            found = [child for child in kind.iterdir() if not child.name.startswith(".")] if kind.is_dir() else []
            self._by_id[kind.name] = {child.name[-12:]: child for child in found}
        known = self._by_id[kind.name].get(path.name[-12:])
        if known is None:
            self.gap(self._failure(name), name)
        return known

    def json(self, folder: Path, file: str) -> dict[str, Any] | None:
        """A JSON document, or None with a gap."""
        try:
            document = json.loads((folder / file).read_bytes())
        except FileNotFoundError:
            return self._unreadable(f"{file} is missing", folder)
        except (OSError, ValueError):
            return self._unreadable(f"{file} is damaged", folder)
        return document if isinstance(document, dict) else self._unreadable(f"{file} is damaged", folder)

    def table(self, folder: Path, file: str, columns: Sequence[str]) -> pa.Table | None:
        """Columns of a Parquet file, or None with a gap."""
        try:
            with pq.ParquetFile(folder / file) as opened:
                table = opened.read(columns=list(columns), use_threads=False)
        except FileNotFoundError:
            return self._unreadable(f"{file} is missing", folder)
        except (OSError, pa.ArrowException):
            return self._unreadable(f"{file} is damaged", folder)
        if table.column_names != list(columns):
            return self._unreadable(f"{file} lacks columns {sorted(set(columns) - set(table.column_names))}", folder)
        return table

    def _unreadable(self, what: str, folder: Path) -> None:
        self.gap(what, str(folder.relative_to(self.root)))

    def _failure(self, name: str) -> str:
        """Why a step has no folder: its error if it left one."""
        if self._failures is None:
            self._failures = {}
            for path in sorted((self.root / "failed").glob("*.json")):
                try:
                    document = json.loads(path.read_bytes())
                    self._failures[document["step"]] = str(document["message"]).splitlines()[0]
                except (OSError, ValueError, KeyError, TypeError, IndexError):
                    self.gap("the record of a failure is damaged", path.name)
        message = self._failures.get(name)
        return f"failed: {message}" if message else "not computed yet"
