"""Runs of a study. Each has a folder, runs/STUDY/RUN:

run.json      its plan: all steps of the study
jobs.json     the Slurm jobs that were submitted for them
record.json   the results (`moe_lab/study/record.py`)
ended.json    of a run with jobs: report and tracker are complete as well

The command and its jobs hold claims, run-RUN-SUFFIX, while they work. What jobs execute is not in
the store, which others may write, but in the cache of who submitted them (`paths.private_cache`):
jobs/RUN, and copies of the code in jobs/code.
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
from typing import Any

from moe_lab.json_files import Number
from moe_lab.paths import cache_folder
from moe_lab.results import DIGITS
from moe_lab.results import RECORD as RECORD_FILE
from moe_lab.study.claims import Claim
from moe_lab.study.graph import uncollected
from moe_lab.study.provenance import code_state
from moe_lab.study.step import Step
from moe_lab.study.store import Store

RUN_SHAPE = {"time": Number, "steps": [str], "inputs": [[int]]}
TEXTS = dict.fromkeys(("id", "array", "name", "kind"), str)
JOB_SHAPE = {**TEXTS, "steps": [str], "after": [str], "user": int}
JOBS_SHAPE = {"jobs": [{"path": str, "inode": int, "job": JOB_SHAPE}]}
ENDED = "ended.json"
RECORD = "record"
"""Kind of job that ends a submission: it writes the record and the report."""

CHOOSING = "gc"
"""Claim under which `gc` chooses and runs begin, one at a time. So no run can find a step finished,
and then lose it because gc had read the list of runs before."""
NAME = re.compile(r"\d+-[0-9a-f]{8}")


@dataclass(frozen=True)
class Submitted:
    """A submitted Slurm job or task of an array: its id and its array's, its steps, and the jobs it
    waits for."""

    id: str
    array: str
    name: str
    kind: str
    steps: Sequence[str]
    after: Sequence[str]
    user: int = field(default_factory=os.getuid)
    """Who submitted it."""


@dataclass
class Run:
    """One run of a study. `replaces`: names of the runs that were recorded before it began."""

    store: Store
    folder: Path
    replaces: tuple[str, ...] = ()

    @property
    def jobs(self) -> list[Submitted]:
        """The submitted jobs, in order of submission; jobs come after those they need. None in a
        copy of the store, for which they do nothing."""
        file = self.folder / "jobs.json"
        document = self.store.read(file, JOBS_SHAPE, "its jobs are forgotten: see squeue")
        path, inode = self._location()
        jobs = []
        for row in document["jobs"] if document else ():
            if row["path"] == path or row["inode"] == inode != 0:
                jobs.append(Submitted(**row["job"]))
        return jobs

    def add(self, jobs: Iterable[Submitted]) -> None:
        """Record further jobs."""
        path, inode = self._location()
        rows = [{"path": path, "inode": inode, "job": asdict(job)} for job in (*self.jobs, *jobs)]
        self.store.write(self.folder / "jobs.json", {"jobs": rows})

    def _location(self) -> tuple[str, int]:
        """Path and inode of the store: other mounts of it have another path, and copies differ in
        both. The inode of a whole disk is replaced by 0, as other disks have the same."""
        root = self.store.root
        return os.path.realpath(root), 0 if os.path.ismount(root) else root.stat().st_ino

    @property
    def logs(self) -> Path:
        """Folder in which submitit keeps the input and the output of jobs of this user."""
        return cache_folder("jobs") / self.folder.name

    @property
    def plan(self) -> dict[str, Any] | None:
        """`time` when the run began; `steps`, the folders of all steps of the study, finished ones
        included, inputs first; and `inputs`, for each the indices of its inputs in that list. None
        when run.json is missing or damaged."""
        file = self.folder / "run.json"
        plan: dict[str, Any] | None = self.store.read(file, RUN_SHAPE, "written again")
        return plan

    def claim(self) -> Claim:
        """Keep `gc` from freeing the steps of the run until the block ends or the process dies."""
        return self.store.claims.take(f"run-{self.folder.name}-{uuid.uuid4().hex[:8]}")

    @uncollected()
    def write_plan(self, steps: Sequence[Step]) -> None:
        """Write the steps of the run, and the version of the code."""
        indices = {step.id: index for index, step in enumerate(steps)}
        inputs = []
        for step in steps:
            inputs.append([indices[needed.id] for needed in step.needs if needed.id in indices])
        plan = {
            "study": self.folder.parent.name,
            "time": time.time(),
            "code": code_state(),
            "steps": [step.folder for step in steps],
            "inputs": inputs,
        }
        self.store.write(self.folder / "run.json", plan)

    def remove(self) -> None:
        """Remove the folder of the run, and that of its study when it has no other."""
        removed = self.store.root / f".{self.folder.name}"
        with suppress(OSError):  # the folder is gone, or that of the study holds other runs
            self.folder.rename(removed)  # jobs that have started already write to it by its name
            self.folder.parent.rmdir()
        shutil.rmtree(removed, ignore_errors=True)
        shutil.rmtree(self.logs, ignore_errors=True)


@contextmanager
def begin(store: Store, study: str, steps: Sequence[Step]) -> Iterator[Run]:
    """Start a new run of the study, which is claimed until the block ends. Waits while gc chooses.
    Removes claims of processes that were killed, and files that they had begun to write.

    The name of a run is a number above those of all earlier runs, whatever clocks show, and a
    random suffix, as others may begin at the same time."""
    folder = store.root / "runs" / study
    with ExitStack() as claims:
        with store.claims.wait_for(CHOOSING):
            earlier = runs(store, study)
            _set_damaged_aside(earlier)
            before = [run.folder for run in earlier]
            number = 1 + max((int(path.name.partition("-")[0]) for path in before), default=0)
            recorded = tuple(path.name for path in before if (path / RECORD_FILE).exists())
            run = Run(store, folder / f"{number:06}-{uuid.uuid4().hex[:8]}", recorded)
            store.make_folder(run.folder)
            claims.enter_context(run.claim())
            run.write_plan(steps)
            store.claims.clear()
            active = active_runs(store)
            for path in before:
                if path.name in active:
                    continue
                # not of record.json, which a job without a claim may be writing
                for unfinished in (*path.glob(".run.json.*"), *path.glob(".jobs.json.*")):
                    unfinished.unlink(missing_ok=True)
        yield run


def _set_damaged_aside(earlier: Sequence[Run]) -> None:
    """Read what `gc` and `status` read of the earlier runs of a study, which sets aside what is
    damaged. Of run.json that is the last one, as each can have millions of steps."""
    for run in earlier:
        _ = run.jobs
    for run in earlier[-1:]:
        _ = run.plan


def runs(store: Store, study: str) -> list[Run]:
    """All runs of the study, the oldest first."""
    return [
        Run(store, path)
        for path in sorted((store.root / "runs" / study).glob("*"))
        if NAME.fullmatch(path.name)
    ]


def active_runs(store: Store) -> set[str]:
    """Names of the runs that a process has claimed."""
    return {name.removeprefix("run-").rpartition("-")[0] for name in store.claims.active()}


def steps_at_work(store: Store) -> set[str]:
    """Starts of the ids of the steps of all runs that a process has claimed."""
    active = active_runs(store)
    starts: set[str] = set()
    for study in studies(store):
        for run in runs(store, study):
            if run.folder.name in active and (plan := run.plan):
                starts.update(folder[-DIGITS:] for folder in plan["steps"])
    return starts


def studies(store: Store) -> list[str]:
    """Names of the studies that were ever run."""
    return sorted(
        path.name
        for path in (store.root / "runs").glob("*")
        if path.is_dir() and any(path.iterdir())
    )
