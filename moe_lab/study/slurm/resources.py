"""Resources of a Slurm job: configured for its kind of step and model, or else estimated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import ceil, inf
from types import MappingProxyType
from typing import Any

from moe_lab.config import JobConfig, ResourcesConfig
from moe_lab.study import Step
from moe_lab.study.estimates import GIB, Memory, Seconds, gpus, memory_of

UNKNOWN = Memory(16 * GIB, on_gpu=True)
"""Assumed for a model of unknown size, before it is downloaded."""
ROUNDED = 30
"""Estimated minutes are rounded up to multiples of this, so that jobs of similar length share an array."""
MARGIN = 2.0
"""Time asked for, as a multiple of what such steps took: a job beside others can take twice as long as one alone."""
CPUS_PER_GPU = 8
"""CPU cores that are asked for with each GPU where `cpus` is not set: clusters have at least as many for each."""
HOST = 8.0
"""GiB of main memory of a GPU job, in addition to the weights that pass through it to the GPU."""


def resources(
    steps: Sequence[Step],
    settings: ResourcesConfig,
    seconds: Seconds,
    time_limits: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Resources of a job that does `steps` one after another.

    The steps are about one model, except small ones. They are of one kind, or go into jobs of the first step's kind,
    such as the costs of the models that the job evaluates.

    Returns the fields of JobConfig: gpus, cpus, memory (GiB) and minutes are always numbers; gpu_type and partition may
    be None; sbatch is a mapping and setup a list. `seconds` estimates the time of a step; if it is unknown for one, the
    job asks for `settings.longest`. Minutes that are not set are limited to the partition's `time_limits` (partition ->
    minutes).
    """
    configured = _configured(steps[0], settings)
    memories = [memory_of(step) or UNKNOWN for step in steps]
    count = configured["gpus"]
    if count is None:
        count = max(gpus(memory, settings.gpu_memory) for memory in memories)
    largest = max(memory.bytes for memory in memories) / GIB
    threads = (steps[0].about.threads if steps[0].about else None) or 1
    minutes = min(_minutes([seconds(step) for step in steps], settings), _time_limit(configured, time_limits))
    estimated = {
        "gpus": count,
        "cpus": max(threads, count * CPUS_PER_GPU),
        "memory": ceil(HOST + largest) if count else ceil(2 * largest),
        "minutes": int(minutes),
    }
    return {name: estimated.get(name) if value is None else value for name, value in configured.items()}


def _minutes(seconds: Sequence[float | None], settings: ResourcesConfig) -> int:
    known = [value for value in seconds if value is not None]
    if len(known) < len(seconds):
        return settings.longest
    return min(settings.longest, ROUNDED * max(1, ceil(MARGIN * sum(known) / 60 / ROUNDED)))


def _configured(step: Step, settings: ResourcesConfig) -> dict[str, Any]:
    """What is set for a step. Settings of its model take precedence over those of its kind, and those over `every`;
    sbatch is merged. Settings of models do not apply to small steps."""
    of_kind, of_model = settings.jobs.get(step.kind), settings.models.get(step.about.name) if step.about else None
    configured: dict[str, Any] = {field.name: None for field in fields(JobConfig)} | {"sbatch": {}, "setup": []}
    for job in (settings.every, of_kind, of_model):
        if job is not None:
            given = {name: value for name, value in vars(job).items() if name in configured and value not in (None, [])}
            configured |= {**given, "sbatch": {**configured["sbatch"], **job.sbatch}}
    return configured


def _time_limit(configured: Mapping[str, Any], time_limits: Mapping[str, float]) -> float:
    """Longest time limit in minutes of the partitions that a job may run in.

    Infinite when they are not known, and when a quality of service (qos) determines the limit.
    """
    if configured["sbatch"].get("qos"):
        return inf
    named = configured["partition"] or os.environ.get("SBATCH_PARTITION", "")
    return max((time_limits[name] for name in named.split(",") if name in time_limits), default=inf)
