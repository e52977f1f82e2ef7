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

LONGEST = 1001
"""Most tasks of an array, from Slurm's default MaxArraySize."""
GONE = (
    *(
        "COMPLETING",
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "DEADLINE",
    ),
    *("BOOT_FAIL", "PREEMPTED", "REVOKED"),
)
"""States of jobs that squeue may still show although they will do nothing more."""
REQUEUED = ("COMPLETING", "None", "0:00")
"""State, reason and time of a job that still ends, and was put back into the queue; one that failed
has a reason."""
ENDED = re.compile(r"Invalid job id|already completing")
"""What scancel says of jobs that have ended."""
NEVER = "DependencyNeverSatisfied"
AT_ONCE = 500
"""Most job ids in one call of scancel, since the length of a command line is limited."""
LIMIT = 120
"""Seconds in which a Slurm command must answer."""
OF_SLURM = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_", "SACCT_")
"""Beginnings of variables by which a shell, or the job that it is in, changes what Slurm's commands
do and show."""
WHICH_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables by which Slurm's commands find their cluster."""
FROM_SHELL = ("partition", "account", "qos", "constraint", "reservation")
"""Options of sbatch for which a variable of the shell counts where the job does not set them."""


@dataclass(frozen=True)
class Queued:
    """A job, or one task of an array, that is pending or running."""

    id: str
    name: str
    state: str
    reason: str
    elapsed: str

    @property
    def pending(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def queue(users: Iterable[int] = ()) -> dict[str, Queued]:
    """Id -> job of this user and `users` that is pending or running; for several at once squeue
    loads the jobs of all. Raises UserError, with the scheduler's message, when squeue fails."""
    command = ("squeue", "--noheader", "--array", "--format=%i|%T|%r|%M|%j")
    rows = [
        row
        for user in {os.getuid(), *users}
        for row in ROW.findall(ask(*command, f"--user={user}"))
    ]
    jobs = [Queued(job, name, state, reason, elapsed) for job, state, reason, elapsed, name in rows]
    alive = [
        job
        for job in jobs
        if job.state not in GONE or (job.state, job.reason, job.elapsed) == REQUEUED
    ]
    return {job.id: job for job in alive if job.reason != NEVER}


ROW = re.compile(r"^(\d[\d_+]*)\|([A-Z_]+)\|([^|\n]*)\|([^|\n]*)\|(.*)", re.MULTILINE)
"""A job in the output of squeue; what follows on further lines is of its name, which may have any
characters."""


def handed_in(folder: Path) -> set[str]:
    """Jobs of this user, of an array its own id, whose scripts are in a folder."""
    lines = ask("squeue", "--noheader", f"--user={os.getuid()}", "--format=%F|%o").splitlines()
    return {
        job
        for job, _, script in (line.partition("|") for line in lines)
        if Path(script).parent == folder
    }


def longest_array() -> int:
    """Most tasks of an array: MaxArraySize of this cluster, or max_array_tasks of its
    SchedulerParameters."""
    limits = re.findall(
        r"(?:^MaxArraySize\s*=\s*|\bmax_array_tasks=)(\d+)", ask("scontrol", "show", "config"), re.M
    )
    return max(1, min(map(int, limits), default=LONGEST))


def time_limits() -> dict[str, float]:
    """Partition -> its time limit in minutes, infinite without one. The default partition is also
    called ""."""
    limits = {}
    for line in ask("sinfo", "--all", "--noheader", "--format=%P|%l").splitlines():
        partition, limit = line.split("|")
        name = partition.removesuffix("*")
        limits[name] = minutes(limit)
        if name != partition:
            limits[""] = limits[name]
    return limits


def minutes(limit: str) -> float:
    """Minutes of a time as written by sinfo: 1-12:00:00, 30:00, infinite."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return inf
    of_day = sum(int(part) * 60.0**place for place, part in enumerate(reversed(parts), start=-1))
    return of_day + 1440 * int(days or 0)


def cancel(jobs: Iterable[str]) -> None:
    """Cancel jobs by id; jobs that have already ended are not an error. Raises UserError, with the
    scheduler's message, when others are not cancelled."""
    ids = list(jobs)
    wrong = list[str]()
    for start in range(0, len(ids), AT_ONCE):
        done = _run("scancel", *ids[start : start + AT_ONCE])
        said = done.stderr.strip().splitlines() or ["nothing"]
        wrong += [line for line in said if done.returncode and not ENDED.search(line)]
    if wrong:
        raise UserError(f"launcher=slurm: some jobs are not cancelled, scancel says: {wrong[0]}")


def fate(job: str, limit: float | None = None) -> dict[str, str]:
    """What Slurm says of a job, such as its JobState, also after its end while it remembers it
    (MinJobAge, five minutes by default). `limit`: seconds in which it must answer."""
    done = _run("scontrol", "--oneliner", "show", "job", job, limit=limit)
    return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)


def ask(*command: str) -> str:
    """Output of a Slurm command. Raises UserError, with its message, when it fails."""
    done = _run(*command)
    if done.returncode:
        raise UserError(f"launcher=slurm: the scheduler does not answer: {done.stderr.strip()}")
    return done.stdout


def _run(*command: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command. Raises UserError when it cannot be started or takes longer than `limit`,
    else LIMIT."""
    why = f"there is no {command[0]} here"
    limit = limit or LIMIT
    if (program := shutil.which(command[0])) is not None:
        words = [program, *command[1:]]
        try:
            # By its path: where PATH has a folder that may not be read, a search ends with that
            # folder's error.
            return subprocess.run(
                words, capture_output=True, errors="replace", env=environment(), timeout=limit
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"launcher=slurm: {command[0]} has not answered for {limit:g} s"
            ) from None
        except OSError as error:
            why = f"{command[0]} cannot be started ({error.strerror})"
    raise UserError(
        f"launcher=slurm: {why}: start this on a machine that submits jobs, or use launcher=local"
    )


def environment(kept: Collection[str] = ()) -> dict[str, str]:
    """The variables of this process without those that change what Slurm's commands do and show,
    but for `kept`."""
    kept = {*WHICH_SLURM, *kept}
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(OF_SLURM)
    }


@contextmanager
def submitting(options: Collection[str]) -> Iterator[None]:
    """While open, variables of the shell say nothing to sbatch but FROM_SHELL, without `options`,
    which the job sets itself: to sbatch, a variable counts more than the script of a job. Jobs ask
    no hub: all was downloaded."""
    kept = environment([f"SBATCH_{name.upper()}" for name in FROM_SHELL if name not in options])
    with patch.dict(os.environ, {**kept, "HF_HUB_OFFLINE": "1"}, clear=True):
        yield


REFUSALS = {
    r"\b(?:QOS|Assoc)\w*Submit\w*Limit\b": "fewer, longer jobs are within the limit of submitted "
    "jobs: raise "
    "launcher.cells_per_job, or start this again when jobs have ended",
    r"\b(?:QOS|Assoc)\w*Limit\b": "ask for less of what the limit is about, in resources",
    r"Invalid account\b": "change resources.every.sbatch.account",
    r"Invalid qos\b": "change resources.every.sbatch.qos",
    r"invalid partition\b": "change resources.every.partition",
    r"Invalid feature\b": "change resources.every.sbatch.constraint",
    r"time limit is invalid": "change the minutes that they ask for",
}
"""What sbatch says, by Slurm's names and sentences of its errors -> what can be done."""
UNANSWERED = re.compile(r"Socket timed out|Unable to contact slurm controller|^timeout: ")


def advice(words: str, kind: str) -> str:
    """What can be done when sbatch, with these words, has not taken jobs of a kind."""
    if UNANSWERED.search(words):
        return (
            "the scheduler has not answered, and may have taken them: see squeue before you "
            "start this again"
        )
    of_kind = f"change resources.every, resources.jobs.{kind} or resources.models"
    return next(
        (what for error, what in REFUSALS.items() if re.search(error, words, re.IGNORECASE)),
        of_kind,
    )
