"""Verdicts on mathematical texts by EvalScope and by Math-Verify themselves, without moe_lab.

benchmarks/grading_differences.py runs this in the interpreter that has EvalScope. Standard input
has one JSON line for each text: [task of EvalScope, right answer, text]. Standard output gets one
for each text: grader -> whether it accepts the text.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any


def main() -> None:
    """Print a line for each line of the standard input."""
    for line in sys.stdin:
        task, right_answer, text = json.loads(line)
        verdicts = {
            "EvalScope": accepted_by_evalscope(task, right_answer, text),
            "Math-Verify": accepted_by_math_verify(right_answer, text),
        }
        print(json.dumps(verdicts), flush=True)


def accepted_by_evalscope(task: str, right_answer: str, text: str) -> bool:
    """Whether EvalScope's adapter of the task finds the answer in a text right."""
    from evalscope.api.dataset import Sample
    from evalscope.api.evaluator import TaskState
    from evalscope.api.model import ModelOutput

    sample = Sample(input="", target=right_answer)
    output = ModelOutput.from_content("texts", text)
    state = TaskState("texts", sample, [output.message], output, completed=True)
    (score,) = _adapter(task).calculate_metrics(state).score.value.values()
    return bool(score == 1)


@cache
def _adapter(task: str) -> Any:
    """EvalScope's adapter of a task."""
    from evalscope import TaskConfig
    from evalscope.api.registry import get_benchmark
    from evalscope.metrics.math import parser

    # a process for each comparison would take most of the time
    parser.isolation_available = lambda: False
    return get_benchmark(task, TaskConfig(datasets=[task]))


def accepted_by_math_verify(right_answer: str, text: str) -> bool:
    """Whether Math-Verify with its default settings finds the answer in a text right."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${right_answer}$"), parse(text)))


if __name__ == "__main__":
    main()
