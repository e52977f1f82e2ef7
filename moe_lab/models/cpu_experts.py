"""Experts on the CPU in fp32: what the eager loop of transformers computes, bit for bit, in less time.

The eager loop looks for its tokens once per expert. Here routed tokens are sorted by expert once. Each matrix product
has the same rows in the same order as there, and outputs are added in the same order, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import Rows, intermediate, output, sort_by_expert

NAME = "moe_lab_cpu"
FEW = 256
"""Tokens up to which one operation for all experts is faster than one for each; see benchmarks/generation.py."""
ALIGNMENT = 64
"""Bytes. A matrix product may round differently when its rows do not start at a multiple of so many, as fresh tensors
do."""
TRIED = 16
"""Tokens on which a family's experts are tried."""


def cpu_experts(
    module: torch.nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Gated sum (T, H) of the outputs of experts `index` (T, K) with gates `weights` (T, K), for hidden states (T, H).

    For gated experts without biases, not transposed, without a norm behind them, as `choose` makes sure.
    """
    down: Any = module.down_proj
    rows = sort_by_expert(index, len(down))
    aligned = all(size * hidden.element_size() % ALIGNMENT == 0 for size in down.shape[1:])
    compute = _together if len(hidden) <= FEW and aligned else _one_by_one
    return compute(module, hidden, rows, weights)


ExpertsInterface.register(NAME, cpu_experts)


def choose(model: PreTrainedModel, layers: Sequence[MoELayer]) -> None:
    """Let `model`, loaded with eager experts, compute them by `cpu_experts` from now on, if that is the same.

    It is where all `layers` hold fp32 weights in a plain form and the first one, tried on a few tokens, gives the same
    bits both ways. Otherwise the model stays eager.
    """
    if layers and all(_is_plain(layer.experts) for layer in layers) and _same_bits(layers[0]):
        model.set_experts_implementation(NAME)


def _together(module: Any, hidden: torch.Tensor, rows: Rows, weights: torch.Tensor) -> torch.Tensor:
    """All that is not a matrix product in one operation for all experts."""
    gathered = hidden.index_select(0, rows.token)
    parts = list(rows.parts())
    phi = module._apply_gate(torch.cat([linear(gathered[part], module.gate_up_proj[expert]) for expert, part in parts]))
    f = torch.cat([linear(phi[part], module.down_proj[expert]) for expert, part in parts])
    return torch.zeros_like(hidden).index_add_(0, rows.token, f * weights[rows.token, rows.column, None])


def _one_by_one(module: Any, hidden: torch.Tensor, rows: Rows, weights: torch.Tensor) -> torch.Tensor:
    """One expert after the other; needs no memory for the outputs of all."""
    gates = weights[rows.token, rows.column, None]
    mixed = torch.zeros_like(hidden)
    for expert, part in rows.parts():
        token = rows.token[part]
        phi = intermediate(module, hidden.index_select(0, token), expert)  # much faster than hidden[token]
        mixed.index_add_(0, token, output(module, phi, expert) * gates[part])
    return mixed


def _is_plain(module: Any) -> bool:
    if any(weight.dtype != torch.float32 for weight in module.parameters()):
        return False
    return module.has_gate and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)


def _same_bits(layer: MoELayer) -> bool:
    """Whether both ways to compute the experts of `layer` give what its own forward gives."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TRIED, layer.hidden, generator=random)
    weights, index = torch.rand(TRIED, layer.n_experts, generator=random).topk(layer.top_k)
    rows = sort_by_expert(index, layer.n_experts)
    with torch.no_grad():
        expected = layer.experts(hidden, index, weights)
        few = cpu_experts(layer.experts, hidden, index, weights)
        many = _one_by_one(layer.experts, hidden, rows, weights)
    return torch.equal(few, expected) and torch.equal(many, expected)
