"""Group steps into Slurm jobs, and jobs into arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

from rich.table import Table

from moe_lab.config import LauncherConfig
from moe_lab.study import KINDS, Step, canonical
from moe_lab.study.estimates import Seconds
from moe_lab.study.slurm.scheduler import LONGEST

Stage = tuple[str, int]
"""The kind of a job, and its depth: how many jobs of the same kind have to run before it, one after another."""
PackSteps = list[Step]
STEPS_PER_JOB = 256
"""Small steps of one job: each takes about a second, and a job some time in the queue."""


@dataclass(frozen=True)
class Array:
    """Jobs of one kind with the same resources, submitted together; each is a list of steps."""

    kind: str
    asks: Mapping[str, Any]
    packs: Sequence[PackSteps]


def arrange(
    steps: Sequence[Step],
    ask: Callable[[Sequence[Step]], Mapping[str, Any]],
    settings: LauncherConfig,
    longest: int = LONGEST,
) -> list[Array]:
    """Arrange `steps` in arrays of at most `longest` jobs; each array comes after those it needs.

    `ask`: steps of a job -> the resources that it asks for.
    """
    stage_of = _stages(steps)
    members: dict[Stage, list[Step]] = defaultdict(list)
    for step in steps:
        members[stage_of[step.id]].append(step)
    arrays = []
    for stage in _in_order(members, stage_of):
        alike: dict[str, tuple[Mapping[str, Any], list[PackSteps]]] = {}
        for pack in _packs(members[stage], stage[0], settings):
            asks = ask(pack)
            alike.setdefault(canonical(asks), (asks, []))[1].append(pack)
        for asks, packs in alike.values():
            arrays += [Array(stage[0], asks, packs[at : at + longest]) for at in range(0, len(packs), longest)]
    return arrays


def table(arrays: Iterable[Array], longest: int, seconds: Seconds) -> Table:
    """Table of the arrays and the resources of their jobs. `longest`: minutes of a job whose time is not known."""
    columns = ("array", "jobs", "steps", "GPUs", "CPUs", "GiB", "minutes", "partition")
    rows = Table(*columns, title="what Slurm would be asked for, each job")
    for array in arrays:
        steps = [step for pack in array.packs for step in pack]
        asks = {name: str(array.asks[name]) for name in ("gpus", "cpus", "memory", "minutes")}
        if array.asks["minutes"] == longest and any(seconds(step) is None for step in steps):
            asks["minutes"] += "?"
            rows.caption = "?: resources.longest, since this store has no such step whose time is known"
        partition = array.asks["partition"] or "default"
        rows.add_row(array.kind, str(len(array.packs)), str(len(steps)), *asks.values(), partition)
    return rows


def _stages(steps: Sequence[Step]) -> dict[str, Stage]:
    """Step id -> its stage. `steps` have inputs before the steps that need them."""
    stages: dict[str, Stage] = {}
    for step in steps:
        before = [stages[needed.id] for needed in step.needs if needed.id in stages]
        kind = step.job()
        stages[step.id] = (kind, max((depth + 1 for other, depth in before if other == kind), default=0))
    return stages


def _in_order(members: Mapping[Stage, Sequence[Step]], stage_of: Mapping[str, Stage]) -> Iterable[Stage]:
    needs = {
        stage: {stage_of[needed.id] for step in steps for needed in step.needs if needed.id in stage_of}
        for stage, steps in members.items()
    }
    return TopologicalSorter(needs).static_order()


def _packs(steps: Sequence[Step], kind: str, settings: LauncherConfig) -> list[PackSteps]:
    """Divide steps into jobs. Steps of the kind itself come before others in its jobs.

    Where the kind loads a model, a job is about one model, and has the steps of a pruned model together.
    """
    if not (per_job := KINDS[kind].per_job):
        return [[step] for step in steps]
    groups: dict[str, dict[str, PackSteps]] = defaultdict(lambda: defaultdict(list))
    for step in sorted(steps, key=lambda step: step.kind != kind):
        plan = step.inputs.get("plan")
        if KINDS[kind].loads == "model":
            groups[repr(step.about)][plan.id if plan else ""].append(step)
        else:
            groups[""][step.id].append(step)
    size = STEPS_PER_JOB if per_job == "steps" else settings.cells_per_job
    return [pack for cells in groups.values() for pack in _cut(list(cells.values()), size)]


def _cut(groups: Sequence[PackSteps], size: int) -> list[PackSteps]:
    """Divide groups into packs of at most `size`, as even as possible."""
    count = -(-len(groups) // size)
    bounds = [number * len(groups) // count for number in range(count + 1)]
    return [[step for group in groups[start:end] for step in group] for start, end in pairwise(bounds)]
