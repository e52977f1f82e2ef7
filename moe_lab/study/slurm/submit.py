"""Submit arrays of jobs that compute missing steps, with dependencies between arrays, and a last
job that writes the record and the report."""

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
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import _make_sbatch_string

import moe_lab
from moe_lab import plugins, start
from moe_lab.calibration import shares_and_sets, sources
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError
from moe_lab.json_files import digest, write_json
from moe_lab.models import files
from moe_lab.paths import private_cache
from moe_lab.study.estimates import seconds_estimator
from moe_lab.study.provenance import CODE_STATE_FILE, code_state
from moe_lab.study.record import Study
from moe_lab.study.runs import RECORD_KIND, Run, SubmittedJob, runs
from moe_lab.study.schedule import Schedule, inform
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.arrays import (
    Array,
    divide_into_arrays,
    job_options,
    job_resources,
    merge_configs,
)
from moe_lab.study.slurm.jobs import RecordJob, StepsJob
from moe_lab.study.slurm.scheduler import QueuedJob
from moe_lab.study.step import Step, unmerged

EARLY_SECONDS = 60
"""Slurm may send its warning signal by this number of seconds earlier than requested."""
PAUSES = (10.0, 60.0)
"""Seconds before the first and the second retry of sbatch."""
RECORD_RESOURCES = {"gpus": 0, "cpus": 1, "minutes": 60}
"""Resources of the last job. Its other settings are those of every job (resources.every)."""
RECORD_MEMORY = 4
"""GiB of memory of the last job."""


# the class is patched, since submitit creates further executors for arrays
SlurmExecutor._make_submission_command = lambda _, script: [  # type: ignore[assignment]
    *("timeout", "--verbose", str(scheduler.ANSWER_SECONDS), "sbatch", str(script))
]


def submit(schedule: Schedule, study: Study, run: Run) -> None:
    """Submit jobs for the waiting steps of `schedule` that no pending job of an earlier submission
    will do. If the submission fails, all its jobs are cancelled, and the run is removed. Raises
    UserError, with the scheduler's message, when the scheduler refuses a job."""
    submission = Submission(study, run)
    try:
        earlier = _submit_missing(schedule, submission)
    except BaseException as error:
        try:
            if run.logs.exists():  # otherwise no job was submitted
                scheduler.cancel({job.array for job in run.jobs})
                # `run.jobs` lacks jobs whose submission sbatch could not confirm
                scheduler.cancel(scheduler.job_ids_from(run.logs.absolute()))
        except UserError as failure:
            raise UserError(
                f"{str(error) or 'interrupted'}; jobs may remain in the queue: {failure}"
            ) from None
        run.remove()
        raise
    name = study.config.study
    if earlier:
        inform(f"{name}: steps that are under way already are in jobs {', '.join(earlier)}")
    if run.jobs:
        inform(f"{name}: submitted; see moe-lab status {name} store={study.store.root}")


def _download(steps: Iterable[Step]) -> None:
    """Download the models and the calibration sets that steps read, because nodes may have no
    network."""
    # settings of the model or set, as text -> function that downloads it
    downloads: dict[str, Callable[[], object]] = {}
    for step in steps:
        if model := step.resources().model:
            downloads[repr(model)] = partial(files.local_folder, model)
        for value in vars(step).values():
            if isinstance(value, CalibrationConfig):
                for _, calibration_set in shares_and_sets(value):
                    downloads[repr(calibration_set)] = partial(sources.download, calibration_set)
    for download in downloads.values():
        download()


def _submit_missing(
    schedule: Schedule, submission: Submission, *, may_repeat: bool = True
) -> list[str]:
    """Download what the waiting steps read, and submit the jobs. Returns the ids of the jobs of
    earlier submissions that will do the other waiting steps. `may_repeat`: whether to look for
    pending jobs again after a long download, as some may have ended meanwhile."""
    study = submission.study
    earlier_jobs = [job for run in runs(study.store, study.config.study) for job in run.jobs]
    pending = pending_jobs(
        earlier_jobs, scheduler.queue(job.user for job in earlier_jobs), schedule.waiting
    )
    # the `merged_steps` of pending steps are left out, as an earlier submission may have divided
    # the work in another way
    steps = unmerged(schedule.waiting.values(), pending.job_of.keys())
    new_steps = [step for step in steps if step.id not in pending.job_of]
    submission.jobs.update(pending.job_of)
    earlier = sorted({*pending.job_of.values()})
    if not new_steps and pending.record_jobs:
        return earlier
    arrays = arrays_for(new_steps, study, scheduler.time_limits(), scheduler.longest_array())
    start = time.monotonic()
    _download(new_steps)
    if may_repeat and time.monotonic() - start > 60:
        return _submit_missing(schedule, submission, may_repeat=False)
    scheduler.cancel(pending.failed_jobs)
    for array in arrays:
        submission.add(array)
    return earlier


def arrays_for(
    steps: Sequence[Step],
    study: Study,
    time_limits: Mapping[str, float],
    longest: int = scheduler.MAX_ARRAY_TASKS,
) -> list[Array]:
    """The arrays of jobs that compute `steps`, and then that of the job that writes the record,
    which has no steps. `time_limits`: partition -> minutes. `longest`: maximum number of jobs in an
    array. UserError if resources in the settings contradict each other, or if jobs are so short
    that they would be told to stop at their start."""
    config = study.config
    resources_of = partial(
        job_resources,
        settings=config.resources,
        seconds=seconds_estimator(study.store),
        time_limits=time_limits,
    )
    arrays = divide_into_arrays(steps, resources_of, config.launcher, longest)
    signal_seconds = config.launcher.signal_seconds
    for array in arrays:
        if array.resources["minutes"] * 60 <= signal_seconds + EARLY_SECONDS:
            raise UserError(
                f"resources: {array.kind} jobs ask for minutes={array.resources['minutes']}, which "
                f"is too short: Slurm warns them launcher.signal_seconds={signal_seconds} before "
                f"the end, and may do so {EARLY_SECONDS} s early"
            )
    record_job = {**merge_configs([config.resources.every]), **RECORD_RESOURCES}
    if record_job["memory"] != 0:  # resources.every.memory=0: jobs request no memory
        record_job["memory"] = RECORD_MEMORY
    return [*arrays, Array(RECORD_KIND, record_job, [[]])]


@dataclass
class Submission:
    """The submission of a run's jobs. `jobs`: step id -> id of the job or the array that will do
    the step."""

    study: Study
    run: Run
    jobs: dict[str, str] = field(default_factory=dict)

    @cached_property
    def starter(self) -> Path:
        """Path of the start.py in a copy of the present code."""
        return copy_code(private_cache("jobs"), self.study.config.plugins)

    @property
    def python(self) -> str:
        """The shell command that starts Python in a job."""
        python = self.study.config.launcher.python or shlex.quote(sys.executable)
        return f"{python} {shlex.quote(str(self.starter))}"

    def add(self, array: Array) -> None:
        """Submit one array. It starts when the submitted jobs that compute inputs of its steps have
        succeeded. The job that writes the record starts when all other jobs have ended,
        successfully or not."""
        if array.kind == RECORD_KIND:
            condition, needed_jobs = "afterany", {*self.jobs.values()}
        else:
            condition, needed_jobs = "afterok", array.needed_jobs(self.jobs)
        after = sorted(needed_jobs)
        dependency = {"dependency": f"{condition}:{':'.join(after)}"} if after else {}
        array_id = self._submit(array, job_parameters(array, self.study, dependency), after)
        self.jobs.update(dict.fromkeys(array.step_ids, array_id))

    def _submit(self, array: Array, parameters: Mapping[str, Any], after: Sequence[str]) -> str:
        """Submit one array, and return its id. `parameters`: those of submitit. `after`: ids of the
        jobs and arrays that it waits for."""
        executor = SlurmExecutor(
            self.run.logs,
            max_num_timeout=self.study.config.launcher.max_requeues,
            python=self.python,
        )
        executor.update_parameters(**parameters)
        try:
            options = [*parameters, *parameters["additional_parameters"]]
            with scheduler.submission_environment(options):
                ids = self._submit_array(executor, self._functions(array))
        except (FailedJobError, FailedSubmissionError) as error:
            requested = {**array.resources, **job_options(array.resources), "sbatch": None}
            message = " ".join(str(error).split())
            request = " ".join(f"{key}={value}" for key, value in requested.items() if value)
            raise UserError(
                f"sbatch says of {array.kind} jobs: {message}; they ask for {request}; "
                f"{scheduler.advice(message, array.kind)}"
            ) from None
        array_id = ids[0].partition("_")[0]  # the id of a job is ARRAY_TASK
        name = parameters["job_name"]
        self.run.add_jobs(
            SubmittedJob(job, array_id, name, array.kind, tuple(step.id for step in steps), after)
            for job, steps in zip(ids, array.jobs, strict=True)
        )
        counts = f"{len(ids)} job(s), {len(array.step_ids)} step(s)"
        print(f"{array_id}  {array.kind}: {counts}", flush=True)
        return array_id

    def _functions(self, array: Array) -> list[Callable[[], Any]]:
        """What each job of an array calls."""
        if array.kind == RECORD_KIND:
            return [RecordJob(self.study, self.run)]
        store = self.study.store.root
        run_path = str(self.run.folder.relative_to(store / "runs"))
        launcher = self.study.config.launcher
        return [StepsJob(str(store.absolute()), job, run_path, launcher) for job in array.jobs]

    def _submit_array(
        self, executor: SlurmExecutor, job_functions: Sequence[Callable[[], Any]]
    ) -> list[str]:
        """Submit jobs as one array, and return the jobs' ids. If Slurm's controller does not
        answer, sbatch is called again after each of the PAUSES."""
        retries = 0
        while True:
            try:
                ids = [job.job_id for job in executor.submit_array(job_functions)]
                break
            except (FailedJobError, FailedSubmissionError) as error:
                if retries == len(PAUSES) or not scheduler.NO_ANSWER.search(str(error)):
                    raise
            time.sleep(PAUSES[retries])
            retries += 1
        if retries:  # the calls without an answer may have submitted jobs
            confirmed_arrays = {ids[0].partition("_")[0], *(job.array for job in self.run.jobs)}
            scheduler.cancel(scheduler.job_ids_from(self.run.logs.absolute()) - confirmed_arrays)
        return ids


def job_parameters(array: Array, study: Study, dependency: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of submitit for an array of jobs. `dependency`: the option of sbatch with this
    name, if the jobs wait for others."""
    settings = study.config.launcher
    resources = array.resources
    parameters = {
        "kill-on-invalid-dep": "yes",
        "requeue": True,
        **dependency,
        **job_options(resources),
    }
    node_options = {"partition": resources["partition"]} if resources["partition"] else {}
    if resources["memory"] and not any(key.startswith("mem-per-") for key in parameters):
        node_options["mem"] = f"{max(1, round(resources['memory'] * 1024))}M"
    return {
        "job_name": f"{study.config.study}.{array.kind}",
        "time": resources["minutes"],
        "cpus_per_task": resources["cpus"],
        "setup": setup_lines(resources["setup"]),
        "signal_delay_s": settings.signal_seconds,
        "array_parallelism": settings.parallel,
        "additional_parameters": parameters,
        **node_options,
    }


class Preview(Submission):
    """Prints the scripts that sbatch would get. Numbers 1, 2, ... stand for the ids of arrays."""

    starter = Path("start.py")  # no code is copied

    def _submit(self, array: Array, parameters: Mapping[str, Any], after: Sequence[str]) -> str:
        command = f"{self.python} -u -m submitit.core._submit {self.run.logs}"
        # as `SlurmExecutor.submit_array` does
        tasks = len(array.jobs) if len(array.jobs) > 1 else None
        print(_make_sbatch_string(command, self.run.logs, map_count=tasks, **parameters))
        return str(1 + len({*self.jobs.values()}))


def preview(study: Study, steps: Sequence[Step]) -> None:
    """Print the scripts of the Slurm jobs that would compute `steps`, in the order of submission.
    UserError as in `arrays_for`."""
    arrays = arrays_for(steps, study, time_limits={})
    run = Run(study.store, study.store.root / "runs" / study.config.study / "RUN")
    submission = Preview(study, run)
    for array in arrays:
        submission.add(array)


SETUP_TRAP = """trap 'code=$?; [ -z "$MOE_LAB_SETUP" ] ||\
echo "moe_lab: setup ended the job with code $code, in the line: $MOE_LAB_SETUP" >&2' EXIT"""
"""Shell line that makes a job print the setup line that ended it. The trap is on EXIT and not on
ERR, since a setup line may source a file that calls `exit`."""


def setup_lines(setup: Iterable[str]) -> list[str]:
    """Shell lines that a job runs before Python. The first line of `setup` that fails ends the job,
    and SETUP_TRAP prints this line to the log."""
    lines = [SETUP_TRAP, "set -e"]
    for line in setup:
        lines += [f"MOE_LAB_SETUP={shlex.quote(line)}", line]
    return [*lines, "set +e", "MOE_LAB_SETUP="]


@dataclass
class PendingJobs:
    """Jobs of earlier submissions that are in the queue."""

    job_of: dict[str, str] = field(default_factory=dict)
    """Id of a missing step -> id of the job that will do the step."""
    failed_jobs: list[str] = field(default_factory=list)
    """Jobs that can no longer do their steps."""
    record_jobs: list[str] = field(default_factory=list)
    """Jobs that will write the record."""


def pending_jobs(
    jobs: Iterable[SubmittedJob], queue: Mapping[str, QueuedJob], missing: Iterable[str]
) -> PendingJobs:
    """The jobs of earlier submissions that are in Slurm's queue. `jobs`: all jobs of earlier
    submissions, in order. `queue`: id -> job. `missing`: ids of missing steps.

    A job is lost if it has left the queue and one of its steps is missing. Slurm cancels jobs that
    wait for an array as soon as one task of the array fails. So a job that is still pending is
    lost, too, if it waits for a lost job or for the array of a lost job.
    """
    missing = set(missing)
    pending = PendingJobs()
    lost: set[str] = set()  # ids of lost jobs and of their arrays
    for job in jobs:
        queued = queue.get(job.id)
        if queued is not None and queued.name != job.name:
            queued = None  # a job of another cluster with the same id
        steps = missing.intersection(job.steps)
        if job.kind == RECORD_KIND:
            if queued:
                pending.record_jobs.append(job.id)
        elif queued and not (queued.is_pending and lost.intersection(job.after)):
            pending.job_of.update(dict.fromkeys(steps, job.id))
        elif steps:
            lost |= {job.id, job.array}
            # only jobs of this user can be cancelled
            if queued and job.user == os.getuid():
                pending.failed_jobs.append(job.id)
    return pending


FOLDERS = ("moe_lab", "moe_lab/analysis", "moe_lab/conf")
"""Folders that jobs need. In a clone, the last two are links, which rglob does not follow."""


def copy_code(jobs_folder: Path, modules: Iterable[str] = ()) -> Path:
    """Copy the present code and plugins to a folder in `jobs_folder`/code, unless it already has
    the same copy. Edits of the code while jobs wait in the queue then do not change the jobs.
    Returns the path of start.py in the copy. `modules`: names of plugins."""
    root = Path(moe_lab.__file__).parents[1]
    # path in the copy -> path of the original, for files and folders
    paths = {path.relative_to(root): path for name in FOLDERS for path in (root / name).rglob("*")}
    paths |= {
        Path(start.PLUGINS) / file: path for file, path in plugins.plugin_files(modules).items()
    }
    originals = {
        file: path
        for file, path in paths.items()
        if path.is_file() and "__pycache__" not in file.parts
    }
    digests = {str(file): sha256(path.read_bytes()).hexdigest() for file, path in originals.items()}
    folder = (
        jobs_folder.absolute() / "code" / digest({"state": code_state(), "files": digests})[:12]
    )
    if not folder.exists():
        scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        for file, path in originals.items():
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, scratch / file)
        write_json(scratch / "moe_lab" / CODE_STATE_FILE, code_state())
        try:
            scratch.rename(folder)
        except OSError:  # another command has published the same copy meanwhile
            shutil.rmtree(scratch)
    return folder / "moe_lab" / Path(start.FILE).name
