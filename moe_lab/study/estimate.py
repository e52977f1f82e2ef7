"""How much memory a step takes, about: the weights in the precision they are loaded in, and room to work."""

from __future__ import annotations

from collections.abc import Iterable

from moe_lab.config import ModelConfig
from moe_lab.models import files
from moe_lab.study.identity import Step

ROOM = 1.2
"""Activations, sums and the interpreter, as a factor on the weights; a guess that errs on the safe side."""
BASE = 600 * 2**20
"""Bytes of Python with torch and transformers loaded."""
LOADS = ("statistics", "damage", "evaluate")


def memory(steps: Iterable[Step]) -> dict[str, str]:
    """Kind -> memory of its largest step, for kinds that load a model whose checkpoint is at hand."""
    most: dict[str, float] = {}
    for step in steps:
        if step.kind in LOADS:
            settings = ModelConfig(**step.runtime["model"])
            size = files.weight_bytes(settings)
            if size is not None:
                most[step.kind] = max(most.get(step.kind, 0), BASE + ROOM * size)
    return {kind: f"{size / 2**30:.1f} GiB" for kind, size in most.items()}
