"""Resolve devices, precisions and engines of models; check memory and disk space of this machine;
and estimate the time of steps.

Devices, precisions, engines and sizes of batches are resolved before ids of steps are computed."""

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

from moe_lab.calibration import IdentifiedText, sources, with_batch_tokens
from moe_lab.config import CalibrationConfig, Config, ModelConfig
from moe_lab.errors import UserError
from moe_lab.machine import main_memory, visible_gpus
from moe_lab.models import config_json
from moe_lab.models.config_json import GPU_COUNTS, WEIGHT_OVERHEAD, Size, size_of
from moe_lab.start import command
from moe_lab.study.resources import GIB, Resources, runs_on_gpu
from moe_lab.study.step import Step
from moe_lab.study.store import Store


def resolved_device(model: ModelConfig, config: Config) -> ModelConfig:
    """The model with device=auto and dtype=auto resolved for the machine where the steps run. On a
    GPU, dtype=auto stays: it means the precision of the model's files."""
    device = model.device
    if device == "auto":
        # "balanced": the device map of accelerate that divides a model among several GPUs
        device = {0: "cpu", 1: "cuda"}.get(_auto_gpus(model, config), "balanced")
    dtype = "float32" if device == "cpu" and model.dtype == "auto" else model.dtype
    return replace(model, device=device, dtype=dtype)


def _auto_gpus(model: ModelConfig, config: Config) -> int:
    """Number of GPUs that device=auto uses for a model."""
    if config.launcher.name == "slurm":  # the login node may have no GPUs
        return _job_gpus(model, config)
    gpu_count = len(visible_gpus())
    if config.launcher.name == "local" or gpu_count <= 1:
        return gpu_count
    size = size_of(model)
    return min(gpu_count, _gpus_for_weights(size, config)) if size else gpu_count


def _job_gpus(model: ModelConfig, config: Config) -> int:
    """Number of GPUs of a Slurm job with a model."""
    for settings in (config.resources.of_model(model), config.resources.every):
        if settings is not None and settings.gpus is not None:
            return settings.gpus
    size = size_of(model)
    return GPU_COUNTS[-1] if size is None or runs_on_gpu(model, size) else 0


def _gpus_for_weights(size: Size, config: Config) -> int:
    """Number of GPUs that hold the weights of a model of `size`."""
    weights = Resources(memory=WEIGHT_OVERHEAD * size.bytes, on_gpu=True)
    return weights.gpus(config.resources.gpu_memory)


def resolved_text(
    text: CalibrationConfig, seed: int, model: ModelConfig, config: Config
) -> IdentifiedText:
    """The settings `text` with seed, batch_tokens, engine and parts resolved. A text without a seed
    gets `seed`, the seed of the cell. `parts` is the number of steps that share the work of one
    pass. The device of `model` must be resolved. UserError if there are more parts than batches.

    engine=auto becomes "streamed" (layer by layer) if the model runs on GPUs and its weights need
    more than one: if the model were split among GPUs, only one GPU at a time would work."""
    text = with_batch_tokens(text, model.device)
    engine = text.engine
    parts = 1
    if engine == "auto":
        engine = "resident"
        size = size_of(model) if model.device != "cpu" else None
        gpus_needed = _gpus_for_weights(size, config) if size else 1
        if gpus_needed > 1 and config_json.config_of(model) and config_json.is_readable(model):
            engine = "streamed"
            # GPUs by launcher: as many as the weights need, all of this machine, or one for inline
            gpus = {"slurm": gpus_needed, "local": len(visible_gpus()), "inline": 1}
            # a text of the user may have fewer batches
            if not sources.is_own_text(text):
                parts = max(1, min(gpus[config.launcher.name], text.batches))
    parts = text.parts or parts
    if parts > text.batches:
        raise UserError(
            f"calibration.parts={parts} is more than the {text.batches} batches of "
            f"calibration.batch_tokens={text.batch_tokens} in {text.rows} rows: expected at most "
            f"{text.batches}, or a smaller calibration.batch_tokens"
        )
    seed = seed if text.seed is None else text.seed
    return IdentifiedText.of(replace(text, seed=seed, engine=engine, parts=parts))


def check_device(name: str) -> None:
    """Raise UserError when this machine lacks the CUDA device `name`, such as cuda:1. For a device
    map, such as balanced, raise UserError when this machine has no CUDA device."""
    # a name without a number, such as cuda or balanced, needs the first device
    if name not in ("auto", "cpu") and int(name.partition(":")[2] or 0) >= len(visible_gpus()):
        # raises UserError with a message that says what is missing
        hardware_name(name)


def hardware_name(device: str) -> str:
    """Hardware name, such as "NVIDIA A100", of the GPU or processor that `device`, a value of
    model.device, selects. Raises UserError when this machine has no such device. The name is read
    in a subprocess, as torch takes seconds to import."""
    process = subprocess.run(command("moe_lab.models.load", device), capture_output=True, text=True)
    if process.returncode:
        # the last line of the trace is "TYPE: MESSAGE"
        reason = process.stderr.strip().splitlines()[-1].partition(": ")[2]
        raise UserError(
            reason if reason.startswith("model.device=") else f"model.device={device}: {reason}"
        )
    return process.stdout.strip().splitlines()[-1]


def check_memory(step: Step) -> None:
    """Raise UserError when a step loads all weights of a model on the CPU and the weights exceed
    the main memory of this machine."""
    resources = step.resources()
    model = resources.model
    # weights="model": the step itself loads all weights, unlike weights="server"
    if model is None or resources.weights != "model" or model.device != "cpu":
        return
    size = size_of(model) if config_json.is_readable(model) else None
    available = main_memory()
    if size and size.bytes > available:
        # a step that needs the whole model cannot load it layer by layer
        advice = "leave it out" if step.whole_model else "set calibration.engine=streamed"
        raise UserError(
            f"model.device=cpu: {step.kind} of model={model.name} loads {size.bytes / GIB:.1f} GiB "
            f"of weights, and there are {available / GIB:.1f} GiB of main memory: {advice}, or "
            "name another device or a smaller dtype"
        )


Seconds = Callable[[Step], float | None]
"""Step -> estimated seconds, None without an estimate."""


def seconds_estimator(store: Store) -> Seconds:
    """A function that estimates the seconds of a step from the finished steps in a store.

    The estimate is the number of units of work of the step, times the median seconds per unit of
    the finished steps of the same kind and `Resources.rate_key`."""
    rates_of = cache(partial(_rates, store))

    def seconds(step: Step) -> float | None:
        if step.merged_steps:
            return 0.0  # merging takes little time
        resources = step.resources()
        rates = rates_of(step.kind).get(resources.rate_key)
        return median(rates) * resources.units if rates else None

    return seconds


def _rates(store: Store, kind: str) -> dict[str, list[float]]:
    """`Resources.rate_key` -> seconds per unit of work of each finished step of the kind
    `kind`."""
    rates: dict[str, list[float]] = {}
    for document in store.documents(kind):
        provenance = document["provenance"]
        # steps with results of other programs have no times, and merging is no work
        if "pace" in provenance and not provenance.get("merged"):
            seconds_per_unit = provenance["seconds"] / provenance["units"]
            rates.setdefault(provenance["pace"], []).append(seconds_per_unit)
    return rates


class StepTime(NamedTuple):
    """Time that a step has taken so far."""

    step: Step
    seconds: float
    progress: float
    """Share of the step's work that was done in this time; 0 if it is unknown."""


def time_left(
    ended: Iterable[StepTime], running: Sequence[StepTime], waiting: Iterable[Step], workers: int
) -> float | None:
    """Estimated seconds until `workers` workers have done all steps of a run; None if a kind of
    steps has no estimate.

    The total time of a step is estimated from the ended and running steps of the same kind whose
    progress is known. Merging takes no time."""
    seconds = defaultdict[str, float](float)  # by kind, for the work that is done
    work = defaultdict[str, float](float)
    for step, spent, progress in (*ended, *running):
        if progress and not step.merged_steps:
            seconds[step.kind] += spent
            work[step.kind] += _work(step) * progress
    remaining = [0.0]  # seconds of each step; the first entry is for a run without steps
    for step, _, progress in (*running, *(StepTime(step, 0.0, 0.0) for step in waiting)):
        if step.merged_steps:
            continue
        if not work[step.kind]:
            return None
        step_seconds = _work(step) * seconds[step.kind] / work[step.kind]
        remaining.append(step_seconds * (1 - progress))
    # workers do not share a step, so the longest step bounds the time from below
    return max(sum(remaining) / workers, *remaining)


MINIMUM_PARAMETERS = 100_000_000
"""Number of parameters that is assumed for smaller models, in which work other than matrix products
dominates."""


@cache
def _work(step: Step) -> float:
    """Amount of work of a step, comparable between steps of one kind: units of work times number of
    parameters of the model."""
    resources = step.resources()
    size = size_of(resources.model) if resources.model else None
    # 1e9 parameters are assumed for a model of unknown size, and for a step without a model
    parameters = max(size.parameters, MINIMUM_PARAMETERS) if size else 1e9
    return resources.units * parameters


def forecast_table(
    steps: Sequence[Step], done: set[str], gpu_memory: float, seconds: Seconds
) -> Table:
    """Table for a dry run with one row for each kind of step. `steps`: distinct steps. `done`: ids
    of finished steps. `gpu_memory`: GiB of memory of one GPU."""
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
    for kind in dict.fromkeys(step.kind for step in steps):
        kind_steps = [step for step in steps if step.kind == kind]
        missing = [step for step in kind_steps if step.id not in done]
        counts = (len(kind_steps), len(kind_steps) - len(missing), len(missing))
        hours = _hour_texts(missing, gpu_memory, seconds)
        table.add_row(kind, *map(str, counts), largest_memory(missing), *hours)
    all_missing = [step for step in steps if step.id not in done]
    total = _hour_texts(all_missing, gpu_memory, seconds)
    # the last two columns are hours and GPU-hours
    for column, value in zip(table.columns[-2:], total, strict=True):
        column.footer = value
    return table


def _hour_texts(steps: Sequence[Step], gpu_memory: float, seconds: Seconds) -> tuple[str, str]:
    """(hours that one worker takes for all `steps`, GPU-hours) as texts for a table, such as
    "1.50 + 2 unknown" if 2 steps have no estimate. GPU-hours are the hours of each step times its
    number of GPUs. `gpu_memory`: GiB of memory of one GPU."""
    hours = gpu_hours = 0.0
    unknown = 0
    for step in steps:
        estimate = seconds(step)
        if estimate is None:
            unknown += 1
            continue
        hours += estimate / 3600
        resources = step.resources()
        if resources.memory is not None:
            gpu_hours += estimate / 3600 * resources.gpus(gpu_memory)
    # steps that only merge results have an estimate of 0 hours, which would tell nothing
    if unknown and not hours:
        return "unknown", "unknown"
    ending = f" + {unknown} unknown" if unknown else ""
    return f"{hours:.2f}{ending}", f"{gpu_hours:.2f}{ending}"


def largest_memory(steps: Iterable[Step]) -> str:
    """The estimated memory of the step that needs most memory, as text, such as "12.0 GiB". If the
    memory of some steps is unknown, the text ends in "or more"."""
    memories = [step.resources().memory for step in steps]
    estimates = [memory for memory in memories if memory is not None]
    if not estimates:
        return "unknown" if memories else ""
    ending = " or more" if len(estimates) < len(memories) else ""
    return f"{max(estimates) / GIB:.1f} GiB{ending}"


def disk_problems(store: str | Path, steps: Iterable[Step]) -> list[str]:
    """A list with one sentence when `steps` would write more bytes than are free on the disk of
    `store`, else []."""
    size = sum(step.resources().disk for step in steps)
    folder = Path(store).expanduser().absolute()
    while not folder.exists():  # the store may not have been created yet
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size <= free:
        return []
    return [
        f"store={store}: about {decimal(int(size))} would be written there and {decimal(free)} "
        "are free: make room, name another store, or ask for less (export=none, fewer cells)"
    ]
