"""The routed experts of a loaded model, stacked or ragged, and the bytes each part of it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moe_lab.models.discover import decoder_layer, is_experts, part_of
from moe_lab.models.families import ROUTERS
from moe_lab.pruning.ragged import RaggedExperts


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
            found.append(Experts(name, decoder_layer(name), module, router))
    return found


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
