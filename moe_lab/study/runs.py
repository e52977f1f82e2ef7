"""Runs of a study: each has a folder that records the study's steps and the Slurm jobs that were submitted for them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_lab.json_files import Number, write_json
from moe_lab.study.step import Step, code_state, edits
from moe_lab.study.store import Store

RUN_SHAPE = {"time": Number, "steps": [(str, str, [str])]}
JOBS_SHAPE = [{"id": str, "array": str, "name": str, "kind": str, "steps": [str], "after": [str]}]
RECORD = "record"
"""Kind of job that ends a submission: it writes the record and the report."""


@dataclass(frozen=True)
class Submitted:
    """A submitted Slurm job or task of an array: its id and its array's, its steps, and the jobs it waits for."""

    id: str
    array: str
    name: str
    kind: str
    steps: tuple[str, ...]
    after: tuple[str, ...]


@dataclass
class Run:
    """One run of a study, recorded in a folder of the store."""

    store: Store
    folder: Path

    @property
    def jobs(self) -> list[Submitted]:
        """The submitted jobs, in order of submission; jobs come after those they need."""
        rows = self.store.read(self.folder / "jobs.json", JOBS_SHAPE, "its jobs are forgotten: see squeue") or []
        return [
            Submitted(row["id"], row["array"], row["name"], row["kind"], tuple(row["steps"]), tuple(row["after"]))
            for row in rows
        ]

    def add(self, jobs: Iterable[Submitted]) -> None:
        """Record further jobs."""
        write_json(self.folder / "jobs.json", [asdict(job) for job in (*self.jobs, *jobs)])

    @property
    def logs(self) -> Path:
        """Folder in which submitit keeps the input and the output of jobs."""
        return self.folder / "jobs"

    @property
    def about(self) -> dict[str, Any] | None:
        """When the run began, and all steps of the study, finished ones included: (id, folder, ids of inputs), inputs
        first. None when run.json is missing or damaged."""
        content: dict[str, Any] | None = self.store.read(self.folder / "run.json", RUN_SHAPE, "written again")
        return content


def begin(store: Store, study: str, steps: Sequence[Step]) -> Run:
    """Start a new run of the study, and record its steps and the version of the code."""
    folder = (
        _folder(store, study) / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}-{uuid.uuid4().hex[:4]}"
    )
    folder.mkdir(parents=True)
    rows = [[step.id, step.folder, [needed.id for needed in step.needs]] for step in steps]
    write_json(folder / "run.json", {"study": study, "time": time.time(), "code": code_state(), "steps": rows})
    if changes := edits():
        (folder / "edits.diff").write_text(changes)
    return Run(store, folder)


def runs(store: Store, study: str) -> list[Run]:
    """All runs of the study, the oldest first."""
    return [Run(store, path) for path in sorted(_folder(store, study).glob("*")) if path.is_dir()]


def last_about(store: Store, study: str) -> dict[str, Any] | None:
    """`Run.about` of the newest run of the study that has it; None when no run has."""
    return next((about for run in reversed(runs(store, study)) if (about := run.about)), None)


def studies(store: Store) -> list[str]:
    """Names of the studies that were ever run."""
    return sorted(path.name for path in (store.root / "runs").glob("*") if path.is_dir() and any(path.iterdir()))


def _folder(store: Store, study: str) -> Path:
    return store.root / "runs" / study
