"""Which missing steps earlier submissions of a study are still going to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moe_lab.study.runs import RECORD, Submitted
from moe_lab.study.slurm.scheduler import Queued


@dataclass
class UnderWay:
    """Steps that need no new job, by the id of the job that does them, and jobs that can no longer do theirs."""

    steps: dict[str, str] = field(default_factory=dict)
    hopeless: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    """Jobs that will write the record."""


def under_way(jobs: Iterable[Submitted], queue: Mapping[str, Queued], missing: Iterable[str]) -> UnderWay:
    """Look through `jobs`, in the order they were submitted in, for those that will do `missing` steps.

    Slurm kills what waits for an array as soon as one task of that array has not ended well; so a pending job is
    hopeless when anything it waits for has lost a step.
    """
    wanted, found, lost = set(missing), UnderWay(), set[str]()
    for job in jobs:
        queued = queue.get(job.id)
        alive = queued is not None and queued.name == job.name
        left = wanted.intersection(job.steps)
        if job.kind == RECORD:
            found.recorded += [job.id] * alive
        elif alive and not (queued and queued.pending and lost.intersection(job.after)):
            found.steps.update({step: job.id for step in left})
        elif left:
            lost |= {job.id, job.array}
            found.hopeless += [job.id] * alive
    return found
