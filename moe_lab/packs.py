"""Packs: files of a store that each hold the results of many small steps, since clusters limit the
number of files.

When a store has many small steps, they are copied into a pack, and their folders are removed. A
pack, packs/NAME.sqlite, is a database that needs no locks: it is written once, under another name,
and then never changed. A new pack can replace older packs.
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

from moe_lab.json_files import Damaged, content_of

TABLES = """
pragma page_size = 65536;
create table file (start text, name text, content blob, primary key (start, name));
create table about (what text primary key, content blob);
"""
"""Tables of a pack. The "start" of a step is its id's first digits, which are in the name of its
folder.

file: the compressed files of steps, including step.json.
about: compressed JSON documents about all steps of the pack, by their names in the column "what":
names     start of a step -> KIND/LABEL; the name of the step's folder is LABEL-START
inputs    start of a step -> starts of the step's inputs, separated by spaces
replaces  names of the packs that this pack replaces

With large pages, reading takes fewer system calls."""
ENDING = ".sqlite"
PART_ENDING = ".part"
"""Ending of a pack that is being written."""
GRACE = 600.0
"""Seconds for which a replaced pack stays, as readers may not have seen the new pack yet."""


class PackedStep(NamedTuple):
    """A step of a pack with its files."""

    id_start: str
    """First digits of the step's id."""
    name: str
    """KIND/LABEL-START, the folder of the step."""
    inputs: Iterable[str]
    """First digits of the ids of the step's inputs."""
    files: Mapping[str, bytes]
    """Name of a file -> content."""


class Packs:
    """The packs in one folder, and an index of their steps. The folder need not exist. Threads can
    share an object of this class.

    In all methods, `id_start` is the first digits of a step's id, and `pack` is the name of a pack.
    The name of a step is KIND/LABEL-START, where START stands for its `id_start`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged_packs: list[Path] = []
        self.damaged_steps: set[str] = set()
        """`id_start` of each damaged step. A damaged step counts as missing until it is removed
        from its pack."""
        self._connections: dict[str, sqlite3.Connection] = {}
        """Name of a pack -> open connection."""
        self._steps: dict[str, dict[str, str]] = {}
        """Name of a pack -> `id_start` of a step -> KIND/LABEL of the step."""
        self._replaces: dict[str, list[str]] = {}
        """Name of a pack -> names of the older packs that it replaces."""
        self._current_packs: list[str] = []
        """Names of the packs that no other pack replaces, sorted."""
        self._pack_of: dict[str, str] = {}
        """`id_start` of a step -> name of the first pack in `_current_packs` that has the step."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        # pickled as a call of `packs_in`, since another process opens connections of its own
        return packs_in, (self.folder.parent,)

    def refresh(self) -> None:
        """Update the index to the packs that are now in the folder."""
        with self._lock:
            damaged = {path.stem for path in self.damaged_packs}
            names = {path.stem for path in self.folder.glob(f"[!.]*{ENDING}")} - damaged
            if names == self._connections.keys():
                return
            for name in self._connections.keys() - names:
                self._connections.pop(name).close()
                del self._steps[name]
                del self._replaces[name]
            for name in names - self._connections.keys():
                self._load(name)
            self._current_packs = sorted(
                self._connections.keys() - set().union(*self._replaces.values())
            )
            pack_of: dict[str, str] = {}
            for name in reversed(self._current_packs):
                pack_of.update(dict.fromkeys(self._steps[name], name))
            self._pack_of = pack_of

    def _load(self, name: str) -> None:
        """Open a pack and add it to the index."""
        path = self.path(name)
        try:
            # no process writes to a finished pack, so no locks are needed
            address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            self._steps[name] = _document(connection, "names")
            self._replaces[name] = _document(connection, "replaces")
            self._connections[name] = connection
        except (sqlite3.Error, Damaged):
            if path.exists():  # otherwise the pack was removed after it was listed
                self.damaged_packs.append(path)

    def path(self, name: str) -> Path:
        """The file of a pack."""
        return self.folder / f"{name}{ENDING}"

    def __contains__(self, id_start: str) -> bool:
        """Whether an undamaged step is in a pack, as of the last `refresh`."""
        return id_start in self._pack_of and id_start not in self.damaged_steps

    def find(self, id_start: str) -> str | None:
        """Name of a step; None when no pack has the step, or the step is damaged."""
        with self._lock:
            if id_start not in self._pack_of:
                self.refresh()
            if id_start not in self:
                return None
            return f"{self._steps[self._pack_of[id_start]][id_start]}-{id_start}"

    def read(self, id_start: str, file: str) -> bytes:
        """Content of a file of a step. Raises FileNotFoundError when no pack has the file, and
        Damaged when the file or the pack cannot be read."""
        query = "select content from file where start = ? and name = ?"
        rows = self._rows(id_start, query, id_start, file)
        if not rows:
            raise FileNotFoundError(f"{self.folder}: {id_start} has no {file}")
        try:
            return zlib.decompress(rows[0][0])
        except zlib.error:
            raise Damaged(f"{file} of {id_start} is damaged in {self.folder}") from None

    def read_from(self, folder: Path, file: str) -> bytes:
        """Content of a file of a step: from the folder of the step, or else from a pack. Raises the
        errors of `read`."""
        try:
            return content_of(folder / file)
        except FileNotFoundError:
            return self.read(folder.name.rpartition("-")[2], file)

    def files(self, id_start: str) -> list[str]:
        """Names of the files of a step, including step.json; [] when no pack has the step. Raises
        Damaged when the pack cannot be read."""
        rows = self._rows(id_start, "select name from file where start = ?", id_start)
        return [name for (name,) in rows]

    def size(self, id_start: str) -> int:
        """Bytes of a step's compressed files; 0 when no pack has the step. Raises Damaged when the
        pack cannot be read."""
        rows = self._rows(id_start, "select length(content) from file where start = ?", id_start)
        return sum(size for (size,) in rows)

    def _rows(self, id_start: str, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Rows that the SQL `query` selects in the pack with step `id_start`; [] when no pack has
        the step."""
        with self._lock:
            # try again if another process has replaced and removed the pack meanwhile
            for _ in range(2):
                if id_start not in self._pack_of:
                    self.refresh()
                if id_start not in self:
                    return []
                name = self._pack_of[id_start]
                try:
                    return self._connections[name].execute(query, values).fetchall()
                except sqlite3.Error:  # the pack is damaged, or was removed on another node
                    if self.path(name).exists():
                        break
                    self.refresh()
        raise Damaged(f"the pack with {id_start} in {self.folder} is damaged")

    def steps(self) -> dict[str, str]:
        """`id_start` -> name, for all undamaged steps in packs, as of the last `refresh`."""
        names = {}
        with self._lock:
            # without calls in the loop, as there may be millions of steps
            for id_start, pack in self._pack_of.items():
                if id_start not in self.damaged_steps:
                    names[id_start] = f"{self._steps[pack][id_start]}-{id_start}"
        return names

    def inputs(self) -> dict[str, str]:
        """`id_start` of a step -> the `id_start` of each of its inputs, in one text with spaces
        between them. Raises Damaged when a pack cannot be read."""
        inputs: dict[str, str] = {}
        with self._lock:
            for pack in self._current_packs:
                inputs.update(_document(self._connections[pack], "inputs"))
        return inputs

    # Methods that write, for the one process that holds the claim of packs.

    def add(self, steps: Iterable[PackedStep]) -> Path:
        """Write steps to a new pack, and return its path. Readers do not see the pack until
        `publish` renames it."""
        return self._write(map(_compress, steps))

    def rewrite(self, packs: Collection[str], dropped: Collection[str] = ()) -> Path:
        """Write the steps of some packs to one new pack, and return its path. The new pack replaces
        them once `publish` is called. `dropped`: `id_start` of each step that is left out. Raises
        Damaged when a pack cannot be read."""
        return self._write(self._remaining_steps(packs, dropped), packs)

    def _remaining_steps(
        self, packs: Iterable[str], dropped: Collection[str]
    ) -> Iterator[PackedStep]:
        """The steps of some packs except `dropped`, with compressed files."""
        for pack in packs:
            try:
                inputs = _document(self._connections[pack], "inputs")
                for id_start, kind_and_label in self._steps[pack].items():
                    # of several packs with the same step, only the first in the index yields it
                    if id_start in dropped or self._pack_of.get(id_start) != pack:
                        continue
                    select = "select name, content from file where start = ?"
                    files = dict(self._connections[pack].execute(select, (id_start,)))
                    yield PackedStep(
                        id_start, f"{kind_and_label}-{id_start}", inputs[id_start].split(), files
                    )
            except (sqlite3.Error, Damaged):
                raise Damaged(pack) from None

    def _write(self, steps: Iterable[PackedStep], replaces: Iterable[str] = ()) -> Path:
        """Write a new pack, which is not published yet, and return its path. `steps`: steps with
        compressed files. `replaces`: names of the packs that the new pack replaces."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f".{uuid.uuid4().hex}{PART_ENDING}"
        names = {}
        inputs = {}
        # no other process knows the path, so no locks are needed
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?nolock=1", uri=True)) as database:
            database.executescript(f"pragma journal_mode = off; pragma synchronous = off; {TABLES}")
            for step in steps:
                # KIND/LABEL
                names[step.id_start] = step.name.removesuffix(f"-{step.id_start}")
                inputs[step.id_start] = " ".join(step.inputs)
                rows = [(step.id_start, *file) for file in step.files.items()]
                database.executemany("insert into file values (?, ?, ?)", rows)
            documents = {"names": names, "inputs": inputs, "replaces": list(replaces)}
            for name, document in documents.items():
                compressed = zlib.compress(json.dumps(document).encode())
                database.execute("insert into about values (?, ?)", (name, compressed))
            database.commit()
        return path

    def publish(self, path: Path) -> None:
        """Flush the pack in `path` to the disk, and give the pack its final name. `path`: result of
        `add` or `rewrite`."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        # the name without the dot that hides unfinished packs
        path.rename(self.path(path.stem.lstrip(".")))
        self.refresh()

    def clear(self) -> None:
        """Remove the files of packs that were never published, and of packs that were replaced more
        than GRACE seconds ago."""
        for path in self.folder.glob(f".*{PART_ENDING}"):
            path.unlink(missing_ok=True)
        self.refresh()
        for name, replaced_names in list(self._replaces.items()):
            # the last write to the file of a pack is shortly before the pack replaces others
            if replaced_names and time.time() - self.path(name).stat().st_mtime > GRACE:
                for old_name in replaced_names:
                    self.path(old_name).unlink(missing_ok=True)
        self.refresh()

    def packs_with(self, id_starts: Iterable[str]) -> set[str]:
        """Names of the packs that have at least one of the steps `id_starts`."""
        return {self._pack_of[start] for start in id_starts if start in self._pack_of}

    def sizes(self) -> dict[str, int]:
        """Name of a pack -> bytes of its file, for all packs that no other pack replaces."""
        return {name: self.path(name).stat().st_size for name in self._current_packs}


def _compress(step: PackedStep) -> PackedStep:
    files = {name: zlib.compress(content, 1) for name, content in step.files.items()}
    return step._replace(files=files)


def _document(database: sqlite3.Connection, name: str) -> Any:
    """The JSON document `name` in the table "about" of a pack; TABLES describes the documents."""
    try:
        # one row, with one column
        ((content,),) = database.execute("select content from about where what = ?", (name,))
        return json.loads(zlib.decompress(content))
    except (sqlite3.Error, ValueError, zlib.error):
        raise Damaged(f"{name} of a pack is damaged") from None


@lru_cache(maxsize=8)
def packs_in(store: Path) -> Packs:
    """The packs of the store in the folder `store`. All callers in a process share one object."""
    return Packs(store / "packs")
