"""State of jobs from squeue and scontrol. sacct is not used, because many clusters run without accounting."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from moe_lab.errors import UserError
from moe_lab.study.slurm.arrays import LONGEST

GONE = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
"""States of jobs that squeue may still show although they will do nothing more."""
NEVER = "DependencyNeverSatisfied"
AT_ONCE = 500
"""Most job ids in one call of scancel, since the length of a command line is limited."""


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


def cancel(jobs: Iterable[str]) -> None:
    """Cancel jobs by id; jobs that have already ended are not an error."""
    ids = list(jobs)
    for start in range(0, len(ids), AT_ONCE):
        subprocess.run(["scancel", *ids[start : start + AT_ONCE]], capture_output=True)


def fate(job: str) -> str:
    """Slurm's state of a job, also after its end while Slurm remembers it (MinJobAge, five minutes by default); else
    ""."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True)
    words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return words.get("JobState", "")


def ask(*command: str) -> str:
    """Output of a Slurm command. Raises UserError when there is no such command, or, with its message, when it
    fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            f"launcher=slurm: there is no {command[0]} here: start this on a machine that submits jobs, "
            "or use launcher=local"
        ) from None
    if done.returncode:
        raise UserError(f"launcher=slurm: the scheduler does not answer: {done.stderr.strip()}")
    return done.stdout
