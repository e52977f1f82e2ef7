"""EvalPlus's own problems, sanitizer and comparison, protected against the programs of models.

EvalPlus compares outputs in the process that runs the program, where the program can see and change
the verdict. Here EvalPlus compares the outputs of a stand-in, which returns the values that the
model's program returned in the sandbox.

EvalPlus's sanitizer takes time cubic in the number of lines. So here the sanitizer searches a
limited number of lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from evalplus import eval as evalplus_eval
from evalplus import sanitize as evalplus_sanitize
from evalplus.data import humaneval, mbpp
from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS

from moe_lab.evaluation.sandbox.encoding import decode, decode_text

MOST_LINES = 150
"""Largest number of lines that are searched in a text that is not Python as a whole."""


def sanitize(text: str, entry_point: str) -> str:
    """The program that EvalPlus's sanitizer extracts from `text`. A text can make the sanitizer
    crash its process, so this is called through LimitedCalls."""
    return str(evalplus_sanitize.sanitize(text, entry_point))


def longest_program(text: str) -> str:
    """The longest block of two or more consecutive lines of `text` that is valid Python. The length
    of a block is its number of non-blank lines. If there is no block, the first line of `text` is
    returned. Only the first MOST_LINES lines are searched, unless the whole text is valid
    Python."""
    lines = text.split("\n")
    if not _is_python(text):
        lines = lines[:MOST_LINES]
    # number of non-blank lines before each line
    counts = [0, *accumulate(bool(line.strip()) for line in lines)]
    # (minus the number of non-blank lines, start, end): sorted, the longest come first
    blocks = []
    for start in range(len(lines)):
        for end in range(start + 2, len(counts)):
            if counts[start] < counts[end]:  # the block has a line that is not blank
                blocks.append((counts[start] - counts[end], start, end))
    for _, start, end in sorted(blocks):
        block = "\n".join(lines[start:end])
        if _is_python(block):
            return block
    return lines[0]


def _is_python(text: str) -> bool:
    """Whether Python can parse `text`."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def has_return_or_yield(function: Any) -> bool:
    """Whether the tree-sitter node `function` contains a return or a yield. EvalPlus's own check
    accepts only a return. The canonical solution of Mbpp/630 needs a generator, which has only a
    yield."""
    return any(
        node.type in ("return_statement", "yield")
        for node in evalplus_sanitize.traverse_tree(function)
    )


evalplus_sanitize.code_extract = longest_program
evalplus_sanitize.has_return_statement = has_return_or_yield

_SUCCESS = 0  # EvalPlus's number for a program that passes
_recorded_outputs: Iterator[Any] = iter(())
"""Outputs that `next_recorded_output` returns."""
_NO_PROTECTION = {
    "create_tempdir": nullcontext,
    "swallow_io": nullcontext,
    "time_limit": lambda seconds: nullcontext(),
    "reliability_guard": lambda maximum_memory_bytes: None,
    "query_maximum_memory_bytes": lambda: None,
}
"""Replacements of EvalPlus's protections, which are not needed because EvalPlus runs only the
stand-in."""


def next_recorded_output(*arguments: Any) -> Any:
    """The next recorded output. EvalPlus calls this function in place of the model's program."""
    return next(_recorded_outputs)


def read_problems(dataset: str, data: str) -> dict[str, dict[str, Any]]:
    """The problems in the file at the path `data`: task id -> problem. `dataset`: humaneval or
    mbpp."""
    get_problems = humaneval.get_human_eval_plus if dataset == "humaneval" else mbpp.get_mbpp_plus
    with (
        patch.object(humaneval, "HUMANEVAL_OVERRIDE_PATH", data),
        patch.object(mbpp, "MBPP_OVERRIDE_PATH", data),
    ):
        problems: dict[str, dict[str, Any]] = get_problems()
    return problems


def compare(
    dataset: str, problem: Mapping[str, Any], encoded: list[str], canonical: list[str]
) -> str:
    """Compare the outputs of a program, `encoded`, with those of the canonical solution,
    `canonical`: one output per test. Returns "right", "wrong", or "no value" if an output of the
    program cannot be decoded.

    `problem` has the keys entry_point, atol (the absolute tolerance) and inputs (encoded).
    """
    try:
        outputs = [decode_text(text) for text in encoded]
    except ValueError:
        return "no value"
    expected = [decode_text(text) for text in canonical]
    # for these tasks EvalPlus reads a bool as the expected value: whether the output is not None
    if dataset == "mbpp" and problem["entry_point"] in MBPP_OUTPUT_NOT_NONE_TASKS:
        expected = [value is not None for value in expected]
    return "right" if _agrees(dataset, problem, outputs, expected) else "wrong"


def _agrees(
    dataset: str, problem: Mapping[str, Any], outputs: list[Any], expected: list[Any]
) -> bool:
    """Whether EvalPlus accepts all `outputs`.

    Only EvalPlus's status of the program is read here. EvalPlus 0.3.1 also reads `details`, and
    reports every program for HumanEval/32 as failed."""
    global _recorded_outputs
    inputs = [decode(arguments) for arguments in problem["inputs"]]
    if len(outputs) != len(inputs):
        return False
    _recorded_outputs = iter(outputs)
    # EvalPlus sets these values; its own are in shared memory
    verdict = SimpleNamespace(value=-1)
    progress = SimpleNamespace(value=0)
    program = f"from {__name__} import next_recorded_output as {problem['entry_point']}"
    limits = [0.0] * len(inputs)
    details = [False] * len(inputs)
    # 0.0: limits are not used; True: stop at the first wrong output
    settings = (inputs, expected, limits, problem["atol"], True)
    with patch.dict(vars(evalplus_eval), _NO_PROTECTION):
        evalplus_eval.unsafe_execute(
            dataset, problem["entry_point"], program, *settings, verdict, details, progress
        )
    return bool(verdict.value == _SUCCESS)
