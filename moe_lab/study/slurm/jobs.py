"""The work of a Slurm job, which does a list of steps one after another; and waiting for the jobs
of a study."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import FrameType

from submitit.helpers import DelayedSubmission

from moe_lab.config import LauncherConfig
from moe_lab.errors import UserError
from moe_lab.results import DIGITS
from moe_lab.study.claims import in_queue, own_job, restarts
from moe_lab.study.record import Study
from moe_lab.study.runs import Run, runs
from moe_lab.study.schedule import (
    Schedule,
    StepError,
    WorkerProcess,
    print_notices,
    show_progress,
    work,
)
from moe_lab.study.slurm import scheduler
from moe_lab.study.status import queued_jobs
from moe_lab.study.step import Step, unmerged
from moe_lab.study.store import Store, retries

SAVING = 20.0
"""Most seconds for which a pass may save: by default Slurm kills a preempted job 30 s after its
warning."""


@dataclass(frozen=True)
class StepsJob:
    """The steps of one job, called by submitit on the node.

    `store`: the store's folder. `run`: STUDY/RUN that it belongs to. `launcher`: its `max_requeues`
    says how often the job may still be requeued.
    """

    store: str
    steps: Sequence[Step]
    run: str
    launcher: LauncherConfig

    @cached_property
    def worker(self) -> WorkerProcess:
        """Computes the steps of this job, in a process of its own."""
        return WorkerProcess(Store(self.store, 60 * self.launcher.stale_minutes, in_queue))

    def __call__(self) -> dict[str, int]:
        """Compute the missing steps. A failed step leaves its error in the store, and the others
        continue."""
        signal.signal(signal.SIGTERM, self.leave)
        store = self.worker.store
        store.check_exists()  # a node that does not see the store must not create a new one
        store.create()
        schedule = Schedule(self.steps)
        with Run(store, store.root / "runs" / self.run).claim():
            schedule.skip(missing_inputs(schedule, store))
            with self.worker as execute:
                work(schedule, store, execute)
        print_notices(store)
        return {
            "done": len(schedule.finished),
            "failed": len(schedule.failed),
            "skipped": len(schedule.skipped),
        }

    def leave(self, _: int, __: FrameType | None) -> None:
        """Handle SIGTERM. A job that Slurm still lists as running is being preempted: it is
        requeued, as when its time is up; so is one that cannot tell, in an image without scontrol.
        One that Slurm requeues itself saves. A cancelled job exits at once. Claims are released."""
        state: dict[str, str] = {}
        with suppress(UserError):
            state = scheduler.job_state(str(own_job()), limit=5.0)
        if state.get("JobState", "RUNNING") == "RUNNING":
            os.kill(os.getpid(), signal.SIGUSR2)
            return
        if int(state.get("Restarts", "0")) > restarts():
            self.worker.end(SAVING)
        sys.exit(128 + signal.SIGTERM)

    def checkpoint(self) -> DelayedSubmission | None:
        """The job to requeue when this one must stop; it resumes from the files that steps have
        saved in the store, which a pass does now. None when it may not be requeued again."""
        self.worker.end(min(SAVING, self.launcher.signal_seconds / 2))
        requeues = self.launcher.max_requeues
        if requeues == 0:
            return None
        launcher = replace(self.launcher, max_requeues=requeues - 1)
        return DelayedSubmission(replace(self, launcher=launcher))


def missing_inputs(schedule: Schedule, store: Store) -> list[Step]:
    """Inputs from other jobs that are missing in the store. Waits for them while no input has
    failed, and marks those that are finished."""
    own = {step.id for step in schedule.steps}
    inputs = [needed for step in schedule.steps for needed in step.needs if needed.id not in own]
    missing: list[Step] = []
    for _ in retries():
        present = store.present()
        schedule.finished |= {step.id for step in inputs if step.id[:DIGITS] in present}
        missing = [step for step in inputs if step.id not in schedule.finished]
        if not missing or any(_has_failed(step, store) for step in missing):
            break
    return missing


def _has_failed(step: Step, store: Store) -> bool:
    """Whether a step, or one that it needs, has failed."""
    if store.error(step.id) is not None:
        return True
    return any(_has_failed(needed, store) for needed in step.needs)


@dataclass(frozen=True)
class RecordJob:
    """The last job of a submission: writes the study's record and its report."""

    study: Study
    run: Run

    def __call__(self) -> int:
        # loads the whole configuration, which other jobs do not need
        from moe_lab.study.record import finish

        schedule = Schedule(self.study.graph.steps)
        settle(schedule, self.study.store)
        return finish(self.study, schedule, self.run)


def settle(schedule: Schedule, store: Store) -> None:
    """Update waiting steps from the store: finished, failed, or else failed because their job was
    lost."""
    _note_finished(schedule, store)
    needed = {step.id for step in unmerged(schedule.steps, schedule.finished)}
    schedule.waiting = {name: step for name, step in schedule.waiting.items() if name in needed}
    for step in list(schedule.waiting.values()):
        if document := store.error(step.id):
            schedule.fail(step, StepError(document))
    for step in list(schedule.waiting.values()):
        if step.id in schedule.waiting and all(
            needed.id in schedule.finished for needed in step.needs
        ):
            message = (
                f"{step.folder} was not finished: its job was cancelled or died; the same "
                "command goes on from here"
            )
            schedule.fail(step, StepError({"message": message, "transient": True}))


EVERY = 3.0
"""Seconds between two queries of the store and the scheduler, which other users share."""


def follow(schedule: Schedule, study: Study) -> None:
    """Wait until no job of the study is queued; then update `schedule` from the store."""
    jobs = {job.id: job for run in runs(study.store, study.config.study) for job in run.jobs}
    with show_progress(schedule, study.store):
        # Jobs continue while the scheduler does not answer, which is an error in the tuple.
        while any(queued_jobs(jobs)):
            time.sleep(EVERY)
            claimed = study.store.claims.active()
            with schedule.changed:
                _note_finished(schedule, study.store)
                for step in schedule.waiting.values():
                    if step.id[:DIGITS] in claimed:
                        schedule.running.setdefault(step.id, (step, schedule.clock()))
    settle(schedule, study.store)


def _note_finished(schedule: Schedule, store: Store) -> None:
    present = store.present()
    for step in list(schedule.waiting.values()):
        if step.id[:DIGITS] in present:
            schedule.finish(step, computed=step.id in schedule.running)
