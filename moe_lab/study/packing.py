"""Move small steps of a store into packs, remove steps from packs, and merge packs, under one
claim.

A finished step is first a folder, which other processes see at once. When a store has many small
steps, they are copied into a pack, and only then their folders are removed.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path

from moe_lab.json_files import Damaged
from moe_lab.packs import PackedStep
from moe_lab.result_files import start_of
from moe_lab.study.claims import Busy, Claim
from moe_lab.study.provenance import STEP, read_step
from moe_lab.study.step import KINDS
from moe_lab.study.store import Store, rename_as_scratch

PACKS = "packs"
"""Claim of the process that writes packs."""
SMALL = 1 << 20
"""Maximum bytes of a step in a pack."""
MANY = 500
"""Minimum number of loose small steps before packing."""
STEPS_PER_PACK = 5000
"""Maximum number of steps that are written to a new pack."""
PACK_INTERVAL = 60.0
"""Minimum seconds between two packs that a process writes."""
FULL = 1 << 26
"""Minimum bytes of a pack that is not merged with others."""
MOST_PACKS = 32
"""Maximum number of packs with fewer than FULL bytes: when there are more, they are merged."""


class Packing:
    """Moves small steps of a store from folders into packs, from time to time. A pack is a file
    that holds many steps."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.unpackable_steps: set[str] = set()
        """First digits of the ids of steps that are too large for packs or have subfolders."""
        self.next_time = time.monotonic() + PACK_INTERVAL
        """Monotonic time, in seconds, before which `pack_regularly` does nothing."""

    def pack_regularly(self) -> None:
        """Call `pack`, at most every PACK_INTERVAL seconds."""
        if time.monotonic() > self.next_time:
            self.next_time = time.monotonic() + PACK_INTERVAL
            self.pack()

    def pack(self, *, last: bool = False) -> None:
        """Move small steps from folders into a pack, unless another process is writing packs. If
        fewer than MANY small steps are in folders, they stay there. At the end of a run (`last`),
        any number of steps is moved if the store already has packs. An error, such as that of a
        full disk, becomes a notice, so that the run continues."""
        try:
            self._pack(last)
        except (OSError, sqlite3.Error) as error:
            self.store.notices.append(
                f"store={self.store.root}: small steps stay in folders of their own: {error}"
            )

    def _pack(self, last: bool) -> None:
        """Do what `pack` describes, but let errors be raised."""
        store = self.store
        if store.packs.damaged_steps:
            remove_from_packs(store, store.packs.damaged_steps)
        folders: dict[str, Path] = {}
        for kind, step_class in KINDS.items():
            if step_class.small:
                folders.update(store.folders_of_kind(kind))
        for id_start in self.unpackable_steps & folders.keys():
            del folders[id_start]
        if not folders:
            return
        if len(folders) < MANY and not (last and store.packs.steps()):
            return
        with suppress(Busy), store.claims.take(PACKS) as claim:
            store.make_folder(store.packs.folder)
            store.packs.clear()
            candidates = [
                (id_start, folder)
                for id_start, folder in folders.items()
                if id_start not in store.packs
            ]
            small_steps = self._small_steps(candidates[:STEPS_PER_PACK])
            if first := next(small_steps, None):  # without a first step, no pack is written
                _publish(store, store.packs.add(chain([first], small_steps)), claim)
            # remove folders of the steps packed now, and of steps that a killed process had packed
            for id_start in folders.keys() & store.packs.steps().keys():
                with suppress(FileNotFoundError):
                    shutil.rmtree(
                        rename_as_scratch(folders[id_start], id_start), ignore_errors=True
                    )
            small_packs = [name for name, size in store.packs.sizes().items() if size < FULL]
            if len(small_packs) > MOST_PACKS:
                _rewrite(store, small_packs, (), claim)  # no step is left out

    def _small_steps(self, folders: Iterable[tuple[str, Path]]) -> Iterator[PackedStep]:
        """The small, undamaged steps in `folders`, read for a pack. `folders`: pairs (start of a
        step's id, its folder)."""
        for id_start, folder in folders:
            with suppress(FileNotFoundError, Damaged):
                document = read_step(folder)
                entries = document["files"]
                size = sum(entry["bytes"] for entry in entries.values())
                # a pack stores no subfolders
                if size > SMALL or any("/" in name for name in entries):
                    self.unpackable_steps.add(id_start)
                    continue
                files = {name: (folder / name).read_bytes() for name in entries}
                hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
                if any(hashes[name] != entry["sha256"] for name, entry in entries.items()):
                    continue
                files[STEP] = (folder / STEP).read_bytes()
                name = f"{folder.parent.name}/{folder.name}"
                inputs = [start_of(needed) for needed in document["inputs"].values()]
                yield PackedStep(id_start, name, inputs, files)


def remove_from_packs(store: Store, id_starts: Collection[str]) -> None:
    """Remove steps from packs. `id_starts`: first digits of the ids of the steps."""
    with store.claims.wait_for(PACKS) as claim:
        store.packs.refresh()
        for name in store.packs.packs_with(id_starts):
            _rewrite(store, [name], id_starts, claim)
        store.packs.damaged_steps -= set(id_starts)


def _rewrite(
    store: Store, names: Collection[str], id_starts: Collection[str], claim: Claim
) -> None:
    """Replace the packs `names` by one new pack. `id_starts`: first digits of the ids of the steps
    to leave out."""
    try:
        _publish(store, store.packs.rewrite(names, id_starts), claim)
    except Damaged as error:
        # the text of the error is the name of the damaged pack
        store.set_aside(store.packs.path(str(error)), "damaged", "its steps are computed again")


def _publish(store: Store, path: Path, claim: Claim) -> None:
    """Publish the new pack in the file `path`. Raises Busy if another process has taken over the
    claim."""
    claim.check()
    store.share(path)
    store.packs.publish(path)
