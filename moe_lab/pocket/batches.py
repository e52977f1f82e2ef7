"""Documents packed into rows of tokens for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab.pocket.examples import Example

# What a token counts in the loss. Prompts are mostly chance; an answer of a word or two is all there is to learn there.
PROMPT_WEIGHT = 0.25
SHORT_ANSWER, SHORT_ANSWER_WEIGHT = 2, 4.0


@dataclass(frozen=True)
class Batch:
    """Tokens (rows, length) int64, loss weights float32, and each token's place in its document int64."""

    tokens: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


def encode(tokenizer: Any, example: Example) -> tuple[list[int], list[float]]:
    """Tokens of the document with its end, and the weight of each in the loss."""
    prompt: list[int] = tokenizer.encode(example.prompt) if example.prompt else []
    answer: list[int] = tokenizer.encode(example.answer)
    weight = SHORT_ANSWER_WEIGHT if len(answer) <= SHORT_ANSWER else 1.0
    weights = [PROMPT_WEIGHT] * len(prompt) + [weight] * len(answer) + [1.0]
    return [*prompt, *answer, tokenizer.eos_token_id], weights


def pack_row(documents: Iterator[Example], tokenizer: Any, length: int) -> tuple[list[int], list[float], list[int]]:
    """A row that starts with a document and is filled with further ones; what does not fit is dropped."""
    tokens: list[int] = []
    weights: list[float] = []
    positions: list[int] = []
    while len(tokens) < length:
        more, counts = encode(tokenizer, next(documents))
        tokens += more
        weights += counts
        positions += range(len(more))
    return tokens[:length], weights[:length], positions[:length]


def batch(documents: Iterator[Example], tokenizer: Any, rows: int, length: int) -> Batch:
    """The next rows of the stream."""
    packed = zip(*(pack_row(documents, tokenizer, length) for _ in range(rows)), strict=True)
    return Batch(*(torch.tensor(column) for column in packed))
