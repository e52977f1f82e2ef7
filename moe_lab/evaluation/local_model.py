"""Text generation by a loaded model: in batches, or with the continuous batching of transformers.

Every harness generates text with it, so that a prompt gets the same text everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from moe_lab.errors import UserError
from moe_lab.evaluation.generation import (
    AnswerRow,
    GenSpec,
    LanguageModel,
    Likelihood,
    check_finite,
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


_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ContinuousModel(LocalModel):
    """A loaded causal language model with continuous batching."""

    sizes: Mapping[str, Any] = field(default_factory=lambda: {"max_memory_percent": 0.5})
    """Memory limits: fields of transformers' ContinuousBatchingConfig."""

    def complete(
        self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> Iterator[tuple[int, str, None]]:
        """(index, text, None) of each prompt as soon as it is done; up to `spec.batch_size` share a forward pass.

        Raises UserError where transformers does not support this model.
        """
        if not prompts:
            return
        encoded: list[list[int]] = self.encoded(prompts, spec)
        order = fitting([len(ids) for ids in encoded], spec, self.max_length)
        stops = self.early_stop(spec)
        with self._manager(spec) as manager:
            for index in order:
                manager.add_request(encoded[index], request_id=str(index), streaming=bool(stops))
            left = set(order)
            while left:
                index, tokens, ended = _next(manager)
                if index not in left:  # a text that was cut at a stop text may still get tokens
                    continue
                if not ended:
                    tail = tokens[-1 - _window(stops) :]
                    recent = self.tokenizer.decode(tail, clean_up_tokenization_spaces=False)
                if ended or any(stop in recent for stop in stops):
                    left.remove(index)
                    if not ended:
                        manager.cancel_request(str(index))
                    text = continuation(self.tokenizer, encoded[index], tokens, self._end_tokens())
                    yield index, cut(text, spec.stop, prompts[index], chat=spec.chat), None

    @contextmanager
    def _manager(self, spec: GenSpec) -> Iterator[Any]:
        """A manager that runs the model greedily, in a thread, until the context ends."""
        ends = self._end_tokens()
        settings = GenerationConfig(
            max_new_tokens=spec.max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
        )
        form = ContinuousBatchingConfig(
            max_requests_per_batch=spec.batch_size,
            auto_switch_to_flash=False,
            use_cuda_graph=False,  # which experts are computed changes from pass to pass
            return_logprobs=True,  # which say whether logits are finite
            **self.sizes,
        )
        try:
            manager = self.model.init_continuous_batching(generation_config=settings, continuous_batching_config=form)
        except ValueError as error:
            raise _unsupported(error) from None
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()


def _next(manager: Any) -> tuple[int, list[int], bool]:
    """(index of a prompt, its new tokens so far, whether it is finished) of the next result."""
    while (result := manager.get_result(timeout=_POLL_SECONDS)) is None:
        if not manager.is_running():
            raise _unsupported(manager.background_thread_status.fatal_error)
        time.sleep(0)
    if result.error is not None:
        raise _unsupported(result.error)
    for log_likelihood in result.logprobs:
        check_finite(log_likelihood, "log-likelihood")
    return int(result.request_id), result.generated_tokens, result.is_finished()


def _unsupported(error: object) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(
        f"transformers' continuous batching fails with this model ({reason}): expected backend.continuous=false"
    )
