"""Runs of a study: a folder each, with the steps of the study and the Slurm jobs they were put in."""

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
"""Kind of the last job of a submission, which writes the record and the report."""


@dataclass(frozen=True)
class Submitted:
    """One job, or one task of an array: its id and that of its array, what it is to do, and what it waits for."""

    id: str
    array: str
    name: str
    kind: str
    steps: tuple[str, ...]
    after: tuple[str, ...]


@dataclass
class Run:
    """One run: a folder in the store."""

    store: Store
    folder: Path

    @property
    def jobs(self) -> list[Submitted]:
        """The jobs, in the order they were submitted in, inputs first."""
        rows = self.store.read(self.folder / "jobs.json", JOBS_SHAPE, "its jobs are forgotten: see squeue") or []
        return [
            Submitted(row["id"], row["array"], row["name"], row["kind"], tuple(row["steps"]), tuple(row["after"]))
            for row in rows
        ]

    def add(self, jobs: Iterable[Submitted]) -> None:
        """Write further jobs down."""
        write_json(self.folder / "jobs.json", [asdict(job) for job in (*self.jobs, *jobs)])

    @property
    def logs(self) -> Path:
        """Where submitit keeps what it hands to jobs, and what they print."""
        return self.folder / "jobs"

    @property
    def code(self) -> Path:
        """Where the copy of the code is that the jobs run, with snapshot=true."""
        return self.folder / "code"

    @property
    def about(self) -> dict[str, Any] | None:
        """When it began, and all steps of the study, done ones too: id, folder, ids of inputs, which come first. None
        where it was not written down, or is damaged."""
        content: dict[str, Any] | None = self.store.read(self.folder / "run.json", RUN_SHAPE, "written again")
        return content


def begin(store: Store, study: str, steps: Sequence[Step]) -> Run:
    """A new run of the study; says what it is of, and by which code."""
    folder = (
        _folder(store, study) / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}-{uuid.uuid4().hex[:4]}"
    )
    folder.mkdir(parents=True)
    rows = [[step.id, step.folder, [needed.id for needed in step.inputs.values()]] for step in steps]
    write_json(folder / "run.json", {"study": study, "time": time.time(), "code": code_state(), "steps": rows})
    if changes := edits():
        (folder / "edits.diff").write_text(changes)
    return Run(store, folder)


def runs(store: Store, study: str) -> list[Run]:
    """All runs of the study, the oldest first."""
    return [Run(store, path) for path in sorted(_folder(store, study).glob("*")) if path.is_dir()]


def last_about(store: Store, study: str) -> dict[str, Any] | None:
    """What the newest run of the study says that it is about; None where no run does."""
    return next((about for run in reversed(runs(store, study)) if (about := run.about)), None)


def studies(store: Store) -> list[str]:
    """Names of the studies that were ever run."""
    return sorted(path.name for path in (store.root / "runs").glob("*") if path.is_dir() and any(path.iterdir()))


def _folder(store: Store, study: str) -> Path:
    return store.root / "runs" / study
