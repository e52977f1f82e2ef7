"""Parameters, bytes and FLOPs per token of a pruned model, counted without its weights: the content
of cost.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from moe_lab.models.discover import MoELayer, linear_modules, routed_layers
from moe_lab.models.experts import replace_experts
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import Layers
from moe_lab.statistics.observe import StatisticsHook

BYTES = 2
"""Bytes of a parameter in bfloat16, the precision in which the papers state loading memory."""
NF4_BLOCK = 64
"""Weights that share one scale."""
SCALE_BLOCK = 256
"""Scales, of 8 bit each, that share one scale of 32 bit."""


def cost(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    unpruned_flops: float,
    routing: Routing,
    **options: Any,
) -> dict[str, Any]:
    """Parameters, bytes and FLOPs of `pruned`, as JSON data: the fields of `parameters_and_bytes`,
    and

    flops_per_token           FLOPs per token of `pruned`
    flops_per_token_unpruned  FLOPs per token of `model`
    flops_ratio               flops_per_token / flops_per_token_unpruned

    `unpruned_flops`: FLOPs per token of `model`. `routing`: the routing in `pruned`. `options`:
    further arguments of `parameters_and_bytes`.
    """
    flops = unpruned_flops
    if pruned is not model:
        layers = routed_layers(model)
        even = even_routing(layers)
        assert even is not None  # a model with experts of unequal width cannot be pruned
        flops -= routed_flops(layers, even)
        flops += routed_flops(routed_layers(pruned), routing)
    return {
        **parameters_and_bytes(model, pruned, **options),
        "flops_per_token": flops,
        "flops_per_token_unpruned": unpruned_flops,
        "flops_ratio": flops / unpruned_flops,
    }


def parameters_and_bytes(
    model: PreTrainedModel, pruned: PreTrainedModel, *, bits: int = 16, modules: Sequence[str] = ()
) -> dict[str, Any]:
    """Parameters and bytes of `pruned`. `modules`: kinds of modules, such as experts, whose
    matrices are in NF4 if `bits` is 4.

    parameters           number of parameters of `pruned`
    parameters_unpruned  number of parameters of `model`
    parameters_kept      parameters / parameters_unpruned
    routed_kept          parameters of routed experts: number in `pruned` / number in `model`
    bits                 the argument `bits`, 16 or 4
    storage_bytes        bytes of `pruned` in bf16; with 4 bits, matrices of `modules` in NF4
    loading_bytes        bytes of `pruned` in bf16, which the papers call loading memory
    """
    parameters = _count(pruned)
    unpruned = _count(model)
    nf4_counts = list(_nf4_weight_counts(pruned, modules)) if bits == 4 else []
    return {
        "parameters": parameters,
        "parameters_unpruned": unpruned,
        "parameters_kept": parameters / unpruned,
        "routed_kept": _routed_count(pruned) / _routed_count(model),
        "bits": bits,
        "storage_bytes": BYTES * (parameters - sum(nf4_counts)) + sum(map(nf4_bytes, nf4_counts)),
        "loading_bytes": BYTES * parameters,
    }


def _count(module: nn.Module) -> int:
    """Number of parameters of a module."""
    return sum(weight.numel() for weight in module.parameters())


def _routed_count(model: PreTrainedModel) -> int:
    """Number of parameters of routed experts."""
    return sum(_count(layer.experts) for layer in routed_layers(model))


def nf4_bytes(weights: int) -> int:
    """Bytes of a matrix of `weights` numbers in NF4 with double quantisation. Weights take 4 bits
    each, in whole blocks of 64. Each block has a scale of 8 bits, each 256 scales share a scale of
    32 bits, and the mean of all scales takes 32 bits."""
    blocks = ceil(weights / NF4_BLOCK)
    return blocks * NF4_BLOCK // 2 + blocks + 4 * ceil(blocks / SCALE_BLOCK) + 4


def _nf4_weight_counts(model: nn.Module, modules: Sequence[str]) -> Iterator[int]:
    """For each matrix that is stored in NF4, the number of its weights. `modules`: any of
    "experts", "shared_experts", "attention"."""
    if "experts" in modules:
        for layer in routed_layers(model):
            for width in layer.widths:
                # gate and up are one matrix, down is another
                down = width * layer.hidden
                yield from (width * channel_parameters(layer) - down, down)
    for part in sorted(set(modules) - {"experts"}):
        for _, module in linear_modules(model, part):
            yield module.weight.numel()


Routing: TypeAlias = Mapping[int, float]
"""Layer -> number of channels that a token uses: the widths of the experts to which it is routed,
added up, on average over tokens."""


def model_flops(model: PreTrainedModel, length: int, routing: Routing) -> float:
    """FLOPs per token of `model`, which is on the meta device and runs on one row of `length`
    tokens."""
    layers = routed_layers(model)
    # Only on the meta device is attention made of matrix products, which torch's counter counts: it
    # does not know the fused kernels of every other device.
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    # transformers uses a mask with four axes as it is. It would read the values of any other mask,
    # and tensors on the meta device have none.
    mask = torch.zeros(1, 1, length, length, dtype=model.dtype, device="meta")
    with ExitStack() as undo, torch.no_grad():
        for layer in layers:
            # the FLOPs of routed experts depend on the routing
            replace_experts(
                layer, lambda _: lambda hidden, index, gates: torch.zeros_like(hidden), undo
            )
        with FlopCounterMode(display=False) as counter:
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    head: Any = model.get_output_embeddings()
    # the head, which is not in the base model, multiplies and adds once for each of its weights
    head_flops = 0 if head is None else 2 * int(head.weight.numel())
    router_flops = 2 * _router_weights(layers)
    counted: float = counter.get_total_flops() / length
    return counted - router_flops + head_flops + routed_flops(layers, routing)


def routed_flops(layers: Sequence[MoELayer], routing: Routing) -> float:
    """FLOPs per token of the routers and routed experts of `layers`."""
    weights: float = _router_weights(layers)
    for layer in layers:
        weights += channel_parameters(layer) * routing[layer.index]
    return 2 * weights  # each weight multiplies and adds once


def _router_weights(layers: Sequence[MoELayer]) -> int:
    """Number of weights of the routers' linear maps in all `layers`."""
    # routers also have tensors of other names, such as biases
    entries = [entry for layer in layers for entry in layer.routing]
    return sum(entry.tensor.numel() for entry in entries if entry.name == "weight")


def even_routing(layers: Sequence[MoELayer]) -> Routing | None:
    """The routing in layers of which all experts have one width. None if they differ in width."""
    channels = {}
    for layer in layers:
        widths = set(computed_widths(layer).tolist())
        if len(widths) > 1:
            return None
        channels[layer.index] = layer.top_k * widths.pop()
    return channels


class LoadHook(StatisticsHook):
    """Counts the valid tokens that are routed to each expert: the sums "tokens" (E,)."""

    kind = "load"
    computes = False

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H)."""
        experts = index[self.valid_indices(hidden)]
        counts = torch.bincount(experts.flatten(), minlength=self.layer.n_experts)
        self.add({"tokens": counts})
        return self.unobserved(hidden, index, weights)


def measured_routing(load: Layers, plan: Plan | None, pruned: Sequence[MoELayer]) -> Routing:
    """The routing of the tokens of a pass. `load`: layer -> sums of a `LoadHook` in the model,
    masked by `plan` unless it is None. `pruned`: the MoE layers of the pruned model, with whose
    widths channels are counted."""
    channels = {}
    for layer in pruned:
        counts = load[layer.index]["tokens"]
        if plan is not None:  # the counts are of all experts, but `layer` has only retained ones
            counts = counts[list(plan.layers[layer.index].retained)]
        used_channels = float((counts * computed_widths(layer)).sum())
        channels[layer.index] = layer.top_k * used_channels / float(counts.sum())
    return channels


def channel_parameters(layer: MoELayer) -> int:
    """Number of weights of one channel of one expert: its rows of gate and up and its column of
    down."""
    projections = [role for role in layer.family.roles if not role.endswith("_bias")]
    return len(projections) * layer.hidden


def computed_widths(layer: MoELayer) -> torch.Tensor:
    """(E,) int64: the number of channels with which each expert is computed. A merged expert is
    computed with the channels of its owner."""
    widths = torch.tensor(layer.widths)
    owners = getattr(layer.experts, "owners", None)  # only packed experts have them
    return widths if owners is None else widths[list(owners)]
