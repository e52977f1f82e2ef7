"""Settings of how a study runs: launcher, resources of Slurm jobs, timing, experiment tracker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LauncherConfig:
    """Where the steps of a study run."""

    name: str = "local"
    """inline (this process), local (one process per GPU, or several on CPU) or slurm."""
    processes: int | None = None
    """Processes of launcher=local; null takes one per GPU, or one per CPU core without GPUs."""
    cells_per_job: int = 16
    """Pruned models that one Slurm job evaluates on weights it loads once."""
    steps_per_job: int = 256
    """Small steps, such as scores and plans, that one Slurm job does."""
    parallel: int = 64
    """Jobs of one array that may run at the same time."""
    max_requeues: int = 3
    """How often a job that is interrupted, by its time limit or by another job, is put back into the queue."""
    signal_seconds: int = 120
    """Seconds before its time limit at which a job is told to stop."""
    python: str | None = None
    """Command that starts Python in a job, such as `apptainer exec image.sif python`; null takes the interpreter that
    runs now."""


@dataclass
class JobConfig:
    """Resources of a Slurm job; null takes the next more general setting, and without one an estimate."""

    gpus: int | None = None
    """GPUs; null takes as many as the model and the work need for their memory."""
    gpu_type: str | None = None
    """Type of the GPUs, as `sinfo --format=%G` names it, such as a100; null takes any."""
    cpus: int | None = None
    """CPU cores."""
    memory: float | None = None
    """Main memory in GiB."""
    minutes: int | None = None
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
    """Further options of sbatch by their long names, such as nodelist: node7, exclusive: true; not those that another
    setting decides."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before Python starts, such as module load cuda."""


@dataclass
class ResourcesConfig:
    """Resources of Slurm jobs by model and kind of step; the most specific setting counts."""

    name: str = "default"
    """Name of the cluster."""
    gpu_memory: float = 80.0
    """GiB of one GPU of the cluster."""
    cpus_per_gpu: int = 8
    """CPU cores that are asked for with each GPU."""
    margin: float = 2.0
    """Time asked for, as a multiple of what such steps took."""
    longest: int = 1440
    """Most minutes that a job asks for, and those it asks for when its time is not known, if the partition allows them;
    longer work is requeued and resumes."""
    every: JobConfig = field(default_factory=JobConfig)
    """All jobs."""
    jobs: dict[str, Any] = field(default_factory=dict)
    """Kind of step -> fields of `every`, for jobs of that kind."""
    models: dict[str, Any] = field(default_factory=dict)
    """Name of a model -> fields of `every`, for jobs that read its weights; they take precedence over `jobs`."""


@dataclass
class TimingConfig:
    """The requests that timing=true measures: how many prompts each has, and how long they are."""

    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    """Prompts per request."""
    prompt_lengths: list[int] = field(default_factory=lambda: [128])
    """Tokens of each prompt."""
    new_tokens: int = 32
    """Tokens that are generated after the first one, for each prompt."""
    repeats: int = 7
    """Requests that are timed; medians and quartiles are over them."""
    warmup: int = 2
    """Requests before the timed ones; memory is measured in the first one."""
    device: str | None = None
    """Name of the GPU or processor to measure on, such as `NVIDIA H100 80GB HBM3`; null is that of this machine."""


@dataclass
class TrackerConfig:
    """Experiment tracker that gets a copy of the results; the store always has them."""

    name: str = "none"
    """none or wandb."""
    project: str = "moe_lab"
    """Project of the tracker."""
    mode: str | None = None
    """online or offline; null is online when a key is configured, offline otherwise."""
