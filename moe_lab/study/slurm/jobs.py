"""Slurm jobs, as submitit runs them on a node: jobs that compute steps, and a last one that writes
the record; and waiting for the jobs of a study."""

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
"""Seconds that a pass has to save its state: by default Slurm kills a preempted job 30 s after its
warning."""


@dataclass(frozen=True)
class StepsJob:
    """A job that computes steps; submitit calls it on the node.

    `store`: the store's folder. `run`: STUDY/RUN that the job belongs to. `launcher`: settings,
    whose `max_requeues` counts down each time the job is requeued.
    """

    store: str
    steps: Sequence[Step]
    run: str
    launcher: LauncherConfig

    @cached_property
    def worker(self) -> WorkerProcess:
        """The process that computes the steps of this job."""
        return WorkerProcess(Store(self.store, 60 * self.launcher.stale_minutes, in_queue))

    def __call__(self) -> dict[str, int]:
        """Compute the missing steps, and return their numbers by result. After the failure of a
        step, whose error is stored, the others continue."""
        signal.signal(signal.SIGTERM, self.handle_sigterm)
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

    def handle_sigterm(self, _: int, __: FrameType | None) -> None:
        """Requeue this job, save or exit, by its state in Slurm.

        A job that Slurm still lists as running is being preempted: it is requeued, as when its time
        is up. So is a job of unknown state, in an image without scontrol. A job that Slurm requeues
        itself saves the state of its pass. A cancelled job exits at once. Claims are released."""
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
        """The job to requeue when this job must stop, after its pass has saved its state; None when
        it may not be requeued again. Steps resume from the files that they have saved."""
        self.worker.end(min(SAVING, self.launcher.signal_seconds / 2))
        requeues = self.launcher.max_requeues
        if requeues == 0:
            return None
        launcher = replace(self.launcher, max_requeues=requeues - 1)
        return DelayedSubmission(replace(self, launcher=launcher))


def missing_inputs(schedule: Schedule, store: Store) -> list[Step]:
    """Inputs from other jobs that are missing in the store. Waits for them while no input has
    failed. Finished inputs are marked in `schedule`."""
    step_ids = {step.id for step in schedule.steps}
    inputs = [
        needed for step in schedule.steps for needed in step.needs if needed.id not in step_ids
    ]
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
        update_from_store(schedule, self.study.store)
        return finish(self.study, schedule, self.run)


def update_from_store(schedule: Schedule, store: Store) -> None:
    """Set the state of waiting steps by the store: finished, or failed. Steps that have neither
    result nor error there failed because their job was lost."""
    _finish_present(schedule, store)
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
"""Seconds between two queries of the store and of the scheduler, which other users share."""


def wait_for_jobs(schedule: Schedule, study: Study) -> None:
    """Wait until no job of the study is in the queue; then update `schedule` from the store."""
    jobs = {job.id: job for run in runs(study.store, study.config.study) for job in run.jobs}
    with show_progress(schedule, study.store):
        while True:
            queue, queue_error = queued_jobs(jobs)
            # an error means that the scheduler does not answer: jobs may still run
            if not queue and not queue_error:
                break
            time.sleep(EVERY)
            claimed = study.store.claims.active()
            with schedule.changed:
                _finish_present(schedule, study.store)
                for step in schedule.waiting.values():
                    if step.id[:DIGITS] in claimed:
                        schedule.running.setdefault(step.id, (step, schedule.clock()))
    update_from_store(schedule, study.store)


def _finish_present(schedule: Schedule, store: Store) -> None:
    """Count waiting steps that are present in the store as finished."""
    present = store.present()
    for step in list(schedule.waiting.values()):
        if step.id[:DIGITS] in present:
            schedule.finish(step, computed=step.id in schedule.running)
