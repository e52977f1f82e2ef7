"""Questions, texts that answer them, and how texts are generated; without a model, and without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from moe_lab.errors import UserError
from moe_lab.json_files import fits

Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""


@dataclass(frozen=True)
class GenSpec:
    """How to generate. Always greedily: the checkpoint's own sampling settings and penalties are not used."""

    max_new_tokens: int
    """Tokens after which a text ends in any case."""
    stop: tuple[str, ...] = ()
    """Texts at which generation ends; they and what follows are cut off. Only generated text is looked at."""
    batch_size: int = 64
    """Prompts in one forward pass."""
    max_length: int | None = None
    """Tokens of prompt and text together at most; None is what the model can read."""
    special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a prompt; a chat template has written them already."""
    skip_long: bool = False
    """Leave a prompt without a text when it and `max_new_tokens` do not fit, instead of refusing all prompts."""


class Generator(Protocol):
    """What generates texts: a loaded model, or a server."""

    def render(self, messages: Messages) -> str:
        """The conversation as the prompt that asks for its next message."""
        ...

    def stream(self, prompts: Sequence[str], spec: GenSpec) -> Iterator[tuple[int, str]]:
        """(index of the prompt, the text that follows it), in the order in which they are done; nothing of a prompt
        that `spec.skip_long` leaves out."""
        ...

    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        """The loss on each answer after its prompt, in bits per byte; None where there is none."""
        ...


def render(tokenizer: Any, messages: Messages, template_arguments: Mapping[str, Any]) -> str:
    """The conversation as the prompt that asks for its next message. UserError without a chat template."""
    if not tokenizer.chat_template:
        raise UserError("chat=true, but the model's tokenizer has no chat template: expected an instruction model")
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, **template_arguments
    )
    return text


def fitting(lengths: Sequence[int], spec: GenSpec, model_length: int | None) -> list[int]:
    """Indices of the prompts, of so many tokens each, that leave room for what is to be generated, the longest first.

    UserError when one leaves too little, unless `spec.skip_long`.
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


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop text."""
    return text[: min((text.index(each) for each in stop if each in text), default=len(text))]


@dataclass(frozen=True)
class Question:
    """One item of a benchmark."""

    item: str
    """Which item; no two of a benchmark are called alike."""
    prompt: str | Messages
    """Text to go on with, or a conversation for the model's chat template."""
    reference: str | None = None
    """A right answer, exactly as it follows the prompt."""


@dataclass(frozen=True)
class Answer:
    """What a model said to a question."""

    item: str
    prompt: str
    """As the model read it."""
    output: str
    too_long: bool = False
    """Whether the prompt was left out because it and the tokens to generate do not fit; there is no output then."""
    loss: float | None = None
    """On the question's reference, in bits per byte."""


def collect(generator: Generator, questions: Sequence[Question], spec: GenSpec, partial: Path) -> list[Answer]:
    """An answer to every question, in their order, with the loss on its reference; all prompts are of one sort, as
    `spec.special_tokens` says.

    Answers are written to `partial` as they come. What a killed process had of the same prompts is taken from there,
    a line it was writing aside.
    """
    prompts = [
        question.prompt if isinstance(question.prompt, str) else generator.render(question.prompt)
        for question in questions
    ]
    names = [f"{number} {_digest(prompt)}" for number, prompt in enumerate(prompts)]
    saved = dict(_saved(partial))
    missing = [number for number, name in enumerate(names) if name not in saved]
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("a", encoding="utf-8") as lines:
        lines.write("\n")  # ends a line that was cut off
        for index, text in generator.stream([prompts[number] for number in missing], spec):
            name = names[missing[index]]
            saved[name] = text
            lines.write(json.dumps([name, text]) + "\n")
            lines.flush()
    if not saved and questions:
        raise UserError(
            f"none of {len(questions)} prompts leaves room for max_new_tokens={spec.max_new_tokens}: expected a model, "
            "or a max_length, of more"
        )
    losses = generator.answer_losses(prompts, [question.reference for question in questions], spec)
    return [
        Answer(question.item, prompt, saved.get(name, ""), too_long=name not in saved, loss=loss)
        for question, prompt, name, loss in zip(questions, prompts, names, losses, strict=True)
    ]


def _digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _saved(partial: Path) -> Iterator[tuple[str, str]]:
    if not partial.exists():
        return
    for line in partial.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            answer = json.loads(line)
            if fits(answer, (str, str)):
                yield answer[0], answer[1]


def write(answers: Sequence[Answer], file: Path) -> None:
    """One JSON line per answer."""
    file.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers), encoding="utf-8")


def read(file: Path) -> list[Answer]:
    """The answers as written."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Answer(**row) for row in rows]
