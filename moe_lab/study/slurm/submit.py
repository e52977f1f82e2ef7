"""Submit missing steps as arrays of jobs with dependencies, and a last job that writes the record
and the report."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from itertools import starmap
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

import moe_lab
from moe_lab import plugins, start
from moe_lab.calibration import shares_and_sets, sources
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError
from moe_lab.json_files import digest, write_json
from moe_lab.models import files
from moe_lab.paths import private_cache
from moe_lab.study.estimates import learned
from moe_lab.study.provenance import NOTED, code_state
from moe_lab.study.record import Study
from moe_lab.study.runs import RECORD, Run, Submitted, runs
from moe_lab.study.schedule import Schedule, inform
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.arrays import Array, arrange, configured, is_for_gpus, options, resources
from moe_lab.study.slurm.jobs import RecordJob, StepsJob
from moe_lab.study.slurm.scheduler import Queued
from moe_lab.study.step import Step, unmerged

EARLY = 60
"""Seconds by which Slurm may send its warning signal earlier than asked for."""
PAUSES = (10.0, 60.0)
"""Seconds before sbatch is tried again."""
RECORD_ASKS, RECORD_MEMORY = {"gpus": 0, "cpus": 1, "minutes": 60}, 4
"""Resources of the last job, and GiB; it has all other settings in common with every job."""


# Of the class, as arrays make executors of their own.
SlurmExecutor._make_submission_command = lambda _, script: [  # type: ignore[assignment]
    *("timeout", "--verbose", str(scheduler.LIMIT), "sbatch", str(script))
]


def submit(schedule: Schedule, study: Study, run: Run) -> None:
    """Submit jobs for the waiting steps, except those that jobs submitted earlier will still do.
    Raises UserError, with the scheduler's message, when it refuses a job; all jobs of this
    submission are then cancelled."""
    submission = Submission(study, run)
    try:
        _submit_missing(schedule, submission)
    except BaseException as error:
        try:
            if run.logs.exists():  # sbatch may have submitted a job without getting an answer
                scheduler.cancel({job.array for job in run.jobs})
                scheduler.cancel(scheduler.submitted_from(run.logs.absolute()))
        except UserError as failure:
            raise UserError(
                f"{str(error) or 'interrupted'}; jobs may remain in the queue: {failure}"
            ) from None
        run.remove()
        raise
    _announce(submission)


def _download(steps: Iterable[Step]) -> None:
    """Download the models and texts of the hub that steps read, as nodes may have no network."""
    wanted: dict[str, Callable[[], object]] = {}
    for step in steps:
        if model := step.resources().model:
            wanted[repr(model)] = partial(files.local_folder, model)
        for text in (
            value for value in vars(step).values() if isinstance(value, CalibrationConfig)
        ):
            wanted |= {
                repr(part): partial(sources.download, part) for _, part in shares_and_sets(text)
            }
    for download in wanted.values():
        download()


def _submit_missing(schedule: Schedule, submission: Submission, *, again: bool = True) -> None:
    study = submission.study
    config = study.config
    store = study.store
    earlier = [job for run in runs(store, config.study) for job in run.jobs]
    covered = under_way(earlier, scheduler.queue(job.user for job in earlier), schedule.waiting)
    needed = unmerged(schedule.waiting.values(), covered.steps.keys())
    missing = [step for step in needed if step.id not in covered.steps]
    submission.jobs.update(covered.steps)
    if not missing and covered.recorded:
        return
    limits = scheduler.time_limits()
    ask = partial(resources, settings=config.resources, seconds=learned(store), time_limits=limits)
    arrays = arrange(missing, ask, config.launcher, scheduler.longest_array())
    signal_seconds = config.launcher.signal_seconds
    for array in arrays:
        if array.asks["minutes"] * 60 <= signal_seconds + EARLY:
            raise UserError(
                f"resources: {array.kind} jobs ask for minutes={array.asks['minutes']}, which is "
                f"too short: Slurm warns them launcher.signal_seconds={signal_seconds} before the "
                f"end, and may do so {EARLY} s early"
            )
    begun = time.monotonic()
    _download(missing)
    if again and time.monotonic() - begun > 60:  # jobs that were in the queue may have ended
        return _submit_missing(schedule, submission, again=False)
    scheduler.cancel(covered.failed_jobs)
    for array in arrays:
        submission.add(array)
    submission.close()


@dataclass
class Submission:
    """Submits jobs one after another. `jobs`: step id -> id of the job or array that a job needing
    it must wait for."""

    study: Study
    run: Run
    jobs: dict[str, str] = field(default_factory=dict)

    @cached_property
    def starter(self) -> Path:
        """The start.py with which jobs are started, in a copy of the present code."""
        return copy_code(private_cache("jobs"), self.study.config.plugins)

    def add(self, array: Array) -> None:
        """Submit one array, to start when the jobs that it needs have succeeded."""
        step_ids = {step.id for pack in array.packs for step in pack}
        needed = {
            needed.id for pack in array.packs for step in pack for needed in step.needs
        } - step_ids
        after = [self.jobs[name] for name in needed if name in self.jobs]
        store = self.study.store.root
        launcher = self.study.config.launcher
        run = str(self.run.folder.relative_to(store / "runs"))
        packs = [StepsJob(str(store.absolute()), pack, run, launcher) for pack in array.packs]
        whole = self._submit(array.kind, array.asks, packs, array.packs, "afterok", after)
        self.jobs.update(dict.fromkeys(step_ids, whole))

    def close(self) -> None:
        """Submit the job that writes the record when all others have ended, successfully or not."""
        every = configured([self.study.config.resources.every])
        asks = {**every, **RECORD_ASKS, "memory": 0 if every["memory"] == 0 else RECORD_MEMORY}
        self._submit(
            RECORD, asks, [RecordJob(self.study, self.run)], [[]], "afterany", self.jobs.values()
        )

    def _submit(
        self,
        kind: str,
        asks: Mapping[str, Any],
        what: Sequence[Callable[[], Any]],
        steps: Sequence[Sequence[Step]],
        condition: str,
        needed: Iterable[str],
    ) -> str:
        """Submit jobs with the same resources as one array, and note them with the steps of each;
        the array's id."""
        after = tuple(sorted(set(needed)))
        name = f"{self.study.config.study}.{kind}"
        settings = self.study.config.launcher
        python = settings.python or shlex.quote(sys.executable)
        executor = SlurmExecutor(
            self.run.logs,
            max_num_timeout=settings.max_requeues,
            python=f"{python} {shlex.quote(str(self.starter))}",
        )
        dependency = {"dependency": f"{condition}:{':'.join(after)}"} if after else {}
        sbatch_options = options(asks["sbatch"], asks["gpus"] > 0)
        more = {"kill-on-invalid-dep": "yes", "requeue": True, **dependency, **sbatch_options}
        optional = {"partition": asks["partition"]} if asks["partition"] else {}
        if asks["memory"] and not any(name.startswith("mem-per-") for name in more):
            optional["mem"] = f"{max(1, round(asks['memory'] * 1024))}M"
        if asks["gpus"] and not any(starmap(is_for_gpus, sbatch_options.items())):
            optional["gpus_per_node"] = ":".join(
                str(word) for word in (asks["gpu_type"], asks["gpus"]) if word
            )
        executor.update_parameters(
            job_name=name,
            time=asks["minutes"],
            cpus_per_task=asks["cpus"],
            setup=setup_lines(asks["setup"]),
            signal_delay_s=settings.signal_seconds,
            array_parallelism=settings.parallel,
            additional_parameters=more,
            **optional,
        )
        try:
            with scheduler.submitting([*optional, *sbatch_options]):
                ids = self._ids(executor, what)
        except (FailedJobError, FailedSubmissionError) as error:
            every = {**asks, **sbatch_options, "sbatch": None}
            words = " ".join(str(error).split())
            asked = " ".join(
                f"{name}={value}" for name, value in every.items() if value not in (None, [])
            )
            raise UserError(
                f"sbatch says of {kind} jobs: {words}; they ask for {asked}; "
                f"{scheduler.advice(words, kind)}"
            ) from None
        array = ids[0].partition("_")[0]
        self.run.add(
            Submitted(job, array, name, kind, tuple(step.id for step in pack), after)
            for job, pack in zip(ids, steps, strict=True)
        )
        return array

    def _ids(
        self, executor: SlurmExecutor, job_functions: Sequence[Callable[[], Any]]
    ) -> list[str]:
        """Submit jobs as one array; their ids. While the controller is away, sbatch is tried again.
        Jobs that an unanswered sbatch had accepted are cancelled after the retry succeeds."""
        tries = 0
        while True:
            try:
                ids = [job.job_id for job in executor.submit_array(job_functions)]
                break
            except (FailedJobError, FailedSubmissionError) as error:
                if tries == len(PAUSES) or not scheduler.UNANSWERED.search(str(error)):
                    raise
            time.sleep(PAUSES[tries])
            tries += 1
        if tries:
            known = {ids[0].partition("_")[0], *(job.array for job in self.run.jobs)}
            scheduler.cancel(scheduler.submitted_from(self.run.logs.absolute()) - known)
        return ids


SETUP_TRAP = """trap 'code=$?; [ -z "$MOE_LAB_SETUP" ] ||\
echo "moe_lab: setup ended the job with code $code, in the line: $MOE_LAB_SETUP" >&2' EXIT"""
"""On EXIT and not on ERR, as a file that a line sources may also say `exit`."""


def setup_lines(setup: Iterable[str]) -> list[str]:
    """Shell lines of a job before Python starts: the first one that fails ends the job, and its log
    names it."""
    lines = [SETUP_TRAP, "set -e"]
    for line in setup:
        lines += [f"MOE_LAB_SETUP={shlex.quote(line)}", line]
    return [*lines, "set +e", "MOE_LAB_SETUP="]


def _announce(submission: Submission) -> None:
    study = submission.study.config.study
    jobs = submission.run.jobs
    for array, kind in dict.fromkeys((job.array, job.kind) for job in jobs):
        tasks = [job for job in jobs if job.array == array]
        steps = sum(len(job.steps) for job in tasks)
        print(f"{array}  {kind}: {_count(len(tasks), 'job')}, {_count(steps, 'step')}", flush=True)
    step_ids = {step for job in jobs for step in job.steps}
    if earlier := {job for step, job in submission.jobs.items() if step not in step_ids}:
        inform(
            f"{study}: steps that are under way already are in jobs {', '.join(sorted(earlier))}"
        )
    if jobs:
        inform(
            f"{study}: submitted; see python -m moe_lab.study status {study} "
            f"store={submission.study.store.root}"
        )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


@dataclass
class UnderWay:
    """Earlier jobs: step id -> id of the job that will do it; and ids of jobs that can no longer do
    their steps."""

    steps: dict[str, str] = field(default_factory=dict)
    failed_jobs: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    """Jobs that will write the record."""


def under_way(
    jobs: Iterable[Submitted], queue: Mapping[str, Queued], missing: Iterable[str]
) -> UnderWay:
    """Find those of `jobs`, given in the order of submission, that will do `missing` steps.

    Slurm cancels jobs that wait for an array as soon as one task of the array fails. So a pending
    job is among `failed_jobs` when any job that it waits for has lost a step.
    """
    wanted = set(missing)
    covered = UnderWay()
    lost: set[str] = set()
    for job in jobs:
        queued = queue.get(job.id)
        if queued is not None and queued.name != job.name:
            queued = None  # the id of another cluster's job
        steps = wanted.intersection(job.steps)
        if job.kind == RECORD:
            if queued:
                covered.recorded.append(job.id)
        elif queued and not (queued.pending and lost.intersection(job.after)):
            covered.steps.update(dict.fromkeys(steps, job.id))
        elif steps:
            lost |= {job.id, job.array}
            if queued and job.user == os.getuid():
                covered.failed_jobs.append(job.id)
    return covered


COPIED = ("moe_lab", "analysis", "conf")


def copy_code(jobs: Path, modules: Iterable[str] = ()) -> Path:
    """Copy the present code to `jobs`/code, with plugins, once for each state of it. Returns the
    start.py of the copy.

    Jobs run the copy, and so do the processes they start: what is edited or updated while jobs wait
    in the queue does not change what they do.
    """
    root = Path(moe_lab.__file__).parents[1]
    found = {path.relative_to(root): path for name in COPIED for path in (root / name).rglob("*")}
    found |= {Path(start.PLUGINS) / file: path for file, path in plugins.sources(modules).items()}
    copied = {
        file: path
        for file, path in found.items()
        if path.is_file() and "__pycache__" not in file.parts
    }
    content = {str(file): sha256(path.read_bytes()).hexdigest() for file, path in copied.items()}
    folder = jobs.absolute() / "code" / digest({"state": code_state(), "files": content})[:12]
    if not folder.exists():
        scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        for file, path in copied.items():
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, scratch / file)
        write_json(scratch / "moe_lab" / NOTED, code_state())
        try:
            scratch.rename(folder)
        except OSError:  # another command has published the same copy meanwhile
            shutil.rmtree(scratch)
    return folder / "moe_lab" / Path(start.FILE).name
