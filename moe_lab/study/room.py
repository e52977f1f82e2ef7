"""Whether this machine holds what steps are about to write and to load."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from moe_lab.config import ModelConfig
from moe_lab.models.config_json import Size, quantization, size_of
from moe_lab.models.memory import main_memory
from moe_lab.study.estimate import items, loads_model
from moe_lab.study.estimate_memory import LAYERED, is_layered, states_of
from moe_lab.study.identity import Step

GIB = 2**30
BYTES_PER_TOKEN = 16
"""Of a generated text as it is stored: with its prompt, as JSON, and once more among the samples."""


def lacking(store: str, steps: Iterable[Step]) -> list[str]:
    """A sentence when `steps` would write more than is free on the disk of `store`: exported checkpoints, hidden states
    of streamed passes, generated texts. Estimates; what else steps leave is small."""
    needed = sum(_written(step) for step in steps)
    place = Path(store).expanduser().absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed <= free:
        return []
    return [
        f"store={store}: about {needed / GIB:.1f} GiB would be written there and {free / GIB:.1f} GiB are free: make "
        "room, name another store, or ask for less (export=null, fewer cells)"
    ]


def unloadable(steps: Iterable[Step]) -> list[str]:
    """A sentence for each model that a step with model.device=cpu would load whole, though its weights alone are larger
    than the main memory of this machine; of models whose size is known and whose weights are stored as plain numbers.
    What is free changes, and is looked at when a model is loaded."""
    there = main_memory()
    found = {}
    for step in (step for step in steps if _loads_on_the_cpu(step)):
        model = ModelConfig(**step.runtime["model"])
        size = None if quantization(model) else size_of(model)
        needed = size.parameters * BYTES_ON_CPU.get(model.dtype, size.bytes_per_parameter) if size else 0
        if needed > there:
            way = "set calibration.engine=streamed" if step.kind in LAYERED else "leave it out"
            found[model.name, way] = (
                f"model.device=cpu: {step.kind} of model={model.name} loads {needed / GIB:.1f} GiB of weights, and "
                f"there are {there / GIB:.1f} GiB of main memory: {way}, or name another device or a smaller dtype"
            )
    return list(found.values())


BYTES_ON_CPU = {"auto": 4}
"""Of a parameter, where the precision alone does not say it."""


def _loads_on_the_cpu(step: Step) -> bool:
    if not loads_model(step) or is_layered(step) or step.runtime["model"]["device"] != "cpu":
        return False
    return bool(step.runtime.get("backend", {}).get("name") != "server")


def _written(step: Step) -> float:
    writes = WRITES.get(step.kind)
    size = size_of(ModelConfig(**step.runtime["model"])) if writes else None
    return writes(step, size) if writes and size else 0.0


def _states(step: Step, size: Size) -> float:
    return states_of(step, size) if is_layered(step) else 0.0


def _texts(step: Step, size: Size) -> float:
    benchmark = step.runtime["benchmark"]
    return float(items(benchmark) * int(benchmark["max_new_tokens"]) * BYTES_PER_TOKEN)


WRITES: Mapping[str, Callable[[Step, Size], float]] = {
    "export": lambda step, size: float(size.bytes),
    "statistics": _states,
    "damage": _states,
    "reconstruction": _states,
    "sequential": _states,
    "gradients": _states,
    "weight_gradients": _states,
    "cost": _states,
    "generate": _texts,
}
"""Kind of step -> bytes it writes at most."""
