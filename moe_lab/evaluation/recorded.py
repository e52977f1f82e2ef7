"""Record each text and likelihood that a model computes, so that none is computed twice. No torch."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from moe_lab.calibration.documents import Tools
from moe_lab.evaluation.generation import AnswerRow, Generator, GenSpec, LanguageModel, Likelihood, Messages
from moe_lab.json_files import fits

COMPUTED = "computed.jsonl"
"""File of a step's record, among the files from which the step resumes."""
BATCHES = 16
"""Batches of likelihoods that are computed before they are recorded; an engine works best on many rows at a time."""
_KEY_LENGTH = 24


class Record:
    """Results by key, in a file to which every new one is appended. A process that dies loses none that was added."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.results: dict[str, Any] = dict(_saved(file))
        self._lines: IO[str] | None = None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines:
            self._lines.close()
            self._lines = None

    def add(self, results: Iterable[tuple[str, Any]]) -> None:
        """Add results, and append those to the file that are finite: others may be due to a fault that is mended."""
        for key, result in results:
            self.results[key] = result
            if isinstance(result, str) or math.isfinite(result[0]):
                self._append(key, result)
        if self._lines:
            self._lines.flush()

    def add_text(self, key: str, text: str, row: AnswerRow | None, likelihood: Likelihood | None) -> None:
        """Add a text, and the likelihood of the right answer in `row` if it was found on the way."""
        found = [(likelihood_key(row.tokens, row.start), likelihood)] if row and likelihood else []
        self.add([(key, text), *(entry for entry in found if entry[0] not in self.results)])

    def _append(self, key: str, value: Any) -> None:
        if self._lines is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self.file.open("a", encoding="utf-8")
            self._lines.write("\n")  # ends a line that a killed process left incomplete
        self._lines.write(json.dumps([key, value]) + "\n")


def _saved(file: Path) -> Iterator[tuple[str, Any]]:
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if fits(entry, (str, str)) or fits(entry, (str, (float, bool))):
                yield entry[0], entry[1]


def text_key(prompt: str, spec: GenSpec) -> str:
    """The name of the text that follows a prompt. Batch size and limits on the length do not change a text."""
    settings = [prompt, spec.max_new_tokens, spec.stop, spec.special_tokens]
    return sha256(json.dumps(settings).encode()).hexdigest()[:_KEY_LENGTH]


def likelihood_key(row: Sequence[int], start: int) -> str:
    """The name of the likelihood of a row of token ids from index `start` on."""
    return sha256(array("q", [start, *row]).tobytes()).hexdigest()[:_KEY_LENGTH]


def by_question(rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[int]:
    """Numbers of the rows in the order in which they are computed: those that are equal up to their start follow each
    other, as they share a forward pass, and the question with the longest row comes first."""
    questions = [tuple(row[:start]) for row, start in zip(rows, starts, strict=True)]
    longest: dict[tuple[int, ...], int] = {}
    for row, question in zip(rows, questions, strict=True):
        longest[question] = max(longest.get(question, 0), len(row))
    return sorted(range(len(rows)), key=lambda number: (-longest[questions[number]], questions[number], number))


class RecordedTexts(Generator):
    """A generator whose texts are recorded. Equal prompts are generated once."""

    def __init__(self, model: Generator, record: Record) -> None:
        self.model, self.record = model, record
        self.tokenizer, self.template_arguments = model.tokenizer, model.template_arguments

    def render(self, messages: Messages, tools: Tools = ()) -> str:
        return self.model.render(messages, tools)

    def complete(
        self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> Iterator[tuple[int, str, Likelihood | None]]:
        """As `Generator.complete`, after all that were missing are generated and recorded."""
        keys = [text_key(prompt, spec) for prompt in prompts]
        results = self.record.results
        missing = {key: index for index, key in enumerate(keys) if key not in results}
        indices = list(missing.values())
        asked = ([prompts[index] for index in indices], [rows[index] for index in indices])
        for number, text, likelihood in self.model.complete(*asked, spec):
            index = indices[number]
            self.record.add_text(keys[index], text, rows[index], likelihood)
        for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if key in results:
                yield index, results[key], results.get(likelihood_key(row.tokens, row.start)) if row else None

    def answer_rows(
        self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec
    ) -> Sequence[AnswerRow | None]:
        return self.model.answer_rows(prompts, answers, spec)

    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        return self.model.answer_losses(prompts, answers, spec)


class Recorded(RecordedTexts, LanguageModel):
    """A language model whose texts and likelihoods are recorded."""

    model: LanguageModel

    def __init__(self, model: LanguageModel, record: Record) -> None:
        super().__init__(model, record)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def max_length(self) -> int | None:
        return self.model.max_length

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int
    ) -> list[Likelihood]:
        """As `LanguageModel.log_likelihoods`, question after question; each part is recorded when it is done."""
        keys = [likelihood_key(row, start) for row, start in zip(rows, starts, strict=True)]
        results = self.record.results
        missing = {keys[number]: number for number in by_question(rows, starts) if keys[number] not in results}
        order = list(missing.values())
        for first in range(0, len(order), BATCHES * batch_size):
            part = order[first : first + BATCHES * batch_size]
            found = self.model.log_likelihoods([rows[n] for n in part], [starts[n] for n in part], batch_size)
            self.record.add(zip([keys[n] for n in part], found, strict=True))
        return [(results[key][0], results[key][1]) for key in keys]

    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        return LanguageModel.answer_losses(self, prompts, answers, spec)
