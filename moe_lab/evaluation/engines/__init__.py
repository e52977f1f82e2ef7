"""Engines compute texts and likelihoods, batch by batch: the loaded model (`hf.py`), a process of vLLM (`vllm.py`) or a
server (`server.py`). `answers.py` is what asks them. No torch.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.evaluation.reasoning import special_marks

TOKEN_SECONDS = 1.0
"""Seconds per token that a slow server or engine may take."""
_CONTEXT_TOKENS = 4  # prompt tokens decoded together with the first new ones: some tokenizers drop a leading space

Likelihood = tuple[float, bool]
"""The summed log-likelihood of tokens in nats, and whether each was the likeliest."""


@dataclass(frozen=True)
class Row:
    """Token ids whose likelihood from index `start` on is wanted. The last one is not read."""

    tokens: tuple[int, ...]
    start: int
    """At least 1."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that a text continues."""

    text: str
    tokens: tuple[int, ...]
    answer: Row | None = None
    """A right answer after the prompt. An engine may compute its likelihood with the text, at less cost than alone."""


@dataclass(frozen=True)
class Writing:
    """How texts are written: always greedily, whatever sampling settings and penalties a checkpoint has."""

    most: int
    """Largest number of tokens of a text."""
    stop: tuple[str, ...] = ()
    """Texts at which a text may end; it may also go on, and is cut by the caller. Prompts are not searched for them."""
    chat: bool = False
    """Whether prompts are conversations, which a chat template has written with all special tokens."""
    batch_size: int = 64
    """Prompts in one forward pass, or requests under way at the same time."""


@dataclass(frozen=True)
class Written:
    """The text after a prompt."""

    text: str
    """It has no special tokens but those that mark a thought, and no end token."""
    ended: str = "end"
    """end (by an end token or a stop text) or limit (by `Writing.most`)."""
    likelihood: Likelihood | None = None
    """Of the prompt's answer, if it was computed."""


class Engine(ABC):
    """One model, under the plan that is evaluated."""

    tokenizer: Any
    """The model's tokenizer."""
    template_arguments: Mapping[str, Any]
    """Arguments of its chat template besides the messages."""
    batches = 1
    """Batch sizes of prompts that are generated in one call."""
    scores = True
    """Whether it computes likelihoods."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Tokens the model can read, prompt and answer together; None when its configuration does not say."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], writing: Writing) -> list[Written]:
        """The text after each prompt. Raises FloatingPointError where a chosen token has no finite likelihood."""

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """The likelihood of each row."""
        raise UserError(f"{type(self).__name__} computes no likelihoods: expected backend=hf or backend=vllm")


def continuation(tokenizer: Any, before: Sequence[int], after: Sequence[int], ends: Collection[int]) -> str:
    """The text of the new tokens `after`, up to the first end token, as it continues the prompt tokens `before`.

    It has no special tokens but those that mark a thought.
    """
    length = next((index for index, token in enumerate(after) if token in ends), len(after))
    marks = special_marks(tokenizer)
    tokens, text, start = [*before[-_CONTEXT_TOKENS:], *after[:length]], "", len(before[-_CONTEXT_TOKENS:])
    for place in [*(number for number in range(start, len(tokens)) if tokens[number] in marks), len(tokens)]:
        prefix, whole = (
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (
                tokens[max(0, start - _CONTEXT_TOKENS) : start],
                tokens[max(0, start - _CONTEXT_TOKENS) : place],
            )
        )
        text += whole[len(prefix) :] + marks.get(tokens[place] if place < len(tokens) else -1, "")
        start = place + 1
    return text


def how_ended(tokens: Sequence[int], most: int, ends: Collection[int]) -> str:
    """`Written.ended` of a text of these new tokens."""
    return "limit" if len(tokens) >= most and not set(ends) & set(tokens) else "end"


def end_tokens(checkpoint: Path, tokenizer: Any) -> list[int]:
    """The tokens that end a text: those of the checkpoint's generation settings, and the tokenizer's."""
    for file in ("generation_config.json", "config.json"):
        path = checkpoint / file
        configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if configured is not None:
            break
    return with_tokenizers(configured, tokenizer)


def with_tokenizers(configured: int | list[int] | None, tokenizer: Any) -> list[int]:
    """The configured end tokens and the tokenizer's, in order."""
    several = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*several, tokenizer.eos_token_id) if token is not None})


def check_finite(number: float, name: str) -> None:
    """Raise FloatingPointError for a logit or log-likelihood that is no finite number.

    Such logits still have a largest one, so that they would give a text.
    """
    if not math.isfinite(number):
        raise FloatingPointError(
            f"the {name} of a token is {number}, expected a finite number: the model's weights or precision "
            "make it overflow"
        )
