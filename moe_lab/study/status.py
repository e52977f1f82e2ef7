"""State of a study, from the store and then from Slurm's queue; the commands of `python -m moe_lab.study`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Number, read_json
from moe_lab.study.runs import RECORD, Run, Submitted, last_about, runs, steps_at_work
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.scheduler import Queued
from moe_lab.study.store import STEP, Store, damaged

STATES = ("done", "running", "pending", "failed", "blocked", "missing")
"""pending: a running command or a Slurm job will do it. blocked: needs a failed step. missing: none of these; the
command that started the study starts it."""


@dataclass(frozen=True)
class StepState:
    """One step: its name, one of STATES, ids of its inputs, its last Slurm job if any, and since when it runs."""

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
    """All steps of a study by id, its Slurm jobs by id, and those of the jobs that are still in the queue."""

    started: float
    steps: Mapping[str, StepState]
    jobs: Mapping[str, Submitted]
    queue: Mapping[str, Queued]
    logs: Mapping[str, Run]
    """Job id -> the run it belongs to."""
    silence: str
    """Why the scheduler could not be asked; "" when it answered, or when the study has no jobs."""


def study_state(store: Store, study: str) -> StudyState:
    """The state of a study that was run at least once."""
    all_runs = runs(store, study)
    of_run = {job.id: run for run in all_runs for job in run.jobs}
    jobs = {job.id: job for run in all_runs for job in run.jobs}
    queue, silence = alive(jobs) if jobs else ({}, "")
    last_job: dict[str, str] = {}
    for job in jobs.values():
        for step in job.steps:
            if last_job.get(step) not in queue:
                last_job[step] = job.id
    if (about := last_about(store, study)) is None:
        raise UserError(f"study={study}: no run says what its steps are: start it again, and it is written down anew")
    steps: dict[str, StepState] = {}
    busy = {kind: store.being_done(kind) for kind in {name.partition("/")[0] for _, name, _ in about["steps"]}}
    at_work = steps_at_work(store)
    for step, name, needs in about["steps"]:
        since = busy[name.partition("/")[0]].get(step[:12])
        own = last_job.get(step)
        inputs = [steps[needed] for needed in needs if needed in steps]
        done = store.place(name, step).exists()
        state = "done" if done else _state(store, step, since, own in queue, own is None and step in at_work, inputs)
        steps[step] = StepState(step, name, state, tuple(needed.id for needed in inputs), own, since)
    return StudyState(about["time"], steps, jobs, queue, of_run, silence)


def alive(jobs: Mapping[str, Submitted]) -> tuple[dict[str, Queued], str]:
    """Those of the jobs that are still in the queue, and "". When the scheduler cannot be asked: {}, and the reason.

    The store alone still gives a useful state, so this is no error.
    """
    try:
        queue = scheduler.queue()
    except UserError as error:
        return {}, str(error)
    return {name: queue[name] for name, job in jobs.items() if name in queue and queue[name].name == job.name}, ""


def _state(store: Store, step: str, since: float | None, queued: bool, held: bool, needs: Iterable[StepState]) -> str:
    """State of a step that is not done. `held`: a running command does it by itself, or has failed in it already."""
    if since is not None:
        return "running"
    if queued:
        return "pending"
    if store.error(step):
        return "failed"
    if any(needed.state in ("failed", "blocked") for needed in needs):
        return "blocked"
    return "pending" if held else "missing"


def left(state: StudyState, seconds: Mapping[str, float]) -> dict[str, float]:
    """Kind -> seconds until its steps are done, if each takes `seconds` of its kind and as many run at once as now."""
    remaining: dict[str, float] = {}
    for kind, mean in seconds.items():
        own = [step for step in state.steps.values() if step.kind == kind]
        running = [step for step in own if step.state == "running"]
        open_steps = len(running) + sum(step.state == "pending" for step in own)
        gone = sum(min(mean, time.time() - (step.since or 0)) for step in running)
        remaining[kind] = max(0.0, open_steps * mean - gone) / max(1, len(running))
    return remaining


LINES = 20
"""Lines shown from the end of a log."""
SAMPLE = 50
"""Most steps of a kind whose times are read for its mean."""
SHOWN = 5
"""Most steps whose logs are shown."""
console = Console(highlight=False)


def status(store: Store, study: str, state: StudyState, steps: Sequence[StepState]) -> None:
    """Print a row per kind of step: number of steps in each state, mean time of one, and time left."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for step in steps:
        kinds[step.kind][step.state] += 1
    total = sum(kinds.values(), Counter[str]())
    seconds = {kind: mean for kind in kinds if (mean := _mean_seconds(store, steps, kind)) is not None}
    rest = left(state, seconds)
    shown = [name for name in STATES if total[name]]
    table = Table(title=f"{study}: {_span(time.time() - state.started)} since it was last started")
    for heading in ("step", *shown, "one takes", "left, about"):
        table.add_column(heading, no_wrap=True)
    for kind, counts in kinds.items():
        times = (_span(seconds[kind]), _span(rest[kind])) if kind in seconds else ("", "")
        table.add_row(kind, *(str(counts[name] or "") for name in shown), *times)
    known = all(kind in seconds for kind, counts in kinds.items() if counts["running"] or counts["pending"])
    table.add_row("all", *(str(total[name]) for name in shown), "", _span(sum(rest.values())) if known else "")
    console.print(table)
    for line in [*_jobs(state), *([state.silence] if state.silence else [])]:
        print(line)
    if total["failed"]:
        print(f"why the failed ones failed: python -m moe_lab.study why {study} store={store.root}")
    if total["missing"]:
        print("the same command as before starts what is missing")


def cancel(store: Store, study: str, state: StudyState, steps: Sequence[StepState]) -> None:
    """Cancel all jobs of the study, or only those of the given steps."""
    everything = len(steps) == len(state.steps)
    wanted = {step.job for step in steps if step.state in ("pending", "running")}
    jobs = [name for name in state.queue if everything or name in wanted]
    scheduler.cancel(jobs)
    others = sum(len(state.jobs[name].steps) for name in jobs) - sum(step.job in jobs for step in steps)
    more = f", with {others} other steps in them" if others > 0 and not everything else ""
    print(f"{study}: cancelled {len(jobs)} jobs{more}; what is finished is kept")


def logs(store: Store, study: str, state: StudyState, steps: Sequence[StepState]) -> None:
    """Print the last log lines of the study's failed and running steps, or of the steps that were named."""
    everything = len(steps) == len(state.steps)
    shown = [step for step in steps if not everything or step.state in ("failed", "running")]
    for step in shown[:SHOWN]:
        print(f"{step.name}: {step.state}")
        _print_log(store.log(step.name))
    if len(shown) > SHOWN:
        print(f"and {len(shown) - SHOWN} more; name one to see it")
    if not shown:
        print(f"{study}: no step has failed, and none is running")


def why(store: Store, study: str, state: StudyState, steps: Sequence[StepState]) -> None:
    """Print why steps are not done: the error, the step they need, the scheduler's reason, or how their job ended.

    Steps with the same reason share one line.
    """
    reasons: dict[str, list[StepState]] = defaultdict(list)
    for step in steps:
        if step.state != "done":
            reasons[_reason(store, state, step)].append(step)
    for reason, alike in reasons.items():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        print(f"{alike[0].name}{more}: {alike[0].state}: {reason}")
        if alike[0].state == "failed":
            _print_log(store.log(alike[0].name))
    if not reasons:
        print(f"{study}: all {len(steps)} steps are done")


def verify(store: Store, study: str, state: StudyState, steps: Sequence[StepState]) -> int:
    """Hash every file of the finished steps, and print each that is missing or damaged. Returns 1 if any is."""
    folders = [store.place(step.name, step.id) for step in steps if step.state == "done"]
    bad = {folder: files for folder in folders if (files := damaged(folder))}
    for folder, files in bad.items():
        for file, what in files.items():
            print(f"{what}: {folder / file}")
    if bad:
        print(f"{study}: {len(bad)} of {len(folders)} finished steps are damaged")
        print("start the study again: they are set aside and made anew; what was made from them is kept")
        return 1
    print(f"{study}: all {len(folders)} finished steps are as they were published")
    return 0


COMMANDS: Mapping[str, Callable[[Store, str, StudyState, list[StepState]], int | None]] = {
    command.__name__: command for command in (status, cancel, logs, why, verify)
}
"""The commands of `python -m moe_lab.study` by name."""


def _reason(store: Store, state: StudyState, step: StepState) -> str:
    if step.state == "failed":
        error = store.error(step.id) or {}
        return f"{error.get('message')} (retry=failed tries again)"
    if step.state == "blocked":
        causes = [name for name in step.needs if state.steps[name].state in ("failed", "blocked")]
        return f"needs {state.steps[causes[0]].name}, which is {state.steps[causes[0]].state}"
    if step.state in ("running", "pending") and step.job not in state.queue:
        by = f"being computed by {store.holder(step.id)}"
        return by if step.state == "running" else "another run will compute it"
    if step.job is None:
        return "no job was made for it; the same command as before starts it"
    if queued := state.queue.get(step.job):
        waits = f" ({queued.reason})" if queued.pending else f", {queued.elapsed} so far"
        return f"job {step.job} is {queued.state}{waits}"
    ended = scheduler.fate(step.job).lower() or "gone, and Slurm no longer says how it ended"
    log = state.logs[step.job].logs / f"{step.job}_0_log.err"
    return f"job {step.job} is {ended}; the same command as before starts it again; its log is {log}"


def _jobs(state: StudyState) -> list[str]:
    """Lines that count the jobs in the queue by kind, state and the scheduler's reason."""
    counts = Counter(
        (state.jobs[name].kind, queued.state.lower(), f" ({queued.reason})" if queued.pending else "")
        for name, queued in state.queue.items()
    )
    return [f"{count} {kind} jobs {word}{reason}" for (kind, word, reason), count in counts.items() if kind != RECORD]


def _mean_seconds(store: Store, steps: Sequence[StepState], kind: str) -> float | None:
    done = [step for step in steps if step.kind == kind and step.state == "done"][:SAMPLE]
    files = [store.place(step.name, step.id) / STEP for step in done]
    seconds = []
    for file in files:
        with suppress(FileNotFoundError, Damaged):  # the next run, or verify, reports it
            seconds.append(read_json(file, {"provenance": {"seconds": Number}})["provenance"]["seconds"])
    return fmean(seconds) if seconds else None


def _print_log(log: Path) -> None:
    if not log.exists():
        print("  it printed nothing")
        return
    print(f"  {log}, last lines:")
    for line in log.read_text(errors="replace").splitlines()[-LINES:]:
        print(f"  | {line}")


def _span(seconds: float) -> str:
    """A duration as text: 12 s, 7 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
