"""The loaded model as an engine.

The loop of generation is moe_lab's own, so that rows whose text is complete leave the batch, and
long prompts are read in several passes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
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
from moe_lab.evaluation.engines.likelihoods import Compare, has_full_attention, log_likelihoods
from moe_lab.evaluation.items import Likelihood
from moe_lab.models.config_json import eos_tokens
from moe_lab.models.load import PASS_TOKENS
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
            generated_text(self.tokenizer, text, prompt.generation, self.end_token_ids)
            for prompt, text in zip(prompts, generate_tokens(self.model, batch), strict=True)
        ]

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """Implement `Engine.score`."""
        return log_likelihoods(self.model, rows, batch_size, self.compare)


# Generation.


Texts = list[list[int]]
"""The new tokens after each prompt."""


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

    def incomplete_rows(self, rows: Sequence[int], texts: Texts) -> list[int]:
        """Those of the `rows` whose text is incomplete, also after its last token. `rows`: indices
        in `texts`."""
        unended_rows = [
            row
            for row in rows
            if len(texts[row]) < self.prompts[row].generation.max_tokens
            and texts[row][-1] not in self.end_token_ids
        ]
        searched_rows = [row for row in unended_rows if self.prompts[row].generation.stop]
        if not searched_rows:
            return unended_rows
        # a stop text may begin before the last token
        last_tokens = [
            texts[row][-self.prompts[row].generation.longest_stop - 1 :] for row in searched_rows
        ]
        endings = self.tokenizer.batch_decode(last_tokens, clean_up_tokenization_spaces=False)
        stopped_rows = {
            row
            for row, ending in zip(searched_rows, endings, strict=True)
            if any(text in ending for text in self.prompts[row].generation.stop)
        }
        return [row for row in unended_rows if row not in stopped_rows]


@torch.inference_mode()
def generate_tokens(model: Any, batch: Batch) -> Texts:
    """The new tokens after each prompt."""
    # replaces the checkpoint's settings, such as a penalty
    settings = GenerationConfig(
        max_new_tokens=max(prompt.generation.max_tokens for prompt in batch.prompts),
        do_sample=False,
        eos_token_id=sorted(batch.end_token_ids),
        pad_token_id=batch.padding,
        use_cache=True,
    )
    ids, attention = _padded_inputs(batch.prompts, batch.padding, model.device)
    texts: Texts = [[] for _ in batch.prompts]
    with patch.object(model, "generation_config", settings):
        model.generate(
            input_ids=ids,
            attention_mask=attention,
            custom_generate=partial(_generate, batch=batch, texts=texts),
        )
    return texts


def _padded_inputs(
    prompts: Sequence[Prompt], padding: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both (B, S) on `device`, of the prompts, which all end at the
    same position."""
    width = max(len(prompt.tokens) for prompt in prompts)
    ids = torch.full((len(prompts), width), padding)
    attention = torch.zeros_like(ids)
    for number, prompt in enumerate(prompts):
        ids[number, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        attention[number, width - len(prompt.tokens) :] = 1
    return ids.to(device), attention.to(device)


def _generate(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    *,
    batch: Batch,
    texts: Texts,
    **arguments: Any,
) -> torch.Tensor:
    """Generate token by token, and append the tokens to `texts`, which has an empty list for each
    prompt of `batch`. transformers' `generate` calls this function and expects token ids in
    return."""
    # without the objects for sampling, `arguments` are arguments of the model's forward pass
    inputs = {
        name: value
        for name, value in arguments.items()
        if name not in ("logits_processor", "stopping_criteria")
    }
    output, logits = _read(model, input_ids, inputs, batch)
    # Both lists have indices in `texts`. `rows` are the rows that are still in the batch.
    rows = incomplete_rows = list(range(len(texts)))
    while True:
        positions = [len(texts[row]) for row in rows]
        new_tokens, largest_logits = batch.next_tokens(logits, rows, positions)
        for row, token, logit in zip(rows, new_tokens.tolist(), largest_logits, strict=True):
            # rows of complete texts may still be in the batch
            if row in incomplete_rows:
                check_finite(logit, "logit")
                texts[row].append(token)
        inputs = next_inputs(model, output, inputs)
        input_ids = torch.cat([input_ids, new_tokens[:, None]], dim=1)
        incomplete_rows = batch.incomplete_rows(incomplete_rows, texts)
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
        logits = output.logits[:, -1]


def _read(model: Any, ids: torch.Tensor, inputs: Inputs, batch: Batch) -> tuple[Any, torch.Tensor]:
    """Read the prompts. Returns the model's output, whose cache has all prompts, and the logits
    (B, V) of the first new tokens. `ids`: token ids (B, S) of the prompts. `inputs`: the other
    arguments of the forward pass.

    A batch of more than PASS_TOKENS tokens is read in several passes if their caches can be joined.
    Each pass reads prompts of similar lengths, which need little padding, and takes little memory.
    """
    token_inputs = [
        name for name, value in inputs.items() if getattr(value, "shape", None) == ids.shape
    ]
    parts = math.ceil(ids.numel() / PASS_TOKENS) if _can_join(model, inputs, token_inputs) else 1
    outputs = []
    rows = math.ceil(len(ids) / parts)
    for start in range(0, len(ids), rows):
        part_ids, part_inputs = ids, inputs
        if parts > 1:
            prompts = batch.prompts[start : start + rows]
            part_ids, attention = _padded_inputs(prompts, batch.padding, ids.device)
            # the mask and the positions are the inputs with a value for each token
            positions = (attention.cumsum(1) - 1).clamp(min=0)  # ordered: integers
            part_inputs = {**inputs, "attention_mask": attention, "position_ids": positions}
            part_inputs[CACHE] = deepcopy(inputs[CACHE])  # an empty cache
        model_inputs = model.prepare_inputs_for_generation(
            part_ids, is_first_iteration=True, **part_inputs
        )
        outputs.append(model(**model_inputs, return_dict=True))
    output, *others = outputs
    if others:
        for number, layer in enumerate(output[CACHE].layers):
            states = [part[CACHE].layers[number] for part in outputs]
            layer.keys = _joined([state.keys for state in states])
            layer.values = _joined([state.values for state in states])
    return output, torch.cat([part.logits[:, -1] for part in outputs])


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all `tensors` (B, H, S, D), with zeros before the shorter ones in dimension S."""
    width = max(tensor.shape[-2] for tensor in tensors)
    # `pad` takes numbers of entries from the last dimension on
    return torch.cat([pad(tensor, [0, 0, width - tensor.shape[-2], 0]) for tensor in tensors])


def _can_join(model: Any, inputs: Inputs, token_inputs: Collection[str]) -> bool:
    """Whether the caches of several passes over prompts can be joined. `inputs`: arguments of the
    forward pass. `token_inputs`: names of the `inputs` with one value per token."""
    cache = inputs.get(CACHE)
    has_plain_cache = (
        type(cache) is DynamicCache
        and bool(cache.layers)
        and {type(layer) for layer in cache.layers} == {DynamicLayer}
    )
    # `_read` makes only the attention mask and the position ids for each pass
    takes_plain_inputs = set(token_inputs) - {"attention_mask"} == {"position_ids"}
    return has_plain_cache and takes_plain_inputs and has_full_attention(model)


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
