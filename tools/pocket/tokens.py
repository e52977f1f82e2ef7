"""The pocket tokenizer, whose pieces never cross a line end or join two digits, and rows of tokens
for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.pocket.examples import END_OF_TEXT, Example

PADDING = "<|pad|>"
VOCABULARY_SIZE = 1024


def build_tokenizer(texts: Iterable[str], size: int = VOCABULARY_SIZE) -> Any:
    """A tokenizer of `size` entries trained on the texts.

    A line end is always a token of its own, so a prompt cut there tokenizes as it does inside a
    longer text; the same holds before a word, because a word takes the space in front of it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


@dataclass(frozen=True)
class LossWeights:
    """Weights of tokens in the loss: of prompts, and of answers of at most SHORT_ANSWER tokens.
    Tokens of longer answers have weight 1.

    Prompts are mostly random, and a short answer is all that a model can learn from its document.
    """

    prompt: float
    short_answer: float


SHORT_ANSWER = 2


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, all (rows, length): tokens (int64), their weights in the loss (float32), and
    their positions in their documents (int64)."""

    tokens: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


def encode(tokenizer: Any, example: Example, count: LossWeights) -> tuple[list[int], list[float]]:
    """(tokens of the document with the end-of-text token, weight of each token in the loss)."""
    tokens: list[int] = []
    weights: list[float] = []
    for prompt, answer in example.turns:
        prompt_tokens = tokenizer.encode(prompt) if prompt else []
        answer_tokens = tokenizer.encode(answer)
        weight = count.short_answer if len(answer_tokens) <= SHORT_ANSWER else 1.0
        tokens += prompt_tokens + answer_tokens
        weights += [count.prompt] * len(prompt_tokens) + [weight] * len(answer_tokens)
    return [*tokens, tokenizer.eos_token_id], [*weights, 1.0]


Row = tuple[list[int], list[float], list[int]]
"""Tokens of a row, their weights in the loss, and their positions in their documents."""


def pack_row(documents: Iterator[Example], tokenizer: Any, count: LossWeights, length: int) -> Row:
    """A row of `length` tokens: the next documents of the stream, the last one cut off."""
    tokens: list[int] = []
    weights: list[float] = []
    positions: list[int] = []
    while len(tokens) < length:
        document_tokens, document_weights = encode(tokenizer, next(documents), count)
        tokens += document_tokens
        weights += document_weights
        positions += range(len(document_tokens))
    return tokens[:length], weights[:length], positions[:length]


def batch(
    documents: Iterator[Example], tokenizer: Any, count: LossWeights, rows: int, length: int
) -> Batch:
    """The next rows of the stream."""
    packed = zip(*(pack_row(documents, tokenizer, count, length) for _ in range(rows)), strict=True)
    return Batch(*(torch.tensor(column) for column in packed))
