"""Parameters, bytes and FLOPs per token of a model under a plan: the content of cost.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from moe_lab.models.discover import MoELayer, linears, moe_layers, routed_layers
from moe_lab.pruning.flops import (
    Routing,
    channel_parameters,
    even_routing,
    flops_per_token,
    kept_experts,
    kept_widths,
)
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import check_fit

NF4_BLOCK = 64
"""Weights that share one scale."""
SCALE_BLOCK = 256
"""Scales, of 8 bit each, that share one scale of 32 bit."""


def cost(
    model: PreTrainedModel,
    plan: Plan | None,
    row: Mapping[str, float],
    routing: Routing,
    *,
    facts: Mapping[str, Any],
    bits: int = 16,
    modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Parameters, bytes and FLOPs of `model` under `plan` (None: unpruned), as JSON data.

    `model` is the unpruned model, possibly on the meta device, and `facts` are its facts. `row` and `routing` are as in
    `flops_per_token`.

    parameters, parameters_unpruned  after and before pruning
    parameters_kept                  share of all parameters
    routed_kept                      share of the parameters of routed experts
    storage_bytes                    all kept parameters in bf16; with bits=4 the weight matrices of `modules` in NF4
    loading_bytes                    all kept parameters in bf16, what the papers call loading memory
    flops_per_token                  with the routing of the masked model
    flops_by_part                    the same by part, see PARTS in flops.py
    flops_per_token_unpruned         of the unpruned model in a row of the same length
    flops_ratio, flops_saving        pruned / unpruned; 1 - flops_ratio

    bits=4 changes bytes only: quantised weights are multiplied in bf16. Raises UserError when the plan does not fit.
    """
    layers = routed_layers(model)
    parts = flops_per_token(layers, plan, row, routing)
    total = before = sum(parts.values())
    if plan is not None:
        check_fit(plan, layers)
        unpruned = even_routing(layers, None)
        assert unpruned is not None  # experts of unequal width cannot be pruned
        before = sum(flops_per_token(layers, None, row, unpruned).values())
    return {
        **size(model, plan, facts=facts, bits=bits, modules=modules),
        "flops_per_token": total,
        "flops_by_part": parts,
        "flops_per_token_unpruned": before,
        "flops_ratio": total / before,
        "flops_saving": 1 - total / before,
    }


def size(
    model: PreTrainedModel,
    plan: Plan | None,
    *,
    facts: Mapping[str, Any],
    bits: int = 16,
    modules: Sequence[str] = (),
) -> dict[str, Any]:
    """The entries of `cost` about parameters and bytes. Needs no weights: the model may be on the meta device."""
    layers = routed_layers(model) if plan is None else moe_layers(model)
    total, bytes_each = facts["parameters"], facts["bytes_per_parameter"]
    routed = sum(weight.numel() for layer in layers for weight in layer.experts.parameters())
    routed_kept = sum(_expert_parameters(layer, plan) for layer in layers)
    kept = total - routed + routed_kept - sum(_router_parameters_dropped(layer, plan) for layer in layers)
    matrices = list(_matrices(model, layers, plan, modules)) if bits == 4 else []
    return {
        "parameters": kept,
        "parameters_unpruned": total,
        "parameters_kept": kept / total,
        "routed_kept": routed_kept / routed,
        "bits": bits,
        "storage_bytes": bytes_each * (kept - sum(matrices)) + sum(map(nf4_bytes, matrices)),
        "loading_bytes": bytes_each * kept,
    }


def nf4_bytes(weights: int) -> int:
    """Bytes of a matrix of `weights` numbers in NF4 with double quantisation.

    4 bits per weight in whole blocks of 64, 8 bits for the scale of a block, 32 bits for the scale of 256 scales, and
    32 bits for their mean.
    """
    blocks = ceil(weights / NF4_BLOCK)
    return blocks * NF4_BLOCK // 2 + blocks + 4 * ceil(blocks / SCALE_BLOCK) + 4


def _expert_parameters(layer: MoELayer, plan: Plan | None) -> int:
    """Parameters of the routed experts of a layer that `plan` keeps."""
    parameters = sum(weight.numel() for weight in layer.experts.parameters())
    if plan is None:
        return parameters
    if plan.channels:
        constants = plan.constants.get(layer.index)
        return channel_parameters(layer) * int(kept_widths(layer, plan).sum()) + (
            0 if constants is None else constants.size
        )
    return parameters // layer.n_experts * len(plan.experts[layer.index])


def _router_parameters_dropped(layer: MoELayer, plan: Plan | None) -> int:
    """Parameters in the routing entries of dropped experts; correction biases that are buffers are no parameters."""
    entries = [part.tensor for part in layer.routing if isinstance(part.tensor, nn.Parameter)]
    dropped = layer.n_experts - len(kept_experts(layer, plan))
    return sum(entry.numel() for entry in entries) // layer.n_experts * dropped


def _matrices(model: nn.Module, layers: Sequence[MoELayer], plan: Plan | None, modules: Sequence[str]) -> Iterator[int]:
    """The number of weights of each matrix that is stored in NF4; 0 for the matrices of a null expert."""
    if "experts" in modules:
        for layer in layers:
            widths = kept_widths(layer, plan)
            for width in widths[kept_experts(layer, plan)].tolist():
                down = width * layer.hidden
                yield from (width * channel_parameters(layer) - down, down)
    for part in sorted(set(modules) - {"experts"}):
        for _, module in linears(model, part):
            yield module.weight.numel()
