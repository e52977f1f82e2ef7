"""Text generation by a loaded model, in batches.

Every harness generates text with it, so that a prompt gets the same text everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moe_lab.evaluation.generation import (
    AnswerRow,
    GenSpec,
    LanguageModel,
    Likelihood,
    continuation,
    cut,
    fitting,
)
from moe_lab.evaluation.greedy import greedy
from moe_lab.evaluation.likelihoods import log_likelihoods


@dataclass(frozen=True)
class LocalModel(LanguageModel):
    """A loaded causal language model, possibly under a mask, with its tokenizer."""

    model: Any
    """A transformers causal language model in eval mode."""
    tokenizer: Any
    """Its tokenizer."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its chat template besides the messages."""

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def max_length(self) -> int | None:
        """Tokens the model can read, prompt and answer together; None when its configuration does not say."""
        length: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return length

    def complete(
        self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> Iterator[tuple[int, str, Likelihood | None]]:
        """As `Generator.complete`, batch after batch: padded on the left, the longest prompts first."""
        encoded = self.encoded(prompts, spec) if prompts else []
        order = fitting([len(ids) for ids in encoded], spec, self.max_length)
        for start in range(0, len(order), spec.batch_size):
            batch = order[start : start + spec.batch_size]
            done = self._batch([encoded[index] for index in batch], [rows[index] for index in batch], spec)
            for index, (text, likelihood) in zip(batch, done, strict=True):
                yield index, cut(text, spec.stop, prompts[index], chat=spec.chat), likelihood

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int
    ) -> list[Likelihood]:
        """As `LanguageModel.log_likelihoods`, in batches of similar length."""
        return log_likelihoods(self.model, rows, starts, batch_size)

    def _end_tokens(self) -> list[int]:
        configured = self.model.generation_config.eos_token_id
        several = configured if isinstance(configured, list) else [configured]
        return sorted({token for token in (*several, self.tokenizer.eos_token_id) if token is not None})

    def _batch(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> list[tuple[str, Likelihood | None]]:
        """The text after each of `prompts` (token ids), and the likelihood of its answer if that was read with it.

        Texts may go on after a stop text.
        """
        ends = self._end_tokens()
        padding = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else ends[0]
        answers = [
            row if row and row.start <= len(prompt) and row.tokens[: len(prompt)] == tuple(prompt) else None
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        is_complete = partial(self._has_stop, self.early_stop(spec))
        produced = greedy(self.model, prompts, spec.max_new_tokens, ends, padding, is_complete, answers)
        return [
            (continuation(self.tokenizer, prompt, text.tokens, ends), text.likelihood)
            for prompt, text in zip(prompts, produced, strict=True)
        ]

    def _has_stop(self, stop: Sequence[str], texts: list[list[int]], new: int) -> list[bool]:
        """Whether the last `new` tokens of each text (new token ids) complete one of the stop texts."""
        if not stop or not texts:
            return [False] * len(texts)
        window = _window(stop) + new
        recent = [ids[-window:] for ids in texts]
        ends = self.tokenizer.batch_decode(recent, clean_up_tokenization_spaces=False)
        return [any(text in end for text in stop) for end in ends]


def _window(stop: Sequence[str]) -> int:
    """Number of tokens before the last that contain any stop text it completes: every token adds at least a byte."""
    return max(len(text.encode()) for text in stop)
