"""Copy finished steps from the stores in `also`, such as those of colleagues, which are only
read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Document
from moe_lab.study.claims import Busy
from moe_lab.study.packing import MANY, Packing
from moe_lab.study.provenance import STEP, file_entry
from moe_lab.study.schedule import inform
from moe_lab.study.step import Step, unmerged
from moe_lab.study.store import Store

LARGE = 64 << 20
"""Minimum bytes of a file to which a link is made instead of a copy."""
THREADS = 8
"""Number of steps that are copied at the same time, as most of the time is waiting for a disk."""


def open_other(path: str) -> Store:
    """The store in the folder `path`. Raises UserError when the folder holds no store, or cannot be
    read."""
    try:
        other = Store(path)
        problem = "" if other.exists() else "no store is there"
    except (OSError, UserError) as error:
        problem = str(error)
    if problem:
        raise UserError(f"also={path}: {problem}: expected the folder of a store")
    return other


def finished_in(other: Store, steps: Iterable[Step]) -> dict[str, str]:
    """Id -> KIND/NAME, for those of `steps` that are finished in `other`."""
    with other.errors_as_sentences():
        names_by_start = other.finished_names()
    return {
        step.id: names_by_start[step.id_start] for step in steps if step.id_start in names_by_start
    }


def copy_from(store: Store, path: str, steps: Sequence[Step]) -> None:
    """Copy into `store` those of `steps` that are finished only in the store at `path`. Steps that
    are damaged, or that another process is computing, are not copied."""
    other = open_other(path)
    names_of = finished_in(other, steps)
    for pack in other.packs.damaged_packs:
        store.notices.append(f"also={other.root}: {pack} is damaged: its steps are computed again")
    done = store.finished_ids(steps)
    # steps whose results a finished step has merged are not needed, so they are not copied
    needed = unmerged(steps, done | names_of.keys())
    names = [names_of[step.id] for step in needed if step.id in names_of and step.id not in done]
    if not names:
        return
    inform(f"taking {len(names)} finished steps from also={other.root}")
    with other.errors_as_sentences():
        packing = Packing(store)
        with ThreadPoolExecutor(THREADS) as threads:
            # copied steps are folders until `pack` moves them into a pack: calling it after every
            # MANY steps bounds the number of folders
            for first in range(0, len(names), MANY):
                batch = names[first : first + MANY]
                # `list` waits until the batch is copied, and raises errors of the threads
                list(threads.map(partial(_copy_step, store, other), batch))
                packing.pack()


def _copy_step(store: Store, other: Store, name: str) -> None:
    """Copy the step `name` (KIND/NAME) from `other` to `store`."""
    file = STEP
    try:
        document = other.document(name)
        with store.claim_named(name, document) as scratch:
            if scratch is None:  # the step is finished in `store`
                return
            for file, expected in document["files"].items():
                target = scratch / file
                # a damaged STEP may name a file that is not in the folder of the step
                if not target.resolve().is_relative_to(scratch.resolve()):
                    raise Damaged(file)
                target.parent.mkdir(parents=True, exist_ok=True)
                _copy_file(other, name, file, expected, target)
    except (Damaged, FileNotFoundError, PermissionError):
        store.notices.append(
            f"also={other.root}: {name}: {file} is missing or damaged: computed again where it is "
            "needed"
        )
    except Busy:
        pass


def _copy_file(other: Store, name: str, file: str, expected: Document, target: Path) -> None:
    """Copy the file `file` of the step `name` to the path `target`, or make a link to it.
    `expected`: entry of the file in STEP."""
    path = other.folder(name) / file
    if expected["bytes"] < LARGE or not os.access(path, os.R_OK):
        target.write_bytes(other.content(name, file))
        return
    target.symlink_to(os.path.realpath(path))
    if file_entry(target) != expected:
        raise Damaged(file)
