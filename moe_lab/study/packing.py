"""Move small steps of a store into packs, take steps out of packs, and put packs together: under
one claim.

A step is finished as a folder, which others see at once, and which nothing can lose. Only when a
store has many of them, they are copied into a pack, and then their folders are removed.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from moe_lab.json_files import Damaged
from moe_lab.packs import PackedStep
from moe_lab.results import DIGITS
from moe_lab.study.claims import Busy, Claim
from moe_lab.study.integrity import STEP, read_step
from moe_lab.study.step import KINDS
from moe_lab.study.store import Store, hide

PACKS = "packs"
"""The claim of whoever writes packs."""
SMALL = 1 << 20
"""Most bytes of a step that is put into a pack."""
MANY = 500
"""Minimum number of loose small steps before packing."""
AT_ONCE = 5000
"""Most steps that are put into one pack at a time."""
EVERY = 60.0
"""Seconds between two packs that a process writes."""
FULL = 1 << 26
"""Bytes from which a pack is not merged with others."""
MOST_PACKS = 32
"""Packs with fewer than FULL bytes: when there are more, they are merged."""


class Packing:
    """What one process packs of a store, from time to time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.large: set[str] = set()
        """Starts of ids of steps that are too large."""
        self.next = time.monotonic() + EVERY

    def pack_regularly(self) -> None:
        """Pack small steps, where there are many, at most once a minute."""
        if time.monotonic() > self.next:
            self.next = time.monotonic() + EVERY
            self.pack()

    def pack(self, *, last: bool = False) -> None:
        """Pack small steps, if there are at least MANY and no other process does; at the end of a
        run (`last`) any number, if the store has packs. After an error, as on a full disk, they
        stay in folders, with a notice: no run fails for it."""
        try:
            self._pack(last)
        except (OSError, sqlite3.Error) as error:
            self.store.notices.append(
                f"store={self.store.root}: small steps stay in folders of their own: {error}"
            )

    def _pack(self, last: bool) -> None:
        store = self.store
        if store.packs.bad:
            drop(store, store.packs.bad)
        loose: dict[str, Path] = {}
        for name, kind in KINDS.items():
            if kind.small:
                loose.update(store.folders(name))
        for start in self.large & loose.keys():
            del loose[start]
        if not loose:
            return
        if len(loose) < MANY and not (last and store.packs.starts()):
            return
        with suppress(Busy), store.claims.take(PACKS) as claim:
            store.make_folder(store.packs.folder)
            store.packs.clear()
            new = [(start, folder) for start, folder in loose.items() if start not in store.packs]
            small = self._small(new[:AT_ONCE])
            if first := next(small, None):
                _publish(store, store.packs.add(chain([first], small)), claim)
            for start in loose.keys() & store.packs.starts():
                with suppress(FileNotFoundError):
                    shutil.rmtree(hide(loose[start], start), ignore_errors=True)
            small_packs = [name for name, size in store.packs.sizes().items() if size < FULL]
            if len(small_packs) > MOST_PACKS:
                _rewrite(store, small_packs, (), claim)

    def _small(self, folders: Iterable[tuple[str, Path]]) -> Iterator[PackedStep]:
        """The undamaged steps of the folders that go into a pack."""
        for start, folder in folders:
            with suppress(FileNotFoundError, Damaged):
                document = read_step(folder)
                published = document["files"]
                size = sum(entry["bytes"] for entry in published.values())
                if size > SMALL or any("/" in name for name in published):
                    self.large.add(start)
                    continue
                files = {name: (folder / name).read_bytes() for name in published}
                hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
                if any(hashes[name] != entry["sha256"] for name, entry in published.items()):
                    continue
                files[STEP] = (folder / STEP).read_bytes()
                name = f"{folder.parent.name}/{folder.name}"
                yield PackedStep(start, name, _inputs(document), files)


def take(store: Store, other: Store, names: Sequence[str]) -> None:
    """Copy undamaged steps, KIND/NAME, from packs of another store into packs of this one, if they
    are at least MANY. Does nothing where that fails, as on a full disk: copying them singly reports
    it."""
    packed = [name for name in names if name[-DIGITS:] in other.packs]
    if len(packed) < MANY:
        return
    with suppress(Busy, OSError, sqlite3.Error), store.claims.take(PACKS) as claim:
        store.make_folder(store.packs.folder)
        for at in range(0, len(packed), AT_ONCE):
            _publish(store, store.packs.add(_sound(other, packed[at : at + AT_ONCE])), claim)


def _sound(other: Store, names: Iterable[str]) -> Iterator[PackedStep]:
    for name in names:
        if not other.damage(name, hash_all=True):
            start = name[-DIGITS:]
            files = {file: other.packs.read(start, file) for file in other.packs.files(start)}
            yield PackedStep(start, name, _inputs(other.document(name)), files)


def _inputs(document: Mapping[str, Any]) -> list[str]:
    return [name[-DIGITS:] for name in document["inputs"].values()]


def drop(store: Store, starts: Collection[str]) -> None:
    """Take steps, by the starts of their ids, out of their packs."""
    with store.claims.wait_for(PACKS) as claim:
        store.packs.refresh()
        for name in store.packs.with_any(starts):
            _rewrite(store, [name], starts, claim)
        store.packs.bad -= set(starts)


def _rewrite(store: Store, names: Collection[str], without: Collection[str], claim: Claim) -> None:
    """Replace packs by one without some of their steps. One that cannot be read is set aside as a
    whole."""
    try:
        _publish(store, store.packs.rewrite(names, without), claim)
    except Damaged as error:
        store.set_aside(store.packs.path(str(error)), "damaged", "its steps are computed again")


def _publish(store: Store, path: Path, claim: Claim) -> None:
    claim.check()
    store.share(path)
    store.packs.publish(path)
