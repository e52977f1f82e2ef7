"""Function calling in the style of BFCL: the model gets functions as tools, and its calls are
compared, never run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.calibration.sources import DataFile
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known
from moe_lab.evaluation import Policy
from moe_lab.evaluation.adapters.function_call_rules import (
    TYPES,
    Description,
    RightCall,
    answer_mistake,
    tool,
)
from moe_lab.evaluation.harness import Graded, Harness, check_count, graded_by_mean
from moe_lab.evaluation.items import Answer, Item, Text
from moe_lab.json_files import fits

_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "question": {
        "id": str,
        "question": ([{"role": str, "content": str}],),
        "function": [
            {
                "name": str,
                "description": str | None,
                "parameters": {"properties": dict, "required": list | None},
            }
        ],
    },
    "answer": {"id": str, "ground_truth": [{str: {str: list}}]},
}
"""Kind of line -> its expected form."""


@dataclass(frozen=True)
class Question:
    """A question with the functions that may be called."""

    name: str
    messages: Sequence[Mapping[str, str]]
    functions: Sequence[Description]
    right_calls: Sequence[RightCall]
    """The calls of a right answer; empty if no call helps to answer the question."""


class FunctionCalls(Harness):
    """Questions for which the model may call functions as tools."""

    metrics = ("acc",)
    other_parameters = ("answers",)
    data = False
    chat = True
    gives_tools = True
    reads_path = True

    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield an item for each question."""
        for question in self.questions(benchmark)[: benchmark.limit]:
            tools = tuple(map(tool, question.functions))
            request = Text(question.messages, benchmark.max_new_tokens, tools=tools)
            yield Item(question.name, (request,), json.dumps(question.right_calls))

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """The outcome of an answer is 1 if all its calls are right, else 0. The field "extracted"
        of a sample says what is wrong with the answer, or "right"."""
        questions = {question.name: question for question in self.questions(benchmark)}
        verdicts = []
        for answer in answers:
            question = questions[answer.item]
            reason = answer_mistake(answer.reply.text, question.functions, question.right_calls)
            verdicts.append((float(reason is None), reason or "right"))
        return graded_by_mean(answers, benchmark, {"acc": verdicts})

    def paths(self, benchmark: BenchmarkConfig) -> list[Path]:
        """The file of right answers, if parameters.answers is set, and the file of questions."""
        (question_file,) = super().paths(benchmark)
        answers = benchmark.parameters.get("answers")
        return [question_file.parent / str(answers), question_file] if answers else [question_file]

    def check_data(self, benchmark: BenchmarkConfig) -> None:
        """Raise UserError if parameters.answers is not set, if a file is missing or in another
        format, or if the number of questions is not benchmark.expected."""
        if "answers" not in benchmark.parameters:
            raise UserError(
                f"benchmark {benchmark.name}: parameters.answers is not set: expected the file of "
                "right answers in the folder of the questions, or null if no question needs a call"
            )
        check_count(benchmark, len(self.questions(benchmark)))

    def questions(self, benchmark: BenchmarkConfig) -> list[Question]:
        """The questions with their right answers. Raises UserError for a file in another format,
        and if questions and right answers have different ids."""
        *answer_files, question_file = self.data_files(benchmark)
        rows = _rows(question_file, "question")
        right_calls: dict[str, Any] = {}
        for file in answer_files:  # at most one
            answers = _rows(file, "answer")
            right_calls = {name: row["ground_truth"] for name, row in answers.items()}
            for name in sorted(rows.keys() ^ right_calls):
                raise UserError(
                    f"{file} and {question_file} must have the same ids, but only one of them has "
                    f"a line with the id {name}"
                )
        questions = []
        for name, row in rows.items():
            source = f"{question_file}: question {name}"
            (messages,) = row["question"]
            for function in row["function"]:
                _check_types(function["parameters"]["properties"], f"{source}: {function['name']}")
            question = Question(name, messages, row["function"], right_calls.get(name, []))
            _check_answer(question, f"{source}: its answer")
            questions.append(question)
        return questions


HARNESS = FunctionCalls()


def _rows(file: Path, kind: str) -> dict[str, Any]:
    """Id -> JSON object, for each line of a file of JSON lines. `kind`: "question" or "answer"."""
    rows: dict[str, Any] = {}
    for source, row in DataFile(file, setting="task").rows():
        if not fits(row, _SHAPES[kind]):
            raise UserError(
                f"{source} is no {kind}: expected the fields {', '.join(_SHAPES[kind])} as in "
                "BFCL, and one turn, as others need calls to be run"
            )
        if row["id"] in rows:
            raise UserError(f"{source}: the id {row['id']} occurs twice: expected different ids")
        rows[row["id"]] = row
    return rows


def _check_types(properties: Mapping[str, Any], source: str) -> None:
    """Raise UserError if the type of a parameter is not in `TYPES`. `properties`: name of a
    parameter -> its JSON schema."""
    for name, schema in properties.items():
        # "missing" is not in TYPES, so that `check_known` refuses it
        declared_type = str(schema.get("type")) if isinstance(schema, Mapping) else "missing"
        check_known(f"{source}: type of {name}", declared_type, TYPES)
        if TYPES[declared_type] is list:
            _check_types({f"items of {name}": schema.get("items")}, source)
        _check_types(schema.get("properties", {}), source)


def _check_answer(question: Question, source: str) -> None:
    """Raise UserError unless each call of the right answer calls one function of the question, with
    allowed values in BFCL's form."""
    names = [function["name"] for function in question.functions]
    for call in question.right_calls:
        if len(call) != 1:
            raise UserError(f"{source} has {len(call)} functions in one call: expected one")
        ((name, allowed_values),) = call.items()
        check_known(f"{source}: function", name, names)
        for argument, values in allowed_values.items():
            # An allowed value may be an object, or a list with objects. Every such object must have
            # a list of allowed values under each key.
            entries: list[Any] = []
            for value in values:
                entries += value if isinstance(value, list) else [value]
            if not fits([entry for entry in entries if isinstance(entry, dict)], [{str: list}]):
                raise UserError(
                    f"{source}: {argument} of {name} has an object without lists of allowed values"
                )
