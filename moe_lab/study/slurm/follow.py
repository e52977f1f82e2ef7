"""wait=true: watch a study's jobs until none is left."""

from __future__ import annotations

import time

from moe_lab.errors import UserError
from moe_lab.study.finish import Study
from moe_lab.study.progress import watch
from moe_lab.study.runs import runs
from moe_lab.study.schedule import Schedule
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.pack import settle

LOOK_EVERY = 1.0
"""Seconds between two looks at the store."""
ASK_EVERY = 5.0
"""Seconds between two questions to the scheduler, whom many ask."""


def follow(schedule: Schedule, study: Study) -> None:
    """Return when the study has no job left, with `schedule` as the store then says."""
    jobs = {job.id: job.name for run in runs(study.store, study.config.study) for job in run.jobs}
    with watch(schedule):
        asked = 0.0
        while True:
            _note_finished(schedule, study)
            if not schedule.waiting or time.monotonic() - asked >= ASK_EVERY:
                asked = time.monotonic()
                if not _any_left(jobs):
                    break
            time.sleep(LOOK_EVERY)
    settle(schedule, study.store)


def _note_finished(schedule: Schedule, study: Study) -> None:
    with schedule.changed:
        for step in [step for step in schedule.waiting.values() if study.store.path(step).exists()]:
            del schedule.waiting[step.id]
            schedule.finished.add(step.id)


def _any_left(jobs: dict[str, str]) -> bool:
    """Whether the scheduler still has one of the jobs; while it does not answer, jobs go on without it."""
    try:
        queue = scheduler.queue()
    except UserError:
        return True
    return any(queue[job].name == name for job, name in jobs.items() if job in queue)
