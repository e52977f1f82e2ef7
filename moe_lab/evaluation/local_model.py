"""Text generation by a loaded model: in batches, or with the continuous batching of transformers.

Every harness generates text with it, so that a prompt gets the same text everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from moe_lab.errors import UserError
from moe_lab.evaluation.generation import GenSpec, LanguageModel, continuation, cut, fitting

LOGITS = 1 << 30
"""Largest size in bytes of the logits of one forward pass, unless a single row has more."""


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

    def stream(self, prompts: Sequence[str], spec: GenSpec) -> Iterator[tuple[int, str]]:
        """(index, text) of each prompt, batch after batch: padded on the left, the longest prompts first."""
        if not prompts:
            return
        lengths = [len(ids) for ids in self.encoded(prompts, spec)]
        order = fitting(lengths, spec, self.max_length)
        for start in range(0, len(order), spec.batch_size):
            chosen = order[start : start + spec.batch_size]
            yield from zip(chosen, self._batch([prompts[index] for index in chosen], spec), strict=True)

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int
    ) -> list[tuple[float, bool]]:
        """As `LanguageModel.log_likelihoods`, in batches of similar length, padded on the right."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for batch in self._batches(rows, batch_size):
            results = self._likelihoods([rows[number] for number in batch], [starts[number] for number in batch])
            for number, result in zip(batch, results, strict=True):
                found[number] = result
        return found

    def _batches(self, rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
        """Numbers of rows in batches, the longest first, each with no more logits than `LOGITS`."""
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        order = sorted(range(len(rows)), key=lambda number: (-len(rows[number]), number))
        while order:
            most = LOGITS // (4 * vocabulary * len(rows[order[0]]))
            size = max(1, min(batch_size, most))
            yield order[:size]
            order = order[size:]

    @torch.inference_mode()
    def _likelihoods(self, rows: list[Sequence[int]], starts: list[int]) -> list[tuple[float, bool]]:
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=self.model.device)
        attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=ids.device)
        logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        results = []
        for row, start, of_row in zip(rows, starts, logits, strict=True):
            scores = of_row[start - 1 : len(row) - 1].float().log_softmax(-1)
            targets = torch.tensor(row[start:], device=ids.device)
            total = float(scores.gather(1, targets[:, None]).double().sum())
            results.append((total, bool((scores.argmax(-1) == targets).all())))
        return results

    def _end_tokens(self) -> list[int]:
        configured = self.model.generation_config.eos_token_id
        several = configured if isinstance(configured, list) else [configured]
        return sorted({token for token in (*several, self.tokenizer.eos_token_id) if token is not None})

    @torch.inference_mode()
    def _batch(self, prompts: list[str], spec: GenSpec) -> list[str]:
        encoded = self.tokenizer(
            prompts,
            add_special_tokens=spec.special_tokens,
            return_tensors="pt",
            padding=True,
            padding_side="left",
        )
        prompt = encoded.input_ids.to(self.model.device)
        ends = self._end_tokens()
        padding = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else ends[0]
        stopping = [_StopTexts(self.tokenizer, spec.stop, prompt.shape[1])] if spec.stop else []
        with _greedily(self.model, spec.max_new_tokens, ends, padding):
            produced = self.model.generate(
                input_ids=prompt,
                attention_mask=encoded.attention_mask.to(self.model.device),
                stopping_criteria=StoppingCriteriaList(stopping),
            )
        new = produced[:, prompt.shape[1] :].tolist()
        return [
            cut(continuation(self.tokenizer, before, after, ends), spec.stop)
            for before, after in zip(prompt.tolist(), new, strict=True)
        ]


@contextmanager
def _greedily(model: Any, max_new_tokens: int, ends: list[int], padding: int) -> Iterator[None]:
    """A context in which the model generates greedily.

    The generation settings of the checkpoint are replaced, because generate() would use those that it is not given,
    such as a repetition penalty.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=padding, use_cache=True
    )
    try:
        yield
    finally:
        model.generation_config = own


def _window(stop: Sequence[str]) -> int:
    """Number of last tokens that contain any stop text just completed, as every token adds at least one byte."""
    return max(len(text.encode()) for text in stop) + 1


class _StopTexts(StoppingCriteria):
    """Ends a row once its generated text contains a stop text. The prompt is not searched."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt_length: int) -> None:
        self.tokenizer, self.stop, self.prompt_length = tokenizer, stop, prompt_length
        self.window = _window(stop)
        self.done: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        """(B,) bool: the rows of input_ids (B, T) that are done."""
        recent = input_ids[:, self.prompt_length :][:, -self.window :]
        texts = self.tokenizer.batch_decode(recent, clean_up_tokenization_spaces=False)
        now = torch.tensor([any(stop in text for stop in self.stop) for text in texts], device=input_ids.device)
        self.done = now if self.done is None else self.done | now
        return self.done


_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ContinuousModel(LocalModel):
    """A loaded causal language model with continuous batching."""

    sizes: Mapping[str, Any] = field(default_factory=lambda: {"max_memory_percent": 0.5})
    """Memory limits: fields of transformers' ContinuousBatchingConfig."""

    def stream(self, prompts: Sequence[str], spec: GenSpec) -> Iterator[tuple[int, str]]:
        """(index, text) of each prompt as soon as it is done; up to `spec.batch_size` prompts share a forward pass.

        Raises UserError where transformers does not support this model.
        """
        if not prompts:
            return
        encoded: list[list[int]] = self.encoded(prompts, spec)
        order = fitting([len(ids) for ids in encoded], spec, self.max_length)
        with self._manager(spec) as manager:
            for index in order:
                manager.add_request(encoded[index], request_id=str(index), streaming=bool(spec.stop))
            left = set(order)
            while left:
                index, tokens, ended = _next(manager)
                if index not in left:  # a text that was cut at a stop text may still get tokens
                    continue
                if not ended:
                    recent = self.tokenizer.decode(tokens[-_window(spec.stop) :], clean_up_tokenization_spaces=False)
                if ended or any(stop in recent for stop in spec.stop):
                    left.remove(index)
                    if not ended:
                        manager.cancel_request(str(index))
                    yield (
                        index,
                        cut(continuation(self.tokenizer, encoded[index], tokens, self._end_tokens()), spec.stop),
                    )

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
    return int(result.request_id), result.generated_tokens, result.is_finished()


def _unsupported(error: object) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(
        f"transformers' continuous batching fails with this model ({reason}): expected backend.continuous=false"
    )
