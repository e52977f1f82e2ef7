"""Free the steps of a store that no study refers to, and what killed runs left:
`python -m moe_lab.study gc`."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal
from rich.table import Table

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged
from moe_lab.results import DIGITS, places, read_record
from moe_lab.study.claims import Busy
from moe_lab.study.integrity import read_step
from moe_lab.study.packing import PACKS, drop
from moe_lab.study.runs import CHOOSING, runs, steps_at_work, studies
from moe_lab.study.status import alive, console
from moe_lab.study.store import SCRATCH, Store, hide

LEFTOVERS = "left by killed runs"


@dataclass(frozen=True)
class Garbage:
    """What nothing refers to: a folder, None in a pack; its step's kind or LEFTOVERS; its bytes;
    the start of its id.

    That is "" for scratch, which needs no renaming before it is removed.
    """

    path: Path | None
    kind: str
    bytes: int
    step_id: str


def gc(store: Store, *, apply: bool = False) -> int:
    """Print what nothing refers to, by kind of step with bytes; with `apply`, free it.

    A step's folder is first renamed as scratch: a process that is killed then leaves nothing that
    looks finished. Only choosing and renaming keep new runs waiting. UserError when a file that may
    refer to steps is damaged, and when folders cannot be removed."""
    removed: list[Path] = []
    if apply:
        Store(store.root).create()  # whether one may write there
    with store.claims.wait_for(CHOOSING) if apply else nullcontext():
        garbage, silence = look(store)
        packed = [item.step_id for item in garbage if item.path is None]
        if apply and packed:
            drop(store, packed)
        for item in garbage if apply else ():
            if item.path and not item.step_id:
                removed.append(item.path)
            elif item.path:
                # not what is worked on
                with suppress(Busy, FileNotFoundError), store.claims.take(item.step_id):
                    removed.append(hide(item.path, item.step_id))
    _print(store, garbage, silence)
    if not apply:
        if garbage:
            print(
                "nothing was freed; this frees it: python -m moe_lab.study gc apply=true "
                f"store={store.root}"
            )
        return 0
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    with suppress(Busy), store.claims.take(PACKS):
        store.packs.clear()
    store.claims.clear()
    if stuck := [path for path in removed if path.exists()]:
        raise UserError(
            f"store={store.root}: {len(stuck)} folders cannot be removed, such as {stuck[0]}: see "
            "who owns it"
        )
    return 0


def look(store: Store) -> tuple[list[Garbage], str]:
    """What nothing refers to, and why the scheduler could not be asked, or "". Changes nothing.

    Raises UserError when a file that may refer to steps is damaged.
    """
    wanted, silence = _wanted(store)
    if store.notices:
        raise _unclear(store, store.notices[0])
    finished = store.loose()
    store.packs.refresh()
    packed = store.packs.steps()
    kept: set[str] = set()
    queue = list(wanted)
    try:
        for path in store.packs.damaged:
            raise Damaged(f"{path} is damaged")
        inputs = store.packs.inputs()
        while queue:
            if (start := queue.pop()) not in kept:
                kept.add(start)
                abouts = [read_step(folder) for folder in finished.get(start, ())]
                queue += [place[-DIGITS:] for about in abouts for place in about["inputs"].values()]
                queue += inputs.get(start, "").split()
        unneeded = {start: store.packs.size(start) for start in packed.keys() - kept}
    except (FileNotFoundError, Damaged) as error:
        raise _unclear(store, str(error)) from None
    steps = [
        _step(folder)
        for start, folders in finished.items()
        for folder in folders
        if start not in kept
    ]
    in_packs = [
        Garbage(None, packed[start].partition("/")[0], size, start)
        for start, size in unneeded.items()
    ]
    return [*filter(None, steps), *in_packs, *_leftovers(store, wanted)], silence


def _leftovers(store: Store, wanted: Set[str]) -> Iterator[Garbage]:
    """Scratch, and resume files of steps that are not wanted, unless a process is working on the
    step."""
    scratch = {
        path: match[1]
        for path in store.root.glob("*/.*")
        if (match := SCRATCH.fullmatch(path.name))
    }
    partial = [path for path in (store.root / "partial").glob("[!.]*") if path.name not in wanted]
    # looked up last, as a step is claimed before its folders are made
    claimed = store.claims.living()
    yield from (
        Garbage(path, LEFTOVERS, _bytes(path), "")
        for path, start in scratch.items()
        if start not in claimed
    )
    yield from (
        Garbage(path, LEFTOVERS, _bytes(path), path.name)
        for path in partial
        if path.name not in claimed
    )


def _wanted(store: Store) -> tuple[set[str], str]:
    """Starts of the ids of the steps that runs and records refer to; and why the scheduler could
    not be asked, or "".

    First those of runs that a process holds, then those of jobs in the queue, then records: a run
    is let go, and a job leaves the queue, after the record refers to what was made. So no step is
    between them.
    """
    wanted = steps_at_work(store)
    runs_of = {study: runs(store, study) for study in studies(store)}
    jobs_of = {run.folder: run.jobs for of_study in runs_of.values() for run in of_study}
    jobs = {job.id: job for of_run in jobs_of.values() for job in of_run}
    queue, silence = alive(jobs) if jobs else ({}, "")
    for study, of_study in runs_of.items():
        try:
            record = read_record(store.root, study) or {"run": ""}
        except Damaged as error:
            raise _unclear(store, str(error)) from None
        wanted.update(place[-DIGITS:] for place in places(record))
        for run in of_study:
            queued = any(job.id in queue or silence for job in jobs_of[run.folder])
            counts = run is of_study[-1] or run.folder.name > record["run"] or queued
            # without it, the run was killed before it did anything
            if counts and (about := run.about):
                wanted.update(folder[-DIGITS:] for folder in about["steps"])
    return wanted, silence


def _unclear(store: Store, reason: str) -> UserError:
    return UserError(
        f"store={store.root}: nothing is freed while it is unclear what is still needed: {reason} "
        "(start the study "
        "again, or remove it)"
    )


def _step(folder: Path) -> Garbage | None:
    """The finished step in a folder; None when its identity does not say that it is one."""
    with suppress(FileNotFoundError, Damaged):
        identity = read_step(folder)
        if identity["kind"] == folder.parent.name and identity["id"].startswith(
            folder.name[-DIGITS:]
        ):
            return Garbage(folder, identity["kind"], _bytes(folder), folder.name[-DIGITS:])
    return None


def _bytes(folder: Path) -> int:
    """Bytes of all files in a folder, which another process may be removing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _print(store: Store, garbage: list[Garbage], silence: str) -> None:
    """Print a row per kind of step that is freed."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for item in garbage:
        sizes[item.kind].append(item.bytes)
    table = Table("step", "number", "size", title=f"what no study in {store.root} refers to")
    for kind, of_kind in {**sizes, "all": [item.bytes for item in garbage]}.items():
        table.add_row(kind, str(len(of_kind)), decimal(sum(of_kind)))
    console.print(table)
    if silence:
        print(f"{silence}; so the steps of all studies that were submitted are kept")
