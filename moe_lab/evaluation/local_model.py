"""Text generation by a loaded model: in batches, or with the continuous batching of transformers.

Every harness generates text with it, so that a prompt gets the same text everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from moe_lab.errors import UserError
from moe_lab.evaluation.generation import Generator, GenSpec, cut, fitting

LOGITS = 1 << 30
"""Largest size in bytes of the logits of one forward pass, unless a single row has more."""
_CONTEXT_TOKENS = 4  # prompt tokens decoded together with the first new ones: some tokenizers drop a leading space


@dataclass(frozen=True)
class LocalModel(Generator):
    """A loaded causal language model, possibly under a mask, with its tokenizer."""

    model: Any
    """A transformers causal language model in eval mode."""
    tokenizer: Any
    """Its tokenizer."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its chat template besides the messages."""

    @property
    def max_length(self) -> int | None:
        """Tokens the model can read, prompt and answer together; None when its configuration does not say."""
        length: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length

    def stream(self, prompts: Sequence[str], spec: GenSpec) -> Iterator[tuple[int, str]]:
        """(index, text) of each prompt, batch after batch: padded on the left, the longest prompts first."""
        if not prompts:
            return
        lengths = [len(ids) for ids in self._encoded(prompts, spec).input_ids]
        order = fitting(lengths, spec, self.max_length)
        for start in range(0, len(order), spec.batch_size):
            chosen = order[start : start + spec.batch_size]
            yield from zip(chosen, self._batch([prompts[index] for index in chosen], spec), strict=True)

    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        """The loss on each answer after its prompt in bits per byte: -log2 p(answer | prompt) / bytes of the answer.

        It is None where there is no answer or no prompt, or where both together are longer than the model can read or
        than `spec.max_length`. As in lm-eval, white space at the end of a prompt counts as part of the answer, and the
        answer's tokens are those after the first n of prompt and answer together, n being the tokens of the prompt.
        """
        losses: list[float | None] = [None] * len(prompts)
        numbers = [number for number, answer in enumerate(answers) if answer]
        if not numbers:
            return losses
        heads = [prompts[number].rstrip() for number in numbers]
        texts = [f"{prompts[number]}{answers[number]}" for number in numbers]
        starts = dict(zip(numbers, map(len, self._encoded(heads, spec).input_ids), strict=True))
        rows = dict(zip(numbers, self._encoded(texts, spec).input_ids, strict=True))
        size = {n: len(text.encode()) - len(head.encode()) for n, text, head in zip(numbers, texts, heads, strict=True)}
        limits = [length for length in (self.max_length, spec.max_length) if length is not None]
        readable = {n: row for n, row in rows.items() if 0 < starts[n] < len(row) <= min(limits, default=len(row))}
        for batch in self._batches(readable, spec):
            likelihoods = self._likelihoods([rows[n] for n in batch], [starts[n] for n in batch])
            for number, likelihood in zip(batch, likelihoods, strict=True):
                losses[number] = -likelihood / math.log(2) / size[number]
        return losses

    def _batches(self, ids: Mapping[int, list[int]], spec: GenSpec) -> Iterator[list[int]]:
        """Keys of `ids` in batches, the longest first, each with no more logits than `LOGITS`."""
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        order = sorted(ids, key=lambda number: (-len(ids[number]), number))
        while order:
            most = LOGITS // (4 * vocabulary * len(ids[order[0]]))
            size = max(1, min(spec.batch_size, most))
            yield order[:size]
            order = order[size:]

    @torch.inference_mode()
    def _likelihoods(self, rows: list[list[int]], starts: list[int]) -> list[float]:
        """The summed log-likelihood, in nats, of each row's tokens from index `starts` on. Pads rows on the right."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in rows], device=self.model.device)
        attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=ids.device)
        logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        sums = []
        for row, start, of_row in zip(rows, starts, logits, strict=True):
            scores = of_row[start - 1 : len(row) - 1].float().log_softmax(-1).double()
            targets = torch.tensor(row[start:], device=ids.device)
            sums.append(float(scores.gather(1, targets[:, None]).sum()))
        return sums

    def _encoded(self, prompts: Sequence[str], spec: GenSpec, **form: Any) -> Any:
        return self.tokenizer(list(prompts), add_special_tokens=spec.special_tokens, **form)

    def _end_tokens(self) -> list[int]:
        configured = self.model.generation_config.eos_token_id
        several = configured if isinstance(configured, list) else [configured]
        return sorted({token for token in (*several, self.tokenizer.eos_token_id) if token is not None})

    @torch.inference_mode()
    def _batch(self, prompts: list[str], spec: GenSpec) -> list[str]:
        encoded = self._encoded(prompts, spec, return_tensors="pt", padding=True, padding_side="left")
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
            cut(self._decode(before, after, ends), spec.stop)
            for before, after in zip(prompt.tolist(), new, strict=True)
        ]

    def _decode(self, before: list[int], after: list[int], ends: list[int]) -> str:
        """The text of the new tokens `after`, up to the first end token, as it continues the prompt tokens `before`."""
        length = next((index for index, token in enumerate(after) if token in ends), len(after))
        tail = before[-_CONTEXT_TOKENS:]
        prefix, whole = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (tail, tail + after[:length])
        )
        return str(whole[len(prefix) :])


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
        encoded: list[list[int]] = self._encoded(prompts, spec).input_ids
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
                    yield index, cut(self._decode(encoded[index], tokens, self._end_tokens()), spec.stop)

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
