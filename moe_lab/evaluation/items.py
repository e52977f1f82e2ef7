"""Items of benchmarks, what is asked for each, and a model's answers. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import Tools
from moe_lab.results import Sample

Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""


@dataclass(frozen=True)
class Text:
    """A text to be written."""

    prompt: str | Messages
    """Text to continue, or a conversation for the model's chat template."""
    most: int
    """Largest number of tokens of the text."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends; they are cut off. Only the answer is searched for them: no prompt, no thought."""
    reference: str | None = None
    """A right answer, with exactly the text that follows the prompt."""
    tools: Tools = ()
    """Functions that the model may call in a conversation."""
    skip_long: bool = False
    """Write nothing after a prompt that leaves too little room; otherwise it is an error."""


@dataclass(frozen=True)
class Pair:
    """How likely is the continuation after the context?"""

    context: str | Messages
    continuation: str


@dataclass(frozen=True)
class Document:
    """How likely is a whole text, window by window?

    By default windows do not overlap, and the first token of each is not predicted. `from_nothing` predicts every
    token, each but the first after another one, as lm-eval does.
    """

    text: str
    length: int | None = None
    """Tokens of a window; None for 2048, or what the model can read."""
    from_nothing: bool = False
    windows: int | None = None
    """Only so many windows."""


@dataclass(frozen=True)
class Item:
    """One item of a benchmark."""

    name: str
    """Unique in its benchmark."""
    requests: tuple[Text | Pair | Document, ...]

    @property
    def text(self) -> Text:
        """The request of an item that asks for one text."""
        (request,) = self.requests
        assert isinstance(request, Text)
        return request


@dataclass(frozen=True)
class Window:
    """The likelihood of a part of a text."""

    nats: float
    """Summed log-likelihood of its tokens."""
    tokens: int
    """Number of these tokens."""
    likeliest: bool
    """Whether each of them was the likeliest."""


@dataclass(frozen=True)
class Reply:
    """What the model said to one request."""

    text: str | None = ""
    """The answer that it wrote, without the thought before it; None where the thought does not end."""
    thought: str = ""
    """What it wrote before the answer."""
    ended: str | None = None
    """Why a text ended: end (an end token), stop (a stop text), limit (too many tokens), or too_long: nothing was
    written, because prompt and limit together are too long. None where nothing was to be written. A server does not
    tell the first two apart."""
    loss: float | None = None
    """Loss on the reference, in bits per byte."""
    windows: tuple[Window, ...] = ()
    """Likelihood of a Pair's continuation, or of each window of a Document."""
    tokens: int = 0
    """Number of tokens of a Document."""

    @property
    def nats(self) -> float:
        """Summed log-likelihood of all windows."""
        return sum(window.nats for window in self.windows)


@dataclass(frozen=True)
class Answer:
    """A model's answer to an item."""

    item: str
    prompt: str
    """The prompt of the first request as the model read it."""
    replies: tuple[Reply, ...]
    """One for each request of the item."""
    replicate: int = 0
    """Number of this answer among several to the same item."""

    @property
    def reply(self) -> Reply:
        """The reply to the first request, which is the only one where texts are written."""
        return self.replies[0]

    def sample(self, result: str, outcome: float, extracted: str, output: str | None = None) -> Sample:
        """The row of samples.parquet for this answer and the result called `result`.

        `output` stands for an answer that is no text.
        """
        return Sample(
            benchmark=result,
            item=self.item,
            replicate=self.replicate,
            outcome=outcome,
            prompt_hash=prompt_hash(self.prompt),
            thought=self.reply.thought,
            output=self.reply.text if output is None else output,
            ended=self.reply.ended,
            extracted=extracted,
            answer_loss=self.reply.loss,
        )


def prompt_hash(prompt: str) -> str:
    """First 16 hexadecimal digits of the prompt's sha256."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def replace_surrogates(text: str) -> str:
    """Replace what cannot be written as UTF-8: a model, or its server, may send half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def write(answers: Sequence[Answer], file: Path) -> None:
    """Write one JSON line per answer."""
    file.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers), encoding="utf-8")


def read(file: Path) -> list[Answer]:
    """The answers that `write` wrote."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Answer(**{**row, "replies": tuple(map(_reply, row["replies"]))}) for row in rows]


def _reply(row: Mapping[str, Any]) -> Reply:
    return Reply(**{**row, "windows": tuple(Window(**window) for window in row["windows"])})
