"""Packs: files of a store that each hold the results of many small steps, since clusters limit the
number of files.

A finished step is first a folder. When a store has many small steps, they are copied into a pack,
and their folders are removed. A pack, packs/NAME.sqlite, is a database that is written once, under
another name, and then never changed, so that it needs no locks. A new pack can replace it; it is
then read no more, and removed some time later.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.json_files import Damaged

TABLES = """
pragma page_size = 65536;
create table file (start text, name text, content blob, primary key (start, name));
create table summary (name text primary key, content blob);
"""
"""file: the compressed files of steps, with step.json, by the start of a step's id.
summary: compressed JSON documents about all steps of the pack:
names     start of the id -> KIND/LABEL; the name of the folder is LABEL-START
inputs    start of the id -> starts of the ids of its inputs, separated by spaces
replaces  names of the packs that this pack replaces

Large pages take fewer reads."""
ENDING = ".sqlite"
UNFINISHED = ".part"
GRACE = 600.0
"""Seconds for which a replaced pack stays: a reader may not have seen its replacement yet."""


class PackedStep(NamedTuple):
    """A step of a pack with its files."""

    start: str
    """Start of its id."""
    name: str
    """KIND/NAME."""
    inputs: Iterable[str]
    """Starts of the ids of its inputs."""
    files: Mapping[str, bytes]


class Packs:
    """The packs in a folder, which may be missing, and an index of their steps. Safe for
    threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: list[Path] = []
        """Packs that cannot be read."""
        self.bad: set[str] = set()
        """Starts of ids of damaged steps, which count as missing until they are removed from their
        packs."""
        self._open: dict[str, sqlite3.Connection] = {}
        self._steps: dict[str, dict[str, str]] = {}
        """Pack -> start of the id -> KIND/LABEL."""
        self._replaces: dict[str, list[str]] = {}
        self._current: list[str] = []
        """Names of packs that are not replaced."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return packs_in, (self.folder.parent,)  # connections are of one process

    def refresh(self) -> None:
        """Read which packs exist."""
        with self._lock:
            damaged = {path.stem for path in self.damaged}
            names = {path.stem for path in self.folder.glob(f"[!.]*{ENDING}")} - damaged
            if names == self._open.keys():
                return
            for name in self._open.keys() - names:
                self._open.pop(name).close()
                del self._steps[name]
                del self._replaces[name]
            for name in names - self._open.keys():
                self._load(name)
            self._current = sorted(self._open.keys() - set().union(*self._replaces.values()))

    def _load(self, name: str) -> None:
        """Open a pack and read its summaries; one that cannot be read is added to `damaged`."""
        path = self.path(name)
        try:
            # no process writes to it, so that no locks are needed
            address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            opened = sqlite3.connect(address, uri=True, check_same_thread=False)
            self._steps[name] = _summary(opened, "names")
            self._replaces[name] = _summary(opened, "replaces")
            self._open[name] = opened
        except (sqlite3.Error, Damaged):
            if path.exists():  # otherwise it was removed after it was listed
                self.damaged.append(path)

    def path(self, name: str) -> Path:
        """The file of a pack."""
        return self.folder / f"{name}{ENDING}"

    def __contains__(self, start: str) -> bool:
        """Whether a step is in a pack, as of the last `refresh`."""
        return self._pack_of(start) is not None and start not in self.bad

    def _pack_of(self, start: str) -> str | None:
        with self._lock:
            return next((pack for pack in self._current if start in self._steps[pack]), None)

    def find(self, start: str) -> str | None:
        """KIND/NAME of a step by the start of its id; None when it is in no pack. New packs are
        read if necessary."""
        with self._lock:
            if self._pack_of(start) is None:
                self.refresh()
            pack = self._pack_of(start)
            return f"{self._steps[pack][start]}-{start}" if pack and start not in self.bad else None

    def read(self, start: str, file: str) -> bytes:
        """Content of a file of a step. Raises FileNotFoundError without it, and Damaged when the
        pack cannot be read."""
        query = "select content from file where start = ? and name = ?"
        rows = self._rows(start, query, start, file)
        if not rows:
            raise FileNotFoundError(f"{self.folder}: {start} has no {file}")
        try:
            return zlib.decompress(rows[0][0])
        except zlib.error:
            raise Damaged(f"{file} of {start} is damaged in {self.folder}") from None

    def files(self, start: str) -> list[str]:
        """Names of the files of a step, step.json included."""
        rows = self._rows(start, "select name from file where start = ?", start)
        return [name for (name,) in rows]

    def size(self, start: str) -> int:
        """Bytes that a step takes in its pack. Raises Damaged when the pack cannot be read."""
        rows = self._rows(start, "select length(content) from file where start = ?", start)
        return sum(size for (size,) in rows)

    def _rows(self, start: str, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Result of a query on the pack that has a step; [] when it is in no pack. New packs are
        read if necessary."""
        with self._lock:
            for _ in range(2):
                if self._pack_of(start) is None:
                    self.refresh()
                if start in self.bad or (name := self._pack_of(start)) is None:
                    return []
                try:
                    return self._open[name].execute(query, values).fetchall()
                except sqlite3.Error:  # damaged, or removed on another node
                    if self.path(name).exists():
                        break
                    self.refresh()
        raise Damaged(f"the pack with {start} in {self.folder} is damaged")

    def starts(self) -> set[str]:
        """Starts of the ids of all steps in packs, as of the last `refresh`."""
        with self._lock:
            return set().union(*(self._steps[pack] for pack in self._current)) - self.bad

    def steps(self) -> dict[str, str]:
        """Start of the id -> KIND/NAME of all steps in packs, as of the last `refresh`."""
        names = {}
        with self._lock:
            for pack in self._current:
                for start, name in self._steps[pack].items():
                    if start not in self.bad:
                        names[start] = f"{name}-{start}"
        return names

    def inputs(self) -> dict[str, str]:
        """Start of the id -> starts of the ids of its inputs, separated by spaces, for all steps in
        packs, as of the last `refresh`. Raises Damaged when a pack cannot be read."""
        inputs: dict[str, str] = {}
        with self._lock:
            for pack in self._current:
                inputs.update(_summary(self._open[pack], "inputs"))
        return inputs

    # Methods that write, for the one process that holds the claim of packs.

    def add(self, steps: Iterable[PackedStep]) -> Path:
        """Write steps to a new pack, and return its path. The pack is unfinished until `publish`
        names it."""
        return self._write(map(_compressed, steps))

    def rewrite(self, names: Collection[str], without: Collection[str] = ()) -> Path:
        """Write a pack that replaces the packs `names` and lacks the steps `without`; see `add`.

        Raises Damaged, with the name of the pack, when a pack cannot be read."""
        return self._write(self._steps_without(names, without), names)

    def _steps_without(
        self, names: Iterable[str], without: Collection[str]
    ) -> Iterator[PackedStep]:
        """The steps of the packs `names`, with compressed files, except those in `without`."""
        for pack in names:
            try:
                inputs = _summary(self._open[pack], "inputs")
                for start, name in self._steps[pack].items():
                    if start in without or self._pack_of(start) != pack:
                        continue
                    select = "select name, content from file where start = ?"
                    files = dict(self._open[pack].execute(select, (start,)))
                    yield PackedStep(start, f"{name}-{start}", inputs[start].split(), files)
            except (sqlite3.Error, Damaged):
                raise Damaged(pack) from None

    def _write(self, steps: Iterable[PackedStep], replaces: Iterable[str] = ()) -> Path:
        """Write `steps`, whose files are compressed, to a new pack; see `add`. `replaces`: names of
        packs."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f".{uuid.uuid4().hex}{UNFINISHED}"
        names = {}
        inputs = {}
        # no other process knows its path, so that no locks are needed
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?nolock=1", uri=True)) as database:
            database.executescript(f"pragma journal_mode = off; pragma synchronous = off; {TABLES}")
            for step in steps:
                names[step.start] = step.name.removesuffix(f"-{step.start}")
                inputs[step.start] = " ".join(step.inputs)
                rows = [(step.start, *file) for file in step.files.items()]
                database.executemany("insert into file values (?, ?, ?)", rows)
            summaries = {"names": names, "inputs": inputs, "replaces": list(replaces)}
            for name, content in summaries.items():
                compressed = zlib.compress(json.dumps(content).encode())
                database.execute("insert into summary values (?, ?)", (name, compressed))
            database.commit()
        return path

    def publish(self, path: Path) -> None:
        """Name an unfinished pack, after it was written to the disk."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.rename(self.path(path.stem.lstrip(".")))
        self.refresh()

    def clear(self) -> None:
        """Remove unfinished packs, and packs that were replaced long ago."""
        for path in self.folder.glob(f".*{UNFINISHED}"):
            path.unlink(missing_ok=True)
        self.refresh()
        for name, replaced in list(self._replaces.items()):
            if replaced and time.time() - self.path(name).stat().st_mtime > GRACE:
                for old in replaced:
                    self.path(old).unlink(missing_ok=True)
        self.refresh()

    def with_any(self, starts: Iterable[str]) -> set[str]:
        """Names of the packs that have any of these steps."""
        return {pack for start in starts if (pack := self._pack_of(start))}

    def sizes(self) -> dict[str, int]:
        """Name of a pack -> its bytes, for packs that are not replaced."""
        return {name: self.path(name).stat().st_size for name in self._current}


def _compressed(step: PackedStep) -> PackedStep:
    """A step with its files compressed."""
    files = {name: zlib.compress(content, 1) for name, content in step.files.items()}
    return step._replace(files=files)


def _summary(database: sqlite3.Connection, name: str) -> Any:
    """A summary of a pack: names, inputs or replaces, see TABLES. Raises Damaged."""
    try:
        ((content,),) = database.execute("select content from summary where name = ?", (name,))
        return json.loads(zlib.decompress(content))
    except (sqlite3.Error, ValueError, zlib.error):
        raise Damaged(f"{name} of a pack is damaged") from None


@lru_cache(maxsize=8)
def packs_in(store: Path) -> Packs:
    """The packs of a store, as one object for this process."""
    return Packs(store / "packs")
