"""Resolve devices, precisions and engines of models; check memory and disk space of this machine;
and estimate the time of steps.

Devices, precisions and engines are resolved before ids of steps are computed. The estimated time of
a step is its amount of work times the seconds per unit of work of finished steps of its kind, in
this store or in the same run; without such steps there is no estimate.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.filesize import decimal
from rich.table import Column, Table

from moe_lab.config import CalibrationConfig, Config, ModelConfig
from moe_lab.errors import UserError
from moe_lab.json_files import Number, canonical, fits
from moe_lab.machine import main_memory, visible_gpus
from moe_lab.models import config_json
from moe_lab.models.config_json import GPU_COUNTS, Size, quantization, size_of
from moe_lab.start import command
from moe_lab.study.resources import GIB, loaded_weights, on_gpu
from moe_lab.study.step import Step
from moe_lab.study.store import Store

TIMES_SHAPE = {"provenance": {"seconds": Number, "units": Number, "pace": list}}
"""Fields of step.json from which times are estimated."""


def resolved_device(model: ModelConfig, config: Config) -> ModelConfig:
    """The model with device=auto and dtype=auto resolved for the machine where the steps run.

    The device follows from the number of GPUs, see `_auto_gpus`. On the CPU, dtype=auto becomes
    float32. On a GPU, dtype=auto stays: it means the precision of the model's files, and the hash
    of the files identifies this precision.
    """
    device = model.device
    if device == "auto":
        # balanced: the device map that divides a model among several GPUs
        device = {0: "cpu", 1: "cuda"}.get(_auto_gpus(model, config), "balanced")
    dtype = "float32" if device == "cpu" and model.dtype == "auto" else model.dtype
    return replace(model, device=device, dtype=dtype)


def _auto_gpus(model: ModelConfig, config: Config) -> int:
    """Number of GPUs that device=auto uses for a model. With launcher=slurm: the GPUs that a job
    requests, as the login node may have none. With launcher=local: all GPUs of this machine. With
    launcher=inline: as many GPUs of this machine as the weights need, or all if the size of the
    model is unknown."""
    if config.launcher.name == "slurm":
        return _job_gpus(model, config)
    gpu_count = len(visible_gpus())
    if config.launcher.name == "local" or gpu_count <= 1:
        return gpu_count
    size = size_of(model)
    return min(gpu_count, _gpus_for_weights(size, config)) if size else gpu_count


def _job_gpus(model: ModelConfig, config: Config) -> int:
    """Number of GPUs of a Slurm job with a model: the number in the settings for jobs with this
    model, or else in the settings for every job. Without such a number: 0 for a model of known size
    that runs on the CPU, otherwise the maximum of GPU_COUNTS."""
    for job in (config.resources.of_model(model), config.resources.every):
        if job is not None and job.gpus is not None:
            return job.gpus
    size = size_of(model)
    return GPU_COUNTS[-1] if size is None or on_gpu(model, size) else 0


def _gpus_for_weights(size: Size, config: Config) -> int:
    """Number of GPUs of resources.gpu_memory GiB that hold the weights of a model of `size`."""
    return loaded_weights(size).gpus(config.resources.gpu_memory)


def resolved_engine(
    text: CalibrationConfig, model: ModelConfig, config: Config
) -> CalibrationConfig:
    """The text with engine=auto and parts=null resolved.

    An engine or a number of parts that is set stays. If only the engine is set, there is one part.
    Otherwise the engine becomes "streamed" (layer by layer) for a model on GPUs that one GPU does
    not hold: splitting this model among the GPUs would leave all but one of them idle. The text
    then has a part for each GPU, but at most one for each batch. The engine becomes "resident",
    with one part, for any other model, and for a model with quantised weights or of unknown
    configuration.
    """
    if text.engine != "auto":
        return replace(text, parts=text.parts or 1)
    size = size_of(model) if model.device != "cpu" else None
    gpus_needed = _gpus_for_weights(size, config) if size else 1
    if gpus_needed <= 1 or not config_json.config_of(model) or quantization(model):
        return replace(text, engine="resident", parts=text.parts or 1)
    # as many GPUs as the weights need in a job, all GPUs of this machine, or one if launcher=inline
    gpus = {"slurm": gpus_needed, "local": len(visible_gpus())}.get(config.launcher.name, 1)
    return replace(text, engine="streamed", parts=text.parts or max(1, min(gpus, text.batches)))


def check_device(name: str) -> None:
    """Raise UserError when this machine lacks the CUDA device `name`, such as cuda:1. For a device
    map, such as balanced, raise UserError when this machine has no CUDA device. The names auto and
    cpu are always valid."""
    # a name without a number, such as cuda or balanced, needs the first device
    if name not in ("auto", "cpu") and int(name.partition(":")[2] or 0) >= len(visible_gpus()):
        device_here(name)  # raises UserError


def device_here(device: str) -> str:
    """Name of the device that `device`, a value of model.device, selects on this machine. Raises
    UserError when there is no such device. Another process finds the name, because torch takes
    seconds to import."""
    process = subprocess.run(command("moe_lab.models.load", device), capture_output=True, text=True)
    if process.returncode:
        # the last line of the trace is "TYPE: MESSAGE"
        reason = process.stderr.strip().splitlines()[-1].partition(": ")[2]
        raise UserError(
            reason if reason.startswith("model.device=") else f"model.device={device}: {reason}"
        )
    return process.stdout.strip().splitlines()[-1]


def check_memory(step: Step) -> None:
    """Raise UserError when a step loads all weights of a model on the CPU and they exceed the main
    memory of this machine. Only models of known size with plain (not quantised) weights are
    checked. Models that a server loads are not checked."""
    needed = step.resources()
    model = needed.model
    if model is None or needed.weights != "model" or model.device != "cpu":
        return
    size = None if quantization(model) else size_of(model)
    available = main_memory()
    if size and size.bytes > available:
        advice = "leave it out" if step.whole_model else "set calibration.engine=streamed"
        raise UserError(
            f"model.device=cpu: {step.kind} of model={model.name} loads {size.bytes / GIB:.1f} GiB "
            f"of weights, and there are {available / GIB:.1f} GiB of main memory: {advice}, or "
            "name another device or a smaller dtype"
        )


Seconds = Callable[[Step], float | None]
"""Step -> estimated seconds, None without an estimate. `seconds_estimator` returns such a
function."""


def seconds_estimator(store: Store) -> Seconds:
    """A function that estimates the seconds of a step from finished steps in a store.

    The estimate is the step's number of units times a rate. The rate is the median of the seconds
    per unit of the finished steps with the same kind and pace (see Resources). The estimate is None
    if there are no such steps, and 0 for a step that merges shares."""
    rates_of = cache(partial(_rates, store))

    def seconds(step: Step) -> float | None:
        if step.merges:
            return 0.0  # reads and writes files
        needed = step.resources()
        rates = rates_of(step.kind).get(canonical(needed.pace))
        return median(rates) * needed.units if rates else None

    return seconds


def _rates(store: Store, kind: str) -> dict[str, list[float]]:
    """Pace as JSON -> seconds per unit of each finished step with this pace. `kind`: kind of the
    steps. Damaged steps and merged shares are left out."""
    rates: dict[str, list[float]] = {}
    for document in store.documents(kind):
        if not fits(document, TIMES_SHAPE):
            continue
        provenance = document["provenance"]
        # the time of merged shares is that of the shares, which are steps themselves
        if not provenance.get("merged"):
            rates.setdefault(canonical(provenance["pace"]), []).append(
                provenance["seconds"] / provenance["units"]
            )
    return rates


class StepTime(NamedTuple):
    """Time that a step has taken so far."""

    step: Step
    seconds: float
    share: float
    """Share of the step's work that was done in this time; 0 if it is unknown."""


def time_left(
    ended: Iterable[StepTime],
    running: Sequence[StepTime],
    waiting: Iterable[Step],
    seconds: Seconds,
    workers: int,
) -> tuple[float, list[str]]:
    """Estimated seconds until `workers` workers have done all steps of a run, and the kinds of
    the steps that have no estimate, which the seconds leave out. `ended`, `running` and `waiting`
    are all steps of the run.

    The total time of a step is estimated from the ended and running steps of its kind, or else, if
    none of them has known progress, by `seconds`.
    """
    seconds_by_kind = defaultdict[str, float](float)
    work_by_kind = defaultdict[str, float](float)
    for step, spent, share in (*ended, *running):
        if share and not step.merges:
            seconds_by_kind[step.kind] += spent
            work_by_kind[step.kind] += _work(step) * share
    remaining = [0.0]  # seconds of each step; 0.0, as there may be no steps
    unknown_kinds = list[str]()
    # a waiting step has spent 0 seconds on a share of 0 of its work
    for step, spent, share in (*running, *(StepTime(step, 0.0, 0.0) for step in waiting)):
        step_seconds: float | None
        if work_by_kind[step.kind]:
            step_seconds = _work(step) * seconds_by_kind[step.kind] / work_by_kind[step.kind]
        else:
            step_seconds = seconds(step)
        if step_seconds is None:
            unknown_kinds.append(step.kind)
        elif share:
            remaining.append(step_seconds * (1 - share))
        else:
            # without known progress, at least half of the time spent so far remains
            remaining.append(max(step_seconds - spent, spent / 2))
    # one worker does the longest step, however many workers there are
    return max(sum(remaining) / workers, *remaining), list(dict.fromkeys(unknown_kinds))


MINIMUM_PARAMETERS = 100_000_000
"""Number of parameters that is assumed for smaller models. A smaller model takes no less time than
a model of this size, as work other than matrix products dominates."""


@cache
def _work(step: Step) -> float:
    """Amount of work of a step, comparable between steps of a kind: units times parameters of the
    model, at least MINIMUM_PARAMETERS. 0 for a step that merges shares."""
    if step.merges:
        return 0.0
    needed = step.resources()
    size = size_of(needed.model) if needed.model else None
    # 1e9 parameters are assumed for a model of unknown size, and for a step without a model
    parameters = max(size.parameters, MINIMUM_PARAMETERS) if size else 1e9
    return needed.units * parameters


def forecast(steps: Sequence[Step], done: set[str], gpu_memory: float, seconds: Seconds) -> Table:
    """Table for a dry run: numbers of distinct, cached and missing steps of each kind. For the
    missing steps of a kind, the table has the largest estimated memory of a step and the estimated
    time of all steps. `done`: ids of finished steps. `gpu_memory`: GiB of memory of one GPU.
    `seconds`: estimates the seconds of a step."""
    columns = (
        Column("step", no_wrap=True),
        "distinct",
        "cached",
        "missing",
        "largest memory",
        "hours",
        "GPU-hours",
    )
    table = Table(*columns, title="steps, and estimates for missing steps", show_footer=True)
    total = Hours()
    for kind in dict.fromkeys(step.kind for step in steps):
        kind_steps = [step for step in steps if step.kind == kind]
        missing = [step for step in kind_steps if step.id not in done]
        counts = (len(kind_steps), len(kind_steps) - len(missing), len(missing))
        hours = _hours(missing, gpu_memory, seconds)
        table.add_row(kind, *map(str, counts), largest_memory(missing), *hours.texts())
        total = Hours(
            total.work + hours.work,
            total.gpu_work + hours.gpu_work,
            total.unknown + hours.unknown,
        )
    for column, value in zip(table.columns[-2:], total.texts(), strict=True):
        column.footer = value
    return table


class Hours(NamedTuple):
    """Total hours of several steps."""

    work: float = 0.0
    """Hours that one worker takes for all steps with an estimate."""
    gpu_work: float = 0.0
    """GPU-hours: the hours of each step times its number of GPUs."""
    unknown: int = 0
    """Number of steps without an estimate."""

    def texts(self) -> tuple[str, str]:
        """Hours and GPU-hours for a table. "unknown" if no step has an estimate; otherwise the
        number of steps without an estimate is appended, if there are any."""
        if self.unknown and not self.work:  # only merges of shares, of 0 hours, have an estimate
            return "unknown", "unknown"
        ending = f" + {self.unknown} unknown" if self.unknown else ""
        return f"{self.work:.2f}{ending}", f"{self.gpu_work:.2f}{ending}"


def _hours(steps: Sequence[Step], gpu_memory: float, seconds: Seconds) -> Hours:
    """Estimated hours of all `steps` together, and number of steps without an estimate. Steps of
    unknown memory add no GPU-hours. `gpu_memory`: GiB of memory of one GPU, which decide how many
    GPUs a step needs."""
    hours = gpu_hours = 0.0
    unknown = 0
    for step in steps:
        estimate = seconds(step)
        if estimate is None:
            unknown += 1
            continue
        hours += estimate / 3600
        needed = step.resources()
        if needed.memory is not None:
            gpu_hours += estimate / 3600 * needed.gpus(gpu_memory)
    return Hours(hours, gpu_hours, unknown)


def largest_memory(steps: Iterable[Step]) -> str:
    """The largest estimated memory of one of the steps, as text, with "or more" if the memory of
    some steps is unknown. "unknown" if that of all steps is unknown; "" without steps."""
    memories = [step.resources().memory for step in steps]
    estimates = [memory for memory in memories if memory is not None]
    if not estimates:
        return "unknown" if memories else ""
    ending = " or more" if len(estimates) < len(memories) else ""
    return f"{max(estimates) / GIB:.1f} GiB{ending}"


def disk_problems(store: str | Path, steps: Iterable[Step]) -> list[str]:
    """A sentence when `steps` would write more bytes than are free on the disk of `store`, else [].
    Only exported checkpoints, hidden states of streamed passes and generated texts count, as all
    other files are small."""
    written = sum(step.resources().disk for step in steps)
    folder = Path(store).expanduser().absolute()
    while not folder.exists():  # the store may not have been created yet
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if written <= free:
        return []
    return [
        f"store={store}: about {decimal(int(written))} would be written there and {decimal(free)} "
        "are free: make room, name another store, or ask for less (export=none, fewer cells)"
    ]
