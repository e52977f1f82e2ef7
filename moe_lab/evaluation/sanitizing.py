"""EvalPlus's sanitizer on what a model wrote: imports and what the entry point needs, nothing else.

The sanitizer looks for the longest run of lines that is Python in a time cubic in the lines, and parses what a model
wrote, which can end a process. So it works in a child with a limit, on few lines, from the longest run down.
"""

from __future__ import annotations

import ast
from itertools import accumulate
from typing import Any

from evalplus import sanitize as evalplus_sanitize

from moe_lab.evaluation.confinement import in_child

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
