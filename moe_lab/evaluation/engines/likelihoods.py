"""Likelihoods of rows of tokens by a loaded model. Answers to the same question share the pass over
the question.

The question is read once, then its answers one after another. An attention mask lets the tokens of
an answer see only the question and the same answer, and their positions continue those of the
question. So each answer gets the likelihood that it has alone, up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from moe_lab import progress
from moe_lab.evaluation.engines import Likelihood, Row
from moe_lab.models.load import tokens_with_logits
from moe_lab.models.transformers_private import attention_implementation

TRIAL = ((5, 7, 11, 13), ((17, 3), (19, 23, 29)))
"""Token ids of a question and of two answers. `_trial_agrees` reads these answers together."""
TOLERANCE = 1e-4
"""Largest difference of logits in the trial, as a share of the largest logit, in fp32."""
HALF_TOLERANCE = 0.05
"""The same share for half precision."""


@dataclass
class _Question:
    """The tokens that several rows have before their start, and the answers after them."""

    tokens: tuple[int, ...]
    answers: dict[tuple[int, ...], list[Row]] = field(default_factory=dict)
    """Tokens of an answer without its last token, which is not read -> the rows with these tokens
    after the question."""

    def __len__(self) -> int:
        """Number of tokens that are read."""
        return len(self.tokens) + sum(map(len, self.answers))


@torch.inference_mode()
def log_likelihoods(model: Any, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
    """The log-likelihood of each row, in nats, and whether each of its tokens was the likeliest.

    A pass has at most `batch_size` questions, and at most as many tokens as `batch_size` rows of
    the largest length and as `tokens_with_logits` allows. It always has one question.
    """
    questions = _questions(rows, can_share=bool(rows) and _can_share(model))
    most_tokens = min(
        batch_size * max((len(row.tokens) for row in rows), default=0), tokens_with_logits(model)
    )
    likelihoods: dict[Row, Likelihood] = {}
    while questions:
        # at least one question, even if it has more tokens than allowed
        size = max(1, min(batch_size, most_tokens // len(questions[0])))
        batch = questions[:size]
        questions = questions[size:]
        for question, logits in zip(batch, _logits(model, batch), strict=True):
            # logits[0] come after the question and predict the first token of every answer
            end = 1
            for answer, answer_rows in question.answers.items():
                predictions = torch.cat([logits[:1], logits[end : end + len(answer)]])
                end += len(answer)
                for row in answer_rows:
                    likelihoods[row] = likelihood(row.tokens[row.start :], predictions)
                progress.add(len(answer_rows))
    return [likelihoods[row] for row in rows]


def _questions(rows: Sequence[Row], *, can_share: bool) -> list[_Question]:
    """The rows by question, the longest question first. If `can_share` is false, each question has
    one answer, which one or more rows have.

    If `can_share` is true, a question has several answers as long as all its answers together are
    no longer than the question. The remaining answers follow another copy of the question. So the
    answers at most double the tokens that are read for a question, which bounds the memory of the
    attention mask. Windows of a long document have only their first token in common. They are
    longer than this question, so each window is read alone.
    """
    answers_of: dict[tuple[int, ...], dict[tuple[int, ...], list[Row]]] = {}
    for row in rows:
        answers = answers_of.setdefault(row.tokens[: row.start], {})
        answers.setdefault(row.tokens[row.start : -1], []).append(row)
    questions: list[_Question] = []
    for tokens, answers in answers_of.items():
        copy = _Question(tokens)
        for answer, answer_rows in answers.items():
            if copy.answers and not (can_share and len(copy) + len(answer) <= 2 * len(tokens)):
                questions.append(copy)
                copy = _Question(tokens)
            copy.answers[answer] = answer_rows
        questions.append(copy)
    return sorted(questions, key=len, reverse=True)


def _logits(model: Any, questions: Sequence[_Question]) -> list[torch.Tensor]:
    """For each question, logits (n, V): row 0 after the last token of the question, the next rows
    after each token of its answers that is read."""
    longest = max(map(len, questions))
    ids = torch.zeros(len(questions), longest, dtype=torch.int64)
    for row, question in enumerate(questions):
        tokens = [*question.tokens, *(token for answer in question.answers for token in answer)]
        # padded with the last token
        ids[row] = torch.tensor(tokens + tokens[-1:] * (longest - len(tokens)))
    inputs: dict[str, torch.Tensor] = {"input_ids": ids}
    if all(len(question.answers) == 1 for question in questions):
        lengths = torch.tensor([len(question) for question in questions])
        inputs["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    else:
        inputs |= _separate_answers(questions, longest, model.dtype)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    first = min(len(question.tokens) for question in questions) - 1
    options = {"logits_to_keep": longest - first} if "logits_to_keep" in _arguments(model) else {}
    logits: torch.Tensor = model(**inputs, **options, use_cache=False).logits
    first = longest - logits.shape[1]  # 0 if the model computes all logits
    return [
        row_logits[len(question.tokens) - 1 - first : len(question) - first]
        for question, row_logits in zip(questions, logits, strict=True)
    ]


def _separate_answers(
    questions: Sequence[_Question], longest: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The model's arguments for reading several answers after each question: position ids (B, S)
    and an attention mask (B, 1, S, S). The mask is added to attention scores and hides the answers
    to a question from each other. `longest`: S, the width of the batch."""
    positions = torch.zeros(len(questions), longest, dtype=torch.int64)
    # number of the answer of each token: 0 for the question, -1 for padding
    answer_of = torch.full((len(questions), longest), -1)
    for row, question in enumerate(questions):
        end = len(question.tokens)
        positions[row, :end] = torch.arange(end)
        answer_of[row, :end] = 0
        for number, answer in enumerate(question.answers, start=1):
            # every answer is read at the positions after the question
            indices = torch.arange(len(answer))
            positions[row, end : end + len(answer)] = len(question.tokens) + indices
            answer_of[row, end : end + len(answer)] = number
            end += len(answer)
    visible = (answer_of[:, None, :] == answer_of[:, :, None]) | (answer_of[:, None, :] == 0)
    visible &= torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return {"position_ids": positions, "attention_mask": mask[:, None]}


def likelihood(targets: Sequence[int], logits: torch.Tensor) -> Likelihood:
    """The log-likelihood of the tokens `targets` (n) by logits (n, V), in nats, and whether each
    target is the likeliest token."""
    scores = logits.float().log_softmax(-1)
    ids = torch.tensor(targets, device=logits.device)
    nats = float(scores.gather(1, ids[:, None]).double().sum())
    return nats, bool((scores.argmax(-1) == ids).all())


def _can_share(model: Any) -> bool:
    """Whether answers can be read together. This is so if the model takes position ids and a mask,
    every layer has full attention, and `_trial_agrees`. The result is cached for each model."""
    if model not in _sharing_results:
        takes_positions = "position_ids" in _arguments(model)
        takes_mask = attention_implementation(model) in ("sdpa", "eager")
        _sharing_results[model] = (
            takes_positions and takes_mask and has_full_attention(model) and _trial_agrees(model)
        )
    return _sharing_results[model]


_sharing_results: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Results of `_can_share`."""


def has_full_attention(model: Any) -> bool:
    """Whether every token attends to all tokens before it, in every layer, by the model's
    config."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return set(layer_types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def _arguments(model: Any) -> Collection[str]:
    """Names of the arguments of the model's forward pass."""
    return inspect.signature(type(model).forward).parameters


def _trial_agrees(model: Any) -> bool:
    """Whether the answers of `TRIAL` have the same logits when read together as when read alone, up
    to rounding."""
    tokens, answers = TRIAL
    question = _Question(tokens, {answer: [] for answer in answers})
    logits = _logits(model, [question])[0].float()
    start = 1  # logits[0] come after the question
    for answer in answers:
        reference = _logits(model, [_Question(tokens, {answer: []})])[0][1:].float()
        part = logits[start : start + len(answer)]
        start += len(answer)
        tolerance = TOLERANCE if model.dtype.itemsize >= 4 else HALF_TOLERANCE
        if not float((part - reference).abs().max()) <= tolerance * float(reference.abs().max()):
            return False
    return True
