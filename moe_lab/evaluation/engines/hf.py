"""The loaded model as an engine.

The loop of generation is moe_lab's own, for two reasons. Rows whose text is complete leave the
batch. A right answer, whose likelihood is requested anyway, is read with its prompt, which saves a
step for each token with which both the answer and the text begin.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from moe_lab.config import Sampling
from moe_lab.evaluation.engines import (
    Engine,
    GeneratedText,
    Prompt,
    Row,
    check_finite,
    generated_text,
    sampling_defaults,
)
from moe_lab.evaluation.engines.likelihoods import (
    Compare,
    Prediction,
    has_full_attention,
    likelihoods,
    log_likelihoods,
)
from moe_lab.evaluation.items import Likelihood
from moe_lab.models.config_json import eos_tokens
from moe_lab.models.load import PASS_TOKENS, max_logit_tokens
from moe_lab.models.transformers_private import CACHE, next_inputs

SHRINK = 0.75
"""Complete rows leave the batch once at most this share of its rows is incomplete. The cache
is copied each time rows leave."""

Inputs = dict[str, Any]
"""Keyword arguments of a forward pass."""


@dataclass(eq=False)
class LoadedModel(Engine):
    """A loaded causal language model with its tokenizer."""

    model: Any
    """A transformers causal language model in eval mode."""
    tokenizer: Any
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    compare: Compare | None = None
    """Compares the logits of rows with those of the unpruned model."""

    def __post_init__(self) -> None:
        self.max_length = getattr(
            self.model.config.get_text_config(), "max_position_embeddings", None
        )
        self.sampling_defaults = sampling_defaults(self.model.generation_config.to_dict())
        self.end_token_ids = eos_tokens(self.model.generation_config.eos_token_id, self.tokenizer)

    def generate(self, prompts: Sequence[Prompt], batch_size: int) -> list[GeneratedText]:
        """Implement `Engine.generate`. All prompts are one batch."""
        padding = (
            self.tokenizer.pad_token_id
            if self.tokenizer.pad_token_id is not None
            else self.end_token_ids[0]
        )
        batch = Batch(prompts, frozenset(self.end_token_ids), padding, self.tokenizer)
        return [
            replace(
                generated_text(self.tokenizer, text.tokens, prompt.generation, self.end_token_ids),
                likelihood=text.likelihood,
            )
            for prompt, text in zip(prompts, generate_tokens(self.model, batch), strict=True)
        ]

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """Implement `Engine.score`."""
        return log_likelihoods(self.model, rows, batch_size, self.compare)


def _readable_answer(prompt: Prompt) -> Row | None:
    """The row of the prompt's right answer, if this row begins with the tokens of the prompt. Some
    rows do not, because one token contains both the end of the prompt and the beginning of the
    answer."""
    row = prompt.answer
    length = len(prompt.tokens)
    # with `row.start > length`, there would be unscored tokens between the prompt and the answer
    return row if row and row.start <= length and row.tokens[:length] == prompt.tokens else None


# Generation.


@dataclass
class NewTokens:
    """The new tokens after a prompt, and the likelihood of its right answer if that was read."""

    tokens: list[int]
    likelihood: Likelihood | None = None


@dataclass(frozen=True)
class Batch:
    """Prompts whose texts are generated together."""

    prompts: Sequence[Prompt]
    end_token_ids: frozenset[int]
    """Tokens at which a text is complete."""
    padding: int
    """The token to the left of shorter prompts."""
    tokenizer: Any = None
    """The tokenizer by which stop texts are found."""

    @cached_property
    def answers(self) -> list[Row | None]:
        """The row of the right answer to each prompt: the tokens of the prompt, then of the answer;
        None if the answer cannot be read with the prompt."""
        return [_readable_answer(prompt) for prompt in self.prompts]

    @property
    def without_answers(self) -> Batch:
        """The same prompts without right answers."""
        return replace(self, prompts=[replace(prompt, answer=None) for prompt in self.prompts])

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self.prompts)

    @cached_property
    def starts(self) -> list[int]:
        """Position of the first token of each prompt. All prompts end at the same position."""
        return [self.longest - len(prompt.tokens) for prompt in self.prompts]

    @cached_property
    def first_position(self) -> int:
        """Position from which logits are needed: they predict the token at the next position."""
        # The first scored token of an answer may be inside the prompt, because white space at the
        # end of a prompt counts as part of the answer.
        rows = zip(self.starts, self.answers, strict=True)
        return min([self.longest, *(start + row.start for start, row in rows if row)]) - 1

    def next_tokens(
        self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, list[float]]:
        """The next token for each row of `logits` (n, V), and the largest logit of each row. NaN
        counts as the largest logit, so that `check_finite` finds it. `rows`, `positions`: for each
        row of `logits`, the index of its prompt and the number of tokens of its text."""
        tokens = logits.float().argmax(-1)
        largest_logits = logits.gather(-1, tokens[:, None])[:, 0].tolist()
        indices_of: dict[Sampling, list[int]] = {}  # rows of `logits` by their sampling settings
        for index, row in enumerate(rows):
            sampling = self.prompts[row].generation.sampling
            if sampling.temperature:
                indices_of.setdefault(sampling, []).append(index)
        for sampling, indices in indices_of.items():
            # of the row and the position alone, so that a text does not depend on its batch
            seeds = [f"{self.prompts[rows[index]].seed} {positions[index]}" for index in indices]
            numbers = torch.tensor([Random(seed).random() for seed in seeds], dtype=torch.float64)
            selected = torch.tensor(indices, device=logits.device)
            tokens[selected] = drawn_tokens(logits[selected], numbers, **sampling.distribution)
        return tokens, largest_logits

    def incomplete_rows(
        self, rows: Sequence[int], texts: Sequence[NewTokens], new_token_count: int
    ) -> list[int]:
        """Those of the `rows` whose text is incomplete. `rows`: indices in `texts`.
        `new_token_count`: number of tokens of each text that earlier calls have not searched."""
        unended_rows = [
            row
            for row in rows
            if len(texts[row].tokens) < self.prompts[row].generation.max_tokens
            and not self.end_token_ids & set(texts[row].tokens[-new_token_count:])
        ]
        searched_rows = [row for row in unended_rows if self.prompts[row].generation.stop]
        if not searched_rows:
            return unended_rows
        # a stop text may begin before the new tokens
        last_tokens = [
            texts[row].tokens[-self.prompts[row].generation.longest_stop - new_token_count :]
            for row in searched_rows
        ]
        endings = self.tokenizer.batch_decode(last_tokens, clean_up_tokenization_spaces=False)
        stopped_rows = {
            row
            for row, ending in zip(searched_rows, endings, strict=True)
            if any(text in ending for text in self.prompts[row].generation.stop)
        }
        return [row for row in unended_rows if row not in stopped_rows]


@torch.inference_mode()
def generate_tokens(model: Any, batch: Batch) -> list[NewTokens]:
    """The new tokens after each prompt. If an answer was read with its prompt, tokens may follow an
    end token."""
    # replaces the checkpoint's settings, such as a penalty
    settings = GenerationConfig(
        max_new_tokens=max(prompt.generation.max_tokens for prompt in batch.prompts),
        do_sample=False,
        eos_token_id=sorted(batch.end_token_ids),
        pad_token_id=batch.padding,
        use_cache=True,
    )
    # transformers warns of tokens that are hidden at the end, as of answers of unequal lengths
    ids, attention = _padded_inputs(batch.without_answers, model.device)
    texts: list[NewTokens] = []
    with patch.object(model, "generation_config", settings):
        model.generate(
            input_ids=ids,
            attention_mask=attention,
            custom_generate=partial(_generate, batch=batch, texts=texts),
        )
    return texts


def _padded_inputs(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both (B, S) on `device`, of the prompts with their right
    answers."""
    # the tokens of an answer's row begin with the prompt
    rows = [
        answer.tokens if answer else prompt.tokens
        for prompt, answer in zip(batch.prompts, batch.answers, strict=True)
    ]
    width = max(start + len(row) for start, row in zip(batch.starts, rows, strict=True))
    ids = torch.full((len(rows), width), batch.padding)
    attention = torch.zeros_like(ids)
    for number, (start, row) in enumerate(zip(batch.starts, rows, strict=True)):
        ids[number, start : start + len(row)] = torch.tensor(row)
        attention[number, start : start + len(row)] = 1
    return ids.to(device), attention.to(device)


def _generate(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    *,
    batch: Batch,
    texts: list[NewTokens],
    **arguments: Any,
) -> torch.Tensor:
    """Generate token by token, and append a text to `texts` for each prompt of `batch`.
    transformers' `generate` calls this function and expects token ids in return."""
    # without the objects for sampling, `arguments` are arguments of the model's forward pass
    inputs = {
        name: value
        for name, value in arguments.items()
        if name not in ("logits_processor", "stopping_criteria")
    }
    output, input_ids, inputs = _read_parts(model, input_ids, inputs, batch, texts)
    # Both lists have indices in `texts`. `rows` are the rows that are still in the batch.
    rows = incomplete_rows = list(range(len(texts)))
    new_tokens = torch.tensor([text.tokens[-1] for text in texts], device=input_ids.device)
    new_token_count = max(len(text.tokens) for text in texts)  # at first, all tokens are new
    while True:
        inputs = next_inputs(model, output, inputs)
        input_ids = torch.cat([input_ids, new_tokens[:, None]], dim=1)
        incomplete_rows = batch.incomplete_rows(incomplete_rows, texts, new_token_count)
        if not incomplete_rows:
            return input_ids
        if len(incomplete_rows) <= SHRINK * len(rows):
            # indices in the batch
            indices = torch.tensor(
                [rows.index(row) for row in incomplete_rows], device=input_ids.device
            )
            inputs[CACHE].reorder_cache(indices)
            # select the same rows of each tensor that has a row for each text
            inputs = {
                name: value[indices]
                if torch.is_tensor(value) and value.dim() > 1 and len(value) == len(rows)
                else value
                for name, value in inputs.items()
            }
            input_ids = input_ids[indices]
            rows = incomplete_rows
        model_inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, is_first_iteration=False, **inputs
        )
        output = model(**model_inputs, return_dict=True)
        positions = [len(texts[row].tokens) for row in rows]
        new_tokens, logits = batch.next_tokens(output.logits[:, -1], rows, positions)
        for row, token, logit in zip(rows, new_tokens.tolist(), logits, strict=True):
            # rows of complete texts may still be in the batch
            if row in incomplete_rows:
                check_finite(logit, "logit")
                texts[row].tokens.append(token)
        new_token_count = 1


def _read_parts(
    model: Any, ids: torch.Tensor, inputs: Inputs, batch: Batch, texts: list[NewTokens]
) -> tuple[Any, torch.Tensor, Inputs]:
    """Do as `_read`, with right answers if they can be removed from the cache. If the batch then
    has more than PASS_TOKENS tokens, it is read in several passes. Each pass reads prompts of
    similar lengths, which need little padding, and takes little memory. A pass that would give too
    many logits reads no answers."""
    token_inputs = [
        name for name, value in inputs.items() if getattr(value, "shape", None) == ids.shape
    ]
    if not _has_plain_inputs(model, inputs, token_inputs):
        return _read(model, ids, inputs, batch.without_answers, texts)
    padded_ids, _ = _padded_inputs(batch, ids.device)
    parts = math.ceil(padded_ids.numel() / PASS_TOKENS)
    results = []
    rows = math.ceil(len(ids) / parts)
    for start in range(0, len(ids), rows):
        part = replace(batch, prompts=batch.prompts[start : start + rows])
        part_ids, attention = _padded_inputs(part, ids.device)
        if attention[:, part.first_position :].numel() > max_logit_tokens(model):
            part = part.without_answers
            part_ids, attention = part_ids[:, : part.longest], attention[:, : part.longest]
        part_inputs = {**inputs, **_masking(attention)}
        part_inputs[CACHE] = deepcopy(inputs[CACHE])  # an empty cache
        part_texts: list[NewTokens] = []
        results.append(_read(model, part_ids, part_inputs, part, part_texts))
        texts += part_texts
    outputs, all_ids, all_inputs = zip(*results, strict=True)
    output, *_ = outputs
    for number, layer in enumerate(output[CACHE].layers):
        states = [part[CACHE].layers[number] for part in outputs]
        layer.keys = _joined([state.keys for state in states], dim=-2)
        layer.values = _joined([state.values for state in states], dim=-2)
    attention = _joined([part["attention_mask"] for part in all_inputs])
    inputs = {**all_inputs[0], **_masking(attention)}
    return output, _joined(all_ids, padding=batch.padding), inputs


def _joined(tensors: Sequence[torch.Tensor], dim: int = -1, padding: int = 0) -> torch.Tensor:
    """The rows of all `tensors`, with `padding` before the shorter ones in dimension `dim`."""
    width = max(tensor.shape[dim] for tensor in tensors)
    later_dims = [0, 0] * (-1 - dim)  # `pad` takes numbers of entries from the last dimension on
    return torch.cat(
        [
            pad(tensor, [*later_dims, width - tensor.shape[dim], 0], value=padding)
            for tensor in tensors
        ]
    )


def _masking(attention: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of a forward pass that follow from an attention mask (B, S)."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # ordered: integers
    return {"attention_mask": attention, "position_ids": positions}


def _read(
    model: Any, ids: torch.Tensor, inputs: Inputs, batch: Batch, texts: list[NewTokens]
) -> tuple[Any, torch.Tensor, Inputs]:
    """Read the prompts with their right answers, and append the beginning of each text to `texts`.
    `ids`: token ids of the prompts and answers. `inputs`: the other arguments of the forward pass.

    Returns the model's output, and `ids` and `inputs` cut to the positions that are in the cache.
    The cache then has the prompts, and each text without its last token.
    """
    logit_count = ids.shape[1] - batch.first_position  # of each row
    has_answers = any(batch.answers)
    if has_answers:
        inputs = {**inputs, "logits_to_keep": logit_count}
    model_inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **inputs)
    output = model(**model_inputs, return_dict=True)
    # the models compute at least these logits
    logits = output.logits[:, -logit_count:]
    scored: dict[int, Prediction] = {}  # index of a row -> its answer
    for row, answer in enumerate(batch.answers):
        texts.append(_beginning(batch, row, logits[row]))
        if answer:
            # index of the logits that predict the first scored token
            start = row * logit_count + batch.starts[row] + answer.start - 1 - batch.first_position
            targets = answer.tokens[answer.start :]
            scored[row] = Prediction(range(start, start + len(targets)), targets)
    if has_answers:
        results = likelihoods(logits.flatten(0, 1), [*scored.values()])
        for row, result in zip(scored, results, strict=True):
            texts[row].likelihood = result
        ids, inputs = _remove_answers(output[CACHE], ids, inputs, batch, texts)
    return output, ids, inputs


def _has_plain_inputs(model: Any, inputs: Inputs, token_inputs: Collection[str]) -> bool:
    """Whether right answers that are read with the prompts can be removed from the cache.
    `inputs`: arguments of the forward pass. `token_inputs`: names of the `inputs` with one value
    per token."""
    cache = inputs.get(CACHE)
    has_plain_cache = (
        type(cache) is DynamicCache
        and bool(cache.layers)
        and {type(layer) for layer in cache.layers} == {DynamicLayer}
    )
    # `_remove_answers` replaces only the attention mask and the position ids
    takes_arguments = (
        set(token_inputs) - {"attention_mask"} == {"position_ids"} and "logits_to_keep" in inputs
    )
    return has_plain_cache and takes_arguments and has_full_attention(model)


def _beginning(batch: Batch, row: int, logits: torch.Tensor) -> NewTokens:
    """The beginning of the text in a row of the batch: the tokens of the right answer up to the
    first token that the model would not choose, and then the model's choice. `logits` (n, V): those
    from batch.first_position on."""
    prompt = batch.prompts[row]
    answer = batch.answers[row]
    tokens = answer.tokens[len(prompt.tokens) :] if answer else ()
    positions = range(len(tokens) + 1)  # in the text
    start = batch.longest - 1 - batch.first_position
    next_tokens, largest_logits = batch.next_tokens(
        logits[start : start + len(positions)], [row] * len(positions), positions
    )
    choices = next_tokens.tolist()
    count = 0  # tokens that the text has in common with the answer
    # minus 1, because the model's choice is one more token
    most = min(len(tokens), prompt.generation.max_tokens - 1)
    while count < most and choices[count] == tokens[count]:
        count += 1
    for logit in largest_logits[: count + 1]:
        check_finite(logit, "logit")
    return NewTokens(choices[: count + 1])


def _remove_answers(
    cache: DynamicCache,
    ids: torch.Tensor,
    inputs: Inputs,
    batch: Batch,
    texts: Sequence[NewTokens],
) -> tuple[torch.Tensor, Inputs]:
    """Remove the answer tokens that differ from the generated `texts`. Positions after the longest
    text are removed from the cache. The attention mask hides the other answer tokens. Returns `ids`
    and `inputs` for the remaining positions."""
    # minus 1, as the model has chosen the last token of a text, but has not read it
    ends = [batch.longest + len(text.tokens) - 1 for text in texts]
    width = max(ends)
    if width < ids.shape[1]:
        # the argument is negative: this many positions are removed from the end
        cache.crop(width - ids.shape[1])
    indices = torch.arange(width, device=ids.device)
    bounds = torch.tensor([batch.starts, ends], device=ids.device)
    start, end = bounds[:, :, None]
    attention = ((indices >= start) & (indices < end)).long()
    return ids[:, :width], inputs | _masking(attention)


def drawn_tokens(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
) -> torch.Tensor:
    """A random token for each row of `logits` (n, V). `numbers` (n,): random numbers in [0, 1).
    The other arguments are those of `Sampling`.

    As in vLLM, the temperature comes first, then min_p, top_k and top_p.
    """
    count = min(top_k or logits.shape[-1], logits.shape[-1])
    values, tokens = logits.topk(count)
    probabilities = (values.double() / temperature).softmax(-1)
    probabilities = probabilities * (probabilities >= min_p * probabilities[:, :1])
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    cumulative = probabilities.cumsum(-1)  # ordered: within a row
    # tokens before which the sum is smaller than top_p
    probabilities = probabilities * (cumulative - probabilities < top_p)
    cumulative = probabilities.cumsum(-1)  # ordered: within a row
    thresholds = numbers.to(logits.device)[:, None] * cumulative[:, -1:]
    indices = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=count - 1)
    return tokens.gather(-1, indices)[:, 0]
