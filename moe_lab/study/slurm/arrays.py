"""Group steps into Slurm jobs, and jobs into arrays, and determine the resources of each job:
those in the configuration, or else estimates."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from graphlib import TopologicalSorter
from itertools import chain, pairwise
from math import ceil, inf
from typing import Any

from moe_lab.config import JobConfig, LauncherConfig, ResourcesConfig
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.errors import UserError
from moe_lab.json_files import canonical
from moe_lab.models.config_json import config_of
from moe_lab.study.estimates import Seconds, largest_memory
from moe_lab.study.resources import GIB, Resources
from moe_lab.study.slurm.scheduler import MAX_ARRAY_TASKS
from moe_lab.study.step import Step

JobSteps = list[Step]
"""The steps of one job, in the order in which the job does them."""
Stage = tuple[str, int]
"""(kind, depth) of jobs; depth: number of earlier stages of the same kind that must end first."""
STEPS_PER_JOB = 256
"""Maximum number of short steps per job. A short step takes about a second."""
DEFAULT_MEMORY = 16.0 * GIB
"""Assumed bytes of GPU memory if the size of a model is unknown before its download."""
MINUTES_STEP = 30
"""Estimated minutes are rounded up to multiples of this number, and jobs of similar length then
share an array."""
TIME_FACTOR = 2.0
"""Requested time / estimated time. A job that shares its node can take twice as long."""
MEMORY_TOLERANCE = 1.25
"""A step is tried if its estimated memory, which is rough, is at most this multiple of the GPUs'
memory."""
CPUS_PER_GPU = 8
"""CPU cores per GPU if `cpus` is not set. Clusters have at least as many."""
HOST_MEMORY = 8.0
"""GiB of main memory of a GPU job, in addition to the weights that pass through it to the GPU."""


def job_options(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of the options of sbatch for a job: those in the settings, and `gres` for its
    GPUs. `resources`: of the job, as `job_resources` returns them."""
    options = {
        name: value
        for name, value in resources["sbatch"].items()
        if value is not None and value is not False
    }
    if resources["gpus"]:
        type_and_count = (resources["gpu_type"], resources["gpus"])
        gpus = ":".join(["gpu", *(str(part) for part in type_and_count if part)])
        options["gres"] = f"{gpus},{options['gres']}" if "gres" in options else gpus
    else:
        options.pop("mem-per-gpu", None)
    return options


@dataclass(frozen=True)
class Array:
    """Jobs of one kind with the same resources, which are submitted together."""

    kind: str
    resources: Mapping[str, Any]
    """Resources of each job, as `job_resources` returns them."""
    jobs: Sequence[JobSteps]

    @property
    def step_ids(self) -> set[str]:
        """Ids of the steps of all jobs."""
        return {step.id for job in self.jobs for step in job}

    def needed_jobs(self, jobs: Mapping[str, str]) -> set[str]:
        """Ids of the jobs and arrays that compute inputs of the steps. `jobs`: step id -> id of its
        job or array."""
        input_ids = {needed.id for job in self.jobs for step in job for needed in step.needs}
        return {jobs[step_id] for step_id in input_ids - self.step_ids if step_id in jobs}


def divide_into_arrays(
    steps: Sequence[Step],
    resources_of: Callable[[Sequence[Step]], Mapping[str, Any]],
    settings: LauncherConfig,
    longest: int = MAX_ARRAY_TASKS,
) -> list[Array]:
    """Divide steps into jobs, and jobs into arrays. The jobs of an array have the same `Stage` and
    the same resources. Each array comes after the arrays whose results it needs.

    `steps`: each step comes after its inputs. `resources_of`: steps of a job -> resources of the
    job. `longest`: maximum number of jobs in an array."""
    stage_of: dict[str, Stage] = {}
    steps_of: dict[Stage, list[Step]] = defaultdict(list)
    earlier_stages: dict[Stage, set[Stage]] = defaultdict(set)
    for step in steps:
        input_stages = {stage_of[needed.id] for needed in step.needs if needed.id in stage_of}
        kind = job_kind(step)
        # jobs of one array run at the same time
        depths = (depth + 1 for input_kind, depth in input_stages if input_kind == kind)
        stage = (kind, max(depths, default=0))
        stage_of[step.id] = stage
        steps_of[stage].append(step)
        earlier_stages[stage] |= input_stages
    arrays = []
    for stage in TopologicalSorter(earlier_stages).static_order():
        kind, _ = stage
        # keys: resources as JSON
        jobs_by_resources: dict[str, list[JobSteps]] = defaultdict(list)
        for job in _jobs(steps_of[stage], kind, settings):
            jobs_by_resources[canonical(resources_of(job))].append(job)
        for jobs in jobs_by_resources.values():
            resources = resources_of(jobs[0])
            for start in range(0, len(jobs), longest):
                arrays.append(Array(kind, resources, jobs[start : start + longest]))
    return arrays


def _jobs(steps: Sequence[Step], kind: str, settings: LauncherConfig) -> list[JobSteps]:
    """Divide the steps of a stage into jobs, see `Resources.steps_per_job`. In a job, steps of the
    kind `kind` come before steps of other kinds."""
    # A block of steps stays in one job. A job has blocks of one group. Key of a group: the unpruned
    # model, or "". Key of a block: the id of the plan that prunes the model, "" for steps of the
    # unpruned model itself; or the id of the only step of the block.
    groups: dict[str, dict[str, JobSteps]] = defaultdict(lambda: defaultdict(list))
    for step in sorted(steps, key=lambda step: step.kind != kind):
        needed = step.resources()
        plan = step.inputs.get("plan")
        if needed.steps_per_job == "models":
            groups[repr(needed.model)][plan.id if plan else ""].append(step)
        else:
            groups[""][step.id].append(step)
    # `steps_per_job` is the same for all steps of one kind of jobs
    steps_per_job = steps[0].resources().steps_per_job
    max_blocks = {"one": 1, "short": STEPS_PER_JOB}.get(steps_per_job, settings.cells_per_job)
    jobs = []
    for group in groups.values():
        blocks = list(group.values())
        job_count = ceil(len(blocks) / max_blocks)
        bounds = [index * len(blocks) // job_count for index in range(job_count + 1)]
        for start, end in pairwise(bounds):
            jobs.append(list(chain.from_iterable(blocks[start:end])))
    return jobs


def job_kind(step: Step) -> str:
    """Kind of the Slurm jobs that compute a step."""
    return step.resources().job or step.kind


def job_resources(
    steps: Sequence[Step],
    settings: ResourcesConfig,
    seconds: Seconds,
    time_limits: Mapping[str, float],
) -> dict[str, Any]:
    """Field of JobConfig -> value, for a job that computes `steps` one after another. The kind of
    its jobs and the model of the first step select the settings. "gpus", "cpus", "memory" (GiB) and
    "minutes" are estimated if not set. `time_limits`: partition -> minutes. UserError if a step is
    too large for the GPUs."""
    resources = list(map(_known_resources, steps))
    model = resources[0].model
    kind = job_kind(steps[0])
    kind_config = settings.jobs.get(kind)
    model_config = settings.of_model(model) if model else None
    job_config = merge_configs([settings.every, kind_config, model_config])
    count = job_config["gpus"]
    if count is None:
        count = max(needs.gpus(settings.gpu_memory) for needs in resources)
        max_memory = MEMORY_TOLERANCE * settings.gpu_memory
        too_large = [step for step in steps if not step.resources().fits(count, max_memory)]
        # without config.json, the memory is a guess, which is no reason to refuse the step
        if model and too_large and config_of(model):
            can_divide = model.device in DEVICE_MAPS or resources[0].weights == "layers"
            has_text = hasattr(too_large[0], "text")
            raise UserError(
                f"{kind} of model={model.name} needs about {largest_memory(too_large)}, and is "
                f"divided among at most {count} GPUs of "
                f"resources.gpu_memory={settings.gpu_memory:g} GiB: expected "
                f"{'a smaller calibration.batch_tokens, ' if has_text else ''}"
                f"resources.jobs={{{kind}: {{gpus: {count}}}}} where that is enough, "
                f"{'' if can_divide else 'model.device=auto, '}or weights of fewer bits"
            )
    elif count and all(needs.weights == "layers" for needs in resources):
        # only two decoder layers at a time are on a GPU
        count = 1
        job_config["gpus"] = count
    max_gib = max(needs.memory or 0.0 for needs in resources) / GIB
    minutes = _minutes([seconds(step) for step in steps], settings.longest)
    estimates = {
        "gpus": count,
        "cpus": max((model.threads if model else None) or 1, count * CPUS_PER_GPU),
        "memory": ceil(HOST_MEMORY + max_gib) if count else ceil(2 * max_gib),
        "minutes": int(min(minutes, _time_limit(job_config, time_limits))),
    }
    return {
        name: estimates.get(name) if value is None else value for name, value in job_config.items()
    }


def _known_resources(step: Step) -> Resources:
    """Resources of a step; for a model of unknown size, DEFAULT_MEMORY is assumed."""
    needs = step.resources()
    return needs._replace(memory=DEFAULT_MEMORY) if needs.memory is None else needs


def _minutes(times: Sequence[float | None], longest: float) -> float:
    """Requested minutes of a job. `times`: estimated seconds of each step, None if unknown."""
    if None in times:
        return longest
    # the filter is for type checkers
    expected = TIME_FACTOR * sum(filter(None, times)) / 60
    return min(longest, MINUTES_STEP * max(1, ceil(expected / MINUTES_STEP)))


def merge_configs(settings: Iterable[JobConfig | None]) -> dict[str, Any]:
    """Field of JobConfig -> value, merged from several settings. The last settings in which a field
    is set determine its value. The options in the field "sbatch" are merged one by one."""
    job_config: dict[str, Any] = {field.name: None for field in fields(JobConfig)} | {
        "sbatch": {},
        "setup": [],
    }
    for config in filter(None, settings):
        fields_set = {
            name: value
            for name, value in vars(config).items()
            if name in job_config and value not in (None, [])
        }
        job_config |= {**fields_set, "sbatch": {**job_config["sbatch"], **config.sbatch}}
    return job_config


def _time_limit(job_config: Mapping[str, Any], time_limits: Mapping[str, float]) -> float:
    """The time limit of a job in minutes: the longest limit of its partitions. Infinite if unknown,
    or if a quality of service (qos) determines the limit. `time_limits`: partition -> minutes."""
    if job_config["sbatch"].get("qos"):
        return inf
    # sbatch reads the variable if no partition is set; "" is the default partition
    partitions = job_config["partition"] or os.environ.get("SBATCH_PARTITION", "")
    limits = (time_limits[name] for name in partitions.split(",") if name in time_limits)
    return max(limits, default=inf)
