"""The loaded model as an engine: every benchmark's texts and likelihoods come from it in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moe_lab.evaluation.engines import (
    Engine,
    Likelihood,
    Prompt,
    Row,
    Writing,
    Written,
    continuation,
    how_ended,
    with_tokenizers,
)
from moe_lab.evaluation.engines.greedy import greedy
from moe_lab.evaluation.engines.likelihoods import log_likelihoods


@dataclass(frozen=True)
class LoadedModel(Engine):
    """A loaded causal language model, possibly under a mask, with its tokenizer."""

    model: Any
    """A transformers causal language model in eval mode."""
    tokenizer: Any
    """Its tokenizer."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its chat template besides the messages."""

    @property
    def max_length(self) -> int | None:
        length: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a text."""
        return with_tokenizers(self.model.generation_config.eos_token_id, self.tokenizer)

    def generate(self, prompts: Sequence[Prompt], writing: Writing) -> list[Written]:
        """As `Engine.generate`, in one batch, padded on the left."""
        ends = self.end_tokens
        padding = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else ends[0]
        is_complete = partial(_has_stop, self.tokenizer, writing.stop)
        tokens = [prompt.tokens for prompt in prompts]
        answers = [_after(prompt) for prompt in prompts]
        texts = greedy(self.model, tokens, writing.most, ends, padding, is_complete, answers)
        return [
            Written(
                continuation(self.tokenizer, prompt, text.tokens, ends),
                how_ended(text.tokens, writing.most, ends),
                text.likelihood,
            )
            for prompt, text in zip(tokens, texts, strict=True)
        ]

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """As `Engine.score`, in batches of similar length."""
        return log_likelihoods(self.model, rows, batch_size)


def _after(prompt: Prompt) -> Row | None:
    """The prompt's answer, if its tokens begin with those of the prompt: where the two join, others may arise."""
    row, length = prompt.answer, len(prompt.tokens)
    return row if row and row.start <= length and row.tokens[:length] == prompt.tokens else None


def _has_stop(tokenizer: Any, stop: Sequence[str], texts: list[list[int]], new: int) -> list[bool]:
    """Whether the last `new` tokens of each text (new token ids) complete one of the stop texts."""
    if not stop or not texts:
        return [False] * len(texts)
    # every token adds at least a byte
    window = max(len(text.encode()) for text in stop) + new
    ends = tokenizer.batch_decode([ids[-window:] for ids in texts], clean_up_tokenization_spaces=False)
    return [any(text in end for text in stop) for end in ends]
