"""Calibration batches of tasks with solutions, in which the tokens of answers are marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from moe_lab.calibration.batches import Packed
from moe_lab.calibration.documents import BLANK_LINE, Chat, Document, Tools, from_template, plain, written
from moe_lab.calibration.sources import read_answered
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError

AnswerBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""ids (B, S) int64, valid (B, S) bool as in a calibration batch, answers (B, S) bool: the tokens of answers."""


def answer_batches(settings: CalibrationConfig, tokenizer: Any, *, header: bool = False) -> list[AnswerBatch]:
    """The batches that `batches(settings, tokenizer)` gives, with the tokens of answers marked.

    An answer is the output, the answer, the completion, or what an assistant says; a token belongs to it if it contains
    one of its characters. `header` also marks what the chat template writes around it (the name of the speaker and the
    end of the turn) or the blank line of a plain pair, as the released code of EvoESAP does. The tokens themselves are
    marked, not the positions that predict them. UserError as for `batches`, and for a set without answers.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "the model's tokenizer does not say which characters a token stands for, so answers cannot be marked: "
            "expected a fast tokenizer (a tokenizer.json)"
        )
    tokenize = partial(marked, tokenizer=tokenizer, header=header)
    batches = list(Packed(settings, tokenizer, read_answered, tokenize).batches())
    if not any(bool(answers.any()) for _, _, answers in batches):
        raise UserError(
            f"calibration.length={settings.length} cuts every answer of {settings.name} away: expected longer rows"
        )
    return batches


def marked(document: Document, special_tokens: bool, *, tokenizer: Any, header: bool) -> tuple[list[int], list[bool]]:
    """Token ids of a document, the same as without marks, and which of them belong to an answer."""
    text, add = written(document, tokenizer, special_tokens)
    encoded = tokenizer(text, add_special_tokens=add, verbose=False, return_offsets_mapping=True)
    spans = list(_spans(document, text, tokenizer, header))
    answers = [
        any(max(first, start) < min(last, end) for start, end in spans) for first, last in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], answers


def _spans(document: Document, text: str, tokenizer: Any, header: bool) -> Iterator[tuple[int, int]]:
    """(start, end) of the characters of each answer in `text`."""
    if isinstance(document, Chat) and tokenizer.chat_template:
        yield from _turns(document, text, tokenizer, header)
    elif (read := plain(document)) and read.answer is not None:
        before = len(BLANK_LINE) if header and isinstance(document, Chat) else 0
        yield read.answer - before, len(text)


def _turns(document: Chat, text: str, tokenizer: Any, header: bool) -> Iterator[tuple[int, int]]:
    """As `_spans`, for a conversation that was rendered with a chat template.

    A turn begins where the rendered messages before it stop being a prefix of `text`. So what a template writes at the
    end of every conversation does no harm.
    """
    turns, tools = document.messages, document.tools
    for number, message in enumerate(turns):
        if message["role"] != "assistant":
            continue
        start = _shared(turns[:number], text, tokenizer, tools)
        if header:
            yield start, len(text) if number + 1 == len(turns) else _shared(turns[: number + 1], text, tokenizer, tools)
        elif "tool_calls" in message:
            raise UserError(
                "calibration.path: the chat template writes the calls of functions, so their tokens cannot be told: "
                "expected a set without tool_calls, or header=true to take the whole turn"
            )
        elif content := message["content"].strip():
            begin = text.find(content, start)
            if begin < 0:
                raise UserError(
                    f"calibration.path: the chat template rewrites the answer {content[:40]!r}, so its tokens cannot "
                    "be told: expected a set of plain answers, or header=true to take the whole turn"
                )
            yield begin, begin + len(content)


def _shared(before: Sequence[Any], text: str, tokenizer: Any, tools: Tools) -> int:
    """Length in characters of the longest common prefix of `text` and the rendered messages `before`."""
    so_far = from_template(before, tools, tokenizer) if before else ""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(so_far, text, strict=False))
    return sum(1 for _ in equal)
