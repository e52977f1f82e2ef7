"""The slow and obvious way back, in fp64: each expert by hand, the loss over all logits, gradients as autograd gives
them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import naive
import tiny
import torch
from torch.nn.functional import cross_entropy

from moe_lab.models.discover import MoELayer, moe_layers


@dataclass
class Backward:
    """The tokens that one expert served: phi (n, I), f (n, H) before the gate, both with .grad; gate and valid (n,)."""

    phi: torch.Tensor
    f: torch.Tensor
    gate: torch.Tensor
    valid: torch.Tensor

    @property
    def counted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """phi, dL/dphi, dL/df and gate of the valid tokens alone."""
        parts = (self.phi.detach(), grad(self.phi), grad(self.f), self.gate.detach())
        return tuple(part[self.valid] for part in parts)  # type: ignore[return-value]


def grad(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient autograd kept, zero if none came."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@cache
def model(name: str) -> Any:
    """The tiny model in fp64; nobody changes it."""
    return tiny.build(name, dtype=torch.float64)


def down(layer: MoELayer, expert: int) -> torch.Tensor:
    """down_proj of one expert, (H, I)."""
    module: Any = layer.experts
    weight: torch.Tensor = module.down_proj[expert]
    return weight.T if module.is_transposed else weight


def by_hand(layer: MoELayer, kept: dict[int, Backward], valid: torch.Tensor) -> Any:
    """A forward of the experts of `layer` that puts what each expert did in `kept`."""
    module: Any = layer.experts

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(hidden)
        for expert in range(layer.n_experts):
            token, column = (index == expert).nonzero(as_tuple=True)
            phi = naive._channels(module, hidden[token], expert)
            phi.retain_grad()
            f = phi @ down(layer, expert).T
            if module.has_bias:
                f = f + module.down_proj_bias[expert]
            f.retain_grad()
            gate = weights[token, column]
            kept[expert] = Backward(phi, f, gate, valid[token])
            mixed = mixed.index_add(0, token, (f * gate[:, None]).to(mixed.dtype))
        return mixed

    return forward


def loss(network: Any, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the next token over pairs of valid tokens, one after the other."""
    logits = network(input_ids=ids, attention_mask=valid.long(), use_cache=False).logits
    terms = [
        cross_entropy(logits[row, t], ids[row, t + 1])
        for row in range(ids.shape[0])
        for t in range(ids.shape[1] - 1)
        if valid[row, t] and valid[row, t + 1]
    ]
    return torch.stack(terms).sum()


@cache
def backward(name: str) -> dict[int, dict[int, Backward]]:
    """Layer -> expert -> what it did on `naive.batch()`, there and back."""
    network = tiny.build(name, dtype=torch.float64)
    network.enable_input_require_grads()
    ids, valid = naive.batch()
    kept: dict[int, dict[int, Backward]] = {}
    for layer in moe_layers(network):
        kept[layer.index] = {}
        layer.experts.forward = by_hand(layer, kept[layer.index], valid.flatten())
    loss(network, ids, valid).backward()
    return kept
