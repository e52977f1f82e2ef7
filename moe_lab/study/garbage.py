"""Remove the steps of a store that no study refers to, and files of killed runs:
`moe-lab gc`."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal
from rich.table import Table

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged
from moe_lab.result_files import finished_steps, read_record, start_of
from moe_lab.study.claims import Busy
from moe_lab.study.packing import PACKS, remove_from_packs
from moe_lab.study.provenance import read_step
from moe_lab.study.runs import GC_CLAIM, runs, steps_of_active_runs, studies
from moe_lab.study.status import console, queued_jobs
from moe_lab.study.store import SCRATCH, Store, rename_as_scratch

LEFTOVERS = "left by killed runs"


@dataclass(frozen=True)
class Garbage:
    """An unreferenced step, or files of a killed run."""

    path: Path | None
    """Folder of the step or of the files; None for a step in a pack."""
    kind: str
    """Kind of step, or LEFTOVERS."""
    bytes: int
    step_id: str
    """First digits of the step's id; "" for a scratch folder."""


def gc(store: Store, *, apply: bool = False) -> int:
    """Print a table of the garbage in a store; with `apply`, remove it. Returns the exit code.
    Raises UserError when a file that may refer to steps is damaged, and when folders cannot be
    removed.

    The folder of each step is first renamed as a scratch folder. If this process is killed while it
    removes files, no incomplete folder looks like a finished step."""
    if not apply:
        garbage, queue_error = find_garbage(store)
        _print_table(store, garbage, queue_error)
        if garbage:
            command = f"moe-lab gc apply=true store={store.root}"
            print(f"nothing was freed; this frees it: {command}")
        return 0
    Store(store.root).create()  # only a check: raises UserError if nothing can be written there
    with store.claims.wait_for(GC_CLAIM):
        garbage, queue_error = find_garbage(store)
        folders = _hide_garbage(store, garbage)
    _print_table(store, garbage, queue_error)
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    # remove packs that newer packs have replaced
    with suppress(Busy), store.claims.take(PACKS):
        store.packs.clear()
    store.claims.clear()
    if remaining_folders := [path for path in folders if path.exists()]:
        raise UserError(
            f"store={store.root}: {len(remaining_folders)} folders cannot be removed, such as "
            f"{remaining_folders[0]}: see who owns it"
        )
    return 0


def _hide_garbage(store: Store, garbage: Sequence[Garbage]) -> list[Path]:
    """Remove garbage steps from packs. Rename folders of garbage as scratch folders. Returns the
    scratch folders, which the caller must still remove."""
    if packed_steps := [item.step_id for item in garbage if item.path is None]:
        remove_from_packs(store, packed_steps)
    folders = []
    for item in garbage:
        if item.path is None:
            continue
        if not item.step_id:  # already a scratch folder
            folders.append(item.path)
            continue
        # if another process is computing the step (Busy), the folder stays
        with suppress(Busy, FileNotFoundError), store.claims.take(item.step_id):
            folders.append(rename_as_scratch(item.path, item.step_id))
    return folders


def find_garbage(store: Store) -> tuple[list[Garbage], str]:
    """(garbage of a store, error). The error is a sentence if Slurm's queue could not be read,
    otherwise "". Raises UserError when a file that may refer to steps is damaged."""
    try:
        referenced, queue_error = _referenced_steps(store)
        if store.notices:  # reading a damaged file adds a notice
            raise Damaged(store.notices[0])
        folders_of = store.step_folders()
        store.packs.refresh()
        packed_names = store.packs.steps()
        for path in store.packs.damaged_packs:  # the error names only the first
            raise Damaged(f"{path} is damaged")
        needed = _needed_steps(store, referenced, folders_of)
        sizes = {start: store.packs.size(start) for start in packed_names.keys() - needed}
    except (FileNotFoundError, Damaged) as error:
        raise UserError(
            f"store={store.root}: nothing is freed while it is unknown which steps are needed: "
            f"{error} (start the study again, or remove it)"
        ) from None
    garbage: list[Garbage] = []
    for start in folders_of.keys() - needed:
        garbage += filter(None, map(_garbage_step, folders_of[start]))
    for start, size in sizes.items():  # the name of a packed step is KIND/LABEL-START
        garbage.append(Garbage(None, packed_names[start].partition("/")[0], size, start))
    unfinished = referenced - folders_of.keys() - packed_names.keys()
    return [*garbage, *_leftovers(store, unfinished)], queue_error


def _needed_steps(store: Store, starts: Set[str], folders_of: Mapping[str, list[Path]]) -> set[str]:
    """Starts of the ids of the steps `starts` and of all their direct and indirect inputs.
    `folders_of`: start of an id -> folders of the step."""
    inputs = store.packs.inputs()
    needed: set[str] = set()
    unvisited = list(starts)
    while unvisited:
        start = unvisited.pop()
        if start in needed:
            continue
        needed.add(start)
        for folder in folders_of.get(start, ()):
            unvisited += [start_of(name) for name in read_step(folder)["inputs"].values()]
        # inputs of a step in a pack are separated by spaces
        unvisited += inputs.get(start, "").split()
    return needed


def _leftovers(store: Store, unfinished: Set[str]) -> Iterator[Garbage]:
    """Scratch folders of all steps, and folders of resume files that nobody will need.
    `unfinished`: starts of the ids of referenced steps that are not finished."""
    scratch_matches = [(path, SCRATCH.fullmatch(path.name)) for path in store.root.glob("*/.*")]
    resume_folders = list((store.root / "partial").glob("[!.]*"))
    claimed = store.claims.active()  # read last, as a step is claimed before its folders are made
    for path, match in scratch_matches:
        if match and match[1] not in claimed:  # group 1 is the start of the step's id
            yield Garbage(path, LEFTOVERS, _folder_bytes(path), "")
    for path in resume_folders:  # the name of such a folder is the start of the step's id
        if path.name not in unfinished and path.name not in claimed:
            yield Garbage(path, LEFTOVERS, _folder_bytes(path), path.name)


def _referenced_steps(store: Store) -> tuple[set[str], str]:
    """(starts of the ids of the steps that runs and records refer to, error). The error is a
    sentence if Slurm's queue could not be read, otherwise "". Raises Damaged for a damaged record.

    Active runs are found first, then the queue is read, then records. This order misses no step,
    because a run writes its record before its claims and jobs disappear."""
    referenced = steps_of_active_runs(store)
    runs_of = {study: runs(store, study) for study in studies(store)}
    jobs_of = {run.folder: run.jobs for study_runs in runs_of.values() for run in study_runs}
    jobs = {job.id: job for run_jobs in jobs_of.values() for job in run_jobs}
    queue, queue_error = queued_jobs(jobs)
    for study, study_runs in runs_of.items():
        # the name of a later run is greater than that of an earlier run
        record = read_record(store.root, study) or {"run": ""}
        referenced.update(start_of(name) for name in finished_steps(record))
        for run in study_runs:
            # if reading the queue failed, every job may be in it
            may_be_queued = any(job.id in queue or queue_error for job in jobs_of[run.folder])
            is_recent = run is study_runs[-1] or run.folder.name > record["run"]
            if is_recent or may_be_queued:
                referenced |= run.step_starts
    return referenced, queue_error


def _garbage_step(folder: Path) -> Garbage | None:
    """The finished step in a folder as garbage. None when its step.json is missing or damaged, or
    belongs to another folder."""
    with suppress(FileNotFoundError, Damaged):
        document = read_step(folder)
        start = start_of(folder.name)
        if document["kind"] == folder.parent.name and document["id"].startswith(start):
            return Garbage(folder, document["kind"], _folder_bytes(folder), start)
    return None


def _folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _print_table(store: Store, garbage: Sequence[Garbage], queue_error: str) -> None:
    """Print a table of the garbage, and then `queue_error` if it is not ""."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for item in garbage:
        sizes[item.kind].append(item.bytes)
    table = Table("step", "number", "size", title=f"what no study in {store.root} refers to")
    for kind, kind_sizes in {**sizes, "all": [item.bytes for item in garbage]}.items():
        table.add_row(kind, str(len(kind_sizes)), decimal(sum(kind_sizes)))
    console.print(table)
    if queue_error:
        print(f"{queue_error}; so the steps of all studies that were submitted are retained")
