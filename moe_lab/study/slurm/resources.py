"""Resources of a Slurm job: configured for its kind of step and model, or else estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import ceil, inf
from typing import Any

from moe_lab.config import JobConfig, ResourcesConfig
from moe_lab.errors import UserError, unknown
from moe_lab.study.estimates import GIB, Memory, Seconds, gpus, memory_of
from moe_lab.study.slurm import scheduler
from moe_lab.study.step import Step
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.kind import Reads

EVERY = "every"
UNKNOWN = Memory(16 * GIB, on_gpu=True)
"""Assumed for a model of unknown size, before it is downloaded."""
ROUNDED = 30
"""Estimated minutes are rounded up to multiples of this, so that jobs of similar length share an array."""
HOST = 8.0
"""GiB of main memory of a GPU job, in addition to the weights that pass through it to the GPU."""


def check(settings: ResourcesConfig) -> None:
    """Raise UserError for a key of `jobs` that names no kind of step, and for options of sbatch that are decided."""
    for key in settings.jobs:
        kind = key.rpartition("/")[2]
        if kind not in (*KINDS, EVERY):
            raise unknown(f"resources.jobs {key}", kind, [*KINDS, EVERY])
    for key, job in {EVERY: settings.every, **settings.jobs}.items():
        _check_sbatch(key, job.sbatch)


def _check_sbatch(key: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for an option of sbatch that another setting decides, or the beginning of one's name."""
    settings = {**scheduler.DECIDED, **{name: name for name in scheduler.OPTIONAL}}
    for written, value in options.items():
        name = scheduler.option(written)
        decided = [each for each in settings if len(name) > 1 and each.startswith(name)]
        if decided:
            raise UserError(
                f"resources {key}: the option {written}={value} of sbatch is decided by other settings: expected "
                f"{settings[decided[0]]}"
            )


def resources(
    steps: Sequence[Step],
    settings: ResourcesConfig,
    seconds: Seconds,
    time_limit: Callable[[Mapping[str, Any]], float] = lambda configured: inf,
) -> dict[str, Any]:
    """Resources of a job that does `steps` one after another.

    The steps are about one model, except small ones. They are of one kind, or go into jobs of the first step's kind,
    such as the costs of the models that the job evaluates.

    Returns the fields of JobConfig: gpus, cpus, memory (GiB) and minutes are always numbers; gpu_type, partition,
    account, qos and constraint may be None; sbatch is a mapping and setup a list. Settings of MODEL/KIND take
    precedence over MODEL/every, KIND and every; sbatch is merged. `seconds` estimates the time of a step; if it is
    unknown for one, the job asks for `settings.longest`. Minutes that are not set are limited to `time_limit` of the
    job's settings.
    """
    configured = _configured(steps[0], settings)
    memories = [memory_of(step) or UNKNOWN for step in steps]
    count = (
        max(gpus(memory, settings.gpu_memory) for memory in memories)
        if configured["gpus"] is None
        else configured["gpus"]
    )
    largest = max(memory.bytes for memory in memories) / GIB
    threads = (steps[0].runtime.get("model") or {}).get("threads")
    estimated = {
        "gpus": count,
        "cpus": max(threads or 1, count * settings.cpus_per_gpu),
        "memory": ceil(HOST + largest) if count else ceil(2 * largest),
        "minutes": int(min(_minutes([seconds(step) for step in steps], settings), time_limit(configured))),
    }
    return {name: estimated.get(name) if value is None else value for name, value in configured.items()}


def _minutes(seconds: Sequence[float | None], settings: ResourcesConfig) -> int:
    known = [value for value in seconds if value is not None]
    if len(known) < len(seconds):
        return settings.longest
    return min(settings.longest, ROUNDED * max(1, ceil(settings.margin * sum(known) / 60 / ROUNDED)))


def _configured(step: Step, settings: ResourcesConfig) -> dict[str, Any]:
    configured: dict[str, Any] = {field.name: None for field in fields(JobConfig)}
    configured |= {"sbatch": {}, "setup": []}
    for job in _levels(step, settings):
        for name in configured:
            value = getattr(job, name)
            if name == "sbatch":
                configured[name] = {**configured[name], **value}
            elif value is not None and value != []:
                configured[name] = value
    return configured


def _levels(step: Step, settings: ResourcesConfig) -> Iterator[JobConfig]:
    """The settings that apply to a step, the most general first; settings of models do not apply to small steps."""
    yield settings.every
    keys = [step.kind]
    if KINDS[step.kind].reads is not Reads.NOTHING:
        model = step.runtime["model"]["name"]
        keys += [f"{model}/{EVERY}", f"{model}/{step.kind}"]
    for key in keys:
        if key in settings.jobs:
            yield settings.jobs[key]
