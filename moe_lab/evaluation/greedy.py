"""Greedy generation for a batch of prompts whose texts end at different times.

transformers prepares the inputs of each step, as a family needs them. The loop is ours, for three reasons: keys and
values are written into a buffer with room for more tokens, where transformers copies all of them in each step; rows
whose text is complete leave the batch; and a right answer, whose likelihood is asked for anyway, is read with its
prompt, so that the text needs no steps as far as it is that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from moe_lab.evaluation.generation import AnswerRow, Likelihood, check_finite
from moe_lab.evaluation.likelihoods import has_full_attention, likelihood
from moe_lab.models.device import tokens_with_logits
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
        if start:
            return self._show(end)
        if self.part == slice(0, self.rows):
            self._show(end)
        return key_states, value_states

    def end_prompts(self, length: int) -> None:
        """All parts have read their prompts, `length` tokens."""
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


@dataclass
class Text:
    """The new tokens after a prompt, and the likelihood of the right answer to it if that was read."""

    tokens: list[int]
    likelihood: Likelihood | None = None


@torch.inference_mode()
def greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Collection[int],
    padding: int,
    is_complete: Callable[[list[list[int]], int], list[bool]],
    answers: Sequence[AnswerRow | None] = (),
) -> list[Text]:
    """The text after each of `prompts` (token ids), up to and with its first token of `ends`.

    `padding` is the token to the left of shorter prompts. A text is complete at `max_new_tokens`, at an end token, and
    where `is_complete` says so, which gets the new tokens of all others, and how many of them are new to it at most.

    Where the family keeps keys and values alone, each of `answers`, whose rows begin with their prompts, is read with
    its prompt.
    """
    answers = answers or [None] * len(prompts)
    texts: list[Text] = []

    def decode(model: Any, input_ids: torch.Tensor, generation_config: Any, **others: Any) -> torch.Tensor:
        """The loop, called by `generate`; `others` are arguments of the model's forward besides those of sampling."""
        inputs = {
            name: value for name, value in others.items() if name not in ("logits_processor", "stopping_criteria")
        }
        reading = _Reading(model, input_ids, inputs, prompts, answers, max_new_tokens)
        output = reading.read()
        texts.extend(reading.texts)
        input_ids, inputs = reading.ids, reading.inputs
        rows = open_rows = list(range(len(texts)))
        new = torch.tensor([text.tokens[-1] for text in texts], device=input_ids.device)
        unseen = max(len(text.tokens) for text in texts)
        while True:
            inputs = next_inputs(model, output, inputs)
            input_ids = torch.cat([input_ids, new[:, None]], dim=1)
            going_on = [
                row
                for row in open_rows
                if len(texts[row].tokens) < max_new_tokens and not set(ends) & set(texts[row].tokens[-unseen:])
            ]
            complete = is_complete([texts[row].tokens for row in going_on], unseen)
            open_rows = [row for row, ended in zip(going_on, complete, strict=True) if not ended]
            if not open_rows:
                return input_ids
            if len(open_rows) <= LEFT * len(rows):
                kept = torch.tensor([rows.index(row) for row in open_rows], device=input_ids.device)
                inputs["past_key_values"].reorder_cache(kept)
                input_ids, inputs = input_ids[kept], _of_rows(kept, inputs, len(input_ids))
                rows = open_rows
            prepared = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=1, is_first_iteration=False, **inputs
            )
            output = model(**prepared, return_dict=True)
            new, largest = _likeliest(output.logits[:, -1])
            choices = dict(zip(rows, zip(new.tolist(), largest, strict=True), strict=True))
            for row in open_rows:  # what follows a complete text is of no use, whatever its logits
                token, logit = choices[row]
                check_finite(logit, "logit")
                texts[row].tokens.append(token)
            unseen = 1

    own = model.generation_config
    # generate() would use the settings of the checkpoint that it is not given, such as a repetition penalty
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(ends),
        pad_token_id=padding,
        use_cache=True,
    )
    ids, attention = (table.to(model.device) for table in _padded(prompts, answers, padding))
    try:
        model.generate(input_ids=ids, attention_mask=attention, custom_generate=decode)
    finally:
        model.generation_config = own
    for text in texts:
        length = next((place for place, token in enumerate(text.tokens, start=1) if token in ends), len(text.tokens))
        del text.tokens[length:]
    return texts


def _padded(
    prompts: Sequence[Sequence[int]], answers: Sequence[AnswerRow | None], padding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask (B, L + A): prompts padded on the left to L tokens, then answers."""
    longest = max(map(len, prompts))
    left = [longest - len(prompt) for prompt in prompts]
    rows = [answer.tokens if answer else prompt for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.full((len(rows), max(pad + len(row) for pad, row in zip(left, rows, strict=True))), padding)
    attention = torch.zeros_like(ids)
    for number, (pad, row) in enumerate(zip(left, rows, strict=True)):
        ids[number, pad : pad + len(row)] = torch.tensor(row)
        attention[number, pad : pad + len(row)] = 1
    return ids, attention


class _Reading:
    """A batch of prompts, with right answers after them where tokens can be forgotten again.

    `ids` (B, S) are the tokens to be read, and after `read` those that are kept: the prompts, and the texts without
    their last tokens. `inputs` are the model's arguments for them.
    """

    def __init__(
        self,
        model: Any,
        ids: torch.Tensor,
        inputs: dict[str, Any],
        prompts: Sequence[Sequence[int]],
        answers: Sequence[AnswerRow | None],
        max_new_tokens: int,
    ) -> None:
        self.model, self.prompts, self.max_new_tokens = model, prompts, max_new_tokens
        self.longest = max(map(len, prompts))
        self.layers = _growing_layers(inputs.get("past_key_values"), len(ids))
        """Layers of the cache, if all of them are buffers of keys and values."""
        by_token = {name: value for name, value in inputs.items() if getattr(value, "shape", None) == ids.shape}
        told_apart = by_token.keys() - {"attention_mask"} == {"position_ids"} and "logits_to_keep" in inputs
        if not (self.layers and told_apart and has_full_attention(model)):
            answers = [None] * len(prompts)
        width = ids.shape[1] if any(answers) else self.longest
        self.answers = answers
        self.ids, self.inputs = ids[:, :width], inputs | {name: value[:, :width] for name, value in by_token.items()}
        # white space at the end of a prompt counts as part of its answer
        spaces = [len(prompt) - answer.start for prompt, answer in zip(prompts, answers, strict=True) if answer]
        self.logits = width - (self.longest - 1 - max(spaces, default=0))
        """Number of the last tokens after which logits are needed."""
        self.texts: list[Text] = []
        """How the texts begin, after `read`."""

    def read(self) -> Any:
        """Read the rows, with answers as few at a time as their logits need. Returns the last output of the model."""
        size = count = len(self.ids)
        inputs = dict(self.inputs)
        if any(self.answers):
            inputs["logits_to_keep"] = self.logits
            size = max(1, tokens_with_logits(self.model) // self.logits)
        for start in range(0, count, size):
            part = torch.arange(start, min(start + size, count), device=self.ids.device)
            for layer in self.layers:
                layer.part = slice(start, start + len(part))
            prepared = self.model.prepare_inputs_for_generation(
                self.ids[part], is_first_iteration=True, **_of_rows(part, inputs, count)
            )
            output = self.model(**prepared, return_dict=True)
            rows = zip(part.tolist(), output.logits[:, -self.logits :], strict=True)
            self.texts += [self._beginning(row, logits) for row, logits in rows]
        if any(self.answers):
            self._forget()
        else:
            for layer in self.layers:
                layer.end_prompts(self.longest)
        return output

    def _beginning(self, row: int, logits: torch.Tensor) -> Text:
        """How a text begins: as its right answer does, if that is what the model would choose, and the next choice."""
        prompt, answer = self.prompts[row], self.answers[row]
        end = self.logits - (self.ids.shape[1] - self.longest)  # the logits at end - 1 come after the prompt
        tokens = answer.tokens[len(prompt) :] if answer else ()
        likeliest, largest = _likeliest(logits[end - 1 : end + len(tokens)])
        choices = likeliest.tolist()
        same = 0
        while same < min(len(tokens), self.max_new_tokens - 1) and choices[same] == tokens[same]:
            same += 1
        for logit in largest[: same + 1]:
            check_finite(logit, "logit")
        if answer is None:
            return Text(choices)
        predicting = logits[end - 1 - (len(prompt) - answer.start) : end - 1 + len(tokens)]
        return Text(choices[: same + 1], likelihood(answer.tokens[answer.start :], predicting))

    def _forget(self) -> None:
        """Forget of the answers what the texts do not begin with: it is masked, or dropped where no text has it."""
        ends = [self.longest + len(text.tokens) - 1 for text in self.texts]
        width = max(ends)
        for layer in self.layers:
            layer.end_prompts(width)
        self.ids = self.ids[:, :width]
        places = torch.arange(width, device=self.ids.device)
        starts = [self.longest - len(prompt) for prompt in self.prompts]
        first, end = (torch.tensor(columns, device=self.ids.device)[:, None] for columns in (starts, ends))
        attention = ((places >= first) & (places < end)).long()
        self.inputs |= {"attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """The likeliest tokens (n) by logits (n, V), and their logits. A logit that is NaN counts as the largest."""
    tokens = logits.float().argmax(-1)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0].tolist()


def _growing_layers(cache: Any, rows: int) -> list[GrowingLayer]:
    """The layers of a cache for so many rows, [] if some are sliding windows or states of other kinds.

    Plain layers of the cache are replaced by buffers in any case.
    """
    if type(cache) is not DynamicCache:
        return []
    cache.layers = [GrowingLayer(rows) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    layers = [layer for layer in cache.layers if type(layer) is GrowingLayer]
    return layers if len(layers) == len(cache.layers) else []


def _of_rows(rows: torch.Tensor, inputs: dict[str, Any], size: int) -> dict[str, Any]:
    """Arguments of the model for some rows of a batch of `size`; the cache is the same object."""
    return {
        name: value[rows] if isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == size else value
        for name, value in inputs.items()
    }
