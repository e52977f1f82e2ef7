"""Schedules evaluated exactly, as masks on the loaded model, with as few layers run as their kinship allows."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab.calibration.answers import AnswerBatch
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan, make_plan
from moe_lab.search.fitness import WITHOUT_FULL, Contexts, average, contexts, log_probabilities, row_sums
from moe_lab.search.prefix import Decoder, Relatives, Schedule, States
from moe_lab.search.settings import FitnessSettings

FLOAT = 4
"""Bytes of a log-probability."""


@dataclass
class Cost:
    """What evaluating has cost so far."""

    candidates: int = 0
    """Schedules evaluated."""
    forwards: float = 0.0
    """Decoder layers run for candidates, in full forwards of the search set."""
    full_forwards: float = 0.0
    """The same for the unpruned model."""


@dataclass(frozen=True)
class Batch:
    """Rows of the search set, cut after the last position that matters (what follows it cannot be seen from it)."""

    ids: torch.Tensor
    valid: torch.Tensor
    at: Contexts


class Plans:
    """Schedules as plans: each layer drops the lowest of `scores` (layer -> a score per expert)."""

    def __init__(self, model: Any, scores: Mapping[int, Sequence[float]]) -> None:
        layers = moe_layers(model)
        self.order = [layer.index for layer in layers]
        self.scores = {layer: list(scores[layer]) for layer in self.order}
        self.limits = {
            "top_k": {layer.index: layer.top_k for layer in layers},
            "n_group": {layer.index: layer.n_group for layer in layers},
            "topk_group": {layer.index: layer.topk_group for layer in layers},
        }

    def plan(self, schedule: Schedule, provenance: Mapping[str, Any] | None = None) -> Plan:
        """The plan of one schedule; UserError when a layer is left with too few experts."""
        remove = dict(zip(self.order, schedule, strict=True))
        return make_plan(self.scores, remove, provenance=dict(provenance or {}), **self.limits)


class Candidates:
    """A fitness over a search set, of any schedule for one model and one ranking of its experts.

    `rows` as from answer_batches. The numbers are those of masking the model and running all of it on all of the set;
    what is spared is layers before the first one that differs from a schedule evaluated in the same call, or from the
    `elites` best before it, positions without an answer in the vocabulary head, and the unpruned model's
    log-probabilities, which are kept if they fit `settings.memory_budget`, as are the elites' states in what is left.
    """

    def __init__(
        self,
        model: Any,
        scores: Mapping[int, Sequence[float]],
        rows: Sequence[AnswerBatch],
        settings: FitnessSettings,
        *,
        seed: int,
        elites: int = 4,
    ) -> None:
        self.model, self.settings, self.elites = model, settings, elites
        self.plans = Plans(model, scores)
        self.decoder = Decoder(model)
        self.batches = _batches(rows, settings, seed)
        self.cost = Cost()
        self.rows = sum(len(batch.ids) for batch in self.batches)
        self.counts = [int(n) for batch in self.batches for n in batch.at.where.sum(1)]
        self.known: dict[Schedule, float] = {}
        self._full: dict[int, torch.Tensor] = {}
        self._keeps_full, left = self._divide(settings.memory_budget)
        self.relatives = Relatives(len(self.batches), left)

    def evaluate(self, schedules: Sequence[Schedule]) -> list[float]:
        """The fitness of each schedule, higher is better. UserError for one that no router can work with, and for a
        fitness that is not finite."""
        plans = {schedule: self.plans.plan(schedule) for schedule in schedules}
        sums: dict[Schedule, list[float]] = {schedule: [] for schedule in plans}
        for number in range(len(self.batches)):
            for schedule, found in self._batch(number, plans).items():
                sums[schedule] += found
        self.known |= {schedule: self._average(schedule, found) for schedule, found in sums.items()}
        self.cost.candidates += len(plans)
        self.relatives.choose(heapq.nlargest(self.elites, self.known, key=lambda schedule: self.known[schedule]))
        return [self.known[schedule] for schedule in schedules]

    def _batch(self, number: int, plans: Mapping[Schedule, Plan]) -> dict[Schedule, list[float]]:
        """Schedule -> the fitness summed over each row of one batch."""
        batch = self.batches[number]
        log_p = None if self.settings.fitness in WITHOUT_FULL else self._full_log_probabilities(number)
        sums = {}

        def visit(schedule: Schedule, states: States) -> None:
            with mask(self.model, plans[schedule]):
                logits, run = self.decoder.logits(batch.ids, batch.valid, batch.at.where, schedule, states)
            self.cost.forwards += run / len(self.decoder.layers) * len(batch.ids) / self.rows
            sums[schedule] = row_sums(self.settings.fitness, log_p, logits, batch.at).tolist()

        self.relatives.walk(number, plans, visit)
        return sums

    def _full_log_probabilities(self, number: int) -> torch.Tensor:
        """log p (N, V) of the unpruned model at the judged positions of one batch."""
        if number in self._full:
            return self._full[number]
        batch = self.batches[number]
        nothing: Schedule = (0,) * len(self.plans.order)
        logits, run = self.decoder.logits(batch.ids, batch.valid, batch.at.where, nothing, {})
        self.cost.full_forwards += run / len(self.decoder.layers) * len(batch.ids) / self.rows
        found = log_probabilities(logits)
        if self._keeps_full:
            self._full[number] = found
        return found

    def _divide(self, budget: int) -> tuple[bool, int]:
        """Whether the unpruned model's log-probabilities fit, and the bytes left for states."""
        if self.settings.fitness in WITHOUT_FULL:
            return False, budget
        needed = sum(self.counts) * self.model.get_output_embeddings().weight.shape[0] * FLOAT
        return needed <= budget, budget - needed if needed <= budget else budget

    def _average(self, schedule: Schedule, sums: Sequence[float]) -> float:
        value = average(sums, self.counts, self.settings.average)
        if not math.isfinite(value):
            raise UserError(
                f"{self.settings.fitness} of the model that loses {list(schedule)} experts a layer is {value}: "
                "expected a finite number, so the model's logits are damaged"
            )
        return value


def _batches(rows: Sequence[AnswerBatch], settings: FitnessSettings, seed: int) -> list[Batch]:
    """The rows with the positions to judge; UserError when there is none."""
    luck = torch.Generator().manual_seed(seed)
    found = []
    for ids, valid, answers in rows:
        at = contexts(ids, answers, shift=settings.shift, luck=luck)
        if len(at.rows):
            end = int(at.where.any(0).nonzero().max()) + 1
            found.append(
                Batch(ids[:, :end], valid[:, :end], Contexts(at.where[:, :end], at.rows, at.targets, at.draws))
            )
    if not found:
        raise UserError("allocation.search holds no answer that a token comes before: expected tasks with answers")
    return found
