"""FLOPs of a model per token, with the routing that really happens, by part of the model.

A FLOP is a multiplication or an addition of a matrix product: a linear map from n to m numbers costs 2 n m for a token,
an expert of width I 6 H I (4 H I without a gate). Norms, activations, softmax are left out, as everyone does. Attention
scores are counted over the full square of the row, causal or not, as torch's own counter does; so what a token costs
depends on the length of its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.decoder import run
from moe_lab.models.discover import MoELayer, is_ragged, routed_layers
from moe_lab.models.families import DISK_SHARED
from moe_lab.models.watch import watched
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.statistics.gather import Batch

PARTS = ("attention", "attention_scores", "router", "shared_experts", "experts", "dense", "lm_head", "other")
"""attention: all that mixes tokens, its projections and what is recurrent; attention_scores: products of activations
with activations; shared_experts: all of a MoE block that is not routed; dense: blocks of layers without experts."""

aten = torch.ops.aten
PROJECTIONS = (aten.mm, aten.addmm, aten.convolution)


def flops_per_token(model: PreTrainedModel, plan: Plan | None, batches: Sequence[Batch]) -> dict[str, float]:
    """Part -> mean FLOPs per token of `model` under `plan` (None: unpruned), one forward pass over `batches`.

    The masked model is run, so a token is charged for the experts it is routed to after pruning, each at its kept
    width; an expert without channels costs nothing, although the token went there. Experts are averaged over the valid
    tokens; everything else is the same for every token of a row, and counted once for each shape of a batch, padding
    included. Keys are PARTS. UserError for no batches, and for a plan that does not fit the model.
    """
    check_batches(batches)
    layers = routed_layers(model)
    counts: dict[torch.Size, Counts] = {}
    routed = Routed(layers)
    with mask(model, plan) if plan is not None else nullcontext(), watched(layers, routed.add), torch.no_grad():
        for ids, valid in batches:
            routed.valid = valid.flatten()
            if ids.shape in counts:
                run(model, ids, valid)
            else:
                _, counts[ids.shape] = counted(partial(run, model, ids, valid))
    return per_token(model, plan, batches, counts, routed)


def check_batches(batches: Sequence[Batch]) -> None:
    """UserError when there is nothing to count on."""
    if not batches:
        raise UserError("cost: no batches to count FLOPs on, expected at least one")


Counts = Mapping[str, Mapping[Any, int]]
"""What torch counted: module path, or Global for all of them -> operation -> FLOPs."""


def per_token(
    model: PreTrainedModel,
    plan: Plan | None,
    batches: Sequence[Batch],
    counts: Mapping[torch.Size, Counts],
    routed: Routed,
) -> dict[str, float]:
    """The answer of `flops_per_token`, from what was counted of a batch of each shape and where tokens went."""
    layers = routed_layers(model)
    fixed = {shape: _by_part(of_shape, layers, paths(model)) for shape, of_shape in counts.items()}
    total: Counter[str] = Counter()
    for ids, _ in batches:
        total.update(fixed[ids.shape])
    positions = sum(ids.numel() for ids, _ in batches)
    valid_tokens = sum(int(valid.sum()) for _, valid in batches)
    found = {part: total[part] / positions for part in PARTS}
    found["experts"] = sum(_experts(layer, routed.tokens[layer.index], plan) for layer in layers) / valid_tokens
    found["lm_head"] = 2.0 * _vocabulary_weights(model)
    return found


def channel_parameters(layer: MoELayer) -> int:
    """Weights of one channel of one expert: its row of down and its columns of gate and up. Biases do not count."""
    if is_ragged(layer.experts):
        return 3 * layer.hidden
    weights = sum(tensor.numel() for tensor in layer.experts.parameters() if tensor.dim() == 3)
    return weights // (layer.n_experts * layer.width)


def kept_widths(layer: MoELayer, plan: Plan | None) -> torch.Tensor:
    """(E,) int64: the channels each expert keeps under `plan`, 0 for a dropped one."""
    if plan is None:
        return torch.tensor(layer.widths)
    widths = torch.zeros(layer.n_experts, dtype=torch.int64)
    kept = torch.tensor(plan.experts[layer.index])
    widths[kept] = torch.tensor(plan.widths(layer.index)) if plan.channels else layer.width
    return widths


def _experts(layer: MoELayer, tokens: torch.Tensor, plan: Plan | None) -> int:
    """FLOPs of all routed tokens of a layer; `tokens` (E,) says how many each expert got."""
    return 2 * channel_parameters(layer) * int((tokens * kept_widths(layer, plan)).sum())


def _vocabulary_weights(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    return 0 if head is None else int(head.weight.numel())


class Routed:
    """How many valid tokens went to each expert: layer -> (E,) int64."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self.valid = torch.zeros(0, dtype=torch.bool)
        self.tokens = {layer.index: torch.zeros(layer.n_experts, dtype=torch.int64) for layer in layers}

    def add(self, layer: MoELayer, index: torch.Tensor) -> None:
        chosen = index[self.valid.to(index.device)].flatten()
        self.tokens[layer.index] += torch.bincount(chosen, minlength=layer.n_experts).cpu()


Result = TypeVar("Result")


def counted(read: Callable[[], Result]) -> tuple[Result, Counts]:
    """What `read` gives, and the FLOPs of what it runs."""
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(FUSED_ATTENTION, _fused_attention))
    with counter:
        result = read()
    return result, counter.get_flop_counts()


def paths(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Module of the decoder -> its path as torch counts under it."""
    base: nn.Module = model.base_model
    return {module: f"{type(base).__name__}.{name}" for name, module in base.named_modules()}


def _by_part(counts: Counts, layers: Sequence[MoELayer], paths: Mapping[nn.Module, str]) -> Counter[str]:
    """Sort what torch counted outside experts and vocabulary into parts.

    In a decoder layer, the child that holds the experts in MoE layers is the block (dense where there are none), and
    the others mix tokens.
    """
    found: Counter[str] = Counter()
    container, block = places(layers[0], paths)
    sparse = {str(layer.index) for layer in layers}
    for path, operations in counts.items():
        number, _, child = path.removeprefix(f"{container}.").partition(".")
        if not number.isdigit() or not child or "." in child:  # not a child of a decoder layer
            continue
        if child == block or f"{child}." in DISK_SHARED:
            found["shared_experts" if number in sparse else "dense"] += sum(operations.values())
            continue
        for operation, flops in operations.items():
            found["attention" if operation in PROJECTIONS else "attention_scores"] += flops
    routers = sum(sum(counts.get(paths[layer.router], {}).values()) for layer in layers)
    experts = sum(sum(counts.get(paths[layer.experts], {}).values()) for layer in layers)
    found["router"] = routers
    found["shared_experts"] -= routers + experts
    found["other"] = sum(counts["Global"].values()) - experts - sum(found.values())
    return found


def places(layer: MoELayer, paths: Mapping[nn.Module, str]) -> tuple[str, str]:
    """Path of the list of decoder layers, and the name of the child of a decoder layer that is the MoE block."""
    container, _, rest = paths[layer.experts].partition(f".{layer.index}.")
    return container, rest.partition(".")[0]


FUSED_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
"""Kernels of attention that torch's counter does not know on every device or with shared key heads."""


def _fused_attention(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Queries (B, heads, S, d) with all keys, and the weights of all values."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])
