"""Whether the disk of the store holds what steps are about to write."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from moe_lab.config import ModelConfig
from moe_lab.models.size import Size, size_of
from moe_lab.study.estimate import items
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


def _written(step: Step) -> float:
    writes = WRITES.get(step.kind)
    size = size_of(ModelConfig(**step.runtime["model"])) if writes else None
    return writes(step, size) if writes and size else 0.0


def _states(step: Step, size: Size) -> float:
    """What enters each layer: of two layers at a time forward, of all of them and once more backward."""
    text = step.runtime["text" if step.kind == "reconstruction" else "calibration"]
    layers = size.moe_layers + 2 if "gradients" in step.kind else 2
    streamed = text["engine"] == "streamed"
    return float(text["tokens"]) * size.hidden * size.bytes_per_parameter * layers if streamed else 0.0


def _texts(step: Step, size: Size) -> float:
    benchmark = step.runtime["benchmark"]
    return float(items(benchmark) * int(benchmark["max_new_tokens"]) * BYTES_PER_TOKEN)


WRITES: Mapping[str, Callable[[Step, Size], float]] = {
    "export": lambda step, size: float(size.bytes),
    "statistics": _states,
    "damage": _states,
    "reconstruction": _states,
    "gradients": _states,
    "weight_gradients": _states,
    "generate": _texts,
}
"""Kind of step -> bytes it writes at most."""
