"""Function calling in the style of BFCL: the model gets functions as tools, and its calls are
compared, never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.calibration.sources import records
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known, user_errors
from moe_lab.evaluation import Policy
from moe_lab.evaluation.harness import (
    Answer,
    Graded,
    Item,
    Text,
    check_count,
    data_files,
    graded_by_mean,
)
from moe_lab.evaluation.harnesses.function_call_rules import TYPES, mistake, tool
from moe_lab.json_files import fits

_QUESTION = {
    "id": str,
    "question": [[{"role": str, "content": str}]],
    "function": [
        {
            "name": str,
            "description": str | None,
            "parameters": {"properties": dict, "required": list | None},
        }
    ],
}
_ANSWER = {"id": str, "ground_truth": [{str: {str: list}}]}
_FIELDS = {
    "question": "id, question (a list of turns) and function",
    "answer": "id and ground_truth",
}


@dataclass(frozen=True)
class Question:
    """A question with the functions that may be called."""

    name: str
    messages: Sequence[Mapping[str, str]]
    functions: Sequence[Mapping[str, Any]]
    right: Sequence[Mapping[str, Mapping[str, Any]]]
    """The calls of a right answer, each {name: {argument: allowed values}}; empty if no function is
    of use."""


def wrong(benchmark: BenchmarkConfig) -> Iterator[str]:
    """A sentence for each problem with the benchmark's settings or files."""
    if benchmark.data is not None:
        yield (
            f"benchmark {benchmark.name}: data={benchmark.data}, but questions are read from "
            "task: expected null"
        )
    if "answers" not in benchmark.parameters:
        yield (
            f"benchmark {benchmark.name}: parameters.answers is not set: expected the file of "
            "right answers beside "
            "the questions, or null if no question needs a call"
        )
        return
    yield from user_errors(lambda: check_count(benchmark, len(_questions(benchmark))))


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """The questions, each with its functions as tools. Only an end token ends an answer."""
    asked = []
    for question in _questions(benchmark)[: benchmark.limit]:
        tools = [tool(function) for function in question.functions]
        asked.append(
            Item(question.name, (Text(question.messages, benchmark.max_new_tokens, tools=tools),))
        )
    return asked


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Whether the calls of each answer are right; what is wrong with them is the extracted text of
    its sample."""
    questions = {question.name: question for question in _questions(benchmark)}

    def verdict(answer: Answer, metric: str) -> tuple[float, str]:
        question = questions[answer.item]
        reason = mistake(answer.reply.text, question.functions, question.right)
        return float(reason is None), reason or "right"

    return graded_by_mean(answers, benchmark, verdict)


def _questions(benchmark: BenchmarkConfig) -> list[Question]:
    """The questions with their right answers. Raises UserError for files that do not fit the format
    or each other."""
    *of_answers, of_questions = data_files(benchmark)
    questions = _rows(of_questions, "question", _QUESTION)
    right: dict[str, Any] = {}
    for file in of_answers:
        right = {name: row["ground_truth"] for name, row in _rows(file, "answer", _ANSWER).items()}
        for name in [*(set(questions) - set(right)), *(set(right) - set(questions))][:1]:
            lacking, other = (file, of_questions) if name in questions else (of_questions, file)
            raise UserError(
                f"{lacking} has no line with the id {name}, which is in {other}: expected the "
                "same ids"
            )
    checked = []
    for name, row in questions.items():
        where = f"{of_questions}: question {name}"
        if len(row["question"]) != 1:
            raise UserError(
                f"{where} has {len(row['question'])} turns: expected one, as others need calls to "
                "be run"
            )
        for function in row["function"]:
            _check_types(function["parameters"]["properties"], f"{where}: {function['name']}")
        question = Question(name, row["question"][0], row["function"], right.get(name, []))
        _check_answer(question, f"{where}: its answer")
        checked.append(question)
    return checked


def _rows(file: Path, kind: str, shape: Any) -> dict[str, Any]:
    """Id -> line of a file of JSON lines. Raises UserError for lines that do not fit `shape`, and
    for equal ids."""
    rows: dict[str, Any] = {}
    for place, row in records(file, "task"):
        if not fits(row, shape):
            raise UserError(f"{place} is no {kind}: expected the fields {_FIELDS[kind]} as in BFCL")
        if row["id"] in rows:
            raise UserError(f"{place}: the id {row['id']} is there twice: expected different ids")
        rows[row["id"]] = row
    if not rows:
        raise UserError(f"{file} has no lines: expected at least one {kind}")
    return rows


def _check_types(properties: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a parameter whose type is none of a function in Python."""
    for name, described in properties.items():
        declared = str(described.get("type")) if isinstance(described, Mapping) else "missing"
        check_known(f"{where}: type of {name}", declared, TYPES)
        if TYPES[declared] is list:
            _check_types({f"items of {name}": described.get("items")}, where)
        _check_types(described.get("properties", {}), where)


def _check_answer(question: Question, where: str) -> None:
    """Raise UserError for a right answer that calls something else than one function of the item at
    a time."""
    names = [function["name"] for function in question.functions]
    for call in question.right:
        if len(call) != 1:
            raise UserError(f"{where} has {len(call)} functions in one call: expected one")
        ((name, allowed),) = call.items()
        check_known(f"{where}: function", name, names)
        for argument, values in allowed.items():
            options = [
                inner
                for value in values
                for inner in (value if isinstance(value, list) else [value])
            ]
            if not fits([option for option in options if isinstance(option, dict)], [{str: list}]):
                raise UserError(
                    f"{where}: {argument} of {name} has an object without lists of allowed values"
                )
