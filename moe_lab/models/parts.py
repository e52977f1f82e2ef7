"""The parts of a model by the paths of its modules: routed experts, shared experts, attention, and the rest."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from moe_lab.models.families import DISK_SHARED

ATTENTION = ("attn", "attention")
"""What the names of attention modules contain."""


def part_of(name: str) -> str:
    """The part a module or tensor of a model belongs to by its path: experts, shared_experts, attention or rest."""
    path = name.split(".")
    if not any(word.isdigit() for word in path):
        return "rest"
    if "experts" in path:
        return "experts"
    if any(f"{word}." in DISK_SHARED for word in path):
        return "shared_experts"
    return "attention" if any(mark in word for word in path for mark in ATTENTION) else "rest"


def decoder_layer(name: str) -> int:
    """The number of the decoder layer that a module of one belongs to: the first in its path."""
    return next(int(word) for word in name.split(".") if word.isdigit())


def linears(model: nn.Module, part: str) -> Iterator[tuple[str, nn.Linear]]:
    """(path, module) of the linear maps of a part: shared_experts or attention.

    A map to one number is the gate of a shared expert: it counts as a router.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.out_features > 1 and part_of(name) == part:
            yield name, module
