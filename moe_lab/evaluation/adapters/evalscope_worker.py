"""The process that runs EvalScope. It returns the questions of a task, or grades the answers to
these questions.

The process needs EvalScope and the standard library, but no other package of moe_lab's environment.

EvalScope runs programs of LiveCodeBench in a process that has the expected outputs and the
verdicts. Here programs run in `sandbox/runner.py`, which has neither, and EvalScope's own
comparison gets the printed or returned outputs.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.metadata import version
from itertools import repeat
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from moe_lab.errors import UserError
from moe_lab.evaluation.sandbox.client import LimitedCalls, Runners
from moe_lab.evaluation.sandbox.runner import Outcome, Request

_ASCII: dict[int, int | str] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full-width characters
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u3000"), r"\,"),  # spaces
    **str.maketrans("٬٫−。", ",.-."),
    ord("°"): r"^\circ",
}
"""Code of a character -> what Math-Verify reads in its place."""
_FACTORS = r"(?:pi|sqrt|sin|cos|tan|log|mod|base|and|dozen|hundred|thousand|[mbtr]*illion)\b"
"""Words after a number that change it."""
_PLAIN_NOTATION: tuple[tuple[str, Any], ...] = (
    (r"\d", lambda digit: str(int(digit[0]))),  # digits of all scripts
    # spaces between thousands
    (
        r"(?<![\d.,])\d{1,3}(?:(?:[ ~]|\\[ ,;:]|\\thinspace )+\d{3})+(?!\d)",
        lambda number: re.sub(r"\D", "", number[0]),
    ),
    # emphasis
    (r"(?<!\w)(\*{1,3}|_{1,3}|`)(\S(?:.{,99}?\S)?)\1(?!\w)", r"\2"),
    (r"答[案え]\s*[是为為は]?\s*:?", " answer: "),
    (r"</?answer>|\\\$(?=\d)|[€£¥₹]", " "),
    (r"\\(?:boxed|fbox)\s*\{\s*(?:\\approx|≈)?", r"\\boxed{"),
    # a unit in a box
    (rf"(?<=\d) ((?!{_FACTORS})(?:[a-zA-Z]{{3,}}|[a-zA-Z]+/)[a-zA-Z/ ]*)(?=\}})", r"\\text{\1}"),
    # a number in braces or parentheses, or with a plus sign
    (
        r"(?<![^\s=:$])(?<!\d\s)(?:\\(?:text|mathbf|textbf)\{|\\left\(|\{|\+)\s*(-?[\d.,]+)"
        r"(?:\s*(?:\\right\)|\}))?",
        r"\1",
    ),
    (r"[.,]\s*(?=\})", ""),  # at the end of a box
)
"""(regular expression, what Math-Verify reads in its place), applied in this order."""
Tests = dict[str, Any]
"""Tests of a problem. "fn_name": function to call, or None for a program that prints; "inputs" and
"outputs": one entry per test."""
Verdict = dict[str, Any]
"""Verdict on an answer. "outcome": score, or None if EvalScope could not compare the answer;
"extracted": the extracted answer, or why there is no score, or why a program fails;
"unlike_harness": whether only Math-Verify accepts the answer."""


def questions(**task: Any) -> list[dict[str, Any]]:
    """The questions of a task, each {"item": name, "messages": conversation, "right_answer": text}.
    `task`: keyword arguments of `load`, without hides_tests."""
    _, samples = load(**task, hides_tests=True)
    return [
        {"item": name, "messages": _messages(sample), "right_answer": str(sample.target)}
        for name, sample in samples.items()
    ]


def grade(
    texts: list[tuple[str, str]],
    as_harness: bool,
    limits: dict[str, Any] | None,
    **task: Any,
) -> dict[str, Any]:
    """Grade answers. Returns {"samples": `Verdict` on each answer, "versions": package -> version}.

    `texts`: (name of an item, answer). `as_harness`: whether EvalScope's own verdict counts, also
    on an answer that Math-Verify accepts. `limits`: arguments of `Programs`; None
    unless answers are programs. `task`: keyword arguments of `load`, without hides_tests.
    """
    adapter, samples = load(**task, hides_tests=False)
    grade_answer: Callable[[Any, Any], Verdict] = _verdict
    # EvalScope's setting of the metric of mathematical answers
    if "numeric" in str(adapter.metric_list) and not as_harness:
        grade_answer = _mathematical_verdict
    threads = 1
    if limits:
        programs = Programs(**limits)
        grade_answer = programs.grade
        threads = programs.processes
    states = [_state(samples[name], text) for name, text in texts]
    with ThreadPoolExecutor(threads) as pool:
        verdicts = list(pool.map(grade_answer, repeat(adapter), states))
    packages = ("evalscope", "datasets", "math-verify", "sympy")
    return {"samples": verdicts, "versions": {name: version(name) for name in packages}}


def load(
    name: str,
    folder: str,
    dataset_args: dict[str, Any],
    limit: int | None,
    days: list[str],
    *,
    hides_tests: bool,
) -> tuple[Any, dict[str, Any]]:
    """EvalScope's adapter of the task `name`, and its samples by the names of items.

    `folder`: the data, in the layout of the Hugging Face hub; EvalScope may delete files in it.
    `dataset_args`: EvalScope's settings of the task. `limit`: number of items, taken evenly from
    the subsets (None: all). `days`: first and last day of the problems; [] unless answers are
    programs. `hides_tests`: omit the private tests of programs.
    """
    from evalscope import TaskConfig
    from evalscope.api.registry import get_benchmark

    args = {name: {"dataset_id": folder, **dataset_args}}
    adapter = get_benchmark(name, TaskConfig(datasets=[name], dataset_args=args))
    if days:
        adapter.record_to_sample = restrict_to_days(
            adapter.record_to_sample, days, hides_tests=hides_tests
        )
    with restrict_pickles():
        subsets = adapter.load_dataset()
    return adapter, dict(_names_and_samples(subsets, limit))


def _names_and_samples(subsets: Any, limit: int | None) -> Iterator[tuple[str, Any]]:
    """Yield (name, sample) for at most `limit` samples. `subsets`: name of a subset -> samples."""
    numbered = (
        (sample.id, subset, sample) for subset, samples in subsets.items() for sample in samples
    )
    # by number first, so that the limit takes items evenly from the subsets
    for number, subset, sample in sorted(numbered, key=itemgetter(0, 1))[:limit]:
        yield item_name(subset, number, _messages(sample)), sample


def item_name(subset: str, number: int, messages: list[dict[str, str]]) -> str:
    """Name of an item. It contains a digest of the messages, so that an answer to an earlier prompt
    matches no sample."""
    digest = sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
    return f"{subset}/{number} {digest[:8]}"


def _messages(sample: Any) -> list[dict[str, str]]:
    """The conversation of a sample."""
    return [{"role": message.role, "content": message.text} for message in sample.input]


def _state(sample: Any, text: str) -> Any:
    """EvalScope's state of an item for which the model has generated `text`."""
    from evalscope.api.evaluator import TaskState
    from evalscope.api.model import ModelOutput

    output = ModelOutput.from_content("moe_lab", text)
    return TaskState("moe_lab", sample, [*sample.input, output.message], output, completed=True)


def _verdict(adapter: Any, state: Any) -> Verdict:
    """EvalScope's verdict. `adapter`: EvalScope's adapter of the task; `state`: EvalScope's
    state of the answer."""
    score = adapter.calculate_metrics(state).score
    if score.status != "success":
        return {"outcome": None, "extracted": f"not compared: {score.metadata}"}
    (value,) = score.value.values()
    return {"outcome": float(value), "extracted": score.extracted_prediction or ""}


def _mathematical_verdict(adapter: Any, state: Any) -> Verdict:
    """As `_verdict`, but an answer is right, too, if Math-Verify accepts its text, as it is or in
    plain notation. Math-Verify reads the last box or, without a box, one formula or number."""
    from evalscope.metrics.math.contracts import MathEvaluationError
    from evalscope.metrics.math.parser import compare_answers

    verdict = _verdict(adapter, state)
    text = state.output.completion
    # without repeating a comparison, which may take half a minute
    for form in dict.fromkeys((text, _in_plain_notation(text))):
        if verdict["outcome"] == 0:
            with suppress(MathEvaluationError):
                result = compare_answers(form, state.target, prediction_mode="output")
                if result.matched:
                    verdict |= {
                        "outcome": 1.0,
                        "extracted": result.extracted,
                        "unlike_harness": True,
                    }
    return verdict


def _in_plain_notation(text: str) -> str:
    """A text with ASCII digits and signs, numbers without spaces between thousands, no emphasis, no
    currencies, units as text, and no point or comma at the end of a box. If it has a box, it begins
    with the sentence of the last box, because Math-Verify joins the boxes of close sentences."""
    text = text.translate(_ASCII)
    for pattern, plain in _PLAIN_NOTATION:
        text = re.sub(pattern, plain, text)
    before, box, answer = text.rpartition(r"\boxed{")
    *_, sentence = re.split(r"[.?!]\s|\n", before)
    return sentence + box + answer


# LiveCodeBench.


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

    def grade(self, adapter: Any, state: Any) -> Verdict:
        """Grade the program in an answer. "outcome": 1 if the program passes every test, else 0;
        "extracted": "pass", or the reason of the failure.

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

    def run_tests(self, solution: str, tests: Tests) -> tuple[list[Any], dict[str, Any]]:
        """Run a program on `tests` and compare the outputs. Returns EvalScope's (results, notes). A
        result is True for a passed test; the list ends with the first failed test. The notes say
        why the test failed; the note "program_error" is the reason why the run ended."""
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

    def _run_script(self, solution: str, tests: Tests) -> Outcome:
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


def _first(count: int, tests: Tests) -> Tests:
    """The first tests of a problem."""
    return {**tests, **{name: tests[name][:count] for name in ("inputs", "outputs")}}


def compare(function: str | None, tests: Tests, outcome: dict[str, Any]) -> Any:
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
