"""Settings of how a study runs: launcher, resources of Slurm jobs, timing, experiment tracker."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict
from pydantic.dataclasses import dataclass

from moe_lab.config.base import SETTINGS, Above0, Count, Positive


def _project(name: str) -> str:
    """wandb refuses other names, but only at the end of a study."""
    if not re.fullmatch(r"[^/\\#?%:]{1,128}", name):
        raise ValueError("expected 1 to 128 characters without / \\ # ? % or :")
    return name


@dataclass(config=SETTINGS, frozen=True)
class LauncherConfig:
    """Where the steps of a study run."""

    basic = frozenset({"processes"})

    name: Literal["inline", "local", "slurm"] = "local"
    """inline (this process), local (one process per GPU, or several on CPU) or slurm."""
    processes: Annotated[int, Strict(), Field(ge=1, le=1024)] | None = None
    """Processes of launcher=local; null takes one per GPU, or one per CPU core without GPUs."""
    cells_per_job: Positive = 16
    """Pruned models that one Slurm job evaluates on weights it loads once."""
    steps_per_job: Positive = 256
    """Small steps, such as scores and plans, that one Slurm job does."""
    parallel: Positive = 64
    """Jobs of one array that may run at the same time."""
    max_requeues: Count = 3
    """How often a job that is interrupted, by its time limit or by another job, is put back into the queue."""
    signal_seconds: Positive = 120
    """Seconds before its time limit at which a job is told to stop."""
    python: str | None = None
    """Command that starts Python in a job, such as `apptainer exec image.sif python`; null takes the interpreter that
    runs now."""


@dataclass(config=SETTINGS, frozen=True)
class JobConfig:
    """Resources of a Slurm job; null takes the next more general setting, and without one an estimate."""

    basic = frozenset({"gpus", "minutes", "partition", "account", "setup"})

    gpus: Count | None = None
    """GPUs; null takes as many as the model and the work need for their memory."""
    gpu_type: str | None = None
    """Type of the GPUs, as `sinfo --format=%G` names it, such as a100; null takes any."""
    cpus: Positive | None = None
    """CPU cores."""
    memory: Annotated[float, Strict(), Field(ge=0.1)] | None = None
    """Main memory in GiB."""
    minutes: Positive | None = None
    """Time limit; interrupted work resumes from where it was."""
    partition: str | None = None
    """Partition, as sinfo names it."""
    account: str | None = None
    """Account the time is charged to."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features a node must have, such as h100."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch by their long names, such as nodelist: node7, exclusive: true. They replace those
    that moe_lab sets."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before Python starts, such as module load cuda."""


@dataclass(config=SETTINGS, frozen=True)
class ResourcesConfig:
    """Resources of Slurm jobs by model and kind of step; the most specific setting counts."""

    basic = frozenset({"gpu_memory"})

    gpu_memory: Above0 = 80.0
    """GiB of one GPU of the cluster."""
    longest: Positive = 1440
    """Most minutes that a job asks for, and those it asks for when its time is not known, if the partition allows them;
    longer work is requeued and resumes."""
    every: JobConfig = field(default_factory=JobConfig)
    """All jobs."""
    jobs: dict[str, JobConfig] = field(default_factory=dict)
    """Kind of step -> fields of `every`, for jobs of that kind."""
    models: dict[str, JobConfig] = field(default_factory=dict)
    """Name of a model -> fields of `every`, for jobs that read its weights; they take precedence over `jobs`."""


@dataclass(config=SETTINGS, frozen=True)
class TimingConfig:
    """The requests that timing=true measures: how many prompts each has, and how long they are."""

    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = field(default_factory=lambda: [1, 8])
    """Prompts per request."""
    prompt_lengths: Annotated[list[Positive], Field(min_length=1)] = field(default_factory=lambda: [128])
    """Tokens of each prompt."""
    new_tokens: Positive = 32
    """Tokens that are generated after the first one, for each prompt."""
    repeats: Positive = 7
    """Requests that are timed; medians and quartiles are over them."""
    device: str | None = None
    """Name of the GPU or processor to measure on, such as `NVIDIA H100 80GB HBM3`; null is that of this machine."""


@dataclass(config=SETTINGS, frozen=True)
class TrackerConfig:
    """Experiment tracker that gets a copy of the results; the store always has them."""

    basic = frozenset({"project"})

    name: Literal["none", "wandb"] = "none"
    """none or wandb."""
    project: Annotated[str, AfterValidator(_project)] = "moe_lab"
    """Project of the tracker."""
    mode: Literal["online", "offline"] | None = None
    """online or offline; null is online when a key is configured, offline otherwise."""
