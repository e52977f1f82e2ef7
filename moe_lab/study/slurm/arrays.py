"""Group steps into Slurm jobs, and jobs into arrays; and what each job asks for: what is set, or
else an estimate."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from graphlib import TopologicalSorter
from itertools import pairwise
from math import ceil, inf
from types import MappingProxyType
from typing import Any

from rich.table import Table

from moe_lab.config import JobConfig, LauncherConfig, ResourcesConfig
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.errors import UserError
from moe_lab.json_files import canonical
from moe_lab.models.config_json import GPU_COUNTS, config_of
from moe_lab.study.estimates import Seconds
from moe_lab.study.resources import GIB
from moe_lab.study.slurm.scheduler import LONGEST
from moe_lab.study.step import Step

PackSteps = list[Step]
STEPS_PER_JOB = 256
"""Small steps of one job: each takes about a second, and a job some time in the queue."""
UNKNOWN = 16.0 * GIB
"""Bytes of GPU memory assumed for a model of unknown size, before it is downloaded."""
ROUNDED = 30
"""Estimated minutes are rounded up to multiples of this, so that jobs of similar length share an
array."""
MARGIN = 2.0
"""Time asked for, as a multiple of what such steps took: a job beside others can take twice as long
as one alone."""
ROUGHLY = 1.25
"""Factor on the memory of GPUs up to which a step is tried that needs more by estimate."""
CPUS_PER_GPU = 8
"""CPU cores that are asked for with each GPU where `cpus` is not set: clusters have at least as
many for each."""
HOST = 8.0
"""GiB of main memory of a GPU job, in addition to the weights that pass through it to the GPU."""


def is_for_gpus(option: str, value: Any) -> bool:
    """Whether an option of sbatch asks for GPUs in a cluster's own words, and then stands for
    `gpus` and `gpu_type`."""
    if option == "gres":
        return any(part.partition(":")[0] == "gpu" for part in str(value).split(","))
    return option in ("gpus", "gpus-per-task", "gpus-per-socket")


def options(sbatch: Mapping[str, Any], on_gpus: bool) -> dict[str, Any]:
    """The options of sbatch that a job is given: without those that are null or false, and those
    about GPUs in one that needs none."""
    given = {
        name: value for name, value in sbatch.items() if value is not None and value is not False
    }
    if on_gpus:
        return given
    others = [
        part
        for part in str(given.pop("gres", "")).split(",")
        if part and not is_for_gpus("gres", part)
    ]
    kept = {
        name: value
        for name, value in given.items()
        if not is_for_gpus(name, value) and name != "mem-per-gpu"
    }
    return {**kept, **({"gres": ",".join(others)} if others else {})}


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
    `ask`: steps of a job -> the resources that it asks for."""
    # A stage is the kind of a job, and how many jobs of the same kind have to run before it, one
    # after another.
    stage_of: dict[str, tuple[str, int]] = {}
    members: dict[tuple[str, int], list[Step]] = defaultdict(list)
    needs: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for step in steps:  # inputs come first
        before = {stage_of[needed.id] for needed in step.needs if needed.id in stage_of}
        kind = step.resources().job or step.kind
        stage = (kind, max((depth + 1 for other, depth in before if other == kind), default=0))
        stage_of[step.id] = stage
        members[stage].append(step)
        needs[stage] |= before - {stage}
    arrays = []
    for stage in TopologicalSorter(needs).static_order():
        packs_by_request: dict[str, tuple[Mapping[str, Any], list[PackSteps]]] = {}
        for pack in _packs(members[stage], stage[0], settings):
            asks = ask(pack)
            packs_by_request.setdefault(canonical(asks), (asks, []))[1].append(pack)
        for asks, packs in packs_by_request.values():
            arrays += [
                Array(stage[0], asks, packs[at : at + longest])
                for at in range(0, len(packs), longest)
            ]
    return arrays


def table(arrays: Iterable[Array], longest: int, seconds: Seconds) -> Table:
    """Table of the arrays and the resources of their jobs. `longest`: minutes of a job whose time
    is not known."""
    columns = ("array", "jobs", "steps", "GPUs", "CPUs", "GiB", "minutes", "partition")
    rows = Table(*columns, title="what Slurm would be asked for, each job")
    for array in arrays:
        steps = [step for pack in array.packs for step in pack]
        asks = {name: str(array.asks[name]) for name in ("gpus", "cpus", "memory", "minutes")}
        if array.asks["minutes"] == longest and any(seconds(step) is None for step in steps):
            asks["minutes"] += "?"
            rows.caption = (
                "?: resources.longest, since this store has no such step whose time is known"
            )
        partition = array.asks["partition"] or "default"
        rows.add_row(array.kind, str(len(array.packs)), str(len(steps)), *asks.values(), partition)
    return rows


def _packs(steps: Sequence[Step], kind: str, settings: LauncherConfig) -> list[PackSteps]:
    """Divide steps into jobs. Steps of the kind itself come before others in its jobs. Where the
    kind loads a model, a job is about one model, and has the steps of a pruned model together."""
    groups: dict[str, dict[str, PackSteps]] = defaultdict(lambda: defaultdict(list))
    for step in sorted(steps, key=lambda step: step.kind != kind):
        needed = step.resources()
        plan = step.inputs.get("plan")
        if needed.pack == "models":
            groups[repr(needed.model)][plan.id if plan else ""].append(step)
        else:
            groups[""][step.id].append(step)
    pack = steps[0].resources().pack
    size = {"one": 1, "short": STEPS_PER_JOB}.get(pack, settings.cells_per_job)
    packs = []
    for cells in (list(cells.values()) for cells in groups.values()):
        count = -(-len(cells) // size)  # jobs of the same length, about
        bounds = [number * len(cells) // count for number in range(count + 1)]
        packs += [
            [step for cell in cells[start:end] for step in cell] for start, end in pairwise(bounds)
        ]
    return packs


def resources(
    steps: Sequence[Step],
    settings: ResourcesConfig,
    seconds: Seconds,
    time_limits: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Resources of a job that does `steps`, of one kind and model, and others after them, one after
    another.

    Returns the fields of JobConfig: gpus, cpus, memory (GiB) and minutes are always numbers.
    `seconds` estimates the time of a step; if it is unknown for one, the job asks for
    `settings.longest`. Minutes that are not set are limited to the partition's `time_limits`
    (partition -> minutes)."""
    every = [step.resources() for step in steps]
    needed = [
        one if one.memory is not None else one._replace(memory=UNKNOWN, gpu_counts=GPU_COUNTS)
        for one in every
    ]
    model = every[0].model
    kind = settings.jobs.get(steps[0].kind)
    job_config = configured([settings.every, kind, settings.of_model(model) if model else None])
    count = job_config["gpus"]
    given = options(job_config["sbatch"], on_gpus=True)
    others = [f"sbatch.{name}={value}" for name, value in given.items() if is_for_gpus(name, value)]
    if others and count != 0 and (count or job_config["gpu_type"]):
        ours = f"gpus={count}" if count else f"gpu_type={job_config['gpu_type']}"
        raise UserError(
            f"resources: {steps[0].kind} jobs have {ours} and {others[0]}: expected one or the "
            "other"
        )
    if count is None:
        count = max(one.gpus(settings.gpu_memory) for one in needed)
        too_large = [
            one.memory
            for one in needed
            if one.memory and not one.fits(count, ROUGHLY * settings.gpu_memory)
        ]
        if model and too_large and not others and config_of(model):
            can_divide = model.device in DEVICE_MAPS or every[0].weights == "layers"
            raise UserError(
                f"{steps[0].kind} of model={model.name} needs about {too_large[0] / GIB:.0f} GiB, "
                f"and is divided among at most {count} GPUs of "
                f"resources.gpu_memory={settings.gpu_memory:g} GiB: expected "
                f"resources.jobs={{{steps[0].kind}: {{gpus: {count}}}}} where that is enough, "
                f"{'' if can_divide else 'model.device=auto, '}or weights of fewer bits"
            )
    elif count and all(one.weights == "layers" for one in every):
        job_config["gpus"] = count = 1  # the model is read layer by layer, each on the same GPU
    largest = max(one.memory or 0.0 for one in needed) / GIB
    minutes = _minutes([seconds(step) for step in steps], settings.longest)
    estimated = {
        "gpus": count,
        "cpus": max((model.threads if model else None) or 1, count * CPUS_PER_GPU),
        "memory": ceil(HOST + largest) if count else ceil(2 * largest),
        "minutes": int(min(minutes, _time_limit(job_config, time_limits))),
    }
    return {
        name: estimated.get(name) if value is None else value for name, value in job_config.items()
    }


def _minutes(times: Sequence[float | None], longest: float) -> float:
    """Minutes that a job asks for whose steps take `times` (seconds): at most `longest`, and that
    where a time is unknown."""
    if None in times:
        return longest
    return min(longest, ROUNDED * max(1, ceil(MARGIN * sum(filter(None, times)) / 60 / ROUNDED)))


def configured(settings: Iterable[JobConfig | None]) -> dict[str, Any]:
    """What is set for a job: `settings` of every job, of its kind and of its model, the later ones
    above the earlier; sbatch is merged. Settings of models do not apply to small steps."""
    job_config: dict[str, Any] = {field.name: None for field in fields(JobConfig)} | {
        "sbatch": {},
        "setup": [],
    }
    for job in filter(None, settings):
        given = {
            name: value
            for name, value in vars(job).items()
            if name in job_config and value not in (None, [])
        }
        job_config |= {**given, "sbatch": {**job_config["sbatch"], **job.sbatch}}
    return job_config


def _time_limit(job_config: Mapping[str, Any], time_limits: Mapping[str, float]) -> float:
    """Longest time limit in minutes of the partitions that a job may run in. Infinite when they are
    not known, and when a quality of service (qos) determines the limit."""
    if job_config["sbatch"].get("qos"):
        return inf
    named = job_config["partition"] or os.environ.get("SBATCH_PARTITION", "")
    return max((time_limits[name] for name in named.split(",") if name in time_limits), default=inf)
