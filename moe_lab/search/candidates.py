"""Exact fitness of schedules, on the loaded model with masks in place of pruning."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_lab.calibration.batches import AnswerBatch
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import check_output, replace_output, to_device
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan, Routers
from moe_lab.pruning.selection import make_plan
from moe_lab.search.evolution import Schedule, SearchSettings
from moe_lab.search.fitness import (
    Positions,
    average,
    evaluated_positions,
    fitness_row_sums,
    log_probabilities,
)


class Plans:
    """Converts schedules (number of experts that each layer loses) to plans. Each layer drops the
    experts with the lowest `scores` (layer -> a score per expert), but no expert that `routers`
    protects."""

    def __init__(self, routers: Routers, scores: Mapping[int, Sequence[float]]) -> None:
        self.layers = sorted(routers)
        self.routers = routers
        self.scores = {layer: scores[layer] for layer in self.layers}

    def plan(self, schedule: Schedule, provenance: Mapping[str, Any] | None = None) -> Plan:
        """The plan of one schedule. UserError when a layer retains too few experts."""
        counts = dict(zip(self.layers, schedule, strict=True))
        return make_plan(self.scores, counts, self.routers, provenance=provenance or {})


FP32_BYTES = 4
"""Bytes of a log-probability."""


@dataclass(frozen=True)
class Batch:
    """Rows of the search set without the tokens after the last evaluated position, which cannot
    affect the fitness."""

    ids: torch.Tensor
    valid: torch.Tensor
    positions: Positions


class Candidates:
    """The fitness of schedules over a search set, for one model and one ranking of the experts.
    `rows`: the search set, from `answer_batches`.

    The fitness is exactly that of the masked model on the whole set. Two results are stored within
    `settings.memory_budget`: the unpruned model's log-probabilities, and the hidden states that
    schedules with the same first entries share.
    """

    def __init__(
        self, model: Any, plans: Plans, rows: Sequence[AnswerBatch], settings: SearchSettings
    ) -> None:
        """UserError for a search set without positions to evaluate."""
        self.model = model
        self.plans = plans
        self.settings = settings
        self.decoder = Decoder(model)
        self.batches = _batches(rows, settings)
        self.forwards = 0.0
        """Forward passes over the whole search set so far, of candidates and of the unpruned model.
        A run of some layers on some rows counts as layers * rows / (all layers * all rows)."""
        self.rows = sum(len(batch.ids) for batch in self.batches)
        self._counts = [
            int(count) for batch in self.batches for count in batch.positions.is_evaluated.sum(1)
        ]
        """Number of evaluated positions of each row."""
        self.fitness: dict[Schedule, float] = {}
        """Fitness of all schedules that were evaluated."""
        # positions at which log-probabilities of the unpruned model are read; "nll" reads none
        n_positions = 0 if settings.fitness == "nll" else sum(self._counts)
        needed_bytes = n_positions * int(model.get_output_embeddings().weight.shape[0]) * FP32_BYTES
        self._log_p: dict[int, torch.Tensor] = {}
        """Batch number -> log-probabilities of the unpruned model."""
        self._stores_log_p = needed_bytes <= settings.memory_budget
        remaining = settings.memory_budget - (needed_bytes if self._stores_log_p else 0)
        self.prefix_states = PrefixStates(len(self.batches), remaining)

    def evaluate(self, schedules: Sequence[Schedule]) -> list[float]:
        """The fitness of each schedule, higher is better. UserError when a value is not finite."""
        plans = {schedule: self.plans.plan(schedule) for schedule in schedules}
        sums: dict[Schedule, list[float]] = {schedule: [] for schedule in plans}
        for number in range(len(self.batches)):
            for schedule, batch_sums in self._row_sums(number, plans).items():
                sums[schedule] += batch_sums
        values = {schedule: self._average(schedule, sums[schedule]) for schedule in plans}
        self.fitness |= values
        self.prefix_states.retain(
            heapq.nlargest(self.settings.elites, self.fitness, key=self.fitness.__getitem__)
        )
        return [values[schedule] for schedule in schedules]

    def _row_sums(self, number: int, plans: Mapping[Schedule, Plan]) -> dict[Schedule, list[float]]:
        """Schedule -> for each row of batch `number`, the fitness summed over the row's evaluated
        positions."""
        batch = self.batches[number]
        sums: dict[Schedule, list[float]] = {}
        log_p = self._full_log_probabilities(number)
        for schedule, states in self.prefix_states.iterate(number, plans):
            with mask(self.model, plans[schedule]):
                logits = self._logits(batch, schedule, states)
            sums[schedule] = fitness_row_sums(
                self.settings.fitness, log_p, logits, batch.positions
            ).tolist()
        return sums

    def _average(self, schedule: Schedule, sums: Sequence[float]) -> float:
        """The fitness of a schedule. `sums`: for each row of the search set, the fitness summed
        over the row's evaluated positions."""
        value = average(sums, self._counts, self.settings.averaging)
        if not math.isfinite(value):
            raise UserError(
                f"{self.settings.fitness} of the model that loses {list(schedule)} experts in its "
                f"layers is {value}: expected a finite number, so the model's logits are damaged"
            )
        return value

    def _full_log_probabilities(self, number: int) -> torch.Tensor | None:
        """Log-probabilities (N, V) of the unpruned model at the evaluated positions of batch
        `number`, if the fitness reads them."""
        if self.settings.fitness == "nll":
            return None
        if number in self._log_p:
            return self._log_p[number]
        unpruned = (0,) * len(self.plans.layers)
        log_p = log_probabilities(self._logits(self.batches[number], unpruned, {}))
        if self._stores_log_p:
            self._log_p[number] = log_p
        return log_p

    def _logits(self, batch: Batch, schedule: Schedule, states: States) -> torch.Tensor:
        """Logits (N, V) at the evaluated positions of `batch`. `schedule`, `states`: as in
        `Decoder.logits`."""
        logits, layers_run = self.decoder.logits(
            batch.ids, batch.valid, batch.positions.is_evaluated, schedule, states
        )
        layer_share = layers_run / len(self.decoder.layers)
        self.forwards += layer_share * len(batch.ids) / self.rows
        return logits


def _batches(marked_batches: Sequence[AnswerBatch], settings: SearchSettings) -> list[Batch]:
    """The batches with evaluated positions, from `marked_batches` (ids, valid, answers)."""
    generator = torch.Generator().manual_seed(settings.seed)
    batches = []
    for ids, valid, answers in marked_batches:
        positions = evaluated_positions(ids, answers, shift=settings.shift, generator=generator)
        if len(positions.targets):
            end = int(positions.is_evaluated.any(0).nonzero().max()) + 1
            positions = replace(positions, is_evaluated=positions.is_evaluated[:, :end])
            batches.append(Batch(ids[:, :end], valid[:, :end], positions))
    if not batches:
        raise UserError(
            "allocation.search holds no answer that a token comes before: expected tasks with "
            "answers"
        )
    return batches


# Hidden states are reused between schedules with a common prefix, so that their first layers run
# only once: the state at the input of MoE layer k depends on the first k entries of a schedule
# alone, bit for bit.

States = dict[Schedule, torch.Tensor]
"""First k entries of a schedule -> (B, S, H) hidden states at the input of MoE layer k."""


class Decoder:
    """Runs a causal language model from any MoE layer on, and the vocabulary head at the evaluated
    positions only."""

    def __init__(self, model: Any) -> None:
        self.model = model
        layers = moe_layers(model)
        self.layers: Sequence[nn.Module] = model.get_submodule(layers[0].stack)
        self.moe_indices = [layer.index for layer in layers]
        """Index in `layers` of each MoE layer."""

    def logits(
        self,
        ids: torch.Tensor,
        valid: torch.Tensor,
        is_evaluated: torch.Tensor,
        schedule: Schedule,
        states: States,
    ) -> tuple[torch.Tensor, int]:
        """Returns (logits (N, V) at the N evaluated positions, number of decoder layers that were
        run).

        `ids`, `valid` (the attention mask) and `is_evaluated` are (B, S). The caller must have
        masked the model as `schedule` says. The model runs from the last MoE layer on that has an
        input for `schedule` in `states`, or as a whole if no layer has. The inputs of all later MoE
        layers are added to `states`.
        """
        n_layers = len(schedule)
        # number k of the last MoE layer with a stored input, or -1
        start = next((k for k in range(n_layers - 1, -1, -1) if schedule[:k] in states), -1)
        first_layer = self.moe_indices[start] if start >= 0 else 0
        device = self.model.get_input_embeddings().weight.device
        attention = None if bool(valid.all()) else to_device(valid.long(), device)
        with ExitStack() as undo, torch.inference_mode():
            if start >= 0:
                # the layers before it compute nothing and return the stored input
                state = states[schedule[:start]].clone()  # layers may write into their input
                for layer in self.layers[:first_layer]:
                    replace_output(layer, state, undo)
            for k in range(max(start, 0), n_layers):
                layer = self.layers[self.moe_indices[k]]
                # later runs may replace the output of the layer by a tensor
                undo.callback(layer.register_forward_hook(check_output).remove)
                if k > start:
                    undo.callback(_store_input(layer, schedule[:k], states).remove)
            head = self.model.get_output_embeddings().register_forward_pre_hook(
                # the head gets the hidden states of the evaluated positions only: (1, N, H)
                lambda module, args: (args[0][is_evaluated.to(args[0].device)][None],)
            )
            undo.callback(head.remove)
            output = self.model(
                input_ids=to_device(ids, device), attention_mask=attention, use_cache=False
            )
        return output.logits[0], len(self.layers) - first_layer


def _store_input(layer: nn.Module, prefix: Schedule, states: States) -> RemovableHandle:
    """Add a hook that stores a copy of the input of `layer` as `states[prefix]`."""

    def store(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[prefix] = (args[0] if args else kwargs["hidden_states"]).clone()

    return layer.register_forward_pre_hook(store, with_kwargs=True)


class PrefixStates:
    """Hidden states of earlier schedules, for later schedules with the same first entries (prefix).
    The states of all `batches` take at most `budget` bytes, an equal part for each batch."""

    def __init__(self, batches: int, budget: int) -> None:
        self.states: list[States] = [{} for _ in range(batches)]
        self.budget = budget // batches
        """Bytes for the states of one batch."""

    def iterate(
        self, batch: int, schedules: Iterable[Schedule]
    ) -> Iterator[tuple[Schedule, States]]:
        """Yield (schedule, states) for each schedule, in sorted order, so that schedules with a
        common prefix follow each other. `batch`: number of the batch.

        `states` maps prefixes of the schedule to the hidden states that are known. The caller adds
        the hidden states of the schedule's other prefixes before it takes the next schedule."""
        states: States = {}
        for schedule in sorted(schedules):
            available = {**states, **self.states[batch]}
            states = {
                prefix: state
                for prefix, state in available.items()
                if schedule[: len(prefix)] == prefix
            }
            yield schedule, states
            stored = self.states[batch]
            room = self.budget - sum(state.nbytes for state in stored.values())
            for prefix, state in states.items():
                if prefix not in stored and state.nbytes <= room:
                    stored[prefix] = state
                    room -= state.nbytes

    def retain(self, best: Iterable[Schedule]) -> None:
        """Drop the states of all prefixes that no schedule in `best` has."""
        prefixes = {schedule[:k] for schedule in best for k in range(len(schedule))}
        for batch, states in enumerate(self.states):
            self.states[batch] = {
                prefix: state for prefix, state in states.items() if prefix in prefixes
            }
