"""Ranking proposals, of which only the best are evaluated: by local reconstruction, or by successive halving."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from moe_lab.calibration.answers import AnswerBatch
from moe_lab.errors import UserError
from moe_lab.search.candidates import Candidates
from moe_lab.search.local_losses import local_losses
from moe_lab.search.prefix import Schedule

Screen = Callable[[Sequence[Schedule]], list[float]]
"""Schedules -> a value each, higher is better; comparable with each other only."""

RUNGS = (4, 2)
"""Successive halving sees a quarter of the rows first, then half of them."""


def reconstruction(
    candidates: Candidates, rows: Sequence[AnswerBatch], removals: Sequence[Sequence[int]], *, tokens: int
) -> Screen:
    """Minus the sum over layers of what their outputs lose (local_losses.py), each layer's loss in units of fitness.

    Losing a tenth of its output matters more in one layer than in another. So each layer alone is pruned as far as it
    may be and evaluated; the fitness this costs is divided by its loss there. Losses are of the first rows with
    `tokens` tokens; `removals`: for each layer, the numbers of experts a schedule may remove, ascending, 0 first. All
    is computed here, once; `candidates.cost` is told.
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
    """For each layer, the fitness lost by its losing `most` experts, for each unit of local loss."""
    nothing = (0,) * len(most)
    alone = [tuple(lost if k == layer else 0 for k, lost in enumerate(most)) for layer in range(len(most))]
    best, *values = candidates.preview([nothing, *alone], range(len(candidates.batches)))
    return [
        max(best - value, 0.0) / losses[lost] if losses[lost] else 0.0
        for value, losses, lost in zip(values, table, most, strict=True)
    ]


def halving(candidates: Candidates) -> Screen:
    """All proposals on a quarter of the rows, the better half of them on half of the rows.

    Values are the fitness on the rows read; that of a schedule that was left behind is below that of every one that
    went on. What was read is not read again when the schedule is evaluated.
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
    """How many batches hold the first 1/part of the rows."""
    totals = accumulate(len(batch.ids) for batch in candidates.batches)
    return 1 + sum(total * part < candidates.rows for total in totals)


def quartered(rows: Sequence[AnswerBatch], batch_size: int) -> list[AnswerBatch]:
    """The same rows in batches that end at every quarter, whatever the batch size was; UserError for fewer than four.

    So successive halving sees the same rows with any batch size.
    """
    ids, valid, answers = (torch.cat(parts) for parts in zip(*rows, strict=True))
    if len(ids) < max(RUNGS):
        raise UserError(
            f"allocation.parameters.filter=halving has {len(ids)} rows to read: expected at least {max(RUNGS)}"
        )
    found = []
    for part in torch.arange(len(ids)).tensor_split(max(RUNGS)):
        found += [(ids[some], valid[some], answers[some]) for some in part.split(batch_size)]
    return found


def _first_rows(rows: Sequence[AnswerBatch], tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, valid) of the rows up to the one that makes `tokens` valid tokens full; at least one row."""
    found, left = [], tokens
    for ids, valid, _ in rows:
        before = valid.sum(1).cumsum(0) - valid.sum(1)
        count = int((before < left).sum())
        if count:
            found.append((ids[:count], valid[:count]))
        left -= int(valid.sum())
    return found
