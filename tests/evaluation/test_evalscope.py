"""EvalScope asks and grades in its own process; what it is handed is what was generated, item by
item."""

import base64
import io
import json
import os
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from fake_engines import (
    ScriptedEngine,
    evaluate_into,
    made_up_answers,
    problems,
    protocol,
    samples,
)
from harness_files import GARBAGE_TEXTS

from benchmarks.grading_differences import (
    FILES,
    OURS,
    SAME_TASK,
    differences,
    judged_texts,
    unexplained,
)
from benchmarks.measure import program_isolation
from moe_lab import machine
from moe_lab.child_process import ChildProcess, ErrorReply
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.adapters import evalscope_worker
from moe_lab.evaluation.harnesses import evalscope
from moe_lab.evaluation.harnesses.evalscope import HARNESS
from moe_lab.evaluation.items import Answer, Reply
from moe_lab.start import command

ALLOWED = Policy(allow_code_execution=True, allow_pickled_data=True)
needs_evalscope = pytest.mark.skipif(
    HARNESS.version(BenchmarkConfig("any", "evalscope", "gsm8k")) is None,
    reason="no EvalScope: make evalscope",
)


DATES = {"start_date": "2025-01-01", "end_date": "2025-04-30"}
STARTER = (
    "class Solution:\n    def largest(self, numbers: List[int], times: int) -> List[int]:\n        "
)


def problem(number: int, day: str, *, function: bool = False) -> dict[str, Any]:
    """A row of LiveCodeBench: read lines and print the sum of each, or return numbers in a new
    order."""
    if function:
        tests = [
            (f"[3, 1, {n}]\n2", json.dumps(sorted([3, 1, n], reverse=True)[:2])) for n in range(6)
        ]
    else:
        tests = [(f"2\n1 {n}\n{n} 5\n", f"{1 + n}\n{n + 5}.0\n") for n in range(6)]
    kind = "functional" if function else "stdin"
    cases = [{"input": text, "output": expected, "testtype": kind} for text, expected in tests]
    return {
        "question_title": f"Problem {number}",
        "question_content": f"Problem {number}: add the numbers of each line.",
        "platform": "leetcode" if function else "atcoder",
        "question_id": f"q{number}",
        "contest_id": f"c{number}",
        "contest_date": day,
        "starter_code": STARTER if function else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases[:2]),
        "private_test_cases": base64.b64encode(
            zlib.compress(pickle.dumps(json.dumps(cases[2:])))
        ).decode(),
        "metadata": json.dumps({"func_name": "largest"} if function else {}),
    }


def configured(task: str, root: Path, **changes: Any) -> BenchmarkConfig:
    """A benchmark of EvalScope on data below `root`."""
    code = {**DATES, "seconds": 1.0, "processes": 2} if task == "live_code_bench" else {}
    usual = {
        "data": "miniature/data",
        "split": "test",
        "reports": {task: "acc"},
        "chat": True,
        "max_new_tokens": 64,
    }
    settings = {
        "harness": "evalscope",
        "task": task,
        "parameters": code,
        "root": str(root),
        **usual,
        **changes,
    }
    return BenchmarkConfig(name=task, **settings)


def write_data(of: BenchmarkConfig, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the mirror of the benchmark's data. `rows`: split -> its rows."""
    source = Path(str(of.root), "source")
    source.mkdir(parents=True, exist_ok=True)
    for split, records in rows.items():
        parquet.write_table(arrow.Table.from_pylist(list(records)), source / f"{split}.parquet")
    mirror.make(of, source)


# LiveCodeBench: what a model may answer to a problem that wants the sum of each line, or `largest`.
SUMS = (
    "import sys\nfor line in sys.stdin.read().split('\\n')[1:]:\n    if line: "
    "print(sum(map(int, line.split())))"
)
LARGEST = (
    "class Solution:\n    def largest(self, numbers, times):\n        return "
    "tuple(sorted(numbers)[::-1][:times])"
)
KILL = "import ctypes, os\nctypes.CDLL(None).kill(os.getppid(), 9)\n"
FORGE = """
import gc, sys
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        if isinstance(value, dict) and "outputs" in value:
            print("\\n".join(value["outputs"]))
            raise SystemExit
    frame = frame.f_back
print(*[each for each in gc.get_objects() if isinstance(each, dict) and "outputs" in each])
"""
ALIKE = """
class Alike(list):
    def __eq__(self, other): return True
class Solution:
    def largest(self, numbers, times): return Alike()
"""
CASES: dict[str, tuple[bool, str, float]] = {
    "reads lines": (False, f"```python\n{SUMS}\n```", 1.0),
    "returns a tuple": (True, f"```python\n{LARGEST}\n```", 1.0),
    "imports from the future": (
        True,
        f"```python\nfrom __future__ import annotations\n{LARGEST}\n```",
        1.0,
    ),
    "prints when it ends": (
        False,
        f"```python\nimport atexit\natexit.register(lambda: exec({SUMS!r}))\n```",
        1.0,
    ),
    "is right in the first tests only": (
        False,
        (
            "```python\nn = 0\n"
            f"{SUMS.replace('print(', 'print(0 if [*map(int, line.split())][-1] == 4 else ')}\n```"
        ),
        0.0,
    ),
    "floods after the first tests": (
        False,
        f"```python\n{SUMS}\n    if line == '4 5': print('x' * (9 << 20))\n```",
        0.0,
    ),
    "has no block": (False, SUMS, 0.0),
    "returns another order": (True, f"```python\n{LARGEST.replace('[::-1]', '')}\n```", 0.0),
    "never ends": (False, "```python\nwhile True: pass\n```", 0.0),
    "dies": (False, "```python\nimport os\nos._exit(0)\n```", 0.0),
    "tries to kill its parent": (False, f"```python\n{KILL}{SUMS}\n```", 1.0),
    "looks for what is expected": (False, f"```python\n{FORGE}\n```", 0.0),
    "equals everything": (True, f"```python\n{ALIKE}\n```", 0.0),
}


@pytest.mark.slow
@needs_evalscope
def test_evalscope_judges_programs_that_run_in_the_sandbox(tmp_path: Path) -> None:
    """It asks in its own words. Two problems are of days outside the benchmark's."""
    benchmark = configured("live_code_bench", tmp_path, expected=len(CASES))
    days = [
        "2025-01-01T00:00:00",
        *["2025-02-02T10:30:00"] * (len(CASES) - 2),
        "2025-04-30T23:59:00",
    ]
    inside = [
        problem(number, day, function=function)
        for number, (day, (function, _, _)) in enumerate(zip(days, CASES.values(), strict=True))
    ]
    earlier, later = problem(97, "2024-12-31T23:59:59"), problem(98, "2025-05-01T00:00:00")
    write_data(benchmark, {"test": [earlier, *inside, later]})
    model = ScriptedEngine([text for _, text, _ in CASES.values()])
    [result] = evaluate_into(model, benchmark, tmp_path / "out", policy=ALLOWED)
    rows = dict(zip(CASES, samples(tmp_path / "out"), strict=True))
    outcomes = {name: outcome for name, (_, _, outcome) in CASES.items()}
    assert {name: sample["outcome"] for name, sample in rows.items()} == outcomes
    assert (result["n"], result["score"]) == (len(CASES), pytest.approx(5 / len(CASES)))
    record = protocol(tmp_path / "out")
    assert record["sandbox"] == program_isolation()
    assert record["evalscope"]["evalscope"]
    verdicts = {name: sample["extracted"] for name, sample in rows.items()}
    assert verdicts["reads lines"] == "pass"
    assert verdicts["never ends"] == "Time Limit Exceeded"
    assert verdicts["returns another order"] == "Wrong Answer"
    assert verdicts["floods after the first tests"] == "Runtime Error"
    assert "mismatched output length" in verdicts["has no block"]
    conversation = next(iter(model.tokenizer.conversations.values()))
    assert [message["role"] for message in conversation] == ["system", "user"]
    assert "Problem 0" in conversation[1]["content"]


@pytest.mark.slow
@needs_evalscope
def test_numbers_of_numpy_are_right() -> None:
    python = machine.interpreter("evalscope", None, "a test")
    _, *arguments = command("moe_lab.child_process", evalscope_worker.__name__)
    number = {"kind": "numpy", "value": ["<i8", [], "AgAAAAAAAAA="]}
    outcome = {"status": "ok", "error": "", "encoded": [json.dumps(number)], "seconds": [0.0]}
    with ChildProcess([python, *arguments], os.environ) as process:
        for expected in ("2", "3"):
            tests = {"inputs": ["1"], "outputs": [expected]}
            results, _ = process.call("compare", function="f", tests=tests, outcome=outcome)
            assert results == [expected == "2"]


@pytest.mark.slow
@needs_evalscope
@pytest.mark.parametrize("task", ["gsm8k", "gpqa_diamond", "live_code_bench"])
def test_garbage_costs_only_its_own_answer(task: str, tmp_path: Path) -> None:
    """EvalScope takes seconds for each text, so that every second one is enough."""
    changes, rows = OTHERS.get(task, ({}, []))
    if task == "gsm8k":
        rows = [{"question": "Two and two?", "answer": "#### 4"}]
    if task == "live_code_bench":
        rows = [problem(0, "2025-01-01T00:00:00")]
    benchmark = configured(task, tmp_path, **changes)
    write_data(benchmark, {str(benchmark.split): rows[:1]})
    (item,) = HARNESS.items(benchmark)
    messages: Any = item.requests[0].prompt
    options = messages[-1]["content"].split("\n")
    letter = next((option[0] for option in options if option.endswith(") right")), "")
    right = f"ANSWER: {letter}\n\\boxed{{4}}\n```python\n{SUMS}\n```"
    replies = [right, *GARBAGE_TEXTS[1::2], right]
    answers = [Answer(item.name, "", (Reply(text),), n) for n, text in enumerate(replies)]
    outcomes = [sample["outcome"] for sample in HARNESS.grade(answers, benchmark, ALLOWED).samples]
    assert outcomes[0] == outcomes[-1] == 1.0
    assert len(outcomes) == len(replies) and set(outcomes[1:-1]) <= {0.0, 1.0}


QUESTIONS = ["What is 1 and 1?", "What is 2 and 2?", "What is 1 and 1?", "What is 3 and 3?"]


@pytest.mark.slow
@needs_evalscope
def test_every_item_is_graded_with_its_own_answer(tmp_path: Path) -> None:
    """Of four questions the third is the first with another answer: equal ones are asked once."""
    benchmark = configured("gsm8k", tmp_path, expected=4)
    rows = [
        {"question": question, "answer": f"Thus.\n#### {answer}"}
        for question, answer in zip(QUESTIONS, ["2", "4", "3", "1,006"], strict=True)
    ]
    write_data(benchmark, {"test": rows})
    # EvalScope deletes such a file where it finds one
    (mirror.folder(benchmark) / "dataset_infos.json").write_text("{}")
    model = ScriptedEngine(
        ["<think>\\boxed{9}?</think>\n\u2028So \\boxed{2}. \ud83c", "\\boxed{5}", "\\boxed{1006}"]
    )
    [result] = evaluate_into(model, benchmark, tmp_path / "out", policy=Policy())
    assert (mirror.folder(benchmark) / "dataset_infos.json").exists()
    graded = samples(tmp_path / "out")
    assert [sample["outcome"] for sample in graded] == [1.0, 0.0, 0.0, 1.0]
    assert [sample["extracted"] for sample in graded] == ["2", "5", "2", "1006"]
    assert result["score"] == 0.5
    assert (model.generation.max_tokens, model.generation.chat) == (64, True)
    conversations = model.tokenizer.conversations.values()
    for messages, question in zip(conversations, dict.fromkeys(QUESTIONS), strict=True):
        content = messages[-1]["content"]
        assert content.startswith(question)
        assert content.endswith("put your final answer within \\boxed{}.")


def test_limit_takes_items_from_all_subsets_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sample(number: int) -> Any:
        return SimpleNamespace(id=number, input=[SimpleNamespace(role="user", text=f"{number}")])

    subsets = {"easy": [*map(sample, range(4))], "hard": [*map(sample, range(2))]}
    names = [name for name, _ in evalscope_worker._names_and_samples(subsets, 5)]
    assert [name.partition(" ")[0] for name in names] == [
        "easy/0",
        "hard/0",
        "easy/1",
        "hard/1",
        "easy/2",
    ]
    assert len(list(evalscope_worker._names_and_samples(subsets, None))) == 6
    adapter = SimpleNamespace(metric_list=[])
    monkeypatch.setattr(
        evalscope_worker,
        "load",
        lambda **_: (adapter, dict(evalscope_worker._names_and_samples(subsets, 5))),
    )
    subsets["easy"][0].input[0].text = "another question"
    # no text is graded as the answer to another question
    with pytest.raises(KeyError, match="easy/0"):
        texts = [(name, "text") for name in names]
        evalscope_worker.grade(texts, as_harness=False, limits=None)


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


def test_only_text_comes_out_of_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert evalscope_worker.TextUnpickler(io.BytesIO(pickle.dumps("[1]"))).load() == "[1]"
    with pytest.raises(UserError, match=r"\.mkdir"):
        evalscope_worker.TextUnpickler(io.BytesIO(pickle.dumps(_Hostile()))).load()
    assert not (tmp_path / "hostile").exists()


@pytest.mark.slow
def test_the_process_needs_nothing_of_this_environment() -> None:
    """Its imports succeed where there is no package at all, and what it asks next is EvalScope."""
    python, *arguments = command("moe_lab.child_process", evalscope_worker.__name__)
    with (
        ChildProcess([python, "-S", *arguments], {}) as process,
        pytest.raises(ErrorReply) as refused,
    ):
        process.call("questions", name="gsm8k", folder="", dataset_args={}, limit=None, days=[])
    assert (refused.value.kind, str(refused.value)) == (
        "ModuleNotFoundError",
        "No module named 'evalscope'",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (
            'echo \'{"error": "its tests are pickled", "kind": "UserError"}\'',
            UserError,
            "its tests are pickled",
        ),
        (
            'echo \'{"error": "no", "kind": "KeyError"}\'',
            RuntimeError,
            "EvalScope failed: KeyError: no",
        ),
        (
            "echo first >&2; echo last words >&2; exit 3",
            RuntimeError,
            "EvalScope failed: exit code 3: last words",
        ),
    ],
)
def test_errors_of_evalscope_and_of_its_process(
    code: str, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    benchmark = configured("gsm8k", tmp_path, python=str(python))
    write_data(benchmark, {"test": [{"question": "?", "answer": "#### 1"}]})
    python.write_text(f"#!/bin/sh\nread line\n{code}\n")
    python.chmod(0o755)
    with pytest.raises(kind, match=f"^benchmark gsm8k: {re.escape(message)}$"):
        next(HARNESS.items(benchmark))


def test_incomparable_answers_are_wrong_and_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benchmark = BenchmarkConfig(
        name="math500", harness="evalscope", task="math_500", reports={"math500": "acc"}
    )
    verdicts: list[dict[str, Any]] = [{"outcome": 1.0, "extracted": "1"}] * 200
    verdicts[7:10] = [{"outcome": None, "extracted": "not compared: exceeded the deadline"}] * 3
    answers = [Answer(f"{n}", "", (Reply(),)) for n in range(200)]
    monkeypatch.setattr(
        evalscope, "_call_worker", lambda *arguments, **more: {"samples": verdicts, "versions": {}}
    )
    graded = HARNESS.grade(answers, benchmark, Policy())
    assert graded.results[0]["score"] == 197 / 200
    assert graded.protocol["unscored"] == ["7", "8", "9"]
    assert graded.samples[7]["extracted"] == "not compared: exceeded the deadline"
    with pytest.raises(RuntimeError, match="could compare no answer"):
        verdicts = [verdicts[7]] * 200
        HARNESS.grade(answers, benchmark, Policy())


@pytest.fixture
def code_benchmark(tmp_path: Path) -> BenchmarkConfig:
    benchmark = configured("live_code_bench", tmp_path, python=sys.executable)
    write_data(benchmark, {"test": [problem(1, "2025-01-01T00:00:00")]})
    return benchmark


@pytest.mark.slow
def test_interpreter_without_evalscope_is_reported(
    code_benchmark: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is one that is missing, or not set."""
    messages = problems([code_benchmark], Policy(allow_code_execution=True))
    assert any(
        f"interpreters.evalscope={sys.executable} has no evalscope" in message
        for message in messages
    )
    assert any("allow_pickled_data=false" in message for message in messages)
    missing = replace(code_benchmark, python=str(tmp_path / "nowhere"))
    assert any(
        "and there is no such file: expected the Python interpreter" in message
        for message in problems([missing], ALLOWED)
    )
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    *_, message = HARNESS.missing_requirements(replace(code_benchmark, python=None), ALLOWED)
    assert "benchmark live_code_bench" in message
    assert "interpreters.evalscope=" in message


def test_wrong_settings_of_evalscope_are_named(code_benchmark: BenchmarkConfig) -> None:
    parameters = {"end_date": "2025-04-31", "processes": 1}
    messages = HARNESS.setting_errors(replace(code_benchmark, shots=2, parameters=parameters))
    assert [message.partition(": ")[2].partition("=")[0] for message in messages] == [
        "shots",
        "parameters.start_date",
        "parameters.end_date",
    ]
    [unknown_task] = HARNESS.setting_errors(replace(code_benchmark, task="gsm8"))
    assert "task=gsm8" in unknown_task
    assert "did you mean gsm8k" in unknown_task


GPQA = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)} | {"Correct Answer": "right"}
MATH = {
    "problem": "?",
    "solution": "",
    "subject": "Algebra",
    "level": 1,
}
OTHERS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "aime25": (
        {},
        [{"problem": "Two and two?", "answer": answer, "id": answer} for answer in ("4", "70")],
    ),
    "math_500": (
        {},
        [{**MATH, "answer": answer, "unique_id": answer} for answer in (r"\frac{1}{2}", "70")],
    ),
    "gpqa_diamond": (
        {"subset": "gpqa_diamond", "split": "train"},
        [{"Question": n, **GPQA} for n in ("a?", "b?")],
    ),
}


@pytest.mark.slow
@needs_evalscope
@pytest.mark.parametrize("task", OTHERS)
def test_other_tasks_find_right_answers_right(task: str, tmp_path: Path) -> None:
    changes, rows = OTHERS[task]
    benchmark = configured(task, tmp_path, **changes)
    write_data(benchmark, {str(benchmark.split): rows})
    conversations: list[Any] = [item.requests[0].prompt for item in HARNESS.items(benchmark)]
    content = [messages[-1]["content"] for messages in conversations]
    letters = [
        next((line[0] for line in text.split("\n") if line.endswith(") right")), "")
        for text in content
    ]
    assert (sorted(map(bool, letters)) == [True, True]) == (task == "gpqa_diamond")
    first_answer = f"ANSWER: {letters[0]}" if letters[0] else f"\\boxed{{{rows[0]['answer']}}}"
    answers = [
        first_answer,
        "ANSWER: " + "ABCD"[letters[1] == "A"] if letters[1] else "\\boxed{71}",
    ]
    graded = HARNESS.grade(made_up_answers(benchmark, answers), benchmark, Policy())
    assert [sample["outcome"] for sample in graded.samples] == [1.0, 0.0]


@pytest.mark.slow
@needs_evalscope
@pytest.mark.parametrize("name", ["gsm8k", "math500"])
def test_every_difference_from_other_graders_is_explained(
    published_data: Callable[[str, str], Path], name: str
) -> None:
    """All texts: `python -m benchmarks.grading_differences`."""
    data = published_data(FILES[name], name).parent
    judged = judged_texts(data, name, seed=0, share=5)
    graders = {grader for each in judged for grader in each.verdicts}
    assert {OURS, "EvalScope", "Math-Verify", SAME_TASK} < graders
    assert unexplained(differences(judged)) == []
    assert any(each.verdicts[OURS] for each in judged)


@pytest.mark.slow
@needs_evalscope
def test_answer_of_the_majority_counts(tmp_path: Path) -> None:
    """Of the answers that were found in the texts."""
    benchmark = configured("gsm8k", tmp_path, expected=2, reports={"gsm8k": "maj@4"})
    rows = [{"question": question, "answer": "#### 2"} for question in QUESTIONS[:2]]
    write_data(benchmark, {"test": rows})
    texts = [["3", "2", "2", ""], ["2", "3", "3", ""]]
    answers = [
        Answer(item.name, "", (Reply(f"So \\boxed{{{text}}}" if text else "No."),), number)
        for item, of_item in zip(HARNESS.items(benchmark), texts, strict=True)
        for number, text in enumerate(of_item)
    ]
    graded = HARNESS.grade(answers, benchmark, Policy())
    assert [sample["outcome"] for sample in graded.samples] == [1.0] * 4 + [0.0] * 4


NUMBERS = [
    r"\boxed{1006^\circ}",
    r"\boxed{\mathbf{1006}}",
    r"\boxed{m+n=1006}",
    r"\boxed{\text{1006}}",
    "**Answer: 1006**",
    "__1006__",
    r"\boxed{**1006**}",
    r"\boxed{1006°}",
    r"\boxed{1006.}",
    r"\boxed{1\,006}",
    r"\boxed{1 006}",
    "The answer is 1\u202f006.",
    "\\boxed{1\u2009006}",
    r"\boxed{１００６}",
    r"\boxed{１，００６}",
    r"\boxed{١٠٠٦}",
    r"\boxed{١٬٠٠٦}",
    r"\boxed{۱۰۰۶}",
    r"\boxed{1006 dollars}",
    r"\boxed{€1006}",
    r"\boxed {1006}",
    "Is it \\boxed{7}? No. So \\boxed{1006}.",
    "答案是１００６",
    "<answer>1006</answer>",
]
"""Right answers, of which EvalScope accepts few."""
SEVEN = str.maketrans("6６٦۶", "7７٧۷")


@pytest.mark.slow
@needs_evalscope
def test_what_math_verify_accepts_is_right(tmp_path: Path) -> None:
    wrong = [text.translate(SEVEN) for text in NUMBERS]
    wrong += ["There are 1006. So \\boxed{?}", r"\boxed{1006 thousand}", r"\boxed{1006 pi}"]
    wrong += [r"\boxed{1006} and \boxed{7}", r"\boxed{1006}? No. \boxed{7}", ""]
    texts = NUMBERS + wrong
    rows = [{"problem": n, "answer": "1006", "id": n} for n in map(str, range(len(texts)))]
    benchmark = configured("aime25", tmp_path)
    write_data(benchmark, {str(benchmark.split): rows})
    answers = made_up_answers(benchmark, texts)
    graded = HARNESS.grade(answers, benchmark, Policy())
    right = [sample["item"] for sample in graded.samples if sample["outcome"]]
    assert right == [answer.item for answer in answers[: len(NUMBERS)]]
    as_harness = replace(benchmark, parameters={"as_harness": True})
    samples = HARNESS.grade(answers, as_harness, Policy()).samples
    right_in_evalscope = {sample["item"] for sample in samples if sample["outcome"]}
    assert set(graded.protocol["unlike_harness"]) == set(right) - right_in_evalscope
    assert len(right_in_evalscope) < len(right) / 2
