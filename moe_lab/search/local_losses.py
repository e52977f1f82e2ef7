"""How much of each MoE layer's output is lost with its lowest-ranked experts, if the layer's input stays as it was.

One table for a whole search: the layers of a schedule are looked up in it, so that ranking a proposal costs nothing.
Layer k without its r lowest experts gives y_kr, the sum of gate x output over the experts its router then chooses;
outputs are computed once for every (token, expert) that any r needs, and mixed again for each r:

    loss_kr = sum_t ||y_kr - y_k0||^2 / sum_t ||y_k0||^2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import intermediate, output, sort_by_expert
from moe_lab.models.partial_forward import run
from moe_lab.pruning.mask import mask
from moe_lab.search.schedules import Plans
from moe_lab.statistics.dispatch import ExpertsFunction, replaced

TOKENS = 128
"""Tokens whose expert outputs are held at once: TOKENS x experts x hidden numbers."""

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What the experts of a layer are called with: hidden states (T, H), expert ids (T, K), gates (T, K)."""


def local_losses(
    model: Any,
    plans: Plans,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    removals: Sequence[Sequence[int]],
) -> tuple[list[dict[int, float]], int]:
    """For each layer k, r -> loss_kr for every r in `removals[k]`; and how many (token, expert) pairs were computed.

    `rows`: batches (ids, valid), (B, S) each. The first of each `removals[k]` must be 0.
    """
    lost = [torch.zeros(len(choices), dtype=torch.float64) for choices in removals]
    whole = [0.0] * len(removals)
    pairs = 0
    with torch.no_grad():
        for ids, valid in rows:
            for k, routings in enumerate(_routings(model, plans, ids, valid, removals)):
                flags = valid.flatten().to(routings[0][0].device)
                for squares, base, computed in _losses(plans.layers[k], routings, flags):
                    lost[k] += squares
                    whole[k] += base
                    pairs += computed
    table = [
        {removed: loss / whole[k] if whole[k] else 0.0 for removed, loss in zip(choices, lost[k].tolist(), strict=True)}
        for k, choices in enumerate(removals)
    ]
    return table, pairs


def _routings(
    model: Any, plans: Plans, ids: torch.Tensor, valid: torch.Tensor, removals: Sequence[Sequence[int]]
) -> list[list[Routing]]:
    """For each layer, its routing after each of its removals; the layer's input is the unpruned model's."""
    calls: list[tuple[Any, Any]] = []
    found: list[list[Routing]] = [[] for _ in removals]

    def record(block: torch.nn.Module, inputs: Any, named: Any) -> None:
        calls.append((inputs, named))

    with ExitStack() as stack:
        for layer in plans.layers:
            stack.callback(layer.block.register_forward_pre_hook(record, with_kwargs=True).remove)
        run(model, ids, valid)
    functions = {layer.index: _recorder(found[k]) for k, layer in enumerate(plans.layers)}
    with replaced(model, plans.layers, functions):
        for number in range(max(map(len, removals))):
            schedule = tuple(choices[min(number, len(choices) - 1)] for choices in removals)
            with mask(model, plans.plan(schedule)):
                for k, layer in enumerate(plans.layers):
                    if number < len(removals[k]):
                        layer.block(*calls[k][0], **calls[k][1])
    return found


def _recorder(found: list[Routing]) -> ExpertsFunction:
    """Stands in for the experts of a layer: notes what it is called with, and computes nothing."""

    def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found.append((hidden, index, weights))
        return torch.zeros_like(hidden)

    return experts


def _losses(
    layer: MoELayer, routings: Sequence[Routing], valid: torch.Tensor
) -> Iterator[tuple[torch.Tensor, float, int]]:
    """Chunk by chunk of the tokens: squared losses (R,) fp64, the square of the whole output, pairs computed."""
    hidden = routings[0][0]
    for token in valid.nonzero()[:, 0].split(TOKENS):
        gates = torch.stack(
            [_spread(index[token], weights[token], layer.n_experts) for _, index, weights in routings], 1
        )
        outputs, pairs = _outputs(layer, hidden[token], (gates != 0).any(1))
        mixed = torch.bmm(gates, outputs)
        squares = (mixed - mixed[:, :1]).double().square().sum((0, 2)).cpu()
        yield squares, float(mixed[:, 0].double().square().sum()), pairs


def _spread(index: torch.Tensor, weights: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Gates (t, K) at expert ids (t, K) as (t, E) fp32, 0 elsewhere."""
    gates = torch.zeros(len(index), n_experts, device=index.device)
    return gates.scatter_(1, index, weights.float())


def _outputs(layer: MoELayer, hidden: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Outputs (t, E, H) fp32 of the experts `used` (t, E) for hidden states (t, H), 0 elsewhere; and how many."""
    found = torch.zeros(*used.shape, layer.hidden, device=hidden.device)
    chosen = torch.where(used, torch.arange(layer.n_experts, device=used.device), layer.n_experts)
    rows = sort_by_expert(chosen, layer.n_experts + 1)
    for expert, part in rows.parts():
        if expert < layer.n_experts:
            token = rows.token[part]
            found[token, expert] = output(
                layer.experts, intermediate(layer.experts, hidden[token], expert), expert
            ).float()
    return found, int(used.sum())
