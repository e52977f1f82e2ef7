"""Documents packed into rows of tokens for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tools.pocket.examples import Example


@dataclass(frozen=True)
class LossWeights:
    """What a token counts in the loss: one of a prompt, one of an answer of a word or two; those of others count 1.

    Prompts are mostly chance, and a short answer is all there is to learn from the document it ends.
    """

    prompt: float
    short_answer: float


SHORT_ANSWER = 2


@dataclass(frozen=True)
class Batch:
    """Tokens (rows, length) int64, loss weights float32, and each token's place in its document int64."""

    tokens: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


def encode(tokenizer: Any, example: Example, count: LossWeights) -> tuple[list[int], list[float]]:
    """Tokens of the document with its end, and the weight of each in the loss."""
    tokens: list[int] = []
    weights: list[float] = []
    for prompt, answer in example.turns:
        asked = tokenizer.encode(prompt) if prompt else []
        answered = tokenizer.encode(answer)
        weight = count.short_answer if len(answered) <= SHORT_ANSWER else 1.0
        tokens += asked + answered
        weights += [count.prompt] * len(asked) + [weight] * len(answered)
    return [*tokens, tokenizer.eos_token_id], [*weights, 1.0]


Row = tuple[list[int], list[float], list[int]]


def pack_row(documents: Iterator[Example], tokenizer: Any, count: LossWeights, length: int) -> Row:
    """A row that starts with a document and is filled with further ones; what does not fit is dropped."""
    tokens: list[int] = []
    weights: list[float] = []
    positions: list[int] = []
    while len(tokens) < length:
        more, their_weights = encode(tokenizer, next(documents), count)
        tokens += more
        weights += their_weights
        positions += range(len(more))
    return tokens[:length], weights[:length], positions[:length]


def batch(documents: Iterator[Example], tokenizer: Any, count: LossWeights, rows: int, length: int) -> Batch:
    """The next rows of the stream."""
    packed = zip(*(pack_row(documents, tokenizer, count, length) for _ in range(rows)), strict=True)
    return Batch(*(torch.tensor(column) for column in packed))
