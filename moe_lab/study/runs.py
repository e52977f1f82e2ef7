"""Runs of a study. Each has a folder, runs/STUDY/RUN:

run.json      the plan of the run: all steps of the study
jobs.json     the submitted Slurm jobs
record.json   the results (`moe_lab/study/record.py`)
ended.json    written, for a run with jobs, when report and tracker are complete as well

The command and its jobs hold claims, run-RUN-SUFFIX, while they work. The code that jobs execute is
not in the store, which others may write, but in the cache of the user who submitted them
(`paths.private_cache`): jobs/RUN, and copies of the code in jobs/code.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moe_lab.json_files import Document
from moe_lab.paths import cache_folder
from moe_lab.result_files import RECORD, start_of
from moe_lab.study.claims import Claim
from moe_lab.study.graph import garbage_collection_off
from moe_lab.study.step import Step
from moe_lab.study.store import Store

ENDED = "ended.json"
RECORD_KIND = "record"
"""Kind of job that ends a submission: it writes the record and the report."""

GC_CLAIM = "gc"
"""Claim that `gc` holds while it chooses steps to remove, and that a run holds while it begins.
Without this claim, `gc` could read the list of runs before the run is in it, and then remove a step
that the run has found finished."""
NAME = re.compile(r"\d+-[0-9a-f]{8}")
"""Name of a run: its number and a random suffix."""


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted Slurm job, or task of an array."""

    id: str
    array: str
    """Id of its array."""
    name: str
    kind: str
    steps: Sequence[str]
    """Ids of its steps."""
    after: Sequence[str]
    """Ids of the jobs that it waits for."""
    user: int = field(default_factory=os.getuid)
    """Id of the user who submitted it."""


@dataclass
class Run:
    """One run of a study. `replaces`: names of the runs that were recorded before it began."""

    store: Store
    folder: Path
    replaces: tuple[str, ...] = ()

    @property
    def jobs(self) -> list[SubmittedJob]:
        """The submitted jobs, in order of submission. If the store is a copy, the list is empty:
        the jobs write only to the original store."""
        document = self.store.read(
            self.folder / "jobs.json", consequence="its jobs are forgotten: see squeue"
        )
        path, inode = self._location()
        jobs = []
        for row in document["jobs"] if document else ():
            # 0 is an unknown inode
            if row["path"] == path or row["inode"] == inode != 0:
                jobs.append(SubmittedJob(**row["job"]))
        return jobs

    @property
    def is_recorded(self) -> bool:
        """Whether the run has a record."""
        return (self.folder / RECORD).exists()

    def add_jobs(self, jobs: Iterable[SubmittedJob]) -> None:
        """Append jobs to jobs.json: path and inode of the store, and a `SubmittedJob`."""
        path, inode = self._location()
        rows = [{"path": path, "inode": inode, "job": asdict(job)} for job in (*self.jobs, *jobs)]
        self.store.write(self.folder / "jobs.json", {"jobs": rows})

    def _location(self) -> tuple[str, int]:
        """(path of the store, inode of the store). The same store mounted elsewhere has another
        path. The inode is 0 if the store is a mount point: mount points of different disks have the
        same inode."""
        root = self.store.root
        return os.path.realpath(root), 0 if os.path.ismount(root) else root.stat().st_ino

    @property
    def logs(self) -> Path:
        """Folder in which submitit keeps input and output of the run's jobs."""
        return cache_folder("jobs") / self.folder.name

    @property
    def plan(self) -> Document | None:
        """The content of run.json; None when the file is missing or damaged.

        time: when the run began. steps: folders of all steps of the study, finished ones included;
        inputs come first. inputs: for each step, the indices of its inputs in `steps`."""
        return self.store.read(self.folder / "run.json", consequence="written again")

    @property
    def step_starts(self) -> set[str]:
        """Starts of the ids of the steps in the plan. Empty without a plan: the run was killed
        before it computed a step."""
        plan = self.plan
        return {start_of(folder) for folder in plan["steps"]} if plan else set()

    def claim(self) -> Claim:
        """Claim the run, so that `gc` does not remove its steps."""
        return self.store.claims.take(f"run-{self.folder.name}-{uuid.uuid4().hex[:8]}")

    @garbage_collection_off()
    def write_plan(self, steps: Sequence[Step]) -> None:
        """Write run.json for the `steps` of the study, see `plan`."""
        indices = {step.id: index for index, step in enumerate(steps)}
        inputs = []
        for step in steps:
            # inputs that are not in `steps`, such as merged shares, are left out
            inputs.append([indices[needed.id] for needed in step.needs if needed.id in indices])
        plan = {
            "time": time.time(),
            "steps": [step.folder for step in steps],
            "inputs": inputs,
        }
        self.store.write(self.folder / "run.json", plan)

    def remove(self) -> None:
        """Remove the folder of the run and the folder of its logs. If the study has no other run,
        also remove the folder of the study."""
        hidden_folder = self.store.root / f".{self.folder.name}"
        with suppress(OSError):  # the folder is gone, or the study's folder holds other runs
            # first renamed, as started jobs may still write to the folder by its old name
            self.folder.rename(hidden_folder)
            self.folder.parent.rmdir()
        shutil.rmtree(hidden_folder, ignore_errors=True)
        shutil.rmtree(self.logs, ignore_errors=True)


@contextmanager
def create_run(store: Store, study: str, steps: Sequence[Step]) -> Iterator[Run]:
    """A context with a new run of the study, which is claimed until the context ends. `steps`: all
    steps of the study. Removes stale claims, and unfinished files that killed processes have left.
    Runs are numbered, so that their order does not depend on clocks."""
    study_folder = store.root / "runs" / study
    with ExitStack() as claims:
        with store.claims.wait_for(GC_CLAIM):
            earlier_runs = runs(store, study)
            _set_damaged_aside(earlier_runs)
            number = 1
            if earlier_runs:
                number += int(earlier_runs[-1].folder.name.partition("-")[0])
            recorded_names = tuple(run.folder.name for run in earlier_runs if run.is_recorded)
            run = Run(store, study_folder / f"{number:06}-{uuid.uuid4().hex[:8]}", recorded_names)
            store.make_folder(run.folder)
            claims.enter_context(run.claim())
            run.write_plan(steps)
            store.claims.clear()
            active_names = active_runs(store)
            for earlier_run in earlier_runs:
                folder = earlier_run.folder
                if folder.name in active_names:
                    continue
                # unfinished files of record.json stay: a job without a claim may be writing one
                for file in (*folder.glob(".run.json.*"), *folder.glob(".jobs.json.*")):
                    file.unlink(missing_ok=True)
        yield run


def _set_damaged_aside(earlier_runs: Sequence[Run]) -> None:
    """Set aside damaged documents of earlier runs. Only the run.json of the last run is checked, as
    a run.json can list millions of steps."""
    for run in earlier_runs:
        _ = run.jobs  # reading a damaged document sets it aside
    for run in earlier_runs[-1:]:
        _ = run.plan


def runs(store: Store, study: str) -> list[Run]:
    """All runs of the study, oldest first."""
    return [
        Run(store, path)
        for path in sorted((store.root / "runs" / study).glob("*"))
        if NAME.fullmatch(path.name)
    ]


def active_runs(store: Store) -> set[str]:
    """Names of the runs that living processes have claimed. The set may also contain strings that
    are no names of runs."""
    # a run's claim is named run-RUN-SUFFIX
    return {name.removeprefix("run-").rpartition("-")[0] for name in store.claims.active()}


def steps_of_active_runs(store: Store) -> set[str]:
    """Ids of the steps of all active runs, each shortened to its first ID_DIGITS characters. The
    names of the steps' folders end with these characters."""
    active_names = active_runs(store)
    short_ids: set[str] = set()
    for study in studies(store):
        for run in runs(store, study):
            if run.folder.name in active_names:
                short_ids |= run.step_starts
    return short_ids


def studies(store: Store) -> list[str]:
    """Names of the studies that have runs in the store, sorted."""
    return sorted(
        path.name
        for path in (store.root / "runs").glob("*")
        if path.is_dir() and any(path.iterdir())
    )
