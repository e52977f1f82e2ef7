"""Reuse of hidden states between schedules with a common prefix, so that their first layers run only once.

A schedule says how many experts each MoE layer loses. The state at the input of MoE layer k depends on the first k
entries alone, so schedules with the same first k entries share it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_lab.errors import UserError
from moe_lab.models import device
from moe_lab.models.discover import moe_layers
from moe_lab.models.partial_forward import run_before, stand_in

Schedule = tuple[int, ...]
"""Experts removed per MoE layer, in layer order; or the first entries of such a schedule."""
States = dict[Schedule, torch.Tensor]
"""First k entries of a schedule -> (B, S, H) hidden states at the input of MoE layer k."""


def tokens_at_once(model: Any) -> int:
    """Tokens of the copies that may share one forward pass of `model`."""
    return min(device.PASS_TOKENS, device.tokens_with_logits(model))


class Decoder:
    """Runs a causal language model from any MoE layer on, and its vocabulary head at chosen positions only."""

    def __init__(self, model: Any) -> None:
        self.model = model
        layers = moe_layers(model)
        self.layers: Sequence[nn.Module] = model.get_submodule(layers[0].stack)
        self.moe = [layer.index for layer in layers]
        """Decoder layer of each MoE layer."""

    def logits(
        self, ids: torch.Tensor, valid: torch.Tensor, where: torch.Tensor, schedule: Schedule, states: States
    ) -> tuple[torch.Tensor, int]:
        """Logits (N, V) at the positions `where` (B, S) of a batch of `ids` (B, S), and how many layers were run.

        Starts from the longest prefix of `schedule` in `states`, and adds the states of longer prefixes. The caller
        must have masked the model as `schedule` says. `valid` (B, S) is the attention mask.
        """
        (logits,), run = self.logits_of_each([schedule], ids, valid, where, states, lambda rows: None)
        return logits, run

    def logits_of_each(
        self,
        schedules: Sequence[Schedule],
        ids: torch.Tensor,
        valid: torch.Tensor,
        where: torch.Tensor,
        states: States,
        set_rows: Callable[[list[int]], None],
    ) -> tuple[list[torch.Tensor], int]:
        """Logits (N, V) of each of `schedules`, which differ, and how many layers were run on the batch of B rows.

        As `logits`, but copies of the batch share forward passes: at every layer, there is one copy for each prefix
        that differs there. So no layer runs more often than for one schedule after the other. Before each pass
        `set_rows` is called with the number of a schedule for each row, as which the caller must mask the row.
        """
        starts = [_longest_known(schedule, states) for schedule in schedules]
        depth, n_layers, run = min(starts), len(schedules[0]), 0
        while True:
            copies = _distinct(schedules, starts, depth)
            end = depth + 1
            while end < n_layers and len(_distinct(schedules, starts, end)) == len(copies):
                end += 1
            set_rows([number for number in copies for _ in range(len(ids))])
            chosen = [schedules[number] for number in copies]
            output = self._run(chosen, ids, valid, where, states, depth, end)
            run += (self._layer(end, n_layers) - self._layer(depth, n_layers)) * len(copies)
            if output is not None:
                return list(output.view(len(copies), -1, output.shape[-1])), run
            depth = end

    def _layer(self, depth: int, n_layers: int) -> int:
        """Decoder layer at which MoE layer number `depth` of `n_layers` is; -1 is the first layer of all."""
        if depth < 0:
            return 0
        return self.moe[depth] if depth < n_layers else len(self.layers)

    def _run(
        self,
        schedules: Sequence[Schedule],
        ids: torch.Tensor,
        valid: torch.Tensor,
        where: torch.Tensor,
        states: States,
        depth: int,
        end: int,
    ) -> torch.Tensor | None:
        """Run a copy of the batch for each of `schedules` from MoE layer `depth` to `end`, and add states on the way.

        Returns logits (N, V) when `end` is after the last MoE layer, otherwise None.
        """
        copies, n_layers = len(schedules), len(schedules[0])
        device = self.model.get_input_embeddings().weight.device
        attention = None if bool(valid.all()) else valid.to(device, torch.int64).repeat(copies, 1)
        forward = partial(
            self.model, input_ids=ids.to(device).repeat(copies, 1), attention_mask=attention, use_cache=False
        )
        with ExitStack() as undo, torch.inference_mode():
            if depth >= 0:
                state = torch.cat([states[schedule[:depth]] for schedule in schedules])
                for layer in self.layers[: self.moe[depth]]:
                    stand_in(layer, state, undo)
            for k in range(max(depth, 0), min(end, n_layers)):
                undo.callback(self.layers[self.moe[k]].register_forward_hook(_check_output).remove)
            for k in range(depth + 1, min(end, n_layers - 1) + 1):
                beginnings = [schedule[:k] for schedule in schedules]
                undo.callback(_remember(self.layers[self.moe[k]], beginnings, states).remove)
            if end < n_layers:
                run_before(self.layers[self.moe[end]], forward)
                return None
            undo.callback(_pick(self.model.get_output_embeddings(), where.repeat(copies, 1)).remove)
            logits: torch.Tensor = forward().logits[0]
        return logits


def _longest_known(schedule: Schedule, states: States) -> int:
    """Entries of the longest prefix of `schedule` in `states`, at most all but one; -1 if there is none."""
    return next((k for k in range(len(schedule) - 1, -1, -1) if schedule[:k] in states), -1)


def _distinct(schedules: Sequence[Schedule], starts: Sequence[int], depth: int) -> list[int]:
    """Numbers of the schedules whose rows MoE layer number `depth` computes: one for each prefix that differs there.

    Those that start at a later layer are not among them.
    """
    first: dict[Schedule, int] = {}
    for number, (schedule, start) in enumerate(zip(schedules, starts, strict=True)):
        if start <= depth:
            first.setdefault(schedule[: depth + 1], number)
    return list(first.values())


def _check_output(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook of decoder layers, which must return hidden states, as states that stand in for them do."""
    if not isinstance(output, torch.Tensor):
        raise UserError(
            f"{type(module).__name__} gives {type(output).__name__} instead of hidden states, so its layers cannot "
            "be run one by one, as searches and ablation do: this model is not supported"
        )


def _remember(layer: nn.Module, beginnings: Sequence[Schedule], states: States) -> RemovableHandle:
    """Add a hook that stores a copy of the input of `layer`, split into states of the prefixes `beginnings`."""

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else named["hidden_states"]
        for beginning, part in zip(beginnings, hidden.chunk(len(beginnings)), strict=True):
            states[beginning] = part.clone()

    return layer.register_forward_pre_hook(before, with_kwargs=True)


def _pick(head: nn.Module, where: torch.Tensor) -> RemovableHandle:
    """Add a hook that gives the vocabulary head only the hidden states at `where` (B, S), as (1, N, H). Returns it."""

    def pick(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (inputs[0][where.to(inputs[0].device)][None],)

    return head.register_forward_pre_hook(pick)


class Relatives:
    """Hidden states of earlier candidates that later ones may share, within a number of bytes for each batch."""

    def __init__(self, batches: int, budget: int) -> None:
        self.states: list[States] = [{} for _ in range(batches)]
        self.bytes = [0] * batches
        self.budget = budget // max(batches, 1)
        self.wanted: set[Schedule] = set()

    def walk(
        self,
        batch: int,
        schedules: Iterable[Schedule],
        size: int,
        visit: Callable[[Sequence[Schedule], States], None],
    ) -> None:
        """Call `visit` with `size` schedules at a time and all stored states of their prefixes; it adds new states.

        Schedules are sorted, so that those with a common prefix follow each other and share states.
        """
        path: States = {}
        ordered = sorted(schedules)
        for first in range(0, len(ordered), size):
            group = ordered[first : first + size]
            known = {**path, **self.states[batch]}
            path = {start: known[start] for start in known if any(one[: len(start)] == start for one in group)}
            visit(group, path)
            for start, state in path.items():
                self._keep(batch, start, state)

    def choose(self, best: Iterable[Schedule]) -> None:
        """Drop all states but those of prefixes of the schedules `best`, which are the parents of the next ones."""
        self.wanted = {schedule[:k] for schedule in best for k in range(len(schedule))}
        for batch, kept in enumerate(self.states):
            self.states[batch] = {start: kept[start] for start in kept if start in self.wanted}
            self.bytes[batch] = sum(state.nbytes for state in self.states[batch].values())

    def _keep(self, batch: int, start: Schedule, state: torch.Tensor) -> None:
        """Store a state if it fits the budget; for a wanted state, states that are not wanted are dropped if needed."""
        kept = self.states[batch]
        if start in kept:
            return
        if start in self.wanted:
            for unwanted in [other for other in kept if other not in self.wanted]:
                if self.bytes[batch] + state.nbytes > self.budget:
                    self.bytes[batch] -= kept.pop(unwanted).nbytes
        if self.bytes[batch] + state.nbytes <= self.budget:
            kept[start] = state
            self.bytes[batch] += state.nbytes
