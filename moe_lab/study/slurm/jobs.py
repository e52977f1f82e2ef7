"""Slurm jobs, which submitit runs on nodes: jobs that compute steps, and a last job that writes the
record."""

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
from moe_lab.study.claims import own_job, restart_count
from moe_lab.study.record import Study, finish
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

SAVE_SECONDS = 20.0
"""Seconds that a pass has to save its state. By default Slurm kills a preempted job 30 s after the
warning signal."""


@dataclass(frozen=True)
class StepsJob:
    """A job that computes steps. submitit calls this object on the node.

    `store`: folder of the store. `run`: STUDY/RUN. `launcher`: settings, in which `max_requeues` is
    the number of times that the job may still be requeued.
    """

    store: str
    steps: Sequence[Step]
    run: str
    launcher: LauncherConfig

    @cached_property
    def worker(self) -> WorkerProcess:
        """The process that computes the steps of this job."""
        return WorkerProcess(Store(self.store, limit=60 * self.launcher.stale_minutes))

    def __call__(self) -> dict[str, int]:
        """Compute the steps that have no result yet. Returns the numbers of steps by state: "done",
        "failed" or "skipped"."""
        signal.signal(signal.SIGTERM, self.handle_sigterm)
        store = self.worker.store
        # `create` permits writing to the store, but would also create a missing store
        store.check_exists()
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
        """Requeue this job or exit, depending on the job's state in Slurm.

        RUNNING: the job is being preempted, and SIGUSR2 requeues the job. Any other state: the job
        exits. If Slurm itself requeues the job, the running step may save its state before the
        exit."""
        state: dict[str, str] = {}
        with suppress(UserError):
            state = scheduler.job_fields(str(own_job()), limit=5.0)
        if state.get("JobState", "RUNNING") == "RUNNING":
            os.kill(os.getpid(), signal.SIGUSR2)
            return
        # Slurm raises the number of restarts when it requeues the job
        if int(state.get("Restarts", "0")) > restart_count():
            self.worker.end(SAVE_SECONDS)
        sys.exit(128 + signal.SIGTERM)

    def checkpoint(self) -> DelayedSubmission | None:
        """End the worker process, and return the job that continues this job; None if this job may
        not be requeued again. submitit calls this method when the job must stop."""
        self.worker.end(min(SAVE_SECONDS, self.launcher.signal_seconds / 2))
        requeues = self.launcher.max_requeues
        if requeues == 0:
            return None
        launcher = replace(self.launcher, max_requeues=requeues - 1)
        return DelayedSubmission(replace(self, launcher=launcher))


def missing_inputs(schedule: Schedule, store: Store) -> list[Step]:
    """Steps of other jobs that are inputs of this job's steps, and that have no result in the
    store. Waits a while for results that other nodes have just written. Inputs with a result are
    added to `schedule.finished`."""
    step_ids = {step.id for step in schedule.steps}
    inputs = [
        needed for step in schedule.steps for needed in step.needs if needed.id not in step_ids
    ]
    missing: list[Step] = []
    for _ in retries():  # waits before each further round
        # keys: `Step.id_start`
        finished_names = store.finished_names()
        schedule.finished |= {step.id for step in inputs if step.id_start in finished_names}
        missing = [step for step in inputs if step.id not in schedule.finished]
        if not missing or any(_has_failed(step, store) for step in missing):
            break
    return missing


def _has_failed(step: Step, store: Store) -> bool:
    """Whether a step has failed, or any step that it needs, directly or indirectly."""
    return store.error(step.id) is not None or any(
        _has_failed(needed, store) for needed in step.needs
    )


@dataclass(frozen=True)
class RecordJob:
    """The last job of a submission."""

    study: Study
    run: Run

    def __call__(self) -> int:
        """Write the record and the report, and return the exit code of the study."""
        schedule = Schedule(self.study.graph.steps)
        update_from_store(schedule, self.study.store)
        return finish(replace(self.study, report_later=False), schedule, self.run)


def update_from_store(schedule: Schedule, store: Store) -> None:
    """Change the state of waiting steps to finished or failed, according to the store. A step with
    neither a result nor an error counts as failed if its inputs are finished, because its job was
    lost. The `merged_steps` of finished steps are removed from `schedule.waiting`."""
    _finish_present(schedule, store)
    needed = {step.id for step in unmerged(schedule.steps, schedule.finished)}
    schedule.waiting = {
        step_id: step for step_id, step in schedule.waiting.items() if step_id in needed
    }
    for step in list(schedule.waiting.values()):
        if document := store.error(step.id):
            schedule.fail(step, StepError(document))
    for step in list(schedule.waiting.values()):
        # `schedule.fail` also moves steps from `waiting` to `skipped`
        if step.id in schedule.waiting and all(
            needed.id in schedule.finished for needed in step.needs
        ):
            message = (
                f"{step.folder} was not finished: its job was cancelled or died; the same "
                "command goes on from here"
            )
            schedule.fail(step, StepError({"message": message, "transient": True}))


INTERVAL = 3.0
"""Seconds between two queries of the store and of the scheduler, which other users share."""


def wait_for_jobs(schedule: Schedule, study: Study) -> None:
    """Show the progress until no job of the study is in Slurm's queue. Then update `schedule` from
    the store."""
    jobs = {job.id: job for run in runs(study.store, study.config.study) for job in run.jobs}
    with show_progress(schedule, study.store):
        while True:
            queue, queue_error = queued_jobs(jobs)
            # after an error, the queue is unknown: jobs may still run
            if not queue and not queue_error:
                break
            time.sleep(INTERVAL)
            # keys: `Step.id_start`
            claimed = study.store.claims.active()
            with schedule.condition:
                _finish_present(schedule, study.store)
                for step in schedule.waiting.values():
                    if step.id_start in claimed:
                        schedule.running.setdefault(step.id, (step, schedule.clock()))
    update_from_store(schedule, study.store)


def _finish_present(schedule: Schedule, store: Store) -> None:
    """Change the state of waiting steps that have a result in the store to finished."""
    # keys: `Step.id_start`
    finished_names = store.finished_names()
    for step in list(schedule.waiting.values()):
        if step.id_start in finished_names:
            schedule.finish(step, computed=step.id in schedule.running)
