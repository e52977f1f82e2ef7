"""Group steps into Slurm jobs, and jobs into arrays; and the resources of each job: as set in the
configuration, or else estimated."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from graphlib import TopologicalSorter
from itertools import chain, pairwise
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

JobSteps = list[Step]
"""The steps of one job, in the order in which it does them."""
Stage = tuple[str, int]
"""Kind of jobs, and how many jobs of the same kind have to run before them, one after another."""
STEPS_PER_JOB = 256
"""Short steps of one job: each takes about a second, and a job some time in the queue."""
UNKNOWN = 16.0 * GIB
"""Bytes of GPU memory assumed for a model of unknown size, before it is downloaded."""
ROUNDED = 30
"""Estimated minutes are rounded up to multiples of this, so that jobs of similar length share an
array."""
MARGIN = 2.0
"""Requested time as a multiple of the estimate: a job that shares its node can take twice as
long."""
ROUGHLY = 1.25
"""Multiple of the memory of GPUs up to which a step is tried, as estimates are rough."""
CPUS_PER_GPU = 8
"""CPU cores per GPU where `cpus` is not set: clusters have at least as many."""
HOST = 8.0
"""GiB of main memory of a GPU job, in addition to the weights that pass through it to the GPU."""


def is_for_gpus(option: str, value: Any) -> bool:
    """Whether an option of sbatch requests GPUs, and so replaces `gpus` and `gpu_type`."""
    if option == "gres":
        return any(part.partition(":")[0] == "gpu" for part in str(value).split(","))
    return option in ("gpus", "gpus-per-task", "gpus-per-socket")


def job_options(sbatch: Mapping[str, Any], on_gpus: bool) -> dict[str, Any]:
    """The options of sbatch for a job: without those that are null or false, and without those
    about GPUs unless it is `on_gpus`."""
    options = {
        name: value for name, value in sbatch.items() if value is not None and value is not False
    }
    if on_gpus:
        return options
    other_gres = [
        part
        for part in str(options.pop("gres", "")).split(",")
        if part and not is_for_gpus("gres", part)
    ]
    options = {
        name: value
        for name, value in options.items()
        if not is_for_gpus(name, value) and name != "mem-per-gpu"
    }
    if other_gres:
        options["gres"] = ",".join(other_gres)
    return options


@dataclass(frozen=True)
class Array:
    """Jobs of one kind with the same resources, which are submitted together."""

    kind: str
    resources: Mapping[str, Any]
    """Resources of each job, as by `job_resources`."""
    jobs: Sequence[JobSteps]


def arrange(
    steps: Sequence[Step],
    resources_of: Callable[[Sequence[Step]], Mapping[str, Any]],
    settings: LauncherConfig,
    longest: int = LONGEST,
) -> list[Array]:
    """Arrange `steps` in arrays of at most `longest` jobs; each array comes after those it needs.
    `resources_of`: steps of a job -> its resources."""
    stage_of: dict[str, Stage] = {}
    steps_of: dict[Stage, list[Step]] = defaultdict(list)
    needs: dict[Stage, set[Stage]] = defaultdict(set)
    for step in steps:  # inputs come first
        input_stages = {stage_of[needed.id] for needed in step.needs if needed.id in stage_of}
        kind = step.resources().job or step.kind
        depths = (depth + 1 for input_kind, depth in input_stages if input_kind == kind)
        stage = (kind, max(depths, default=0))
        stage_of[step.id] = stage
        steps_of[stage].append(step)
        needs[stage] |= input_stages - {stage}
    arrays = []
    for stage in TopologicalSorter(needs).static_order():
        kind, _ = stage
        jobs_by_resources: dict[str, list[JobSteps]] = defaultdict(list)
        for job in _jobs(steps_of[stage], kind, settings):
            jobs_by_resources[canonical(resources_of(job))].append(job)
        for jobs in jobs_by_resources.values():
            resources = resources_of(jobs[0])
            for start in range(0, len(jobs), longest):
                arrays.append(Array(kind, resources, jobs[start : start + longest]))
    return arrays


def array_table(arrays: Iterable[Array], longest: int, seconds: Seconds) -> Table:
    """Table of the arrays and the resources of their jobs. `longest`: requested minutes of a job
    whose time is unknown. `seconds`: estimated seconds of a step."""
    header = ("array", "jobs", "steps", "GPUs", "CPUs", "GiB", "minutes", "partition")
    rows = Table(*header, title="what would be requested from Slurm for each job")
    for array in arrays:
        resources = array.resources
        steps = [step for job in array.jobs for step in job]
        columns = {name: str(resources[name]) for name in ("gpus", "cpus", "memory", "minutes")}
        if resources["minutes"] == longest and any(seconds(step) is None for step in steps):
            columns["minutes"] += "?"
            rows.caption = (
                "?: resources.longest, since this store has no such step whose time is known"
            )
        partition = resources["partition"] or "default"
        counts = (str(len(array.jobs)), str(len(steps)))
        rows.add_row(array.kind, *counts, *columns.values(), partition)
    return rows


def _jobs(steps: Sequence[Step], kind: str, settings: LauncherConfig) -> list[JobSteps]:
    """Divide the steps of jobs of a kind into jobs of about equal length. In a job, steps of `kind`
    come before others. With steps_per_job=models, a job reads one model, and the steps of a pruned
    model are in one job."""
    # model -> pruned model or step -> steps that are not divided
    groups: dict[str, dict[str, JobSteps]] = defaultdict(lambda: defaultdict(list))
    for step in sorted(steps, key=lambda step: step.kind != kind):
        needed = step.resources()
        plan = step.inputs.get("plan")
        if needed.steps_per_job == "models":
            groups[repr(needed.model)][plan.id if plan else ""].append(step)
        else:
            groups[""][step.id].append(step)
    steps_per_job = steps[0].resources().steps_per_job
    size = {"one": 1, "short": STEPS_PER_JOB}.get(steps_per_job, settings.cells_per_job)
    jobs = []
    for group in groups.values():
        units = list(group.values())
        count = ceil(len(units) / size)
        bounds = [number * len(units) // count for number in range(count + 1)]
        for start, end in pairwise(bounds):
            jobs.append(list(chain.from_iterable(units[start:end])))
    return jobs


def job_resources(
    steps: Sequence[Step],
    settings: ResourcesConfig,
    seconds: Seconds,
    time_limits: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Resources of a job that does `steps` one after another; kind and model of the first step
    select the settings.

    Returns the fields of JobConfig: gpus, cpus, memory (GiB) and minutes are always numbers.
    `seconds`: estimated seconds of a step; if they are unknown for any, the job requests
    `settings.longest`. Minutes that are not set are limited to the partition's `time_limits`
    (partition -> minutes). UserError for GPUs that are set twice, and for a step that is too large
    for the GPUs."""
    needed = []
    for step in steps:
        of_step = step.resources()
        if of_step.memory is None:
            of_step = of_step._replace(memory=UNKNOWN, gpu_counts=GPU_COUNTS)
        needed.append(of_step)
    model = needed[0].model
    kind = settings.jobs.get(steps[0].kind)
    job_config = configured([settings.every, kind, settings.of_model(model) if model else None])
    count = job_config["gpus"]
    sbatch = job_options(job_config["sbatch"], on_gpus=True)
    gpu_options = [
        f"sbatch.{name}={value}" for name, value in sbatch.items() if is_for_gpus(name, value)
    ]
    if gpu_options and count != 0 and (count or job_config["gpu_type"]):
        setting = f"gpus={count}" if count else f"gpu_type={job_config['gpu_type']}"
        raise UserError(
            f"resources: {steps[0].kind} jobs have {setting} and {gpu_options[0]}: expected only "
            "one of these"
        )
    if count is None:
        count = max(of_step.gpus(settings.gpu_memory) for of_step in needed)
        too_large = [
            of_step.memory
            for of_step in needed
            if of_step.memory and not of_step.fits(count, ROUGHLY * settings.gpu_memory)
        ]
        if model and too_large and not gpu_options and config_of(model):
            can_divide = model.device in DEVICE_MAPS or needed[0].weights == "layers"
            raise UserError(
                f"{steps[0].kind} of model={model.name} needs about {too_large[0] / GIB:.0f} GiB, "
                f"and is divided among at most {count} GPUs of "
                f"resources.gpu_memory={settings.gpu_memory:g} GiB: expected "
                f"resources.jobs={{{steps[0].kind}: {{gpus: {count}}}}} where that is enough, "
                f"{'' if can_divide else 'model.device=auto, '}or weights of fewer bits"
            )
    elif count and all(of_step.weights == "layers" for of_step in needed):
        # the model is read layer by layer, each on the same GPU
        count = 1
        job_config["gpus"] = count
    largest = max(of_step.memory or 0.0 for of_step in needed) / GIB
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
    """Requested minutes of a job whose steps take `times` (seconds): at most `longest`, and
    `longest` where a time is unknown (None)."""
    if None in times:
        return longest
    return min(longest, ROUNDED * max(1, ceil(MARGIN * sum(filter(None, times)) / 60 / ROUNDED)))


def configured(settings: Iterable[JobConfig | None]) -> dict[str, Any]:
    """The fields of JobConfig, merged from `settings` of every job, of its kind and of its model:
    later ones override earlier ones, except that sbatch is merged."""
    job_config: dict[str, Any] = {field.name: None for field in fields(JobConfig)} | {
        "sbatch": {},
        "setup": [],
    }
    for job in filter(None, settings):
        fields_set = {
            name: value
            for name, value in vars(job).items()
            if name in job_config and value not in (None, [])
        }
        job_config |= {**fields_set, "sbatch": {**job_config["sbatch"], **job.sbatch}}
    return job_config


def _time_limit(job_config: Mapping[str, Any], time_limits: Mapping[str, float]) -> float:
    """Longest time limit in minutes of the partitions that a job may run in. Infinite when they are
    not known, and when a quality of service (qos) determines the limit."""
    if job_config["sbatch"].get("qos"):
        return inf
    partitions = job_config["partition"] or os.environ.get("SBATCH_PARTITION", "")
    limits = (time_limits[name] for name in partitions.split(",") if name in time_limits)
    return max(limits, default=inf)
