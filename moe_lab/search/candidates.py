"""Exact fitness of schedules, as masks on the loaded model.

Hidden states of schedules with a common prefix are computed once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from moe_lab.calibration.answers import AnswerBatch
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan, make_plan
from moe_lab.search.fitness import WITHOUT_FULL, Contexts, average, contexts, log_probabilities, row_sums
from moe_lab.search.prefix import Decoder, Relatives, Schedule
from moe_lab.search.settings import FitnessSettings


@dataclass
class Cost:
    """Computation so far, in full forward passes over the search set: layers x rows run / (all layers x all rows)."""

    candidates: int = 0
    """Schedules evaluated exactly."""
    forwards: float = 0.0
    """Forward passes for candidates."""
    full: float = 0.0
    """Forward passes of the unpruned model, to which candidates are compared."""


class Plans:
    """Converts schedules to plans: each layer drops the experts with the lowest `scores` (layer -> per expert).

    `protected`: layer -> ids of experts that it never drops.
    """

    def __init__(
        self, model: Any, scores: Mapping[int, Sequence[float]], protected: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.layers = moe_layers(model)
        self.scores = {layer.index: list(scores[layer.index]) for layer in self.layers}
        kept = protected or {}
        self.routers = {layer.index: {**vars(layer), "protected": kept.get(layer.index, ())} for layer in self.layers}

    def plan(self, schedule: Schedule, provenance: Mapping[str, Any] | None = None) -> Plan:
        """The plan of one schedule. Raises UserError when a layer keeps too few experts."""
        remove = {layer.index: lost for layer, lost in zip(self.layers, schedule, strict=True)}
        return make_plan(self.scores, remove, self.routers, provenance=provenance or {})


ROUNDS = (4, 2)
"""Successive halving reads a quarter of the rows first, then half of them."""

FLOAT = 4
"""Bytes of a log-probability."""


@dataclass(frozen=True)
class Batch:
    """Rows of the search set, cut after the last position that is evaluated, which later tokens do not affect."""

    ids: torch.Tensor
    valid: torch.Tensor
    at: Contexts


class Candidates:
    """The fitness of schedules over a search set, for one model and one ranking of its experts.

    `rows` are as from answer_batches. Values equal those of masking the model and running all of it on the whole set.
    Three things are not computed again: layers before the first one that differs from a schedule of the same call or
    from the `elites` best schedules so far; the vocabulary head at positions that are not evaluated; and the unpruned
    model's log-probabilities, if they fit `settings.memory_budget`. Hidden states of the elites take what is left of
    it.
    """

    def __init__(
        self,
        model: Any,
        plans: Plans,
        rows: Sequence[AnswerBatch],
        settings: FitnessSettings,
        *,
        seed: int,
        elites: int = 4,
    ) -> None:
        self.model, self.plans, self.settings, self.elites = model, plans, settings, elites
        self.decoder = Decoder(model)
        self.batches = _batches(rows, settings, seed)
        self.cost = Cost()
        self._totals = list(accumulate(len(batch.ids) for batch in self.batches))
        self.rows = self._totals[-1]
        self._counts = [int(count) for batch in self.batches for count in batch.at.where.sum(1)]
        self.known: dict[Schedule, float] = {}
        self._full: dict[int, torch.Tensor] = {}
        self._keeps_full, left = self._divide(settings.memory_budget)
        self.relatives = Relatives(len(self.batches), left)

    def evaluate(self, schedules: Sequence[Schedule], count: int | None = None) -> list[float | None]:
        """The fitness of each schedule, higher is better; None for all but the best `count`, if it is given.

        These are found by successive halving: all are evaluated on a quarter of the rows, the better half of them (at
        least `count`) on half of the rows, and the best `count` on all rows. No row is read twice.
        Raises UserError for a schedule that the routers cannot work with, and for a fitness that is not finite.
        """
        plans = {schedule: self.plans.plan(schedule) for schedule in schedules}
        best, read = list(plans), 0
        sums: dict[Schedule, list[float]] = {schedule: [] for schedule in plans}
        for end, survivors in self._rounds(len(plans), count):
            for number in range(read, end):
                for schedule, of_rows in self.row_sums(number, {each: plans[each] for each in best}).items():
                    sums[schedule] += of_rows
            values = {schedule: self._average(schedule, sums[schedule]) for schedule in best}
            best, read = heapq.nlargest(survivors, values, key=values.__getitem__), end
        self.cost.candidates += len(values)
        self.known |= values
        self.relatives.choose(heapq.nlargest(self.elites, self.known, key=self.known.__getitem__))
        return [values.get(schedule) for schedule in schedules]

    def _rounds(self, schedules: int, count: int | None) -> list[tuple[int, int]]:
        """(batches that are read when a round ends, how many schedules survive it) of each round of halving."""
        everything = len(self.batches)
        if count is None or count >= schedules:
            return [(everything, schedules)]
        ends = [1 + sum(total * part < self.rows for total in self._totals) for part in ROUNDS]
        return [(ends[0], max(count, (schedules + 1) // 2)), (ends[1], count), (everything, count)]

    def row_sums(self, number: int, plans: Mapping[Schedule, Plan]) -> dict[Schedule, list[float]]:
        """Schedule -> the sum of the fitness over each row of one batch."""
        batch = self.batches[number]
        sums: dict[Schedule, list[float]] = {}
        log_p = self._full_log_probabilities(number)
        for schedule, states in self.relatives.walk(number, plans):
            with mask(self.model, plans[schedule]):
                logits, run = self.decoder.logits(batch.ids, batch.valid, batch.at.where, schedule, states)
            sums[schedule] = row_sums(self.settings.fitness, log_p, logits, batch.at).tolist()
            self.cost.forwards += self._forwards(run, batch)
        return sums

    def _average(self, schedule: Schedule, sums: Sequence[float]) -> float:
        """The fitness on the first rows, from its sum over each of them."""
        value = average(sums, self._counts[: len(sums)], self.settings.averaging)
        check_finite(self.settings.fitness, schedule, value)
        return value

    def _full_log_probabilities(self, number: int) -> torch.Tensor | None:
        """log p (N, V) of the unpruned model at the evaluated positions of one batch; None if it is not needed."""
        if self.settings.fitness in WITHOUT_FULL:
            return None
        if number in self._full:
            return self._full[number]
        batch = self.batches[number]
        nothing = (0,) * len(self.plans.layers)
        logits, run = self.decoder.logits(batch.ids, batch.valid, batch.at.where, nothing, {})
        self.cost.full += self._forwards(run, batch)
        log_p = log_probabilities(logits)
        if self._keeps_full:
            self._full[number] = log_p
        return log_p

    def _forwards(self, layers: int, batch: Batch) -> float:
        """`layers` run on one batch, as a share of a full forward pass over the search set."""
        return layers / len(self.decoder.layers) * len(batch.ids) / self.rows

    def _divide(self, budget: int) -> tuple[bool, int]:
        """Whether the unpruned model's log-probabilities fit, and the bytes left for states."""
        if self.settings.fitness in WITHOUT_FULL:
            return False, budget
        positions = sum(len(batch.at.rows) for batch in self.batches)
        needed = positions * int(self.model.get_output_embeddings().weight.shape[0]) * FLOAT
        return needed <= budget, budget - needed if needed <= budget else budget


def check_finite(fitness: str, schedule: Schedule, value: float) -> None:
    """Raise UserError for a fitness that is NaN or infinite."""
    if not math.isfinite(value):
        raise UserError(
            f"{fitness} of the model that loses {list(schedule)} experts in its layers is {value}: expected a finite "
            "number, so the model's logits are damaged"
        )


def _batches(rows: Sequence[AnswerBatch], settings: FitnessSettings, seed: int) -> list[Batch]:
    """The rows with the positions to evaluate. Raises UserError when there is none."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for ids, valid, answers in rows:
        at = contexts(ids, answers, shift=settings.shift, generator=generator)
        if len(at.rows):
            end = int(at.where.any(0).nonzero().max()) + 1
            at = Contexts(at.where[:, :end], at.rows, at.targets, at.draws)
            batches.append(Batch(ids[:, :end], valid[:, :end], at))
    if not batches:
        raise UserError("allocation.search holds no answer that a token comes before: expected tasks with answers")
    return batches


def quartered(rows: Sequence[AnswerBatch], batch_size: int) -> list[AnswerBatch]:
    """The same rows in batches of at most `batch_size` rows, with a boundary at every quarter.

    So successive halving reads the same rows with any batch size. Raises UserError for fewer than four rows.
    """
    ids, valid, answers = (torch.cat(parts) for parts in zip(*rows, strict=True))
    parts = max(ROUNDS)
    if len(ids) < parts:
        raise UserError(
            f"allocation.search has {len(ids)} rows, and halving (allocation.parameters.proposals) reads a quarter of "
            f"them first: expected at least {parts}"
        )
    places = [few for part in torch.arange(len(ids)).tensor_split(parts) for few in part.split(batch_size)]
    return [(ids[few], valid[few], answers[few]) for few in places]
