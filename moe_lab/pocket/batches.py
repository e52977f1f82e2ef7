"""Documents packed into rows of tokens for training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_lab.pocket.examples import Example

PROMPT_WEIGHT = 0.25


def encode(tokenizer: Any, example: Example) -> tuple[list[int], list[float]]:
    """Tokens of the document with its end, and how much each counts in the loss: prompts less, they are mostly chance."""
    prompt: list[int] = tokenizer.encode(example.prompt) if example.prompt else []
    answer: list[int] = tokenizer.encode(example.answer) + [tokenizer.eos_token_id]
    return prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer)


def pack_row(documents: Iterator[Example], tokenizer: Any, length: int) -> tuple[list[int], list[float]]:
    """A row that starts with a document and is filled with further ones; what does not fit is dropped."""
    tokens: list[int] = []
    weights: list[float] = []
    while len(tokens) < length:
        more, counts = encode(tokenizer, next(documents))
        tokens += more
        weights += counts
    return tokens[:length], weights[:length]


def batch(documents: Iterator[Example], tokenizer: Any, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, length) int64 and loss weights (rows, length) float32."""
    packed = [pack_row(documents, tokenizer, length) for _ in range(rows)]
    return torch.tensor([tokens for tokens, _ in packed]), torch.tensor([weights for _, weights in packed])
