"""EvalPlus's own problems, sanitizer and comparison, protected against the programs of models.

EvalPlus compares outputs in the process that runs the program, where the program can see and change
the verdict. Here EvalPlus compares the outputs of a stand-in, which returns the values that the
model's program returned in the sandbox.

EvalPlus's sanitizer searches the longest program in a text in time cubic in the number of lines, so
its search is replaced by a faster one with the same result.

A text can make a function of this module take hours or gigabytes, or crash its process. So these
functions are called through LimitedCalls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from textwrap import dedent
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from evalplus import eval as evalplus_eval
from evalplus import sanitize as evalplus_sanitize
from evalplus.data import humaneval, mbpp
from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
from markdown_it import MarkdownIt

from moe_lab.evaluation.sandbox.encoding import decode, decode_text

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).disable("inline")
"""Finds the blocks of a text. HTML is not parsed, because a fence may directly follow a tag."""
_FENCE = re.compile(r"(?:`{3,}|~{3,})(?:py\w*)?")
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions of Python's parser for a text that it cannot parse."""


def sanitize(text: str, entry_point: str) -> str:
    """The program that EvalPlus's sanitizer extracts from `text`."""
    # thousands of empty lines, which some models write, would take long
    return str(evalplus_sanitize.sanitize(re.sub(r"\n{4,}", "\n\n\n", text), entry_point))


def read_program(text: str, entry_point: str) -> tuple[str, str] | None:
    """The program in `text`, as it stands, and the same program without statements that raise. The
    program is the first of these that Python compiles and that defines `entry_point`: the text, all
    fenced blocks, the last of them, the lines that are Python, all indented blocks. None if there
    is none."""
    for candidate in _candidates(text):
        blocks = [block for block in candidate if _parsed(block)]
        # The last definition counts. A signature without a body, which must not replace the
        # function, is not a definition; but imports beside it may be needed.
        blocks.sort(key=lambda block: _defines(block, entry_point))
        program = "\n".join(blocks).strip()
        if _defines(program, entry_point):
            return program, _guarded(program)
    return None


def _candidates(text: str) -> Iterator[list[str]]:
    """Yield lists of blocks of `text` that together may be its program."""
    tokens = _MARKDOWN.parse(text)
    fenced_blocks = [dedent(token.content) for token in tokens if token.type == "fence"]
    yield [text]
    yield fenced_blocks
    for block in reversed(fenced_blocks):
        yield [block]
    # a closing fence may directly follow the code
    yield list(_python_blocks(_FENCE.sub("\n", text)))
    yield [token.content for token in tokens if token.type == "code_block"]


def _parsed(program: str) -> ast.Module | None:
    """The syntax tree of a program; None if Python does not compile it."""
    try:
        compile(program, "<program>", "exec", dont_inherit=True)
        return ast.parse(program)
    except _NOT_PYTHON:
        return None


def _defines(program: str, name: str) -> bool:
    """Whether Python compiles a program that assigns to `name`, or has a function `name` with a
    return."""
    for node in ast.walk(_parsed(program) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef) and node.name == name and "Return(" in ast.dump(node):
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
    return False


def _guarded(program: str) -> str:
    """The program in which a statement that raises is skipped, such as an example that reads
    input."""
    tree = ast.parse(program)
    handler = ast.ExceptHandler(ast.Name("BaseException"), None, [ast.Pass()])
    for index, statement in enumerate(tree.body):
        if getattr(statement, "module", None) != "__future__":  # must not be in a block
            tree.body[index] = ast.Try([statement], [handler], [], [])
    return ast.unparse(tree)


def _python_blocks(text: str) -> Iterator[str]:
    """Yield the blocks of consecutive lines of `text` that are Python, each as long as possible."""
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        end = _end_of_python(lines, start)
        yield "\n".join(lines[start:end])
        start = max(end, start + 1)


def longest_program(text: str) -> str:
    """The longest block of two or more consecutive lines of `text` that is Python. The length of a
    block is its number of non-blank lines. If there is no block, the first line of `text` is
    returned. EvalPlus's own search has the same result, except for blank lines at the end."""
    lines = text.split("\n")
    longest = lines[:1]
    length = 0
    for start in range(len(lines)):
        block = lines[start : _end_of_python(lines, start)]
        block_length = len([*filter(str.strip, block)])
        if len(block) > 1 and block_length > length:
            longest = block
            length = block_length
        if len(lines) - start <= length:
            break
    return "\n".join(longest)


def _end_of_python(lines: list[str], start: int) -> int:
    """The largest `end` for which lines[start:end] is Python; `start` if there is none."""
    end = len(lines)
    while end > start:
        try:
            ast.parse("\n".join(lines[start:end]))
        except _NOT_PYTHON as error:
            # A block with the line of the error is not Python either. No line: a null byte.
            line = getattr(error, "lineno", None) or len(lines)
            end = min(end, start + line) - 1
        else:
            break
    return end


evalplus_sanitize.code_extract = longest_program

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
        return dict(get_problems())


def compare(
    dataset: str, problem: Mapping[str, Any], encoded: list[str], canonical: list[str]
) -> str:
    """Compare the outputs of a program, `encoded`, with those of the canonical solution,
    `canonical`: one output per test. Returns "right", "wrong", or "no value" if an output of the
    program cannot be decoded.

    `problem` has the keys entry_point, atol (the absolute tolerance), inputs (encoded) and
    as_harness, which only matters for HumanEval/32: EvalPlus 0.3.1 accepts outputs there, but
    reports no passed test, so that every program fails.
    """
    global _recorded_outputs
    try:
        outputs = [decode_text(text) for text in encoded]
    except ValueError:
        return "no value"
    expected = [decode_text(text) for text in canonical]
    # for these tasks EvalPlus reads a bool as the expected value: whether the output is not None
    if dataset == "mbpp" and problem["entry_point"] in MBPP_OUTPUT_NOT_NONE_TASKS:
        expected = [value is not None for value in expected]
    inputs = [decode(arguments) for arguments in problem["inputs"]]
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
    is_right = verdict.value == _SUCCESS and (all(details) or not problem["as_harness"])
    return "right" if is_right else "wrong"
