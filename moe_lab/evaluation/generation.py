"""Questions, answers, and settings of generation. No torch."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import Tools, render_whole
from moe_lab.errors import UserError
from moe_lab.evaluation.harness import prompt_hash
from moe_lab.evaluation.reasoning import answer_in, may_think, special_marks
from moe_lab.results import Sample

TOKEN_SECONDS = 1.0
"""Seconds per token that a slow server or engine may take."""
_CONTEXT_TOKENS = 4  # prompt tokens decoded together with the first new ones: some tokenizers drop a leading space

Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""
Likelihood = tuple[float, bool]
"""The summed log-likelihood of tokens in nats, and whether each was the likeliest."""


@dataclass(frozen=True)
class GenSpec:
    """Settings of generation, which is always greedy: the checkpoint's sampling settings and penalties are not used."""

    max_new_tokens: int
    """Largest number of tokens of a text."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends; they are cut off. Only generated text is searched for them, and no thought."""
    batch_size: int = 64
    """Prompts in one forward pass."""
    max_length: int | None = None
    """Largest number of tokens of prompt and text together; None: what the model can read."""
    special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a prompt. False for chats: the template has written them."""
    skip_long: bool = False
    """Generate nothing for a prompt that leaves too little room, instead of raising UserError."""

    @property
    def chat(self) -> bool:
        """Whether prompts are conversations that a chat template has written."""
        return not self.special_tokens


@dataclass(frozen=True)
class AnswerRow:
    """A right answer after its prompt."""

    tokens: tuple[int, ...]
    """Token ids of both."""
    start: int
    """The first token that counts as the answer's."""
    size: int
    """Bytes that count as the answer's."""


class Generator(ABC):
    """Generates texts: a loaded model (`local_model.py`), a server (`served_model.py`) or an engine
    (`engine_model.py`)."""

    tokenizer: Any
    """The model's tokenizer."""
    template_arguments: Mapping[str, Any]
    """Arguments of its chat template besides the messages."""

    def render(self, messages: Messages, tools: Tools = ()) -> str:
        """The prompt for the next message of a conversation, in which the model may call `tools`.

        Raises UserError without a chat template, and for one that ignores the tools or leaves out words.
        """
        if not self.tokenizer.chat_template:
            raise UserError("chat=true, but the model's tokenizer has no chat template: expected an instruction model")
        return render_whole(messages, tools, self._rendered, "the questions come with")

    def _rendered(self, messages: Messages, tools: Tools) -> str:
        with_tools = {"tools": list(tools)} if tools else {}
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **with_tools, **self.template_arguments
        )
        return text

    def early_stop(self, spec: GenSpec) -> tuple[str, ...]:
        """The stop texts that may end a text while it is generated: none where the model may think before its answer.

        What a thought says ends nothing, so texts of such models are cut when they are complete.
        """
        return () if spec.chat and may_think(self.tokenizer) else spec.stop

    def generate(self, prompts: Sequence[str], spec: GenSpec, answers: Sequence[str | None] = ()) -> list[str]:
        """The text that follows each prompt, in order, up to a stop text, an end token or the token limit.

        For `answers` see `stream`. Raises UserError for a prompt that leaves too little room.
        """
        return [text for _, text in sorted(self.stream(prompts, spec, answers))]

    def stream(
        self, prompts: Sequence[str], spec: GenSpec, answers: Sequence[str | None] = ()
    ) -> Iterator[tuple[int, str]]:
        """(index, text) of each prompt as soon as it is done; none for a prompt that `spec.skip_long` leaves out.

        `answers` are right answers. A model that records its results may compute their losses on the way, so that
        `answer_losses` then costs nothing.
        """
        rows = self.answer_rows(prompts, answers, spec) if answers else [None] * len(prompts)
        return ((index, text) for index, text, _ in self.complete(prompts, rows, spec))

    @abstractmethod
    def complete(
        self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> Iterator[tuple[int, str, Likelihood | None]]:
        """(index, text, likelihood of the answer in `rows`) of each prompt as soon as it is done.

        The likelihood is None where the answer is not read with the prompt. Nothing comes for a prompt that
        `spec.skip_long` leaves out.
        """

    def answer_rows(
        self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec
    ) -> Sequence[AnswerRow | None]:
        """Each answer after its prompt, as `answer_losses` reads them; None where it reads nothing."""
        return [None] * len(prompts)

    @abstractmethod
    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        """The loss on each answer after its prompt in bits per byte, None where it is unknown."""


class LanguageModel(Generator):
    """A generator that also gives the likelihoods of texts that are there: a loaded model, or an engine."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """The model's configuration, a transformers config."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Tokens the model can read, prompt and answer together; None when its configuration does not say."""

    @abstractmethod
    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int
    ) -> list[Likelihood]:
        """For each row of token ids, from index `start` >= 1 on: the summed log-likelihood of its tokens, in nats, and
        whether each was the likeliest. The last token of a row is not read."""

    def encoded(self, prompts: Sequence[str], spec: GenSpec) -> list[list[int]]:
        """The token ids of each prompt."""
        ids: list[list[int]] = self.tokenizer(list(prompts), add_special_tokens=spec.special_tokens).input_ids
        return ids

    def answer_rows(
        self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec
    ) -> Sequence[AnswerRow | None]:
        rows: list[AnswerRow | None] = [None] * len(prompts)
        numbers = [number for number, answer in enumerate(answers) if answer]
        if not numbers:
            return rows
        heads = [prompts[number].rstrip() for number in numbers]
        texts = [f"{prompts[number]}{answers[number]}" for number in numbers]
        limits = [length for length in (self.max_length, spec.max_length) if length is not None]
        encoded = zip(self.encoded(texts, spec), map(len, self.encoded(heads, spec)), strict=True)
        for number, head, text, (tokens, start) in zip(numbers, heads, texts, encoded, strict=True):
            if 0 < start < len(tokens) <= min(limits, default=len(tokens)):
                rows[number] = AnswerRow(tuple(tokens), start, len(text.encode()) - len(head.encode()))
        return rows

    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        """The loss on each answer after its prompt in bits per byte: -log2 p(answer | prompt) / bytes of the answer.

        It is None where there is no answer or no prompt, or where both together are longer than the model can read or
        than `spec.max_length`. As in lm-eval, white space at the end of a prompt counts as part of the answer, and the
        answer's tokens are those after the first n of prompt and answer together, n being the tokens of the prompt.
        """
        losses: list[float | None] = [None] * len(prompts)
        rows = {number: row for number, row in enumerate(self.answer_rows(prompts, answers, spec)) if row}
        asked = ([row.tokens for row in rows.values()], [row.start for row in rows.values()])
        for (number, row), (total, _) in zip(
            rows.items(), self.log_likelihoods(*asked, spec.batch_size) if rows else [], strict=True
        ):
            losses[number] = -total / math.log(2) / row.size
        return losses


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


def end_tokens(checkpoint: Path, tokenizer: Any) -> list[int]:
    """The tokens that end a text: those of the checkpoint's generation settings, and the tokenizer's."""
    for file in ("generation_config.json", "config.json"):
        path = checkpoint / file
        configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if configured is not None:
            break
    tokens = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*tokens, tokenizer.eos_token_id) if token is not None})


def check_finite(number: float, name: str) -> None:
    """Raise FloatingPointError for a logit or log-likelihood of a generated token that is no finite number.

    Such logits still have a largest one, so that they would give a text.
    """
    if not math.isfinite(number):
        raise FloatingPointError(
            f"the {name} of a generated token is {number}, expected a finite number: the model's weights or precision "
            "make it overflow"
        )


def fitting(lengths: Sequence[int], spec: GenSpec, model_length: int | None) -> list[int]:
    """Indices of the prompts that leave room for `spec.max_new_tokens`, longest first; `lengths` are in tokens.

    Raises UserError when a prompt leaves too little room, unless `spec.skip_long`.
    """
    room = min((length for length in (model_length, spec.max_length) if length is not None), default=None)
    fits = [index for index, length in enumerate(lengths) if room is None or length + spec.max_new_tokens <= room]
    if room is not None and len(fits) < len(lengths) and not spec.skip_long:
        longest = max(lengths)
        left = room - longest
        hint = f"lower max_new_tokens to {left} or less" if left > 0 else "they need a model, or a max_length, of more"
        raise UserError(
            f"a prompt of {longest} tokens and max_new_tokens={spec.max_new_tokens} do not fit the "
            f"{'model' if room == model_length else 'benchmark'}'s {room} tokens: {hint}"
        )
    return sorted(fits, key=lambda index: (-lengths[index], index))


def cut(text: str, stop: Sequence[str], prompt: str = "", *, chat: bool = True) -> str:
    """The text up to the first stop text in its answer; a thought before the answer is not searched."""
    answer = answer_in(text, prompt, chat=chat) or ""
    end = min((answer.index(end) for end in stop if end in answer), default=len(answer))
    return text[: len(text) - len(answer) + end]


def replace_surrogates(text: str) -> str:
    """Replace what cannot be written as UTF-8: a model, or its server, may send half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class Question:
    """One item of a benchmark."""

    item: str
    """Name of the item, unique in its benchmark."""
    prompt: str | Messages
    """Text to continue, or a conversation for the model's chat template."""
    reference: str | None = None
    """A right answer, with exactly the text that follows the prompt."""
    tools: Tools = ()
    """Functions that the model may call in a conversation."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question."""

    item: str
    prompt: str
    """The prompt as the model read it."""
    output: str
    too_long: bool = False
    """Whether nothing was generated, because prompt and max_new_tokens together are too long."""
    loss: float | None = None
    """Loss on the question's reference, in bits per byte."""

    def without_thought(self, *, chat: bool = True) -> str | None:
        """The part of the output that is graded; None if a thought before it does not end. See `answer_in`."""
        return "" if self.too_long else answer_in(self.output, self.prompt, chat=chat)

    def sample(self, result: str, outcome: float, extracted: str) -> Sample:
        """The row of samples.parquet for this answer and the result called `result`."""
        return Sample(
            benchmark=result,
            item=self.item,
            outcome=outcome,
            prompt_hash=prompt_hash(self.prompt),
            output=self.output,
            extracted=extracted,
            answer_loss=self.loss,
        )


def collect(generator: Generator, questions: Sequence[Question], spec: GenSpec) -> list[Answer]:
    """An answer to every question, in order, with the loss on its reference."""
    prompts = [
        question.prompt if isinstance(question.prompt, str) else generator.render(question.prompt, question.tools)
        for question in questions
    ]
    references = [question.reference for question in questions]
    texts = dict(generator.stream(prompts, spec, references))
    if not texts and questions:
        raise UserError(
            f"none of {len(questions)} prompts leaves room for max_new_tokens={spec.max_new_tokens}: expected a model, "
            "or a max_length, of more"
        )
    losses = generator.answer_losses(prompts, references, spec)
    return [
        Answer(question.item, prompt, texts.get(number, ""), too_long=number not in texts, loss=loss)
        for number, (question, prompt, loss) in enumerate(zip(questions, prompts, losses, strict=True))
    ]


def write(answers: Sequence[Answer], file: Path) -> None:
    """Write one JSON line per answer."""
    file.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers), encoding="utf-8")


def read(file: Path) -> list[Answer]:
    """The answers that `write` wrote."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Answer(**row) for row in rows]
