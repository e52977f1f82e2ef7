"""Record each text and likelihood that a model computes, so that none is computed twice.

Steps that evaluate the same benchmark under different plans are computed together: one of them records the results of
all, each in its own step's files (`RecordedTogether`). No torch.
"""

from __future__ import annotations

import json
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from moe_lab.calibration.documents import Tools
from moe_lab.evaluation.generation import AnswerRow, Generator, GenSpec, LanguageModel, Likelihood, Messages
from moe_lab.json_files import Number, fits
from moe_lab.models.memory import release_memory

if TYPE_CHECKING:
    from moe_lab.evaluation.plans_model import PlansModel

COMPUTED = "computed.jsonl"
"""File of a step's record, among the files from which the step resumes."""
BATCHES = 16
"""Batches of likelihoods that are computed before they are recorded; an engine works best on many rows at a time."""
_KEY_LENGTH = 24
_SECONDS, _ALONE = "seconds", "alone"
"""Entries of a record that are no results: see `Record`."""


class Record:
    """Results by key, in a file to which every new one is appended. A process that dies loses none that was added."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.results: dict[str, Any] = {}
        self.seconds = 0.0
        """Seconds that shared batches took for the results in the file, before it was opened."""
        self.alone = False
        """Whether shared batches have failed, so that what is missing is computed alone."""
        for key, value in _saved(file):
            if key == _SECONDS:
                self.seconds += value
            elif key == _ALONE:
                self.alone = True
            else:
                self.results[key] = value
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

    def add_seconds(self, seconds: float) -> None:
        """Note that shared batches took so long for results of this record."""
        self._append(_SECONDS, seconds, flush=True)

    def set_alone(self, reason: str) -> None:
        """Note that what is missing has to be computed alone, also by later processes."""
        self.alone = True
        self._append(_ALONE, reason, flush=True)

    def _append(self, key: str, value: Any, *, flush: bool = False) -> None:
        if self._lines is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self.file.open("a", encoding="utf-8")
            self._lines.write("\n")  # ends a line that a killed process left incomplete
        self._lines.write(json.dumps([key, value]) + "\n")
        if flush:
            self._lines.flush()


def _saved(file: Path) -> Iterator[tuple[str, Any]]:
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            is_result = fits(entry, (str, str)) or fits(entry, (str, (float, bool)))
            if is_result or (fits(entry, (str, Number)) and entry[0] == _SECONDS):
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

    @property
    def seconds_elsewhere(self) -> float:
        """Seconds that other steps took for the results of this one, less those that this one took for others."""
        return self.record.seconds

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


class RecordedTogether(Recorded):
    """A loaded model that computes all it is asked for under several plans, in shared batches, and records it for each.

    The plan of the first record is the model's own. What shared batches leave out is computed alone, by the step of
    each plan.
    """

    def __init__(
        self, together: PlansModel, records: Sequence[Record], alone: Callable[[], AbstractContextManager[Any]]
    ):
        """`together`: the model under the plans of `records`; `alone`: a context with the mask of the own plan."""
        super().__init__(together.local, records[0])
        self.together, self.records, self.alone = together, list(records), alone
        self.seconds_for_others = 0.0

    @property
    def seconds_elsewhere(self) -> float:
        return super().seconds_elsewhere - self.seconds_for_others

    def complete(
        self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> Iterator[tuple[int, str, Likelihood | None]]:
        """As `RecordedTexts.complete`, after the texts of all plans are generated."""
        with self._failures_left_to_steps():
            self._generate_all(prompts, rows, spec)
        with self.alone():
            yield from super().complete(prompts, rows, spec)

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int
    ) -> list[Likelihood]:
        """As `Recorded.log_likelihoods`, after the likelihoods under all plans are computed."""
        with self._failures_left_to_steps():
            self._weigh_all(rows, starts, batch_size)
        with self.alone():
            return super().log_likelihoods(rows, starts, batch_size)

    @contextmanager
    def _failures_left_to_steps(self) -> Iterator[None]:
        """A context after whose failure, such as too little memory, every plan is computed alone.

        So an error that is not due to shared batches is reported by the step that it belongs to.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whose it is turns out when each is computed alone
            reason = f"{type(error).__name__}: {error}"
        else:
            return
        print(f"each plan is computed alone, as shared batches fail ({reason})", file=sys.stderr, flush=True)
        for record in self.records:
            record.set_alone(reason)
        del self.records[1:]
        release_memory()

    def _generate_all(self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec) -> None:
        """Generate what is missing for any plan."""
        indices = {text_key(prompt, spec): index for index, prompt in enumerate(prompts)}
        missing = self._missing(indices)
        requests = [(plan, prompts[indices[key]], rows[indices[key]]) for plan, key in missing]
        with self._timed(missing):
            for number, text, likelihood in self.together.complete(requests, spec):
                plan, key = missing[number]
                self.records[plan].add_text(key, text, rows[indices[key]], likelihood)

    def _weigh_all(self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int) -> None:
        numbers = {likelihood_key(rows[n], starts[n]): n for n in by_question(rows, starts)}
        missing = self._missing(numbers)
        most = BATCHES * batch_size * len(self.records)
        with self._timed(missing):
            for first in range(0, len(missing), most):
                part = missing[first : first + most]
                plans = [plan for plan, _ in part]
                of_part = [rows[numbers[key]] for _, key in part]
                starts_of_part = [starts[numbers[key]] for _, key in part]
                found = self.together.log_likelihoods(of_part, starts_of_part, plans, batch_size)
                for (plan, key), result in zip(part, found, strict=True):
                    self.records[plan].add([(key, result)])

    def _missing(self, keys: Iterable[str]) -> list[tuple[int, str]]:
        """(number of the plan, key) of results that are not recorded; [] if only the own plan lacks any."""
        plans = range(len(self.records))
        missing = [(plan, key) for key in keys for plan in plans if key not in self.records[plan].results]
        return missing if any(plan for plan, _ in missing) else []

    @contextmanager
    def _timed(self, missing: Sequence[tuple[int, str]]) -> Iterator[None]:
        """A context whose time is divided among plans by the number of their results."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            for plan, count in Counter(plan for plan, _ in missing).items():
                share = seconds * count / len(missing)
                self.records[plan].add_seconds(share)
                self.seconds_for_others += share if plan else 0.0
