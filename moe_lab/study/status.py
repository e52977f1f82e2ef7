"""State of a study, from the store and then from Slurm's queue; the commands of
`python -m moe_lab.study`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Number, fits
from moe_lab.results import DIGITS, current_records
from moe_lab.results import RECORD as RECORD_FILE
from moe_lab.study.packing import drop
from moe_lab.study.runs import ENDED, RECORD, Run, Submitted, active_runs, runs, steps_at_work
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.scheduler import Queued
from moe_lab.study.store import Store

STATES = ("done", "running", "pending", "failed", "blocked", "missing")
"""pending: a running command or a Slurm job will do it. blocked: needs a failed step. missing: none
of these; the command that started the study starts it."""
LINES = 20
"""Lines shown from the end of a log."""
TIMED = {"provenance": {"seconds": Number}}
"""What the table reads of step.json."""
SAMPLE = 50
"""Most steps of a kind whose times are read for its mean."""
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class StepState:
    """One step: its name, one of STATES, the steps it needs, its last Slurm job if any, and since
    when it runs."""

    name: str
    state: str
    needs: Sequence[StepState] = ()
    job: str | None = None
    since: float = 0.0

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True, eq=False)
class StudyState:
    """All steps of a study, its Slurm jobs by id, and those of the jobs that are still in the
    queue."""

    store: Store
    study: str
    started: float
    steps: Sequence[StepState]
    jobs: Mapping[str, Submitted]
    queue: Mapping[str, Queued]
    queue_error: str
    """Why the queue is unknown; "" when the scheduler answered, or when the study has no jobs."""


def study_state(store: Store, study: str) -> StudyState:
    """The state of a study that was run at least once. A damaged document of it becomes a notice of
    the store."""
    _check_records(store, study)
    every = runs(store, study)
    jobs = {job.id: job for run in every for job in run.jobs}
    queue, queue_error = queued_jobs(jobs) if jobs else ({}, "")
    plan = next((plan for run in reversed(every) if (plan := run.plan)), None)
    if plan is None:
        missing = f"study={study}: the record is missing: start the study again to write it"
        raise UserError("; ".join([*store.notices, missing]))
    steps = _step_states(store, plan, jobs, queue)
    record_job = _missing_record_job(store, every)
    if record_job and record_job not in queue and not queue_error:
        steps.append(StepState(RECORD, "missing", job=record_job))
    return StudyState(store, study, plan["time"], steps, jobs, queue, queue_error)


def _step_states(
    store: Store,
    plan: Mapping[str, Any],
    jobs: Mapping[str, Submitted],
    queue: Mapping[str, Queued],
) -> list[StepState]:
    """States of the steps of a run's `plan`. `jobs`: all jobs of the study by id."""
    job_of = _last_jobs(jobs, queue)
    finished = store.present()
    claimed = store.claims.active()
    planned = steps_at_work(store)
    steps: list[StepState] = []
    for name, indices in zip(plan["steps"], plan["inputs"], strict=True):
        start = name[-DIGITS:]
        job_id = job_of.get(start)
        inputs = [steps[index] for index in indices]
        if start in finished:
            state = "done"
        elif start in claimed:
            state = "running"
        elif job_id in queue:
            state = "pending"
        elif store.error(start):
            state = "failed"
        elif any(needed.state in ("failed", "blocked") for needed in inputs):
            state = "blocked"
        elif job_id is None and start in planned:
            state = "pending"
        else:
            state = "missing"
        steps.append(StepState(name, state, inputs, job_id, claimed.get(start, 0.0)))
    return steps


def _last_jobs(jobs: Mapping[str, Submitted], queue: Mapping[str, Queued]) -> dict[str, str]:
    """Start of a step's id -> its last job, or an earlier one that is in the queue."""
    job_of: dict[str, str] = {}
    for job in jobs.values():
        for step in job.steps:
            if job_of.get(step[:DIGITS]) not in queue:
                job_of[step[:DIGITS]] = job.id
    return job_of


def _check_records(store: Store, study: str) -> None:
    try:
        current_records(store.root, study)
    except Damaged as error:
        store.notices.append(f"{error}: remove it, and start the study again")


def _missing_record_job(store: Store, every: Sequence[Run]) -> str | None:
    """The job that should have written the record, the report and the tracker's runs.

    It is of the last run with such a job or a record; None if all of these are complete, or if a
    later run is active.
    """
    for run in reversed(every):
        if run.folder.name in active_runs(store) or (run.folder / ENDED).exists():
            return None
        record_jobs = [job.id for job in run.jobs if job.kind == RECORD]
        if record_jobs:
            return record_jobs[-1]
        if (run.folder / RECORD_FILE).exists():
            return None
    return None


def queued_jobs(jobs: Mapping[str, Submitted]) -> tuple[dict[str, Queued], str]:
    """Those of the jobs that are in the queue, and "". When the scheduler does not answer: {}, and
    the error. The store alone still gives a useful state, so this is not raised."""
    try:
        queue = scheduler.queue(job.user for job in jobs.values())
    except UserError as error:
        return {}, str(error)
    queued = {}
    for name, job in jobs.items():
        if name in queue and queue[name].name == job.name:
            queued[name] = queue[name]
    return queued, ""


def seconds_left(steps: Sequence[StepState], seconds: float) -> float:
    """Seconds until steps of a kind are done, if each takes `seconds` and as many run at the same
    time as now."""
    running = [step for step in steps if step.state == "running"]
    unfinished = len(running) + sum(step.state == "pending" for step in steps)
    spent = sum(min(seconds, time.time() - step.since) for step in running)
    return max(0.0, unfinished * seconds - spent) / max(1, len(running))


def status(study: StudyState, steps: Sequence[StepState]) -> None:
    """Print a row per kind of step: number of steps in each state, mean time of one, and time
    left."""
    kinds: dict[str, list[StepState]] = defaultdict(list)
    for step in steps:
        kinds[step.kind].append(step)
    total = Counter(step.state for step in steps)
    shown = [name for name in STATES if total[name]]
    since = _duration(time.time() - study.started)
    table = Table(
        "step",
        *shown,
        "one takes",
        "left, about",
        title=f"{study.study}: {since} since it was last started",
    )
    for column in table.columns:
        column.no_wrap = True
    for kind, of_kind in kinds.items():
        counts = Counter(step.state for step in of_kind)
        mean = _mean_seconds(study.store, of_kind)
        times = [mean, seconds_left(of_kind, mean)] if mean else []
        cells = [str(counts[name] or "") for name in shown]
        table.add_row(kind, *cells, *map(_duration, times))
    table.add_row("all", *(str(total[name]) for name in shown))
    console.print(table)
    _print_jobs(study)
    if study.queue_error:
        print(study.queue_error)
    why_command = f"python -m moe_lab.study why {study.study} store={study.store.root}"
    if total["failed"]:
        print(f"why the failed ones failed: {why_command}")
    if total["missing"] and not study.queue_error:
        if lost := {step.job: step for step in steps if step.state == "missing" and step.job}:
            print(f"jobs that ended without their steps: {len(lost)}; why: {why_command}")
            _print_log(study, next(iter(lost.values())), 3)
        print("the same command as before starts what is missing")


def _print_jobs(study: StudyState) -> None:
    """Print how many jobs of each kind are in each state in the queue."""
    counts: Counter[str] = Counter()
    for name, queued in study.queue.items():
        kind = study.jobs[name].kind
        if kind != RECORD:
            reason = f" ({queued.reason})" if queued.pending else ""
            counts[f"{kind} jobs {queued.state.lower()}{reason}"] += 1
    for line, count in counts.items():
        print(f"{count} {line}")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def cancel(study: StudyState, steps: Sequence[StepState]) -> None:
    """Cancel all jobs of the study, or only those of the given steps."""
    if study.queue_error:
        raise UserError(study.queue_error)
    jobs = list(study.queue)
    if len(steps) < len(study.steps):
        wanted = {step.job for step in steps if step.state in ("pending", "running")}
        jobs = [name for name in jobs if name in wanted]
    scheduler.cancel(jobs)
    count = sum(len(study.jobs[name].steps) for name in jobs)
    print(f"{study.study}: cancelled {len(jobs)} jobs, with {count} steps; finished ones remain")


def why(study: StudyState, steps: Sequence[StepState]) -> None:
    """Print why steps are not done, a line for each reason; and the last log lines of failed and
    running steps."""
    reasons: dict[str, list[StepState]] = defaultdict(list)
    for step in steps:
        if step.state != "done":
            reasons[_reason(study, step)].append(step)
    for reason, (first, *more) in reasons.items():
        print(f"{first.name}{f' and {len(more)} more' if more else ''}: {first.state}: {reason}")
        if first.state in ("failed", "running", "missing"):
            _print_log(study, first, LINES)
    if not reasons:
        print(f"{study.study}: all {len(steps)} steps are done")


def _print_log(study: StudyState, step: StepState, lines: int) -> None:
    """Print the last lines of the log of a step; of a missing one, of its job, which may have died
    before it began."""
    logs = [study.store.log(step.name)]
    if step.state == "missing":
        of_job = f"{step.job}_0_log.err"
        logs = [*(run.logs / of_job for run in runs(study.store, study.study)), *logs]
    for log in logs:
        if log.exists():
            print(f"  {log}, last lines:")
            for line in log.read_text(errors="replace").splitlines()[-lines:]:
                print(f"  | {line}")
            return


def verify(study: StudyState, steps: Sequence[StepState]) -> int:
    """Hash every file of the finished steps, and print each that is missing or damaged. Returns 1
    if any is, or another document of the study, of which the store has a notice."""
    store = study.store
    names = [step.name for step in steps if step.state == "done"]
    damaged = 0
    for name in names:
        states = store.damage(name, hash_all=True)
        damaged += bool(states)
        for file, state in states.items():
            print(f"{state}: {store.folder(name) / file}")
    if store.packs.bad:
        drop(store, store.packs.bad)
    if damaged:
        print(f"{study.study}: {damaged} of {len(names)} finished steps are damaged")
        print("start the study again: they are set aside and computed again, but not later steps")
        return 1
    print(f"{study.study}: all {len(names)} finished steps are as they were published")
    return 1 if store.notices else 0


def unpack(study: StudyState, steps: Sequence[StepState]) -> None:
    """Copy the files of steps that are in packs to unpacked/KIND/NAME, below the current folder;
    print all folders."""
    for step in [step for step in steps if step.state == "done"]:
        folder = study.store.folder(step.name)
        if not folder.exists():
            folder = Path("unpacked", step.name)
            folder.mkdir(parents=True, exist_ok=True)
            for name in study.store.packs.files(step.name[-DIGITS:]):
                (folder / name).write_bytes(study.store.content(step.name, name))
        print(folder)


COMMANDS: Mapping[str, Callable[[StudyState, list[StepState]], int | None]] = {
    command.__name__: command for command in (status, cancel, why, verify, unpack)
}
"""The commands of `python -m moe_lab.study` by name."""


def _reason(study: StudyState, step: StepState) -> str:
    if step.state == "failed":
        error = study.store.error(step.name[-DIGITS:]) or {}
        return f"{error.get('message')} (retry=failed tries again)"
    if step.state == "blocked":
        cause = next(needed for needed in step.needs if needed.state in ("failed", "blocked"))
        return f"needs {cause.name}, which is {cause.state}"
    if step.job is not None and step.job in study.queue:
        queued = study.queue[step.job]
        waits = f" ({queued.reason})" if queued.pending else f", {queued.elapsed} so far"
        return f"job {step.job} is {queued.state}{waits}"
    if step.state == "running":
        return f"being computed by {study.store.claims.holder(step.name[-DIGITS:])}"
    if step.state == "pending":
        return "another run will compute it"
    if step.job is None:
        return "no job was submitted for it; the same command as before starts it"
    if study.queue_error:
        return f"job {step.job} should compute it; {study.queue_error}"
    end = _job_end(study, step.job)
    return f"job {step.job} is {end}; the same command as before starts it again"


@cache
def _job_end(study: StudyState, job: str) -> str:
    """How a job of a study ended, which Slurm is asked once."""
    with suppress(UserError):
        if state := scheduler.job_state(job).get("JobState"):
            return state.lower()
    return "gone, and Slurm no longer says how it ended"


def _mean_seconds(store: Store, steps: Sequence[StepState]) -> float | None:
    """Mean time of those of the steps that are done, None without any."""
    seconds: list[float] = []
    for step in [step for step in steps if step.state == "done"][:SAMPLE]:
        with suppress(FileNotFoundError, Damaged):  # the next run, or verify, reports it
            document = store.document(step.name)
            if fits(document, TIMED):
                seconds.append(document["provenance"]["seconds"])
    return fmean(seconds) if seconds else None
