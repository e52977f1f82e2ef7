"""Where steps run a model, and what they take: memory, disk space and time.

Device and precision are resolved before steps are named. Memory is computed from the model's shape,
to within a factor of two. Time is what steps of the same kind took for a unit of work, in this
store or in a run; without a comparable step there is no estimate.
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


def resolved(model: ModelConfig, config: Config) -> ModelConfig:
    """The model with the device and the precision that `auto` stands for where the steps of a study
    run.

    A login node without a GPU names the device that its jobs ask for. On a GPU, dtype=auto is the
    precision of the files, which the hash of these identifies.
    """
    device = model.device
    if device == "auto":
        device = {0: "cpu", 1: "cuda"}.get(_auto_gpus(model, config), "balanced")
    dtype = "float32" if device == "cpu" and model.dtype == "auto" else model.dtype
    return replace(model, device=device, dtype=dtype)


def _auto_gpus(model: ModelConfig, config: Config) -> int:
    """The most GPUs that a process with a model may have: those of this machine, inline as many as
    hold the weights."""
    if config.launcher.name == "slurm":
        return _job_gpus(model, config)
    visible = len(visible_gpus())
    if config.launcher.name == "local" or visible <= 1:
        return visible
    size = size_of(model)
    return min(visible, _holding(size, config)) if size else visible


def _job_gpus(model: ModelConfig, config: Config) -> int:
    """The GPUs of a job with a model: what is set, or else the most that a step may need."""
    for job in (config.resources.of_model(model), config.resources.every):
        if job is not None and job.gpus is not None:
            return job.gpus
    size = size_of(model)
    return GPU_COUNTS[-1] if size is None or on_gpu(model, size) else 0


def _holding(size: Size, config: Config) -> int:
    """GPUs that hold the weights of a model of this size."""
    return loaded_weights(size).gpus(config.resources.gpu_memory)


def divided(text: CalibrationConfig, model: ModelConfig, config: Config) -> CalibrationConfig:
    """The text with the engine and the number of parts that auto and null stand for.

    A model that one GPU does not hold is read layer by layer, in a part on each GPU: divided among
    them, its layers would be computed by one at a time. Weights that are quantised, or not known
    not to be, are loaded whole.
    """
    if text.engine != "auto":
        return replace(text, parts=text.parts or 1)
    size = size_of(model) if model.device != "cpu" else None
    needed = _holding(size, config) if size else 1
    if needed <= 1 or not config_json.config_of(model) or quantization(model):
        return replace(text, engine="resident", parts=text.parts or 1)
    cards = {"slurm": needed, "local": len(visible_gpus())}.get(config.launcher.name, 1)
    return replace(text, engine="streamed", parts=text.parts or max(1, min(cards, text.batches)))


def check_device(name: str) -> None:
    """Raise UserError when the CUDA device of model.device, or for a device map any, is not on this
    machine."""
    if name not in ("auto", "cpu") and int(name.partition(":")[2] or 0) >= len(visible_gpus()):
        device_here(name)


def device_here(device: str) -> str:
    """Name of the device that `model.device` selects on this machine. Raises UserError when there
    is none. Runs in another process, because torch takes seconds to import."""
    answer = subprocess.run(command("moe_lab.models.load", device), capture_output=True, text=True)
    if answer.returncode:
        reason = answer.stderr.strip().splitlines()[-1].partition(": ")[2]
        raise UserError(
            reason if reason.startswith("model.device=") else f"model.device={device}: {reason}"
        )
    return answer.stdout.strip().splitlines()[-1]


def check_memory(step: Step) -> None:
    """Raise UserError when the weights that a step loads whole on the CPU alone exceed the main
    memory of this machine. Only models of known size with plain (not quantised) weights are
    checked, and none that a server loads."""
    needed = step.resources()
    model = needed.model
    if model is None or needed.weights != "model" or model.device != "cpu":
        return
    size = None if quantization(model) else size_of(model)
    there = main_memory()
    if size and size.bytes > there:
        way = "leave it out" if step.whole_model else "set calibration.engine=streamed"
        raise UserError(
            f"model.device=cpu: {step.kind} of model={model.name} loads {size.bytes / GIB:.1f} GiB "
            f"of weights, and there are {there / GIB:.1f} GiB of main memory: {way}, or name "
            "another device or a smaller dtype"
        )


Seconds = Callable[[Step], float | None]
"""Step -> estimated seconds, as by `learned`."""


def learned(store: Store) -> Seconds:
    """Estimates of how long steps take, from finished steps in a store: units times the median rate
    of those of equal kind and pace; None without such a step."""
    rates_of = cache(partial(_rates, store))

    def seconds(step: Step) -> float | None:
        if step.merges:
            return 0.0  # reads and writes files
        needed = step.resources()
        rates = rates_of(step.kind).get(canonical(needed.pace))
        return median(rates) * needed.units if rates else None

    return seconds


def _rates(store: Store, kind: str) -> dict[str, list[float]]:
    """Pace -> seconds of a unit of the finished steps of a kind. Steps that are damaged are left
    out."""
    rates: dict[str, list[float]] = {}
    for document in store.documents(kind):
        if not fits(document, TIMES_SHAPE):
            continue
        provenance = document["provenance"]
        if not provenance.get("merged"):  # the time of its shares is in their own folders
            rates.setdefault(canonical(provenance["pace"]), []).append(
                provenance["seconds"] / provenance["units"]
            )
    return rates


Spent = tuple[Step, float, float]
"""A step, the seconds that it has taken, and the share of its work that was done in them, 0 where
it is not known."""


def time_left(
    ended: Iterable[Spent],
    running: Sequence[Spent],
    waiting: Iterable[Step],
    seconds: Seconds,
    workers: int,
) -> tuple[float, list[str]]:
    """Estimated seconds until so many workers have done all steps of a run, and the kinds of which
    nothing is known.

    Steps of a kind take what its work has taken in this run, or else what `seconds` says.
    """
    seconds_by_kind = defaultdict[str, float](float)
    work_by_kind = defaultdict[str, float](float)
    for step, spent, share in (*ended, *running):
        if share and not step.merges:
            seconds_by_kind[step.kind] += spent
            work_by_kind[step.kind] += _work(step) * share
    remaining = [0.0]
    unknown = list[str]()
    for step, spent, share in (*running, *((step, 0.0, 0.0) for step in waiting)):
        whole = (
            _work(step) * seconds_by_kind[step.kind] / work_by_kind[step.kind]
            if work_by_kind[step.kind]
            else seconds(step)
        )
        if whole is None:
            unknown.append(step.kind)
        else:
            # one that takes longer than others needs half as long again, until it reports progress
            remaining.append(whole * (1 - share) if share else max(whole - spent, spent / 2))
    return max(sum(remaining) / workers, *remaining), list(dict.fromkeys(unknown))


SMALL = 100_000_000
"""Parameters below which a model takes no less time: what is around its products takes longer than
they do."""


@cache
def _work(step: Step) -> float:
    """Amount of work, comparable between steps of a kind: units, times the parameters of the model
    that is read."""
    if step.merges:
        return 0.0
    needed = step.resources()
    size = size_of(needed.model) if needed.model else None
    parameters = max(size.parameters, SMALL) if size else 1e9  # unknown: as of a usual model
    return needed.units * parameters


def forecast(steps: Sequence[Step], done: set[str], gpu_memory: float, seconds: Seconds) -> Table:
    """Table for a dry run: distinct, cached and missing steps of each kind, and estimated memory
    and time of the missing ones. `done`: ids of finished steps."""
    columns = (
        Column("step", no_wrap=True),
        "distinct",
        "cached",
        "missing",
        "memory of one",
        "hours",
        "GPU-hours",
    )
    table = Table(*columns, title="what would run, and about what it takes", show_footer=True)
    missing = [step for step in steps if step.id not in done]
    total = Hours()
    for kind in dict.fromkeys(step.kind for step in steps):
        of_kind = [step for step in steps if step.kind == kind]
        own = [step for step in missing if step.kind == kind]
        counts = (len(of_kind), len(of_kind) - len(own), len(own))
        hours = _hours(own, gpu_memory, seconds)
        table.add_row(kind, *map(str, counts), largest_memory(own), *hours.texts())
        total = Hours(
            total.work + hours.work,
            total.gpu_work + hours.gpu_work,
            total.unknown + hours.unknown,
        )
    for column, value in zip(table.columns[-2:], total.texts(), strict=True):
        column.footer = value
    return table


class Hours(NamedTuple):
    """Hours of steps that run one after another; one on several GPUs counts for all of them."""

    work: float = 0.0
    gpu_work: float = 0.0
    unknown: int = 0
    """Steps of which no time is known."""

    def texts(self) -> tuple[str, str]:
        """Hours and GPU-hours for a table."""
        if self.unknown and not self.work:  # merges of shares are nothing beside the shares
            return "unknown", "unknown"
        more = f" + {self.unknown} unknown" if self.unknown else ""
        return f"{self.work:.2f}{more}", f"{self.gpu_work:.2f}{more}"


def _hours(steps: Sequence[Step], gpu_memory: float, seconds: Seconds) -> Hours:
    work = gpu_work = 0.0
    unknown = 0
    for step in steps:
        if (takes := seconds(step)) is None:
            unknown += 1
            continue
        work += takes / 3600
        needed = step.resources()
        if needed.memory is not None:
            gpu_work += takes / 3600 * needed.gpus(gpu_memory)
    return Hours(work, gpu_work, unknown)


def largest_memory(steps: Iterable[Step]) -> str:
    """The largest estimated memory of any of the steps, as text."""
    memories = [step.resources().memory for step in steps]
    known = [memory for memory in memories if memory is not None]
    unknown = " or more" if len(known) < len(memories) else ""
    return f"{max(known) / GIB:.1f} GiB{unknown}" if known else "unknown" if memories else ""


def disk_problems(store: str | Path, steps: Iterable[Step]) -> list[str]:
    """A sentence when `steps` would write more than is free on the disk of `store`. Estimates
    exported checkpoints, hidden states of streamed passes and generated texts; all other files are
    small."""
    needed = sum(step.resources().disk for step in steps)
    place = Path(store).expanduser().absolute()
    free = shutil.disk_usage(next(filter(Path.exists, (place, *place.parents)))).free
    if needed <= free:
        return []
    return [
        f"store={store}: about {decimal(int(needed))} would be written there and {decimal(free)} "
        "are free: make room, name another store, or ask for less (export=none, fewer cells)"
    ]
