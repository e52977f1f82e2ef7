"""Reuse of hidden states between schedules with a common prefix, so that their first layers run only once.

A schedule says how many experts each MoE layer loses. The state at the input of MoE layer k depends on the first k
entries alone, so schedules with the same first k entries share it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import stand_in

Schedule = tuple[int, ...]
"""Experts removed per MoE layer, in layer order; or the first entries of such a schedule."""
States = dict[Schedule, torch.Tensor]
"""First k entries of a schedule -> (B, S, H) hidden states at the input of MoE layer k."""


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
        must have masked the model as `schedule` says. `valid` (B, S) is the attention mask."""
        start, n_layers = _longest_known(schedule, states), len(schedule)
        first = self.moe[start] if start >= 0 else 0
        device = self.model.get_input_embeddings().weight.device
        attention = None if bool(valid.all()) else valid.to(device, torch.int64)
        with ExitStack() as undo, torch.inference_mode():
            if start >= 0:
                state = states[schedule[:start]].clone()  # which the layers that read it may change
                for layer in self.layers[:first]:
                    stand_in(layer, state, undo)
            for k in range(max(start, 0), n_layers):
                undo.callback(self.layers[self.moe[k]].register_forward_hook(_check_output).remove)
            for k in range(start + 1, n_layers):
                undo.callback(_remember(self.layers[self.moe[k]], schedule[:k], states).remove)
            undo.callback(_pick(self.model.get_output_embeddings(), where).remove)
            output = self.model(input_ids=ids.to(device), attention_mask=attention, use_cache=False)
        return output.logits[0], len(self.layers) - first


def _longest_known(schedule: Schedule, states: States) -> int:
    """Entries of the longest prefix of `schedule` in `states`, at most all but one; -1 if there is none."""
    return next((k for k in range(len(schedule) - 1, -1, -1) if schedule[:k] in states), -1)


def _check_output(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook of decoder layers, which must return hidden states, as states that stand in for them do."""
    if not isinstance(output, torch.Tensor):
        raise UserError(
            f"{type(module).__name__} gives {type(output).__name__} instead of hidden states, so its layers cannot "
            "be run one by one, as searches and ablation do: this model is not supported"
        )


def _remember(layer: nn.Module, beginning: Schedule, states: States) -> RemovableHandle:
    """Add a hook that stores a copy of the input of `layer` as the state of the prefix `beginning`. Returns it."""

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[beginning] = (inputs[0] if inputs else named["hidden_states"]).clone()

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

    def walk(self, batch: int, schedules: Iterable[Schedule]) -> Iterator[tuple[Schedule, States]]:
        """Each schedule with all stored states of its prefixes, to which the caller adds new ones before it goes on.
        Schedules are sorted, so that those with a common prefix follow each other and share states."""
        path: States = {}
        for schedule in sorted(schedules):
            known = {**path, **self.states[batch]}
            path = {start: known[start] for start in known if schedule[: len(start)] == start}
            yield schedule, path
            kept = self.states[batch]
            for start, state in path.items():
                if start not in kept and self.bytes[batch] + state.nbytes <= self.budget:
                    kept[start] = state
                    self.bytes[batch] += state.nbytes

    def choose(self, best: Iterable[Schedule]) -> None:
        """Drop all states but those of prefixes of the schedules `best`, which are the parents of the next ones."""
        wanted = {schedule[:k] for schedule in best for k in range(len(schedule))}
        for batch, states in enumerate(self.states):
            self.states[batch] = {start: states[start] for start in states if start in wanted}
            self.bytes[batch] = sum(state.nbytes for state in self.states[batch].values())
