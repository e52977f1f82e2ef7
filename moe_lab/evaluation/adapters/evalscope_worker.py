"""The process that runs EvalScope. It returns the questions of a task, or grades the answers to
these questions.

The process needs EvalScope and the standard library, but no other package of moe_lab's environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from itertools import repeat
from operator import itemgetter
from typing import Any

from moe_lab.errors import UserError
from moe_lab.evaluation.adapters import evalscope_code

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
    """Grade answers. Returns {"samples": verdict on each answer, "versions": package -> version}.

    A verdict is {"outcome": score, or None if EvalScope could not compare the answer; "extracted":
    the extracted answer, or why there is no score, or why a program fails; "unlike_harness":
    whether only Math-Verify accepts the answer}.
    `texts`: (name of an item, answer). `as_harness`: whether EvalScope's own verdict counts, also
    on an answer that Math-Verify accepts. `limits`: arguments of `evalscope_code.Programs`; None
    unless answers are programs. `task`: keyword arguments of `load`, without hides_tests.
    """
    adapter, samples = load(**task, hides_tests=False)
    grade_answer: Callable[[Any, Any], dict[str, Any]] = _verdict
    # EvalScope's setting of the metric of mathematical answers
    if "numeric" in str(adapter.metric_list) and not as_harness:
        grade_answer = _mathematical_verdict
    threads = 1
    if limits:
        programs = evalscope_code.Programs(**limits)
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
    days: list[str] | None,
    *,
    hides_tests: bool,
) -> tuple[Any, dict[str, Any]]:
    """EvalScope's adapter of the task `name`, and its samples by the names of items. Raises
    UserError if there are no samples.

    `folder`: the data, in the layout of the Hugging Face hub; EvalScope may delete files in it.
    `dataset_args`: EvalScope's settings of the task. `limit`: number of items, taken evenly from
    the subsets (None: all). `days`: first and last day of the problems; None unless answers are
    programs. `hides_tests`: omit the private tests of programs.
    """
    from evalscope import TaskConfig
    from evalscope.api.registry import get_benchmark

    args = {name: {"dataset_id": folder, **dataset_args}}
    adapter = get_benchmark(name, TaskConfig(datasets=[name], dataset_args=args))
    if days:
        adapter.record_to_sample = evalscope_code.restrict_to_days(
            adapter.record_to_sample, days, hides_tests=hides_tests
        )
    with evalscope_code.restrict_pickles():
        subsets = adapter.load_dataset()
    samples = dict(_names_and_samples(subsets, limit))
    if not samples:
        raise UserError("no item is selected: check the data and the dates")
    return adapter, samples


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


def _verdict(adapter: Any, state: Any) -> dict[str, Any]:
    """A verdict as in `grade`. `adapter`: EvalScope's adapter of the task; `state`: EvalScope's
    state of the answer."""
    score = adapter.calculate_metrics(state).score
    if score.status != "success":
        return {"outcome": None, "extracted": f"not compared: {score.metadata}"}
    (value,) = score.value.values()
    return {"outcome": float(value), "extracted": score.extracted_prediction or ""}


def _mathematical_verdict(adapter: Any, state: Any) -> dict[str, Any]:
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
