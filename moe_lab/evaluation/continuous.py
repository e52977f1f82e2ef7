"""A loaded model that generates by transformers' continuous batching: what has ended makes room for the next at once.

For CUDA. It is asked for by name (backend.continuous), because not every architecture can, and because attention
computes in another order than in batches, which may flip a near tie.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from moe_lab.errors import UserError
from moe_lab.evaluation.generation import GenSpec, cut, fitting
from moe_lab.evaluation.subject import Subject

_LOOK = 1.0


@dataclass(frozen=True)
class ContinuousSubject(Subject):
    """A loaded causal language model whose texts end one by one."""

    sizes: Mapping[str, Any] = field(default_factory=lambda: {"max_memory_percent": 0.5})
    """What keys, values and one forward pass may take: fields of transformers' ContinuousBatchingConfig."""

    def stream(self, prompts: Sequence[str], spec: GenSpec) -> Iterator[tuple[int, str]]:
        """(index, text) of each prompt as it is done, `spec.batch_size` in one forward pass.

        UserError where transformers cannot do it with this model.
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
                if index not in left:  # a text that was cut may still grow a little
                    continue
                if ended or self._stopped(tokens, spec.stop):
                    left.remove(index)
                    if not ended:
                        manager.cancel_request(str(index))
                    yield index, cut(self._decode(encoded[index], tokens, self._end_tokens()), spec.stop)

    @contextmanager
    def _manager(self, spec: GenSpec) -> Iterator[Any]:
        """What runs the model in a thread of its own until the context ends; greedy, and with the attention it has."""
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
            raise _cannot(error) from None
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()

    def _stopped(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the last of these generated tokens completed a stop text; a token adds at least one byte."""
        window = max(len(text.encode()) for text in stop) + 1
        text = self.tokenizer.decode(tokens[-window:], clean_up_tokenization_spaces=False)
        return any(each in text for each in stop)


def _next(manager: Any) -> tuple[int, list[int], bool]:
    """(prompt, its tokens so far, whether that is all) of whatever comes next."""
    while (result := manager.get_result(timeout=_LOOK)) is None:
        if not manager.is_running():
            raise _cannot(manager.background_thread_status.fatal_error)
        time.sleep(0)
    if result.error is not None:
        raise _cannot(result.error)
    return int(result.request_id), result.generated_tokens, result.is_finished()


def _cannot(error: object) -> UserError:
    said = " ".join(str(error).split())
    return UserError(
        f"transformers' continuous batching fails with this model ({said}): expected backend.continuous=false"
    )
