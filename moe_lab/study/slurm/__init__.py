"""Run studies on a Slurm cluster: group steps into jobs, submit them, and follow their state."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import lru_cache

from moe_lab.errors import UserError


def in_queue(job: str, user: int) -> bool:
    """Whether Slurm shows a job of a user. False when it does not answer: then heartbeats alone
    decide on a claim."""
    # it is asked once a minute, as old claims are many after a power cut
    minute = int(time.monotonic() // 60)
    return job in _jobs(user, minute)


@lru_cache(maxsize=64)
def _jobs(user: int, _: int) -> Collection[str]:
    from moe_lab.study.slurm import scheduler  # imported only when there are old claims of jobs

    try:
        return scheduler.queue([user]).keys()
    except UserError:
        return ()
