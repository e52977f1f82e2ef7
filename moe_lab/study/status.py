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

from rich.console import Console
from rich.table import Table

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Number, fits
from moe_lab.results import DIGITS, current_records
from moe_lab.results import RECORD as RECORD_FILE
from moe_lab.study.packing import drop
from moe_lab.study.runs import ENDED, RECORD, Run, Submitted, held_runs, runs, steps_at_work
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
    silence: str
    """Why the scheduler could not be asked; "" when it answered, or when the study has no jobs."""


def study_state(store: Store, study: str) -> StudyState:
    """The state of a study that was run at least once. A damaged document of it becomes a notice of
    the store."""
    _check_records(store, study)
    every = runs(store, study)
    jobs = {job.id: job for run in every for job in run.jobs}
    queue, silence = alive(jobs) if jobs else ({}, "")
    last_job: dict[str, str] = {}
    for job in jobs.values():
        last_job |= {
            step[:DIGITS]: job.id for step in job.steps if last_job.get(step[:DIGITS]) not in queue
        }
    if (about := next((about for run in reversed(every) if (about := run.about)), None)) is None:
        missing = (
            f"study={study}: no run says what its steps are: start it again, and it is "
            "written down anew"
        )
        raise UserError("; ".join([*store.notices, missing]))
    steps: list[StepState] = []
    finished = store.present()
    claimed = store.claims.living()
    at_work = steps_at_work(store)
    for name, needs in zip(about["steps"], about["inputs"], strict=True):
        start = name[-DIGITS:]
        own = last_job.get(start)
        inputs = [steps[needed] for needed in needs]
        if start in finished:
            state = "done"
        elif start in claimed:
            state = "running"
        elif own in queue:
            state = "pending"
        elif store.error(start):
            state = "failed"
        elif any(needed.state in ("failed", "blocked") for needed in inputs):
            state = "blocked"
        else:
            state = "pending" if own is None and start in at_work else "missing"
        steps.append(StepState(name, state, inputs, own, claimed.get(start, 0.0)))
    if (last := _unrecorded(store, every)) and last not in queue and not silence:
        steps.append(StepState(RECORD, "missing", job=last))
    return StudyState(store, study, about["time"], steps, jobs, queue, silence)


def _check_records(store: Store, study: str) -> None:
    try:
        current_records(store.root, study)
    except Damaged as error:
        store.notices.append(f"{error}: remove it, and start the study again")


def _unrecorded(store: Store, every: Sequence[Run]) -> str | None:
    """The job of the last run with such a job or a record that should have written the record, the
    report and the tracker's runs; None if all that is done, or if a later run is under way."""
    for run in reversed(every):
        if run.folder.name in held_runs(store) or (run.folder / ENDED).exists():
            return None
        writes = [job.id for job in run.jobs if job.kind == RECORD]
        if writes or (run.folder / RECORD_FILE).exists():
            return writes[-1] if writes else None
    return None


def alive(jobs: Mapping[str, Submitted]) -> tuple[dict[str, Queued], str]:
    """Those of the jobs that are still in the queue, and "". When the scheduler cannot be asked:
    {}, and the reason. The store alone still gives a useful state, so this is no error."""
    try:
        queue = scheduler.queue(job.user for job in jobs.values())
    except UserError as error:
        return {}, str(error)
    return {
        name: queue[name]
        for name, job in jobs.items()
        if name in queue and queue[name].name == job.name
    }, ""


def left(steps: Sequence[StepState], seconds: float) -> float:
    """Seconds until steps of a kind are done, if each takes `seconds` and as many run at once as
    now."""
    running = [step for step in steps if step.state == "running"]
    unfinished = len(running) + sum(step.state == "pending" for step in steps)
    gone = sum(min(seconds, time.time() - step.since) for step in running)
    return max(0.0, unfinished * seconds - gone) / max(1, len(running))


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
        times = map(_duration, (mean, left(of_kind, mean)) if mean else ())
        table.add_row(kind, *(str(counts[name] or "") for name in shown), *times)
    table.add_row("all", *(str(total[name]) for name in shown))
    console.print(table)
    counted = Counter(
        (
            f"{study.jobs[name].kind} jobs "
            f"{queued.state.lower()}{f' ({queued.reason})' if queued.pending else ''}"
        )
        for name, queued in study.queue.items()
        if study.jobs[name].kind != RECORD
    )
    for line, count in counted.items():
        print(f"{count} {line}")
    if study.silence:
        print(study.silence)
    if total["failed"]:
        print(
            f"why the failed ones failed: python -m moe_lab.study why {study.study} "
            f"store={study.store.root}"
        )
    if total["missing"] and not study.silence:
        if lost := {step.job: step for step in steps if step.state == "missing" and step.job}:
            said = f"python -m moe_lab.study why {study.study} store={study.store.root}"
            print(f"jobs that ended without their steps: {len(lost)}; why: {said}")
            _show_end(study, next(iter(lost.values())), 3)
        print("the same command as before starts what is missing")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def cancel(study: StudyState, steps: Sequence[StepState]) -> None:
    """Cancel all jobs of the study, or only those of the given steps."""
    if study.silence:
        raise UserError(study.silence)
    everything = len(steps) == len(study.steps)
    wanted = {step.job for step in steps if step.state in ("pending", "running")}
    jobs = [name for name in study.queue if everything or name in wanted]
    scheduler.cancel(jobs)
    stopped = sum(len(study.jobs[name].steps) for name in jobs)
    print(
        f"{study.study}: cancelled {len(jobs)} jobs, with {stopped} steps; what is finished is kept"
    )


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
            _show_end(study, first, LINES)
    if not reasons:
        print(f"{study.study}: all {len(steps)} steps are done")


def _show_end(study: StudyState, step: StepState, lines: int) -> None:
    """Print the last lines of the log of a step; of a missing one, of its job, which may have died
    before it began."""
    logs = [
        run.logs / f"{step.job}_0_log.err"
        for run in runs(study.store, study.study)
        if step.state == "missing"
    ]
    if log := next(filter(Path.exists, [*logs, study.store.log(step.name)]), None):
        print(f"  {log}, last lines:")
        for line in log.read_text(errors="replace").splitlines()[-lines:]:
            print(f"  | {line}")


def verify(study: StudyState, steps: Sequence[StepState]) -> int:
    """Hash every file of the finished steps, and print each that is missing or damaged. Returns 1
    if any is, or another document of the study, of which the store has a notice."""
    store = study.store
    names = [step.name for step in steps if step.state == "done"]
    bad = {name: files for name in names if (files := store.damage(name, hash_all=True))}
    for name, files in bad.items():
        for file, what in files.items():
            print(f"{what}: {store.folder(name) / file}")
    if store.packs.bad:
        drop(store, store.packs.bad)
    if bad:
        print(f"{study.study}: {len(bad)} of {len(names)} finished steps are damaged")
        print(
            "start the study again: they are set aside and made anew; what was made from them is "
            "kept"
        )
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
        return "no job was made for it; the same command as before starts it"
    if study.silence:
        return f"job {step.job} was to do it; {study.silence}"
    return f"job {step.job} is {_end(study, step.job)}; the same command as before starts it again"


@cache
def _end(study: StudyState, job: str) -> str:
    """How a job of a study ended, asked once."""
    with suppress(UserError):
        if state := scheduler.fate(job).get("JobState"):
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
