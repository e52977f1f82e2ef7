"""Likelihoods of rows of tokens by a loaded model. Answers to the same question share the pass over
the question.

An attention mask lets the tokens of an answer see only the question and the same answer, and their
positions continue those of the question. So each answer gets the likelihood that it has alone, up
to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from moe_lab import progress
from moe_lab.evaluation.engines import Row, Tokens
from moe_lab.evaluation.items import Likelihood
from moe_lab.models.experts import to_device
from moe_lab.models.load import max_logit_tokens
from moe_lab.models.transformers_private import attention_implementation

TRIAL = ((5, 7, 11, 13), ((17, 3), (19, 23, 29)))
"""Token ids of a question and of two answers."""
TOLERANCE = 1e-4
"""Largest difference of logits in the trial, as a share of the largest logit, in fp32."""
HALF_TOLERANCE = 0.05
"""The same share for half precision."""
LOGITS = 1 << 26
"""Most logits that are normalised at once: 256 MB in fp32."""


Compare = Callable[[Row, torch.Tensor], tuple[float, int]]
"""Function of a row and of the logits (N, V) that predict its N scored tokens. It returns
`Likelihood.divergence` and `Likelihood.disagreements`."""


@dataclass
class _Question:
    """A question and one or more answers to it. In a row, the tokens before index `Row.start` are
    the question, and the other tokens are an answer."""

    tokens: Tokens
    answers: dict[Tokens, list[Row]] = field(default_factory=dict)
    """Tokens of an answer without the last token, which is not read -> rows with this answer."""

    def __len__(self) -> int:
        """Number of tokens that are read: the question and all answers."""
        return len(self.tokens) + sum(map(len, self.answers))


@torch.inference_mode()
def log_likelihoods(
    model: Any, rows: Sequence[Row], batch_size: int, compare: Compare | None = None
) -> list[Likelihood]:
    """The likelihood of each row. `batch_size`: most questions in a forward pass."""
    questions = _questions(rows, can_share=bool(rows) and _can_share(model))
    most_tokens = min(
        batch_size * max((len(row.tokens) for row in rows), default=0), max_logit_tokens(model)
    )
    results: dict[Row, Likelihood] = {}
    while questions:
        # at least one question, even if it has more tokens than allowed
        size = max(1, min(batch_size, most_tokens // len(questions[0])))
        batch = questions[:size]
        questions = questions[size:]
        logits, starts = _logits(model, batch)
        scored: dict[Row, Prediction] = {}
        for question, start in zip(batch, starts, strict=True):
            # logits[start] predict the first token of every answer; the next predict the later
            # tokens of the first answer, then of the second, and so on
            end = start + 1
            for answer, answer_rows in question.answers.items():
                positions = [start, *range(end, end + len(answer))]
                end += len(answer)
                for row in answer_rows:
                    scored[row] = Prediction(positions, row.tokens[row.start :])
        results |= zip(scored, likelihoods(logits, [*scored.values()]), strict=True)
        if compare:
            for row, prediction in scored.items():
                divergence, disagreements = compare(row, logits[list(prediction.positions)])
                results[row] = replace(
                    results[row], divergence=divergence, disagreements=disagreements
                )
        progress.add(sum(len(rows) for question in batch for rows in question.answers.values()))
    return [results[row] for row in rows]


def _questions(rows: Sequence[Row], *, can_share: bool) -> list[_Question]:
    """The rows, grouped by question and answer, the longest `_Question` first.

    If `can_share` is true, a `_Question` can have several answers, which together have at most as
    many tokens as the question. This limit bounds the memory of the attention mask. It also
    separates the windows of a long document, because they share a question of at most one token.
    """
    # tokens of a question -> tokens of an answer without the last token -> rows
    answers_by_question: dict[Tokens, dict[Tokens, list[Row]]] = {}
    for row in rows:
        answers = answers_by_question.setdefault(row.tokens[: row.start], {})
        answers.setdefault(row.tokens[row.start : -1], []).append(row)
    questions: list[_Question] = []
    for tokens, answers in answers_by_question.items():
        question = _Question(tokens)
        for answer, answer_rows in answers.items():
            # `len(question)` counts the question and its answers so far
            fits = can_share and len(question) + len(answer) <= 2 * len(tokens)
            if question.answers and not fits:
                questions.append(question)
                question = _Question(tokens)
            question.answers[answer] = answer_rows
        questions.append(question)
    return sorted(questions, key=len, reverse=True)


def _logits(model: Any, questions: Sequence[_Question]) -> tuple[torch.Tensor, list[int]]:
    """(logits (R, V), index of the first row of each question). This row predicts the token after
    the question. For each token of `question.answers`, in their order, a further row predicts the
    token after it."""
    longest = max(map(len, questions))
    ids = torch.zeros(len(questions), longest, dtype=torch.int64)
    for row, question in enumerate(questions):
        tokens = [*question.tokens, *(token for answer in question.answers for token in answer)]
        # pad on the right with the last token; earlier tokens do not see the padding
        ids[row] = torch.tensor(tokens + tokens[-1:] * (longest - len(tokens)))
    inputs: dict[str, torch.Tensor] = {"input_ids": ids}
    if all(len(question.answers) == 1 for question in questions):
        lengths = torch.tensor([len(question) for question in questions])
        inputs["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    else:
        inputs |= _separate_answers(questions, longest, model)
    inputs = {name: to_device(value, model.device) for name, value in inputs.items()}
    options = {}
    if "logits_to_keep" in _arguments(model):
        shortest_question = min(len(question.tokens) for question in questions)
        options["logits_to_keep"] = longest - shortest_question + 1
    logits: torch.Tensor = model(**inputs, **options, use_cache=False).logits
    count = logits.shape[1]  # `longest` if the model computes all logits
    starts = [
        # the last token of a question
        row * count + len(question.tokens) - 1 - (longest - count)
        for row, question in enumerate(questions)
    ]
    return logits.flatten(0, 1), starts


def _separate_answers(
    questions: Sequence[_Question], longest: int, model: Any
) -> dict[str, torch.Tensor]:
    """Arguments of the forward pass: position ids (B, S), and an attention mask (B, 1, S, S) that
    is added to the attention scores. The mask hides the answers to a question from each other.
    `longest`: S."""
    # (positions, for each token: 0 in the question, 1 in the first answer, 2 in the second, ...)
    rows = []
    for question in questions:
        length = len(question.tokens)
        positions = [*range(length)]
        answer_of = [0] * length
        for number, answer in enumerate(question.answers, start=1):
            positions += range(length, length + len(answer))
            answer_of += [number] * len(answer)
        padding = longest - len(positions)
        rows.append((positions + [0] * padding, answer_of + [-1] * padding))
    position_ids, answers = to_device(torch.tensor(rows), model.device).unbind(1)
    # (B, S, S): a token sees the earlier tokens of its own answer and of the question
    visible = (answers[:, None, :] == answers[:, :, None]) | (answers[:, None, :] == 0)
    visible.tril_()
    lowest = torch.finfo(model.dtype).min
    mask = visible.new_full(visible.shape, lowest, dtype=model.dtype).masked_fill_(visible, 0)
    return {"position_ids": position_ids, "attention_mask": mask[:, None]}


class Prediction(NamedTuple):
    """A text that logits predict."""

    positions: Sequence[int]
    """Rows of the logits (R, V)."""
    targets: Sequence[int]
    """The token ids that these rows predict."""


def likelihoods(logits: torch.Tensor, predictions: Sequence[Prediction]) -> list[Likelihood]:
    """The likelihood of each prediction by `logits` (R, V). The device waits once."""
    positions = [position for prediction in predictions for position in prediction.positions]
    targets = [target for prediction in predictions for target in prediction.targets]
    pairs = to_device(torch.tensor([positions, targets]), logits.device)
    results = []
    for rows, ids in pairs.split(max(1, LOGITS // logits.shape[1]), 1):
        scores = logits[rows].log_softmax(-1, dtype=torch.float32)
        nats = scores.gather(1, ids[:, None])[:, 0]
        results.append(torch.stack([nats, (scores.argmax(-1) == ids).float()]))
    lengths = [len(prediction.targets) for prediction in predictions]
    return [
        Likelihood(float(nats.sum()), len(nats), bool(right.all()))
        for nats, right in torch.cat(results, 1).cpu().double().split(lengths, 1)
    ]


def _can_share(model: Any) -> bool:
    """Whether the model can read several answers after one question."""
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
    """Whether, by the model's config, each token attends to all earlier tokens in every layer."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return set(layer_types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def _arguments(model: Any) -> Collection[str]:
    """Names of the arguments of the model's forward pass."""
    return inspect.signature(type(model).forward).parameters


def _trial_agrees(model: Any) -> bool:
    """Whether one pass that reads both answers of `TRIAL` gives the same logits, up to rounding, as
    one pass for each answer."""
    tokens, answers = TRIAL
    # the answers have no rows ([]), because only logits are compared
    question = _Question(tokens, {answer: [] for answer in answers})
    logits, [start] = _logits(model, [question])
    for answer in answers:
        reference, [first] = _logits(model, [_Question(tokens, {answer: []})])
        # the row before those of the answers comes after the question
        reference = reference[first + 1 : first + 1 + len(answer)].float()
        answer_logits = logits[start + 1 : start + 1 + len(answer)].float()
        start += len(answer)
        tolerance = TOLERANCE if model.dtype.itemsize >= 4 else HALF_TOLERANCE
        # `not <=` instead of `>`: NaN is also a difference
        if not float((answer_logits - reference).abs().max()) <= tolerance * float(
            reference.abs().max()
        ):
            return False
    return True
