"""Estimates of the memory, disk space and time of steps, and checks whether this machine has enough of each.

Memory is computed from the model's shape, to within a factor of two. Time is what steps of the same kind took in this
store, scaled by the amount of work; without a comparable step there is no estimate.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from rich.table import Table

from moe_lab.config import ModelConfig
from moe_lab.json_files import Damaged, Number, read_json
from moe_lab.models.config_json import Size, quantization, size_of
from moe_lab.models.memory import main_memory
from moe_lab.study.step import Step, canonical
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.kind import Kind, Reads, Settings
from moe_lab.study.steps.memory import (
    BASE,
    converter_memory,
    is_layered,
    items,
    layered_memory,
    merging_memory,
    resident_memory,
    rewriting_memory,
)
from moe_lab.study.store import STEP, Store

GIB = 2**30
GPU_FROM = 2**30
"""Bytes of weights from which a model is put on a GPU."""
READ = 500
"""Most finished steps of a kind whose times are read, the newest first."""
STEP_SHAPE = {"settings": dict, "inputs": {str: str}, "provenance": {"seconds": Number}}
BYTES_ON_CPU = {"auto": 4}
"""dtype -> bytes of a parameter on the CPU, for dtypes that do not determine it themselves."""


@dataclass(frozen=True)
class Memory:
    """Estimated peak memory of one step."""

    bytes: float
    """Bytes including weights; of GPU memory if `on_gpu`, else of main memory."""
    on_gpu: bool
    """Whether the step uses GPUs: its model is at least GPU_FROM bytes, and model.device is not cpu."""


def memory_of(step: Step) -> Memory | None:
    """Estimated peak memory of `step`; None when it depends on a model of unknown size."""
    kind = KINDS[step.kind]
    if not step.merges and not kind.loads_model(step) and kind.reads is not Reads.CHECKPOINT:
        return Memory(kind.memory or BASE, False)
    size = size_of(ModelConfig(**step.runtime["model"]))
    if size is None:
        return None
    if step.merges:
        return Memory(merging_memory(size), False)
    if kind.reads is Reads.CHECKPOINT:
        rewriting = rewriting_memory(size) if kind.second_model(step) else 0
        return Memory(2 * BASE + max(rewriting, converter_memory(step, size)), False)
    on_gpu = size.bytes >= GPU_FROM and step.runtime["model"]["device"] != "cpu"
    holds = layered_memory if is_layered(kind, step) else resident_memory
    return Memory(holds(kind, step, size), on_gpu)


def gpus(memory: Memory, gpu_memory: float) -> int:
    """How many GPUs of `gpu_memory` GiB a step needs, when a tenth of each cannot be used; 0 for a step on the CPU."""
    return int(-(-memory.bytes // (0.9 * gpu_memory * GIB))) if memory.on_gpu else 0


@dataclass(frozen=True)
class Measured:
    """A finished step: seconds per unit of work, limit on the items of its benchmark, and its model."""

    seconds: float
    limit: int | None
    model: str | None
    """Folder of its model step."""


class Times:
    """Estimates of how long steps take, from the provenance of finished steps in a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._measured = cache(self._read)
        self._active = cache(self._read_active)
        self._rates: dict[tuple[str, str, str | None, float], float | None] = {}

    def seconds(self, step: Step) -> float | None:
        """Estimated seconds of `step`; None without a comparable step, or when a model's size is unknown.

        The median over finished steps of the same kind, benchmark and model, each scaled by tokens or items. Where
        there are none, the median over steps with other models, also scaled by the active parameters per token.
        """
        if step.merges:
            return 0.0  # reads and writes files
        kind = KINDS[step.kind]
        settings = {role: part.settings for role, part in step.parts.items()}
        model = step.inputs["model"].id if "model" in step.inputs else None
        key = (step.kind, _alike(settings), model, items(step, None))
        if key not in self._rates:
            rates = self._comparable(kind, step, self._measured(kind).get(key[1], []))
            self._rates[key] = median(rates) if rates else None
        rate = self._rates[key]
        if rate is None:
            return None
        limit = settings.get("benchmark", {}).get("limit")
        return rate * kind.units(settings) * items(step, limit)

    def _comparable(self, kind: Kind, step: Step, measured: Sequence[Measured]) -> list[float]:
        """Seconds per unit and item for the step's model, one estimate from each comparable measured step."""
        rates = [one.seconds / items(step, one.limit) for one in measured]
        if kind.reads is Reads.NOTHING:
            return rates
        model = step.inputs["model"].id[:12]
        same = [rate for rate, one in zip(rates, measured, strict=True) if (one.model or "").endswith(model)]
        size = size_of(ModelConfig(**step.runtime["model"]))
        if same or size is None:
            return same
        scaled = []
        for rate, one in zip(rates, measured, strict=True):
            if one.model and (active := self._active(one.model)):
                scaled.append(rate * size.active / active)
        return scaled

    def _read(self, kind: Kind) -> dict[str, list[Measured]]:
        """Settings as by `_alike` -> the finished steps of a kind. Steps that are damaged, or too old to have recorded
        their time, are left out."""
        parent = self.store.root / kind.name
        folders = [entry for entry in os.scandir(parent) if not entry.name.startswith(".")] if parent.is_dir() else []
        folders.sort(key=_changed)
        by_settings: dict[str, list[Measured]] = {}
        for folder in folders[-READ:]:
            try:
                about = read_json(Path(folder, STEP), STEP_SHAPE)
                provenance = about["provenance"]
                units = kind.units(about["settings"])
            except (OSError, Damaged, LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
                continue
            if provenance.get("merged"):  # the time of its shares is in their own folders
                continue
            limit = about["settings"].get("benchmark", {}).get("limit")
            one = Measured(provenance["seconds"] / units, limit, about["inputs"].get("model"))
            by_settings.setdefault(_alike(about["settings"]), []).append(one)
        return by_settings

    def _read_active(self, folder: str) -> float | None:
        """Active parameters per token of a model, from the facts of its model step; None where they cannot be read."""
        try:
            facts = json.loads((self.store.place(folder, folder[-12:]) / "facts.json").read_text())
            idle = sum((a["n_experts"] - a["top_k"]) * a["expert_parameters"] for a in facts["layers"].values())
            return float(facts["parameters"] - idle)
        except (OSError, ValueError, LookupError, TypeError):
            return None


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:  # another run has set it aside
        return 0.0


def _alike(settings: Settings) -> str:
    """Settings that must be equal for times to be comparable: the benchmark without its limit, whether a text is read,
    and what a fine-tuning trains or fits, and whether by a teacher."""
    benchmark = {name: value for name, value in settings.get("benchmark", {}).items() if name != "limit"}
    tuning = settings.get("recovery", {})
    return canonical(
        [
            benchmark,
            "text" in settings or "calibration" in settings,
            *(tuning.get(name) for name in ("trained", "teacher", "fitted")),
        ]
    )


Seconds = Callable[[Step], float | None]
"""Step -> estimated seconds, as by `Times.seconds`."""


def forecast(steps: Sequence[Step], done: set[str], gpu_memory: float, seconds: Seconds) -> Table:
    """Table for a dry run: distinct, cached and missing steps of each kind, and estimated memory and time of the
    missing ones. `done`: ids of finished steps."""
    columns = ("step", "distinct", "cached", "missing", "memory of one", "hours", "GPU-hours")
    table = Table(*columns, title="what would run, and about what it takes", show_footer=True)
    missing = [step for step in steps if step.id not in done]
    for kind in dict.fromkeys(step.kind for step in steps):
        of_kind = [step for step in steps if step.kind == kind]
        own = [step for step in missing if step.kind == kind]
        counts = (len(of_kind), len(of_kind) - len(own), len(own))
        table.add_row(kind, *map(str, counts), largest_memory(own), *_hours(own, gpu_memory, seconds))
    for column, value in zip(table.columns[-2:], _hours(missing, gpu_memory, seconds), strict=True):
        column.footer = value
    return table


def _hours(steps: Sequence[Step], gpu_memory: float, seconds: Seconds) -> tuple[str, str]:
    """Total hours of the steps run one after another, and GPU-hours, as text. A step on several GPUs counts for all."""
    work = gpu_work = 0.0
    unknown = 0
    for step in steps:
        if (takes := seconds(step)) is None:
            unknown += 1
            continue
        work += takes / 3600
        if memory := memory_of(step):
            gpu_work += takes / 3600 * gpus(memory, gpu_memory)
    if unknown == len(steps) > 0:
        return "unknown", "unknown"
    more = f" + {unknown} unknown" if unknown else ""
    return f"{work:.2f}{more}", f"{gpu_work:.2f}{more}"


def largest_memory(steps: Iterable[Step]) -> str:
    """The largest estimated memory of any of the steps, as text."""
    memories = [memory_of(step) for step in steps]
    known = [memory.bytes for memory in memories if memory is not None]
    unknown = " or more" if len(known) < len(memories) else ""
    return f"{max(known) / GIB:.1f} GiB{unknown}" if known else "unknown" if memories else ""


def disk_problems(store: str | Path, steps: Iterable[Step]) -> list[str]:
    """A sentence when `steps` would write more than is free on the disk of `store`.

    Estimates exported checkpoints, hidden states of streamed passes and generated texts; all other files are small.
    """
    needed = sum(_written(step) for step in steps)
    place = Path(store).expanduser().absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed <= free:
        return []
    return [
        f"store={store}: about {needed / GIB:.1f} GiB would be written there and {free / GIB:.1f} GiB are free: make "
        "room, name another store, or ask for less (export=none, fewer cells)"
    ]


def _written(step: Step) -> float:
    kind = KINDS[step.kind]
    if step.merges or "model" not in step.runtime or kind.reads is Reads.NOTHING:
        return 0.0
    size: Size | None = size_of(ModelConfig(**step.runtime["model"]))
    return kind.writes(kind, step, size) if size else 0.0


def memory_problems(steps: Iterable[Step]) -> list[str]:
    """A sentence for each model whose weights alone exceed the main memory of this machine, and that a step with
    model.device=cpu would load whole.

    Only models of known size with plain (not quantised) weights are checked. Total memory counts here; free memory,
    which changes, is checked when a model is loaded.
    """
    there = main_memory()
    problems = {}
    for step in (step for step in steps if _loads_on_the_cpu(step)):
        model = ModelConfig(**step.runtime["model"])
        size = None if quantization(model) else size_of(model)
        needed = size.parameters * BYTES_ON_CPU.get(model.dtype, size.bytes_per_parameter) if size else 0
        if needed > there:
            way = "set calibration.engine=streamed" if KINDS[step.kind].checkpoint_reads else "leave it out"
            problems[model.name, way] = (
                f"model.device=cpu: {step.kind} of model={model.name} loads {needed / GIB:.1f} GiB of weights, and "
                f"there are {there / GIB:.1f} GiB of main memory: {way}, or name another device or a smaller dtype"
            )
    return list(problems.values())


def _loads_on_the_cpu(step: Step) -> bool:
    kind = KINDS[step.kind]
    if not kind.loads_model(step) or is_layered(kind, step) or step.runtime["model"]["device"] != "cpu":
        return False
    return bool(step.runtime.get("backend", {}).get("name") != "server")
