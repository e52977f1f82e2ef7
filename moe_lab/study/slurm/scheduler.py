"""What the scheduler says of jobs, by squeue and scontrol: accounting, and with it sacct, is off on many a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from moe_lab.errors import UserError
from moe_lab.study.slurm.arrays import LONGEST

GONE = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
"""States in which squeue may still show a job that will do nothing more."""
NEVER = "DependencyNeverSatisfied"
AT_ONCE = 500
"""Job ids in one call of scancel, whose command line has an end."""


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
    """Id -> what of this user is pending or running. UserError with the scheduler's words when it cannot be asked."""
    text = ask("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%T|%r|%M|%j")
    rows = (line.split("|", 4) for line in text.splitlines())
    jobs = [Queued(job, name, state, reason, elapsed) for job, state, reason, elapsed, name in rows]
    return {job.id: job for job in jobs if job.state not in GONE and job.reason != NEVER}


def longest_array() -> int:
    """Tasks that an array may have: MaxArraySize of this cluster."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return max(1, int(match[1])) if match else LONGEST


def cancel(jobs: Iterable[str]) -> None:
    """Cancel jobs by id; those that have ended meanwhile are no error."""
    ids = list(jobs)
    for start in range(0, len(ids), AT_ONCE):
        subprocess.run(["scancel", *ids[start : start + AT_ONCE]], capture_output=True)


def fate(job: str) -> str:
    """How a job ended, in Slurm's word, as long as it remembers (MinJobAge, five minutes by default); else ""."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True)
    words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return words.get("JobState", "")


def ask(*command: str) -> str:
    """What a command of Slurm prints. UserError when there is none, or when it fails, with its words."""
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
