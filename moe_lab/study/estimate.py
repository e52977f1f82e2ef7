"""How much memory a step takes, about: the weights in the precision they are loaded in, and room to work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_lab.paths import resolve
from moe_lab.study.identity import Step

ROOM = 1.2
"""Activations, sums and the interpreter, as a factor on the weights; a guess that errs on the safe side."""
BASE = 600 * 2**20
"""Bytes of Python with torch and transformers loaded."""
LOADS = (
    "statistics",
    "gradients",
    "weight_gradients",
    "damage",
    "ablation",
    "search",
    "reconstruction",
    "finetune",
    "cost",
    "evaluate",
)
"""Kinds of step that load the model."""


def memory(steps: Iterable[Step]) -> dict[str, str]:
    """Kind -> memory of its largest step, for kinds that load a model whose checkpoint is at hand."""
    most: dict[str, float] = {}
    for step in steps:
        if step.kind in LOADS:
            size = _weight_bytes(step.runtime["model"])
            if size:
                most[step.kind] = max(most.get(step.kind, 0), BASE + ROOM * size)
    return {kind: f"{size / 2**30:.1f} GiB" for kind, size in most.items()}


def _weight_bytes(model: Mapping[str, Any]) -> int:
    """Bytes of the weights in memory; 0 for a model that is not on this machine yet."""
    folder = Path(resolve(model["path"])).expanduser()
    if not folder.is_dir():
        return 0
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return stored * 2 if model["dtype"] in ("float32", "auto") else stored
