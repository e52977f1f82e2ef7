"""EvalPlus's own comparison, applied to recorded return values.

EvalPlus decides whether outputs are right inside the process that runs the program, where the program can see and
change the verdict. Here its comparison is given a program of ours that hands back what the model's program returned
elsewhere: tolerances, set equality and the special cases of MBPP stay EvalPlus's, and nothing is left to tamper with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any

from evalplus import eval as evalplus_eval

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
