"""EvalPlus's own sanitizer and its own comparison, each where a program cannot reach it.

EvalPlus decides whether outputs are right inside the process that runs the program, where the program can see and
change the verdict. Here its comparison is given a program of ours that hands back what the model's program returned
elsewhere: tolerances, set equality and the special cases of MBPP stay EvalPlus's.

The sanitizer looks for the longest run of lines that is Python in a time cubic in the lines, and parses what a model
wrote, which can end a process. So it works in a child with a limit, on few lines, from the longest run down.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from types import FunctionType
from typing import Any

from evalplus import eval as evalplus_eval
from evalplus import sanitize as evalplus_sanitize

from moe_lab.evaluation.sandbox.confinement import in_child

MOST_LINES = 150
"""Lines looked at of a text that is not Python as a whole."""
_SECONDS = 20
_MEMORY = 4 << 30


def sanitized(text: str, entry_point: str) -> str:
    """What EvalPlus's sanitizer leaves of `text`; the text itself where it dies or takes more than 20 CPU seconds."""
    left = in_child(lambda: str(evalplus_sanitize.sanitize(text, entry_point)), _SECONDS, _MEMORY)
    return text if left is None else left


def longest_program(text: str) -> str:
    """The longest run of lines of `text` that is Python, counted in lines that are not blank, the first of equals.

    This is `code_extract` of EvalPlus, which tries every run. Only the first MOST_LINES lines of a text that is not
    Python as a whole are looked at.
    """
    lines = text.split("\n")
    if not _is_python(text):
        lines = lines[:MOST_LINES]
    full = [0, *accumulate(bool(line.strip()) for line in lines)]
    runs = [(full[start] - full[end], start, end) for start in range(len(lines)) for end in range(start + 2, len(full))]
    for _, start, end in sorted(run for run in runs if run[0] < 0):
        run = "\n".join(lines[start:end])
        if _is_python(run):
            return run
    return lines[0]


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def gives_something(function: Any) -> bool:
    """Whether a function's tree-sitter node holds a return or a yield.

    EvalPlus drops functions that return nothing, as unfinished. Generators are among them, such as the one that
    Mbpp/630's own solution needs, which could not pass.
    """
    return any(node.type in ("return_statement", "yield") for node in evalplus_sanitize.traverse_tree(function))


evalplus_sanitize.code_extract = longest_program
evalplus_sanitize.has_return_statement = gives_something

_SUCCESS = 0
_recorded: Iterator[Any] = iter(())


class _Cell:
    """Stands in for the shared memory EvalPlus reports through."""

    def __init__(self) -> None:
        self.value = -1


def _compare_without_guards() -> FunctionType:
    """EvalPlus's `unsafe_execute` less what protects a process from the program it runs: ours needs no protection."""
    original = evalplus_eval.unsafe_execute
    unguarded = {
        "create_tempdir": nullcontext,
        "swallow_io": nullcontext,
        "time_limit": lambda seconds: nullcontext(),
        "reliability_guard": lambda maximum_memory_bytes: None,
        "query_maximum_memory_bytes": lambda: None,
    }
    return FunctionType(original.__code__, {**original.__globals__, **unguarded}, original.__name__)


_compare = _compare_without_guards()


def replay(*arguments: Any) -> Any:
    """The next recorded value, whatever the arguments."""
    return next(_recorded)


def agrees(dataset: str, problem: dict[str, Any], part: str, outputs: list[Any], expected: list[Any]) -> bool:
    """Whether EvalPlus takes `outputs` for right: one per input of the problem's `part`, base or plus.

    HumanEval/32 can pass: EvalPlus 0.3.1 reports it as failed after its own check has succeeded, which counts here.
    """
    global _recorded
    inputs = problem[f"{part}_input"]
    if len(outputs) != len(inputs):
        return False
    _recorded = iter(outputs)
    verdict, progress = _Cell(), _Cell()
    progress.value = 0
    program = f"from {__name__} import replay as {problem['entry_point']}"
    limits, details = [0.0] * len(inputs), [False] * len(inputs)
    _compare(
        dataset,
        problem["entry_point"],
        program,
        inputs,
        expected,
        limits,
        problem["atol"],
        True,
        verdict,
        details,
        progress,
    )
    return verdict.value == _SUCCESS
