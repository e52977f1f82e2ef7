"""Resources of a Slurm job: as configured for its kind of step and model, the rest estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import ceil, inf
from typing import Any

from omegaconf import OmegaConf

from moe_lab.config import JobConfig, ResourcesConfig
from moe_lab.errors import UserError, unknown
from moe_lab.grid import typed
from moe_lab.secret_settings import escaped
from moe_lab.study.estimates import GIB, Memory, Seconds, gpus, memory_of
from moe_lab.study.step import Step
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.kind import Reads

EVERY = "every"
UNKNOWN = Memory(16 * GIB, on_gpu=True)
"""For models nothing is known of before they are downloaded."""
ROUNDED = 30
"""Minutes are asked for in multiples of it, so that jobs of nearly the same length are of one array."""
HOST = 8.0
"""GiB of main memory beside what the weights take on their way to a GPU."""


def check(settings: ResourcesConfig) -> None:
    """UserError for a key of `jobs` that names no kind of step, and for numbers that cannot be."""
    for key in settings.jobs:
        kind = key.rpartition("/")[2]
        if kind not in (*KINDS, EVERY):
            raise unknown(f"resources.jobs {key}", kind, [*KINDS, EVERY])
    for name in ("gpu_memory", "margin", "longest", "cpus_per_gpu"):
        if not getattr(settings, name) > 0:
            raise UserError(f"resources.{name}={getattr(settings, name)}: expected a number above 0")
    for key, job in {EVERY: settings.every, **{key: _job(key, settings) for key in settings.jobs}}.items():
        for name, least in (("gpus", 0), ("cpus", 1), ("memory", 0.1), ("minutes", 1)):
            value = getattr(job, name)
            if value is not None and not value >= least:
                raise UserError(f"resources {key}: {name}={value}: expected at least {least}")


def resources(
    steps: Sequence[Step],
    settings: ResourcesConfig,
    seconds: Seconds,
    time_limit: Callable[[Mapping[str, Any]], float] = lambda configured: inf,
) -> dict[str, Any]:
    """What a job asks for that does `steps` one after the other: of one model (but the small ones), and of one kind
    (but what else counts for the first, such as the costs of the models it evaluates).

    The fields of JobConfig: gpus, cpus, memory (GiB) and minutes are always numbers; partition, account, qos and
    constraint may be None; sbatch is a mapping and setup a list. What is set for MODEL/KIND counts before MODEL/every,
    KIND and every; sbatch is merged. `seconds` says how long a step takes; where that is not known of one, the job may
    take `settings.longest`. Minutes that are not set are no more than `time_limit` gives for what is set of the job.
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
    """What is set for a step, the most general first; a job of small steps is about no model."""
    yield settings.every
    keys = [step.kind]
    if KINDS[step.kind].reads is not Reads.NOTHING:
        model = step.runtime["model"]["name"]
        keys += [f"{model}/{EVERY}", f"{model}/{step.kind}"]
    for key in keys:
        if key in settings.jobs:
            yield _job(key, settings)


def _job(key: str, settings: ResourcesConfig) -> JobConfig:
    """What is set under a key of `jobs`; UserError for what is no field, or of the wrong type."""
    names = [field.name for field in fields(JobConfig)]
    values = settings.jobs[key]
    if not isinstance(values, dict):
        raise UserError(f"resources.jobs {key}: {values}: expected fields and values, such as {{gpus: 2}}")
    for name in values:
        if name not in names:
            raise unknown(f"resources.jobs {key}", name, names)
    written = {**values, "setup": escaped(values["setup"])} if "setup" in values else values
    return typed(JobConfig, OmegaConf.create(written), f"resources.jobs {key}")
