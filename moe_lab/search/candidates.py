"""Exact fitness of schedules, as masks on the loaded model."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab.calibration.batches import AnswerBatch
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan, make_plan
from moe_lab.search.fitness import Contexts, average, contexts, log_probabilities, row_sums
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
    """Converts schedules to plans: each layer drops the experts with the lowest `scores` (layer -> per expert), but
    none of `protected` (layer -> ids)."""

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
        self.rows = sum(len(batch.ids) for batch in self.batches)
        self._counts = [int(count) for batch in self.batches for count in batch.at.where.sum(1)]
        self.known: dict[Schedule, float] = {}
        positions = 0 if settings.fitness == "nll" else sum(len(batch.at.rows) for batch in self.batches)
        needed = positions * int(model.get_output_embeddings().weight.shape[0]) * FLOAT
        self._full: dict[int, torch.Tensor] = {}
        self._keeps_full = needed <= settings.memory_budget
        left = settings.memory_budget - needed * self._keeps_full
        self.relatives = Relatives(len(self.batches), left)

    def evaluate(self, schedules: Sequence[Schedule]) -> list[float]:
        """The fitness of each schedule, higher is better. UserError for one that is not finite."""
        plans = {schedule: self.plans.plan(schedule) for schedule in schedules}
        sums: dict[Schedule, list[float]] = {schedule: [] for schedule in plans}
        for number in range(len(self.batches)):
            for schedule, of_rows in self._row_sums(number, plans).items():
                sums[schedule] += of_rows
        values = {schedule: self._average(schedule, sums[schedule]) for schedule in plans}
        self.cost.candidates += len(values)
        self.known |= values
        self.relatives.choose(heapq.nlargest(self.elites, self.known, key=self.known.__getitem__))
        return [values[schedule] for schedule in schedules]

    def _row_sums(self, number: int, plans: Mapping[Schedule, Plan]) -> dict[Schedule, list[float]]:
        """Schedule -> the sum of the fitness over each row of one batch."""
        batch = self.batches[number]
        sums: dict[Schedule, list[float]] = {}
        log_p = self._full_log_probabilities(number)
        for schedule, states in self.relatives.walk(number, plans):
            with mask(self.model, plans[schedule]):
                logits, run = self.decoder.logits(batch.ids, batch.valid, batch.at.where, schedule, states)
            sums[schedule] = row_sums(self.settings.fitness, log_p, logits, batch.at).tolist()
            self.cost.forwards += self._share(run, batch)
        return sums

    def _average(self, schedule: Schedule, sums: Sequence[float]) -> float:
        """The fitness of a schedule, from its sum over each row. UserError when it is not finite."""
        value = average(sums, self._counts, self.settings.averaging)
        if not math.isfinite(value):
            raise UserError(
                f"{self.settings.fitness} of the model that loses {list(schedule)} experts in its layers is {value}: "
                "expected a finite number, so the model's logits are damaged"
            )
        return value

    def _full_log_probabilities(self, number: int) -> torch.Tensor | None:
        """log p (N, V) of the unpruned model at the evaluated positions of one batch; None if it is not needed."""
        if self.settings.fitness == "nll":
            return None
        if number in self._full:
            return self._full[number]
        batch = self.batches[number]
        nothing = (0,) * len(self.plans.layers)
        logits, run = self.decoder.logits(batch.ids, batch.valid, batch.at.where, nothing, {})
        self.cost.full += self._share(run, batch)
        log_p = log_probabilities(logits)
        if self._keeps_full:
            self._full[number] = log_p
        return log_p

    def _share(self, layers: int, batch: Batch) -> float:
        """`layers` run on one batch, as a share of a full forward pass over the search set."""
        return layers / len(self.decoder.layers) * len(batch.ids) / self.rows


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
