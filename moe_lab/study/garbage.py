"""Free the steps of a store that no study refers to, and what killed runs left: `python -m moe_lab.study gc`."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, read_json
from moe_lab.results import places, read_record
from moe_lab.study.runs import runs, steps_at_work, studies
from moe_lab.study.status import alive, console
from moe_lab.study.store import DIGITS, SCRATCH, STEP, Store

IDENTITY_SHAPE = {"id": str, "kind": str, "inputs": {str: str}}
LEFTOVERS = "left by killed runs"


@dataclass(frozen=True)
class Garbage:
    """A folder that nothing refers to: its step's kind or LEFTOVERS, its bytes, and the step's id.

    The id is "" for scratch, which needs no renaming before it is removed.
    """

    path: Path
    kind: str
    bytes: int
    step_id: str


@dataclass(frozen=True)
class Survey:
    """What gc would free, how many finished steps it keeps for how many studies, and why it keeps more, if it does."""

    garbage: list[Garbage]
    kept: int
    studies: int
    silence: str


def gc(store: Store, *, apply: bool = False) -> None:
    """Print what nothing refers to, by kind of step with bytes; with `apply`, free it.

    A step is freed by renaming its folder as scratch, then removing the scratch: a process that is killed in between
    leaves nothing that looks finished. Only choosing and renaming keep new runs waiting. Raises UserError when a file
    that may refer to steps is damaged, and when folders cannot be removed.
    """
    if not apply:
        survey = look(store)
        _print(store, survey)
        if survey.garbage:
            print(f"nothing was freed; this frees it: python -m moe_lab.study gc apply=true store={store.root}")
        return
    Store(store.root).create()  # whether one may write there
    hidden: list[tuple[Garbage, Path]] = []
    with store.choosing():
        survey = look(store)
        _print(store, survey)
        for item in survey.garbage:
            if path := store.hide(item.path, item.step_id) if item.step_id else item.path:
                hidden.append((item, path))
    for _, path in hidden:
        shutil.rmtree(path, ignore_errors=True)
    store.claims.clear()
    freed = [item.bytes for item, path in hidden if not path.exists()]
    if survey.garbage:
        print(f"freed {_size(sum(freed))} in {len(freed)} folders")
    if stuck := [path for _, path in hidden if path.exists()]:
        raise UserError(
            f"store={store.root}: {len(stuck)} folders cannot be removed, such as {stuck[0]}: see who owns it"
        )


def look(store: Store) -> Survey:
    """Find what nothing refers to. Changes nothing. Raises UserError when a file that may refer to steps is damaged."""
    wanted, names, silence = _wanted(store)
    if store.notices:
        raise _unclear(store, store.notices[0])
    finished = store.finished()
    kept: set[Path] = set()
    queue = list(wanted)
    while queue:
        for folder in finished.get(queue.pop(), ()):
            if folder not in kept:
                kept.add(folder)
                queue += _inputs(store, folder)
    steps = [_step(folder) for folders in finished.values() for folder in folders if folder not in kept]
    return Survey([*filter(None, steps), *_leftovers(store, wanted)], len(kept), names, silence)


def _leftovers(store: Store, wanted: Set[str]) -> Iterator[Garbage]:
    """Scratch, and resume files of steps that are not wanted, unless a process is working on the step."""
    for path in store.root.glob("*/.*"):
        if SCRATCH.fullmatch(path.name) and not store.locked(path.name[1 : 1 + DIGITS]):
            yield Garbage(path, LEFTOVERS, _bytes(path), "")
    for path in (store.root / "partial").glob("[!.]*"):
        if path.name[:DIGITS] not in wanted and not store.locked(path.name):
            yield Garbage(path, LEFTOVERS, _bytes(path), path.name)


def _wanted(store: Store) -> tuple[set[str], int, str]:
    """Starts of the ids of the steps that runs and records refer to; the number of studies; and why the scheduler could
    not be asked, or "".

    First those of runs that a process holds, then those of jobs in the queue, then records: a run is let go, and a job
    leaves the queue, after the record refers to what was made. So no step is between them.
    """
    wanted = {step[:DIGITS] for step in steps_at_work(store)}
    runs_of = {study: runs(store, study) for study in studies(store)}
    jobs_of = {run.folder: run.jobs for of_study in runs_of.values() for run in of_study}
    jobs = {job.id: job for of_run in jobs_of.values() for job in of_run}
    queue, silence = alive(jobs) if jobs else ({}, "")
    for study, of_study in runs_of.items():
        recorded = ""
        if document := _record(store, study):
            recorded = document["run"]
            wanted.update(place[-DIGITS:] for place in places(document))
        for run in of_study:
            if (about := run.about) is None:  # killed before it was written, so it had done nothing
                continue
            queued = any(job.id in queue or silence for job in jobs_of[run.folder])
            if run is of_study[-1] or run.folder.name > recorded or queued:
                wanted.update(step[:DIGITS] for step, _, _ in about["steps"])
    return wanted, len(runs_of), silence


def _record(store: Store, study: str) -> dict[str, Any] | None:
    try:
        return read_record(store.root, study)
    except Damaged as error:
        raise _unclear(store, str(error)) from None


def _inputs(store: Store, folder: Path) -> list[str]:
    """Starts of the ids of the inputs of a finished step."""
    try:
        identity = read_json(folder / STEP, IDENTITY_SHAPE)
    except (FileNotFoundError, Damaged):
        raise _unclear(store, f"{folder.relative_to(store.root)}: {STEP} is missing or damaged") from None
    return [place[-DIGITS:] for place in identity["inputs"].values()]


def _unclear(store: Store, reason: str) -> UserError:
    return UserError(
        f"store={store.root}: nothing is freed while it is unclear what is still needed: {reason} (start the study "
        "again, or remove it)"
    )


def _step(folder: Path) -> Garbage | None:
    """The finished step in a folder; None when its identity does not say that it is one."""
    with suppress(FileNotFoundError, Damaged):
        identity = read_json(folder / STEP, IDENTITY_SHAPE)
        if identity["kind"] == folder.parent.name and identity["id"].startswith(folder.name[-DIGITS:]):
            return Garbage(folder, identity["kind"], _bytes(folder), identity["id"])
    return None


def _bytes(folder: Path) -> int:
    """Bytes of all files in a folder, which another process may be removing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _print(store: Store, survey: Survey) -> None:
    """Print a row per kind of step that would be freed."""
    groups: dict[str, list[int]] = defaultdict(list)
    for item in survey.garbage:
        groups[item.kind].append(item.bytes)
    if groups:
        table = Table("step", "number", "size", title="what no study refers to", show_footer=True)
        for kind, sizes in groups.items():
            table.add_row(kind, str(len(sizes)), _size(sum(sizes)))
        every = [item.bytes for item in survey.garbage]
        for column, text in zip(table.columns, ("all", str(len(every)), _size(sum(every))), strict=True):
            column.footer = text
        console.print(table)
    else:
        print(f"store={store.root}: there is nothing to free")
    if store.url and survey.garbage:
        print(f"{store.url} keeps what is freed here")
    word = "study" if survey.studies == 1 else "studies"
    print(f"kept: {survey.kept} finished steps, of {survey.studies} {word} and of running processes")
    if survey.silence:
        print(f"{survey.silence}; so the steps of all studies that were submitted are kept")


def _size(number: float) -> str:
    """A number of bytes as text: 12 B, 3.4 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
