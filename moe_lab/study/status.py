"""The state of a study, from its store and from Slurm's queue; and the commands of
`moe-lab`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Document
from moe_lab.result_files import ID_DIGITS, current_records, start_of
from moe_lab.study.packing import remove_from_packs
from moe_lab.study.runs import (
    ENDED,
    RECORD_KIND,
    Run,
    SubmittedJob,
    active_runs,
    runs,
    steps_of_active_runs,
)
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.scheduler import QueuedJob
from moe_lab.study.store import Store

STATES = ("done", "running", "pending", "failed", "blocked", "missing")
"""pending: a running command or a Slurm job will do the step. blocked: the step needs a failed
step. missing: the step has no other state; the command that started the study starts such a
step."""
LINES = 20
"""Lines shown from the end of a log."""
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of one step. `name`: the path KIND/NAME of the step's folder in the store."""

    name: str
    state: str
    """One of STATES."""
    needs: Sequence[StepState] = ()
    job: str | None = None
    """Id of its last Slurm job."""

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True, eq=False)
class StudyState:
    """All steps of a study, its submitted Slurm jobs by id, and its jobs in Slurm's queue by id."""

    store: Store
    study: str
    start_time: float
    """Start of its last run, in seconds since the epoch."""
    record_time: float
    """When its last record was written, in seconds since the epoch; 0.0 if there is none."""
    steps: Sequence[StepState]
    jobs: Mapping[str, SubmittedJob]
    queue: Mapping[str, QueuedJob]
    queue_error: str
    """Why the queue is unknown; "" when the scheduler answered, or when the study has no jobs."""


def study_state(store: Store, study: str) -> StudyState:
    """The state of a study that was run at least once. Its steps are those in the last undamaged
    plan of a run. If a job should have written the record and has not, the record is one more step,
    with the state "missing". A damaged document adds a notice to `store.notices`. Raises UserError
    when no run has an undamaged plan."""
    record_time = _record_time(store, study)
    study_runs = runs(store, study)
    jobs = {job.id: job for run in study_runs for job in run.jobs}
    queue, queue_error = queued_jobs(jobs)
    # `plan` of a run is None if it is missing or damaged
    plan = next(filter(None, (run.plan for run in reversed(study_runs))), None)
    if plan is None:
        error = f"study={study}: the record is missing: start the study again to write it"
        raise UserError("; ".join([*store.notices, error]))
    steps = _step_states(store, plan, jobs, queue)
    record_job = _unfinished_record_job(store, study_runs)
    if record_job and record_job not in queue and not queue_error:
        steps.append(StepState(RECORD_KIND, "missing", job=record_job))
    return StudyState(store, study, plan["time"], record_time, steps, jobs, queue, queue_error)


def _step_states(
    store: Store,
    plan: Document,
    jobs: Mapping[str, SubmittedJob],
    queue: Mapping[str, QueuedJob],
) -> list[StepState]:
    """The states of all steps in `plan`, the content of run.json. plan["steps"]: names of steps.
    plan["inputs"]: for each step, the indices of its inputs. `jobs`, `queue`: id -> job."""
    job_of = _job_of_steps(jobs, queue)
    finished = store.finished_names()
    claimed = store.claims.active()
    active_steps = steps_of_active_runs(store)
    steps: list[StepState] = []
    for name, indices in zip(plan["steps"], plan["inputs"], strict=True):
        id_start = start_of(name)
        job_id = job_of.get(id_start)
        inputs = [steps[index] for index in indices]
        if id_start in finished:
            state = "done"
        elif id_start in claimed:
            state = "running"
        elif job_id in queue:
            state = "pending"
        elif store.error(id_start):
            state = "failed"
        elif any(needed.state in ("failed", "blocked") for needed in inputs):
            state = "blocked"
        elif job_id is None and id_start in active_steps:
            state = "pending"
        else:
            state = "missing"
        steps.append(StepState(name, state, inputs, job_id))
    return steps


def _job_of_steps(
    jobs: Mapping[str, SubmittedJob], queue: Mapping[str, QueuedJob]
) -> dict[str, str]:
    """First ID_DIGITS digits of a step's id -> id of the job for the step: the first in the queue,
    else the last submitted job."""
    job_of: dict[str, str] = {}
    for job in jobs.values():
        for step in job.steps:
            if job_of.get(step[:ID_DIGITS]) not in queue:
                job_of[step[:ID_DIGITS]] = job.id
    return job_of


def _record_time(store: Store, study: str) -> float:
    """`StudyState.record_time` of a study. If a record is damaged, adds a notice to the store."""
    try:
        records = current_records(store.root, study)
    except Damaged as error:
        store.notices.append(f"{error}: remove it, and start the study again")
        return 0.0
    return max((float(record["created"]) for record in records.values()), default=0.0)


def _unfinished_record_job(store: Store, study_runs: Sequence[Run]) -> str | None:
    """Id of the record job of a study, if it has not finished its work: the record, the report and
    the tracker's runs. `study_runs`: all runs of the study, the oldest first."""
    for run in reversed(study_runs):
        if run.folder.name in active_runs(store) or (run.folder / ENDED).exists():
            return None
        record_jobs = [job.id for job in run.jobs if job.kind == RECORD_KIND]
        if record_jobs:
            return record_jobs[-1]
        if run.is_recorded:
            return None
    return None


def queued_jobs(jobs: Mapping[str, SubmittedJob]) -> tuple[dict[str, QueuedJob], str]:
    """(id -> job, for those of `jobs` that are in Slurm's queue; ""). If the scheduler does not
    answer: ({}, the error as text)."""
    if not jobs:
        return {}, ""
    try:
        queue = scheduler.queue(job.user for job in jobs.values())
    except UserError as error:
        return {}, str(error)
    queued = {}
    for job_id, job in jobs.items():
        # Slurm may have given the id to another job since
        if job_id in queue and queue[job_id].name == job.name:
            queued[job_id] = queue[job_id]
    return queued, ""


def status(study: StudyState, steps: Sequence[StepState]) -> None:
    """Print when a study was started and ended, a table with the number of steps of each kind in
    each state, and the jobs in the queue."""
    steps_by_kind: dict[str, list[StepState]] = defaultdict(list)
    for step in steps:
        steps_by_kind[step.kind].append(step)
    total = Counter(step.state for step in steps)
    states = [state for state in STATES if total[state]]
    has_ended = states == ["done"] and study.record_time > study.start_time
    end_time = study.record_time if has_ended else time.time()
    # without fractions of seconds
    since = timedelta(seconds=round(end_time - study.start_time))
    end = f"ended on {datetime.fromtimestamp(end_time):%Y-%m-%d at %H:%M}, " if has_ended else ""
    print(f"{study.study}: {end}{since} after it was last started")
    table = Table("step", *states)
    for column in table.columns:
        column.no_wrap = True
    for kind, kind_steps in steps_by_kind.items():
        counts = Counter(step.state for step in kind_steps)
        table.add_row(kind, *(str(counts[state] or "") for state in states))
    table.add_row("all", *(str(total[state]) for state in states))
    console.print(table)
    _print_jobs(study)
    if study.queue_error:
        print(study.queue_error)
    why_command = f"moe-lab why {study.study} store={study.store.root}"
    if total["failed"]:
        print(f"why the failed ones failed: {why_command}")
    if total["missing"] and not study.queue_error:
        if jobs := {step.job for step in steps if step.state == "missing" and step.job}:
            print(f"jobs that ended without their steps: {len(jobs)}; why: {why_command}")
        print("the same command as before starts what is missing")


def _print_jobs(study: StudyState) -> None:
    """Print the number of jobs in the queue by kind, state and, for pending jobs, Slurm's
    reason."""
    counts: Counter[str] = Counter()
    for job_id, queued in study.queue.items():
        kind = study.jobs[job_id].kind
        if kind != RECORD_KIND:
            reason = f" ({queued.reason})" if queued.is_pending else ""
            counts[f"{kind} jobs {queued.state.lower()}{reason}"] += 1
    for line, count in counts.items():
        print(f"{count} {line}")


def cancel(study: StudyState, steps: Sequence[StepState]) -> None:
    """Cancel the jobs of a study that are in the queue. If `steps` are only some of the study's
    steps, cancel only the jobs of the running and pending steps among `steps`. Raises UserError
    when the queue is unknown."""
    if study.queue_error:
        raise UserError(study.queue_error)
    job_ids = list(study.queue)
    if len(steps) < len(study.steps):
        jobs_of_steps = {step.job for step in steps if step.state in ("pending", "running")}
        job_ids = [job_id for job_id in job_ids if job_id in jobs_of_steps]
    scheduler.cancel(job_ids)
    count = sum(len(study.jobs[job_id].steps) for job_id in job_ids)
    print(f"{study.study}: cancelled {len(job_ids)} jobs, with {count} steps; finished ones remain")


def explain(study: StudyState, steps: Sequence[StepState]) -> None:
    """Print each reason why steps are not done, with the first step that has this reason and the
    end of its log."""
    reasons: dict[str, list[StepState]] = defaultdict(list)
    for step in steps:
        if step.state != "done":
            reasons[_reason(study, step)].append(step)
    for reason, (first, *others) in reasons.items():
        more = f" and {len(others)} more" if others else ""
        print(f"{first.name}{more}: {first.state}: {reason}")
        if first.state in ("failed", "running", "missing"):
            _print_log(study, first)
    if not reasons:
        print(f"{study.study}: all {len(steps)} steps are done")


def _print_log(study: StudyState, step: StepState) -> None:
    """Print the last LINES lines of the log of a step, if there is one."""
    logs = [study.store.log(step.name)]
    if step.state == "missing":
        # the job may have died before it began the step; the name is submitit's
        name = f"{step.job}_0_log.err"
        logs = [*(run.logs / name for run in runs(study.store, study.study)), *logs]
    for log in logs:
        if log.exists():
            print(f"  {log}, last lines:")
            for line in log.read_text(errors="replace").splitlines()[-LINES:]:
                print(f"  | {line}")
            return


def verify(study: StudyState, steps: Sequence[StepState]) -> int:
    """Hash all files of the finished steps, and print the files that are missing or damaged.
    Damaged steps are removed from packs. Returns the exit code: 1 if a file is missing or damaged,
    or if the store has notices of damaged documents, otherwise 0."""
    store = study.store
    names = [step.name for step in steps if step.state == "done"]
    damaged_count = 0
    for name in names:
        # file -> "missing" or "damaged"; a damaged step in a pack is noted in `damaged_steps`
        states = store.damaged_files(name, hash_all=True)
        damaged_count += bool(states)
        for file, state in states.items():
            print(f"{state}: {store.folder(name) / file}")
    if store.packs.damaged_steps:
        remove_from_packs(store, store.packs.damaged_steps)
    if damaged_count:
        print(f"{study.study}: {damaged_count} of {len(names)} finished steps are damaged")
        print("start the study again: they are set aside and computed again, but not later steps")
        return 1
    print(f"{study.study}: all {len(names)} finished steps are as they were published")
    return 1 if store.notices else 0


def unpack(study: StudyState, steps: Sequence[StepState]) -> None:
    """Print the folder of each finished step among `steps`. The files of a step in a pack are first
    copied to the folder unpacked/KIND/NAME in the current folder."""
    for step in steps:
        if step.state != "done":
            continue
        folder = study.store.folder(step.name)
        if not folder.exists():
            folder = Path("unpacked", step.name)
            folder.mkdir(parents=True, exist_ok=True)
            for name in study.store.packs.files(start_of(step.name)):
                (folder / name).write_bytes(study.store.content(step.name, name))
        print(folder)


COMMANDS: Mapping[str, Callable[[StudyState, list[StepState]], int | None]] = {
    "status": status,
    "cancel": cancel,
    "why": explain,
    "verify": verify,
    "unpack": unpack,
}
"""The commands of `moe-lab` by name."""


def _reason(study: StudyState, step: StepState) -> str:
    """Why a step is not done, and what starts it again if no run will compute it."""
    if step.state == "failed":
        error = study.store.error(start_of(step.name)) or {}
        return f"{error.get('message')} (retry=failed tries again)"
    if step.state == "blocked":
        cause = next(needed for needed in step.needs if needed.state in ("failed", "blocked"))
        return f"needs {cause.name}, which is {cause.state}"
    if step.job is not None and step.job in study.queue:
        queued = study.queue[step.job]
        detail = f" ({queued.reason})" if queued.is_pending else f", {queued.elapsed} so far"
        return f"job {step.job} is {queued.state}{detail}"
    if step.state == "running":
        return f"being computed by {study.store.claims.holder(start_of(step.name))}"
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
    """How a job of a study ended, as text. Cached, as a job may have many steps."""
    with suppress(UserError):
        if state := scheduler.job_fields(job).get("JobState"):
            return state.lower()
    return "gone, and Slurm no longer says how it ended"
