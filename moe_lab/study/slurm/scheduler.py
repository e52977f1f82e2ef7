"""State of jobs from squeue and scontrol. sacct is not used, because many clusters run without
accounting."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from unittest.mock import patch

from moe_lab.errors import UserError

MAX_ARRAY_TASKS = 1001
"""Slurm's default MaxArraySize."""
ENDED_STATES = (
    "COMPLETING",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
    "BOOT_FAIL",
    "PREEMPTED",
    "REVOKED",
)
"""States of jobs that have ended, although squeue may still show them."""
REQUEUED_STATE = ("COMPLETING", "None", "0:00")
"""(state, reason, time) of a job that is still ending, but was put back into the queue. Jobs that
failed have other reasons."""
ENDED_MESSAGE = re.compile(r"Invalid job id|already completing")
"""Pattern of scancel's messages about jobs that have ended."""
NEVER_REASON = "DependencyNeverSatisfied"
"""squeue's reason of a pending job that cannot start because a job that it waits for failed."""
IDS_PER_CALL = 500
"""Maximum number of job ids in one call of scancel."""
ANSWER_SECONDS = 120
"""Seconds in which a Slurm command must answer."""
SLURM_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SQUEUE_",
    "SINFO_",
    "SCONTROL_",
    "SCANCEL_",
    "SACCT_",
)
"""Prefixes of environment variables that change what Slurm's commands do and show."""
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables by which Slurm's commands find their cluster."""
SHELL_OPTIONS = ("partition", "account", "qos", "constraint", "reservation")
"""Options of sbatch that a variable of the shell may set if the job's settings do not."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, or one task of an array, that is pending or running."""

    id: str
    name: str
    state: str
    reason: str
    elapsed: str

    @property
    def is_pending(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def queue(users: Iterable[int] = ()) -> dict[str, QueuedJob]:
    """Id of a job -> job, for all pending and running jobs of this user and of `users`. Pending
    jobs that can never start are left out. Raises UserError, with the scheduler's message, when
    squeue fails."""
    # one call for each user, since a call for several users would load the jobs of all users
    command = ("squeue", "--noheader", "--array", "--format=%i|%T|%r|%M|%j")
    jobs = {}
    for user in {os.getuid(), *users}:
        # %i id, %T state, %r reason, %M elapsed time, %j name
        rows = ROW.findall(command_output(*command, f"--user={user}"))
        for job_id, state, reason, elapsed, name in rows:
            # squeue still lists ended jobs for a while
            has_ended = state in ENDED_STATES and (state, reason, elapsed) != REQUEUED_STATE
            if not has_ended and reason != NEVER_REASON:
                jobs[job_id] = QueuedJob(job_id, name, state, reason, elapsed)
    return jobs


ROW = re.compile(r"^(\d[\d_+]*)\|([A-Z_]+)\|([^|\n]*)\|([^|\n]*)\|(.*)", re.MULTILINE)
"""The line of a job in the output of squeue. Other lines are the rest of a job's name, which may
contain newlines."""


def job_ids_from(folder: Path) -> set[str]:
    """Ids of jobs and arrays of this user whose scripts are in `folder`."""
    # %F id of the array or job, %o path of the script
    output = command_output("squeue", "--noheader", f"--user={os.getuid()}", "--format=%F|%o")
    job_ids = set()
    for line in output.splitlines():
        job_id, _, script = line.partition("|")
        if Path(script).parent == folder:
            job_ids.add(job_id)
    return job_ids


def longest_array() -> int:
    """Maximum number of tasks of an array on this cluster: the smaller of the cluster's settings
    MaxArraySize and SchedulerParameters=max_array_tasks."""
    limits = re.findall(
        r"(?:^MaxArraySize\s*=\s*|\bmax_array_tasks=)(\d+)",
        command_output("scontrol", "show", "config"),
        re.M,
    )
    return max(1, min(map(int, limits), default=MAX_ARRAY_TASKS))


def time_limits() -> dict[str, float]:
    """Partition -> time limit in minutes; inf for a partition without a limit. The key "" stands
    for the default partition."""
    limits = {}
    for line in command_output("sinfo", "--all", "--noheader", "--format=%P|%l").splitlines():
        partition, limit = line.split("|")
        name = partition.removesuffix("*")
        limits[name] = minutes(limit)
        if name != partition:
            limits[""] = limits[name]
    return limits


def minutes(limit: str) -> float:
    """Whole minutes of a time limit in sinfo's format DAYS-HOURS:MINUTES:SECONDS; days and hours
    may be missing, as in 30:00. inf for a limit that is not a number, such as infinite."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):\d+", limit)
    if match is None:
        return inf
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return 1440 * days + 60 * hours + minutes


def cancel(jobs: Iterable[str]) -> None:
    """Cancel the jobs with the ids `jobs`. Raises UserError, with the first error message of
    scancel, when a job could not be cancelled and has not ended."""
    ids = list(jobs)
    errors: list[str] = []
    for start in range(0, len(ids), IDS_PER_CALL):
        answer = _run("scancel", *ids[start : start + IDS_PER_CALL])
        if answer.returncode:
            lines = answer.stderr.strip().splitlines() or ["nothing"]
            errors += [line for line in lines if not ENDED_MESSAGE.search(line)]
    if errors:
        raise UserError(f"launcher=slurm: some jobs are not cancelled, scancel says: {errors[0]}")


def job_fields(job: str, limit: float | None = None) -> dict[str, str]:
    """All that Slurm states about a job: name of a field, such as "JobState" -> value. {} for a job
    that Slurm has forgotten, by default five minutes after the job's end (MinJobAge). `limit`:
    seconds in which Slurm must answer."""
    answer = _run("scontrol", "--oneliner", "show", "job", job, limit=limit)
    return dict(item.split("=", 1) for item in answer.stdout.split() if "=" in item)


def command_output(*command: str) -> str:
    """Output of a Slurm command. Raises UserError, with the command's error message, when the
    command fails."""
    answer = _run(*command)
    if answer.returncode:
        raise UserError(f"launcher=slurm: the scheduler does not answer: {answer.stderr.strip()}")
    return answer.stdout


def _run(*command: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command. Raises UserError when the command cannot be started or takes longer than
    `limit` seconds."""
    limit = ANSWER_SECONDS if limit is None else limit
    # without the path, the error may only say that a folder of PATH is unreadable
    program = shutil.which(command[0]) or command[0]
    try:
        return subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            errors="replace",
            env=environment(),
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"launcher=slurm: {command[0]} has not answered for {limit:g} s") from None
    except OSError as error:
        reason = error.strerror if program != command[0] else "there is no such program"
        raise UserError(
            f"launcher=slurm: {command[0]} cannot be started ({reason}): start this on a machine "
            "that submits jobs, or use launcher=local"
        ) from None


def environment(retained: Collection[str] = ()) -> dict[str, str]:
    """Environment variables of this process without those for Slurm's commands: name -> value.
    `retained`: variables for Slurm's commands that stay, in addition to CLUSTER_VARIABLES."""
    variables = {}
    for name, value in os.environ.items():
        is_for_slurm = name.startswith(SLURM_PREFIXES)
        if not is_for_slurm or name in CLUSTER_VARIABLES or name in retained:
            variables[name] = value
    return variables


@contextmanager
def submission_environment(options: Collection[str]) -> Iterator[None]:
    """A context with the environment variables for calls of sbatch, which jobs inherit. `options`:
    options of sbatch that the script of the job sets."""
    # other variables SBATCH_* of the shell would override the script
    retained = [f"SBATCH_{name.upper()}" for name in SHELL_OPTIONS if name not in options]
    # all downloads are done before the submission
    variables = {**environment(retained), "HF_HUB_OFFLINE": "1"}
    with patch.dict(os.environ, variables, clear=True):
        yield


NO_ANSWER = re.compile(r"Socket timed out|Unable to contact slurm controller|^timeout: ")
"""Pattern of a message of sbatch when Slurm's controller has not answered."""


def advice(message: str, kind: str) -> str:
    """Advice for the user after sbatch has refused jobs. `message`: error message of sbatch."""
    if NO_ANSWER.search(message):
        return (
            "the scheduler has not answered, and may have accepted them: see squeue before you "
            "start this again"
        )
    return f"change resources.every, resources.jobs.{kind} or resources.models"
