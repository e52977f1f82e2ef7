"""The parts of a loaded model that recovery tells apart, and the bytes each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moe_lab.models.discover import is_experts
from moe_lab.models.families import DISK_SHARED, ROUTERS
from moe_lab.pruning.ragged import RaggedExperts

ATTENTION = ("attn", "attention")
"""What the names of attention modules contain."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of one decoder layer, stacked or ragged."""

    name: str
    """Module path, such as model.layers.3.mlp.experts."""
    layer: int
    module: nn.Module
    router: nn.Module

    @property
    def count(self) -> int:
        """Number of routed experts."""
        if isinstance(self.module, RaggedExperts):
            return self.module.num_experts
        down = self.module.down_proj
        assert isinstance(down, torch.Tensor)
        return len(down)


def experts_of(model: nn.Module) -> list[Experts]:
    """The routed experts of every MoE layer of `model`, in the order of the decoder."""
    found = []
    for name, module in model.named_modules():
        if is_experts(module):
            block = model.get_submodule(name.rpartition(".")[0])
            router = next(child for child in (getattr(block, word, None) for word in ROUTERS) if child is not None)
            found.append(Experts(name, next(int(part) for part in name.split(".") if part.isdigit()), module, router))
    return found


def linears(model: nn.Module, part: str) -> Iterator[tuple[str, nn.Linear]]:
    """(path, module) of the linear maps of a part: shared_experts or attention.

    A map to one number is the gate of a shared expert: it counts as a router.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.out_features > 1 and part_of(name) == part:
            yield name, module


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


def storage(model: nn.Module) -> dict[str, int]:
    """Bytes of the parameters and buffers of `model`: experts, shared_experts, attention, rest, and their total.

    Everything that is held counts, with the constants of quantised weights; tensors that share memory count once.
    """
    held = {"experts": 0, "shared_experts": 0, "attention": 0, "rest": 0}
    seen: set[tuple[torch.device, int]] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = (tensor.device, tensor.data_ptr())
        if tensor.numel() and place not in seen:
            seen.add(place)
            held[part_of(name)] += tensor.numel() * tensor.element_size()
    return {**held, "total": sum(held.values())}
