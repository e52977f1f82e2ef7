"""LiveCodeBench in EvalScope's process: selecting problems, and running programs that a model
wrote.

EvalScope runs such programs in a process that has the expected outputs and the verdicts. Here
programs run in `sandbox/runner.py`, which has neither, and EvalScope's own comparison gets the
printed or returned outputs.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from moe_lab.errors import UserError
from moe_lab.evaluation.sandbox.client import LimitedCalls, Runners
from moe_lab.evaluation.sandbox.runner import Outcome, Request

_FIRST_TESTS = 4
"""Number of tests that run before the others. Most wrong programs fail one of these tests."""
_COMPARISON_LIMITS = (60.0, 4 << 30)  # CPU seconds and bytes of memory
_WRONG = -2  # EvalScope's number for a wrong answer
_MORE_OUTPUT = 1 << 16
"""Bytes that a program may print beyond four for each expected character."""
_PARTS = 1 << 30  # no output becomes a hash: EvalScope's comparison needs the values

# What is added to a solution, so that the runner can call its function as EvalScope does.
_CALL = """

def moe_lab_answer(text):
    import json
    return moe_lab_method(*[json.loads(line) for line in text.split(chr(10))])
moe_lab_method = {method}
"""


def restrict_to_days(
    record_to_sample: Callable[[dict[str, Any]], Any], days: Sequence[str], *, hides_tests: bool
) -> Any:
    """A replacement for EvalScope's `record_to_sample`. The replacement returns [] for a problem
    whose contest day is outside `days`, the first and the last day as YYYY-MM-DD."""
    first_day, last_day = days

    def select_samples(record: dict[str, Any]) -> Any:
        day = str(record["contest_date"])  # a datetime in some file formats
        row = {**record, "contest_date": day}
        if not first_day <= day[:10] <= last_day:
            return []
        if hides_tests:
            row["private_test_cases"] = "[]"
        return record_to_sample(row)

    return select_samples


def restrict_pickles() -> AbstractContextManager[object]:
    """A context in which EvalScope reads pickled tests only if the pickle holds text. UserError
    otherwise."""
    from evalscope.benchmarks.live_code_bench import load_utils

    def loads(content: bytes) -> Any:
        return TextUnpickler(io.BytesIO(content)).load()

    return patch.object(load_utils, "pickle", SimpleNamespace(loads=loads))


class TextUnpickler(pickle.Unpickler):
    """Reads pickles that need no import."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise UserError: the pickle needs an import."""
        raise UserError(
            f"its private tests are a pickle that would run {module}.{name}: the data is not to be "
            "trusted"
        )


class Programs:
    """Runs programs and grades their outputs.

    `isolation`: see `sandbox/isolation.py`. `seconds`: CPU limit of each test; the default is
    EvalScope's. `memory_mib`: limit on the address space in MiB. `processes`: number of programs
    that run at the same time.
    """

    def __init__(
        self, isolation: str, seconds: float = 6.0, memory_mib: int = 4096, processes: int = 1
    ) -> None:
        self.seconds = seconds
        self.memory = memory_mib << 20
        self.processes = processes
        self._runners = Runners(isolation)
        # calls `compare` of this module in processes with limits
        self._comparison = LimitedCalls(__name__, os.environ)

    def grade(self, adapter: Any, state: Any) -> dict[str, Any]:
        """Grade the program in an answer. Returns {"outcome": 1 if the program passes every test,
        else 0; "extracted": "pass", or the reason of the failure}.

        `adapter`: EvalScope's adapter of the task; `state`: EvalScope's state of the answer."""
        solution = adapter.filter_prediction(state.output.completion, state)
        tests = json.loads(state.metadata["evaluation_sample"])
        if not tests["inputs"]:
            raise UserError("it has a problem without tests")
        for count in (_FIRST_TESTS, len(tests["inputs"])):
            results, notes = self.run_tests(solution, _first(count, tests))
            is_right = all(result is True for result in results)
            if not is_right:
                break
        why = " ".join(notes.get(name) or "" for name in ("error_message", "program_error")).strip()
        return {"outcome": float(is_right), "extracted": "pass" if is_right else why}

    def run_tests(self, solution: str, tests: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Run a program on `tests` and compare the outputs. Returns EvalScope's (results, notes). A
        result is True for a passed test; the list ends with the first failed test. The notes say
        why the test failed; the note "program_error" is the reason why the run ended.

        `tests`: {"fn_name": function to call, or None for a program that prints; "inputs" and
        "outputs": one entry per test}."""
        if tests["fn_name"] is None:
            outcome = self._run_script(solution, tests)
        else:
            owner = "Solution()." if "class Solution" in solution else ""
            program = solution + _CALL.format(method=owner + tests["fn_name"])
            inputs = [[text] for text in tests["inputs"]]
            outcome = self._run(program, "moe_lab_answer", inputs)
        # number of tests with an output, plus the test at which the program failed
        run_count = len(outcome.encoded) + (outcome.status != "ok")
        arguments = [tests["fn_name"], _first(run_count, tests), asdict(outcome)]
        results_and_notes = self._comparison("compare", arguments, *_COMPARISON_LIMITS)
        if results_and_notes is None:
            return [_WRONG], {"program_error": "its outputs take too much to compare"}
        results, notes = results_and_notes
        return results, {**notes, "program_error": outcome.error}

    def _run_script(self, solution: str, tests: dict[str, Any]) -> Outcome:
        """Run a program that prints, once for each test, until a run fails. The outcome has the
        printed texts as values."""
        encoded: list[str] = []
        for text, expected in zip(tests["inputs"], tests["outputs"], strict=True):
            # the texts of all runs are in memory together
            outcome = self._run(solution, None, [text], output=_MORE_OUTPUT + 4 * len(expected))
            encoded += outcome.encoded
            if outcome.status != "ok":
                break
        return replace(outcome, encoded=encoded)

    def _run(
        self, program: str, entry_point: str | None, inputs: list[Any], **limits: int
    ) -> Outcome:
        """Run a program once, after the imports that EvalScope adds to every solution. `limits`:
        more fields of the request."""
        from evalscope.benchmarks.live_code_bench import testing_util

        request = Request(
            program=program,
            entry_point=entry_point,
            inputs=inputs,
            seconds=[self.seconds] * len(inputs),
            total_seconds=(self.seconds + 1) * len(inputs),
            memory=self.memory,
            parts=_PARTS,
            prelude=testing_util.import_string,
            **limits,
        )
        return self._runners.run(request)


def _first(count: int, tests: dict[str, Any]) -> dict[str, Any]:
    """The first tests of a problem."""
    return {**tests, **{name: tests[name][:count] for name in ("inputs", "outputs")}}


def compare(function: str | None, tests: dict[str, Any], outcome: dict[str, Any]) -> Any:
    """EvalScope's [results, notes], made of JSON values, for a program that was run on `tests`.
    EvalScope's comparison reads the recorded outputs instead of running the program. `function`:
    name of the called function, or None for a program that prints. `outcome`: fields of the run's
    `Outcome`."""
    from evalscope.benchmarks.live_code_bench import testing_util

    outputs = _outputs(Outcome(**outcome))
    printed_texts = list[str]()  # EvalScope reads the printed text from this list
    # stands for the compiled solution, in which EvalScope calls the function of this name
    solution = SimpleNamespace(**{function or "wrapped_function": lambda *_: next(outputs)})

    def call_method(method: Any, _: str) -> None:
        printed_texts[:] = [method()]

    with (
        patch.object(testing_util, "compile_code", lambda code, timeout: solution),
        patch.object(testing_util, "Capturing", lambda: nullcontext(printed_texts)),
        patch.object(testing_util, "call_method", call_method),
        patch.object(testing_util, "_set_alarm", lambda seconds: None),
    ):
        # "" and 0 stand for the program and its time limit: the program is not run again here
        if function is None:
            results_and_notes = testing_util.grade_stdio("", tests["inputs"], tests["outputs"], 0)
        else:
            results_and_notes = testing_util.grade_call_based(
                "", tests["inputs"], tests["outputs"], function, 0
            )
    # as EvalScope, by the first item of an array; numbers of numpy have one item
    return json.loads(json.dumps(results_and_notes, default=lambda result: result.item(0)))


def _outputs(outcome: Outcome) -> Iterator[Any]:
    """Yield the program's output for each call that returned, then raise RuntimeError with the
    reason why the program ended. The test for which EvalScope gets this error counts as failed."""
    try:
        yield from outcome.values()
    except ValueError as error:
        raise RuntimeError(f"it sent no value: {error}") from None
    raise RuntimeError(
        "TimeoutException" if outcome.status == "timeout" else f"{outcome.status}: {outcome.error}"
    )
