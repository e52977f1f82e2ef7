"""Rank proposals, so that only the best are evaluated: by local reconstruction loss, or by successive halving."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch

from moe_lab.calibration.answers import AnswerBatch
from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import ExpertsFunction, mix_outputs, replace_experts, spread
from moe_lab.models.partial_forward import run
from moe_lab.pruning.mask import mask
from moe_lab.search.candidates import Candidates, Plans
from moe_lab.search.prefix import Schedule

TOKENS = 128
"""Tokens whose expert outputs are in memory at a time: TOKENS x experts x hidden numbers."""

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Arguments of the experts of a layer: hidden states (T, H), expert ids (T, K), gates (T, K)."""


def local_losses(
    model: Any,
    plans: Plans,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    removals: Sequence[Sequence[int]],
) -> tuple[list[dict[int, float]], int]:
    """Relative squared error of the routed output of each layer alone, after removing r of its experts.

    Returns r -> loss for every r in `removals[k]`, for each layer k, and the number of (token, expert) pairs computed.
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
    """For each layer, its routing after each of its removals, on its input in the unpruned model."""
    calls: list[tuple[Any, Any]] = []
    by_layer: list[list[Routing]] = [[] for _ in removals]

    def record(block: torch.nn.Module, inputs: Any, named: Any) -> None:
        calls.append((inputs, named))

    with ExitStack() as stack:
        for layer in plans.layers:
            stack.callback(layer.block.register_forward_pre_hook(record, with_kwargs=True).remove)
        run(model, ids, valid)
    with ExitStack() as stack:
        for k, layer in enumerate(plans.layers):
            replace_experts(layer, lambda _, routings=by_layer[k]: _recorder(routings), stack)  # type: ignore[misc]
        for number in range(max(map(len, removals))):
            schedule = tuple(choices[min(number, len(choices) - 1)] for choices in removals)
            with mask(model, plans.plan(schedule)):
                for k, layer in enumerate(plans.layers):
                    if number < len(removals[k]):
                        layer.block(*calls[k][0], **calls[k][1])
    return by_layer


def _recorder(routings: list[Routing]) -> ExpertsFunction:
    """An experts function that records its arguments in `routings` and computes nothing."""

    def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routings.append((hidden, index, weights))
        return torch.zeros_like(hidden)

    return experts


def _losses(
    layer: MoELayer, routings: Sequence[Routing], valid: torch.Tensor
) -> Iterator[tuple[torch.Tensor, float, int]]:
    """For each chunk of tokens: squared errors (R,) fp64, the squared norm of the unpruned output, pairs computed."""
    hidden = routings[0][0]
    for token in valid.nonzero()[:, 0].split(TOKENS):
        by_removal = [spread(index[token], weights[token], layer.n_experts) for _, index, weights in routings]
        gates = torch.stack(by_removal, 1)
        mixed = mix_outputs(layer, hidden[token], gates)
        squares = (mixed - mixed[:, :1]).double().square().sum((0, 2)).cpu()
        yield squares, float(mixed[:, 0].double().square().sum()), int((gates != 0).any(1).sum())


Screen = Callable[[Sequence[Schedule]], list[float]]
"""Schedules -> a value each, higher is better; values of different calls are not comparable."""

RUNGS = (4, 2)
"""Successive halving reads a quarter of the rows first, then half of them."""


def reconstruction(
    candidates: Candidates, rows: Sequence[AnswerBatch], removals: Sequence[Sequence[int]], *, tokens: int
) -> Screen:
    """Rank by minus the sum of the layers' reconstruction losses (`local_losses`), each in units of fitness.

    The same loss matters more in one layer than in another. So each layer alone is pruned as much as allowed and
    evaluated, and the weight of its loss is the fitness lost divided by that loss. Losses are measured on the first
    rows that hold `tokens` tokens. `removals`: for each layer, the numbers of experts a schedule may remove, ascending,
    0 first. Everything is computed once, in this call, and counted in `candidates.cost`.
    """
    plans, cost = candidates.plans, candidates.cost
    read = _first_rows(rows, tokens)
    table, pairs = local_losses(candidates.model, plans, read, removals)
    routed = sum(int(valid.sum()) for _, valid, _ in rows) * sum(layer.top_k for layer in plans.layers)
    cost.screening += pairs / routed + sum(len(ids) for ids, _ in read) / sum(len(ids) for ids, _, _ in rows)
    weights = _worth(candidates, [choices[-1] for choices in removals], table)

    def screen(schedules: Sequence[Schedule]) -> list[float]:
        return [
            -math.fsum(weight * losses[lost] for weight, losses, lost in zip(weights, table, schedule, strict=True))
            for schedule in schedules
        ]

    return screen


def _worth(candidates: Candidates, most: Sequence[int], table: Sequence[Mapping[int, float]]) -> list[float]:
    """For each layer, the fitness lost per unit of local loss, measured by removing `most` experts from it alone."""
    nothing = (0,) * len(most)
    alone = [tuple(lost if k == layer else 0 for k, lost in enumerate(most)) for layer in range(len(most))]
    best, *values = candidates.preview([nothing, *alone], range(len(candidates.batches)))
    return [
        max(best - value, 0.0) / losses[lost] if losses[lost] else 0.0
        for value, losses, lost in zip(values, table, most, strict=True)
    ]


def halving(candidates: Candidates) -> Screen:
    """Rank by the fitness of all proposals on a quarter of the rows, then of the better half on half of the rows.

    Values of proposals in the worse half are lowered below those of all in the better half. Rows that were read are not
    read again when the schedule is evaluated.
    """
    ends = [_leading(candidates, part) for part in RUNGS]

    def screen(schedules: Sequence[Schedule]) -> list[float]:
        first = candidates.preview(schedules, range(ends[0]))
        ranked = sorted(range(len(schedules)), key=lambda number: -first[number])
        better = ranked[: (len(ranked) + 1) // 2]
        second = candidates.preview([schedules[number] for number in better], range(ends[1]))
        least = math.nextafter(min(second), -math.inf)
        values = [min(value, least) for value in first]
        for number, value in zip(better, second, strict=True):
            values[number] = value
        return values

    return screen


def _leading(candidates: Candidates, part: int) -> int:
    """Number of batches that hold the first 1/part of the rows."""
    totals = accumulate(len(batch.ids) for batch in candidates.batches)
    return 1 + sum(total * part < candidates.rows for total in totals)


def quartered(rows: Sequence[AnswerBatch], batch_size: int) -> list[AnswerBatch]:
    """The same rows in batches of at most `batch_size` rows, with a boundary at every quarter.

    So successive halving reads the same rows with any batch size. Raises UserError for fewer than four rows.
    """
    ids, valid, answers = (torch.cat(parts) for parts in zip(*rows, strict=True))
    if len(ids) < max(RUNGS):
        raise UserError(
            f"allocation.parameters.filter=halving has {len(ids)} rows to read: expected at least {max(RUNGS)}"
        )
    batches = []
    for part in torch.arange(len(ids)).tensor_split(max(RUNGS)):
        batches += [(ids[places], valid[places], answers[places]) for places in part.split(batch_size)]
    return batches


def _first_rows(rows: Sequence[AnswerBatch], tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, valid) of the first rows that together have `tokens` valid tokens or more; at least one row."""
    chosen, left = [], tokens
    for ids, valid, _ in rows:
        before = valid.sum(1).cumsum(0) - valid.sum(1)
        count = int((before < left).sum())
        if count:
            chosen.append((ids[:count], valid[:count]))
        left -= int(valid.sum())
    return chosen
