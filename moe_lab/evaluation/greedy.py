"""Greedy generation for a batch of prompts whose texts end at different times.

transformers prepares the inputs of each step, as a family needs them. The loop is ours, for two reasons: keys and
values are written into a buffer with room for more tokens, where transformers copies all of them in each step; and
rows whose text is complete leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from moe_lab.models.transformers_private import next_inputs

LEFT = 0.75
"""Complete rows leave the batch when at most this share of its rows is still generated: leaving copies the cache."""
ROOM = 64
"""Least number of tokens for which a buffer that is full gets more room."""


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, in buffers with room for further tokens."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.part = slice(0, rows)
        """Rows of the batch whose prompts are read."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys (B, heads, S, D) and values of S new tokens; returns those of all tokens so far.

        The first tokens, the prompts, may come in parts of the batch, until `end_prompts` is called.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            empty = (states[:1, :, :0].expand(self.rows, -1, -1, -1) for states in (key_states, value_states))
            self.buffers = tuple(_grown(buffer, 0, key_states.shape[2] + ROOM) for buffer in empty)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            self.buffers = tuple(_grown(buffer, start, end + max(ROOM, end // 2)) for buffer in self.buffers)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[self.part, :, start:end] = states
        if start == 0:
            return key_states, value_states
        return self._show(end)

    def end_prompts(self, length: int) -> None:
        """All rows have read their prompts of `length` tokens."""
        self.part = slice(0, self.rows)
        self._show(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the rows `beam_idx` of the batch."""
        self.buffers = tuple(buffer[beam_idx] for buffer in self.buffers)
        self.rows = len(beam_idx)
        self.end_prompts(self.get_seq_length())

    def _show(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (buffer[:, :, :end] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values


def _grown(buffer: torch.Tensor, used: int, length: int) -> torch.Tensor:
    """A buffer for `length` tokens that begins with the `used` ones of another."""
    larger = buffer.new_empty(*buffer.shape[:2], length, buffer.shape[3])
    larger[:, :, :used] = buffer[:, :, :used]
    return larger


def everyone(rows: Sequence[int]) -> None:
    """For `greedy`: nothing has to be done when rows leave the batch."""


@torch.inference_mode()
def greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Collection[int],
    padding: int,
    is_complete: Callable[[list[list[int]]], list[bool]],
    before: Callable[[Sequence[int]], None] = everyone,
    prompts_at_once: int | None = None,
) -> list[list[int]]:
    """The new tokens of each of `prompts` (token ids), up to and with its first token of `ends`.

    `padding` is the token to the left of shorter prompts. A text is complete at `max_new_tokens`, at an end token, and
    where `is_complete`, which gets the new tokens of all texts that are not, says so. `before` is called with the
    numbers of the rows that the next forward passes read, in order, whenever these change. Prompts are read
    `prompts_at_once` at a time, where the family keeps keys and values alone: a pass over whole prompts takes much
    memory, and gains nothing from more rows.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[padding] * (longest - len(row)) + list(row) for row in prompts], device=model.device)
    attention = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    texts: list[list[int]] = [[] for _ in prompts]

    def decode(model: Any, input_ids: torch.Tensor, generation_config: Any, **others: Any) -> torch.Tensor:
        """The loop, called by `generate`; `others` are arguments of the model's forward besides those of sampling."""
        inputs = {
            name: value for name, value in others.items() if name not in ("logits_processor", "stopping_criteria")
        }
        rows = list(range(len(texts)))
        open_rows = list(rows)
        output = _read_prompts(model, input_ids, inputs, prompts_at_once or len(rows), before)
        for step in range(max_new_tokens):
            if step:
                prepared = model.prepare_inputs_for_generation(
                    input_ids, next_sequence_length=1, is_first_iteration=False, **inputs
                )
                output = model(**prepared, return_dict=True)
            inputs = next_inputs(model, output, inputs)
            new = output.logits[:, -1].float().argmax(-1)
            input_ids = torch.cat([input_ids, new[:, None]], dim=1)
            tokens = dict(zip(rows, new.tolist(), strict=True))
            for row in open_rows:
                texts[row].append(tokens[row])
            open_rows = _open(open_rows, texts, ends, is_complete)
            if not open_rows:
                break
            if len(open_rows) <= LEFT * len(rows):
                kept = torch.tensor([rows.index(row) for row in open_rows], device=input_ids.device)
                inputs["past_key_values"].reorder_cache(kept)
                input_ids, inputs = input_ids[kept], _of_rows(kept, inputs, len(input_ids))
                rows = list(open_rows)
                before(rows)
        return input_ids

    own = model.generation_config
    # generate() would use the settings of the checkpoint that it is not given, such as a repetition penalty
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(ends),
        pad_token_id=padding,
        use_cache=True,
    )
    try:
        model.generate(input_ids=ids, attention_mask=attention, custom_generate=decode)
    finally:
        model.generation_config = own
    return texts


def _open(
    rows: list[int],
    texts: Sequence[list[int]],
    ends: Collection[int],
    is_complete: Callable[[list[list[int]]], list[bool]],
) -> list[int]:
    """Those of `rows` whose text goes on."""
    rows = [row for row in rows if texts[row][-1] not in ends]
    complete = is_complete([texts[row] for row in rows])
    return [row for row, ended in zip(rows, complete, strict=True) if not ended]


def _read_prompts(
    model: Any, ids: torch.Tensor, inputs: dict[str, Any], size: int, before: Callable[[Sequence[int]], None]
) -> Any:
    """The output of the model for all prompts, of which `size` are read at a time where the cache allows that.

    Plain layers of the cache get buffers; sliding windows and states of other kinds stay as they are.
    """
    cache: Any = inputs.get("past_key_values")
    growing = []
    if type(cache) is DynamicCache:
        cache.layers = [GrowingLayer(len(ids)) if type(layer) is DynamicLayer else layer for layer in cache.layers]
        growing = [layer for layer in cache.layers if type(layer) is GrowingLayer]
    if not growing or len(growing) < len(cache.layers):
        size = len(ids)
    logits = []
    for start in range(0, len(ids), size):
        part = torch.arange(start, min(start + size, len(ids)), device=ids.device)
        before(part.tolist())
        for layer in growing:
            layer.part = slice(start, start + len(part))
        prepared = model.prepare_inputs_for_generation(
            ids[part], is_first_iteration=True, **_of_rows(part, inputs, len(ids))
        )
        output = model(**prepared, return_dict=True)
        logits.append(output.logits[:, -1:])
    for layer in growing:
        layer.end_prompts(ids.shape[1])
    if len(logits) > 1:
        before(range(len(ids)))
    output.logits = torch.cat(logits)
    return output


def _of_rows(rows: torch.Tensor, inputs: dict[str, Any], size: int) -> dict[str, Any]:
    """Arguments of the model for some rows of a batch of `size`; the cache is the same object."""
    return {
        name: value[rows] if isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == size else value
        for name, value in inputs.items()
    }
