"""State of jobs from squeue and scontrol. sacct is not used, because many clusters run without accounting."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from moe_lab.errors import UserError

LONGEST = 1001
"""Most tasks of an array, from Slurm's default MaxArraySize."""
GONE = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
"""States of jobs that squeue may still show although they will do nothing more."""
NEVER = "DependencyNeverSatisfied"
AT_ONCE = 500
"""Most job ids in one call of scancel, since the length of a command line is limited."""
DISPLAY = (
    *("SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_", "SACCT_"),
    *("SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_TOPO_LEN"),
)
"""Beginnings of variables by which a shell selects what Slurm's commands show or cancel, and how they show it."""
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


def queue() -> dict[str, Queued]:
    """Id -> job of this user that is pending or running. Raises UserError, with the scheduler's message, when squeue
    fails."""
    text = ask("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%T|%r|%M|%j")
    rows = (line.split("|", 4) for line in text.splitlines())
    jobs = [Queued(job, name, state, reason, elapsed) for job, state, reason, elapsed, name in rows]
    return {job.id: job for job in jobs if job.state not in GONE and job.reason != NEVER}


def longest_array() -> int:
    """Most tasks of an array: MaxArraySize of this cluster."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return max(1, int(match[1])) if match else LONGEST


def time_limits() -> dict[str, float]:
    """Partition -> its time limit in minutes, infinite without one. The default partition is also called ""."""
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
    """Cancel jobs by id; jobs that have already ended are not an error."""
    ids = list(jobs)
    for start in range(0, len(ids), AT_ONCE):
        _run("scancel", *ids[start : start + AT_ONCE])


def fate(job: str) -> str:
    """Slurm's state of a job, also after its end while Slurm remembers it (MinJobAge, five minutes by default); else
    ""."""
    done = _run("scontrol", "--oneliner", "show", "job", job)
    words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return words.get("JobState", "")


def ask(*command: str) -> str:
    """Output of a Slurm command. Raises UserError, with its message, when it fails."""
    done = _run(*command)
    if done.returncode:
        raise UserError(f"launcher=slurm: the scheduler does not answer: {done.stderr.strip()}")
    return done.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command, whose output and selection the variables of the user's shell do not change. Raises UserError
    when it cannot be started."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(DISPLAY)}
    why = f"there is no {command[0]} here"
    if (program := shutil.which(command[0])) is not None:
        try:
            # By its path: where PATH has a folder that may not be read, a search ends with that folder's error.
            return subprocess.run([program, *command[1:]], capture_output=True, text=True, env=environment)
        except OSError as error:
            why = f"{command[0]} cannot be started ({error.strerror})"
    raise UserError(f"launcher=slurm: {why}: start this on a machine that submits jobs, or use launcher=local")


@contextmanager
def submitting(options: Collection[str]) -> Iterator[None]:
    """While open, variables of the shell say nothing to sbatch but FROM_SHELL, without `options`, which the job sets
    itself: to sbatch, a variable counts more than the script of a job."""
    usual = {f"SBATCH_{name.upper()}" for name in FROM_SHELL if name not in options}
    ignored = [name for name in os.environ if name.startswith(("SBATCH_", *DISPLAY)) and name not in usual]
    away = {name: os.environ.pop(name) for name in ignored}
    try:
        yield
    finally:
        os.environ.update(away)
