"""How far a study is: every step's state, from the store first and the scheduler second."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moe_lab.errors import UserError
from moe_lab.study.runs import Run, Submitted, last_about, runs
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.scheduler import Queued
from moe_lab.study.store import Store

STATES = ("done", "running", "pending", "failed", "blocked", "missing")
"""blocked: needs a failed step. missing: nobody is going to do it; the same command starts it."""


@dataclass(frozen=True)
class StepState:
    """One step: its name, one of STATES, the job it is in if there is one, and since when it runs."""

    id: str
    name: str
    state: str
    needs: tuple[str, ...]
    job: str | None = None
    since: float | None = None

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class StudyState:
    """All steps of a study by id, its jobs, and what of them the scheduler still has."""

    started: float
    steps: Mapping[str, StepState]
    jobs: Mapping[str, Submitted]
    queue: Mapping[str, Queued]
    logs: Mapping[str, Run]
    """Job id -> the run it belongs to."""
    silence: str
    """Why the scheduler could not be asked; "" when it was, or when there is nothing to ask."""


def study_state(store: Store, study: str) -> StudyState:
    """The state of a study that was run at least once."""
    all_runs = runs(store, study)
    of_run = {job.id: run for run in all_runs for job in run.jobs}
    jobs = {job.id: job for run in all_runs for job in run.jobs}
    queue, silence = _alive(jobs) if jobs else ({}, "")
    last_job: dict[str, str] = {}
    for job in jobs.values():
        for step in job.steps:
            if last_job.get(step) not in queue:
                last_job[step] = job.id
    if (about := last_about(store, study)) is None:
        raise UserError(f"study={study}: no run says what its steps are: start it again, and it is written down anew")
    steps: dict[str, StepState] = {}
    busy = {kind: store.being_done(kind) for kind in {name.partition("/")[0] for _, name, _ in about["steps"]}}
    for step, name, needs in about["steps"]:
        since = busy[name.partition("/")[0]].get(step[:12])
        own = last_job.get(step)
        inputs = [steps[needed] for needed in needs if needed in steps]
        state = _state(store, step, name, since, queue.get(own or ""), inputs)
        steps[step] = StepState(step, name, state, tuple(needed.id for needed in inputs), own, since)
    return StudyState(about["time"], steps, jobs, queue, of_run, silence)


def _alive(jobs: Mapping[str, Submitted]) -> tuple[dict[str, Queued], str]:
    """What the scheduler still has of the jobs, and why it could not be asked if so: the store can be, in any case."""
    try:
        found = scheduler.queue()
    except UserError as error:
        return {}, str(error)
    return {name: found[name] for name, job in jobs.items() if name in found and found[name].name == job.name}, ""


def _state(
    store: Store, step: str, name: str, since: float | None, queued: Queued | None, needs: Iterable[StepState]
) -> str:
    if store.place(name, step).exists():
        return "done"
    if since is not None:
        return "running"
    if queued:
        return "pending"
    if store.error_of(step):
        return "failed"
    return "blocked" if any(needed.state in ("failed", "blocked") for needed in needs) else "missing"


def left(state: StudyState, seconds: Mapping[str, float]) -> dict[str, float]:
    """Kind -> seconds until its steps are done, if each takes the mean of `seconds` and as many run as now."""
    found: dict[str, float] = {}
    for kind, mean in seconds.items():
        own = [step for step in state.steps.values() if step.kind == kind]
        running = [step for step in own if step.state == "running"]
        open_steps = len(running) + sum(step.state == "pending" for step in own)
        gone = sum(min(mean, time.time() - (step.since or 0)) for step in running)
        found[kind] = max(0.0, open_steps * mean - gone) / max(1, len(running))
    return found
