"""EvalPlus's published problems through the adapter: what is asked, what is taken from an answer,
and its verdict."""

import json
import os
import resource
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engines import ScriptedEngine, samples
from harness_files import problem, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import is_running, wait_until

from benchmarks.grading import canonical, count, raising, wrong_at_last
from benchmarks.grading_differences import (
    FILES,
    OURS,
    EvalPlusProblems,
    differences,
    evalplus_sanitizer,
    judged_texts,
    unexplained,
)
from benchmarks.measure import program_isolation
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, mirror, run
from moe_lab.evaluation.adapters.evalplus import GRADER, GradeRequest, Verdict
from moe_lab.evaluation.adapters.evalplus_rules import (
    longest_program,
    read_program,
    sanitize,
)
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.harnesses import evalplus
from moe_lab.evaluation.items import Answer, read_rows, write_rows
from moe_lab.evaluation.mirror import benchmarks, make

pytestmark = pytest.mark.slow

ALLOWED = Policy(allow_code_execution=True, sandbox=program_isolation())
CHOSEN = {
    # 32: judged by putting the answer in; 38, 50: helpers in the prompt
    "humaneval": (0, 2, 32, 38, 50, 115, 163),
    "mbpp": (2, 6, 63, 75, 106, 124, 232, 250, 252, 259, 278, 558, 580, 581, 722, 737, 787, 794),
}
"""Problems with oracles and input types of their own."""
UNSTABLE = {"humaneval": int(sys.version_info >= (3, 12))}
"""How many are not passed by their own solution on the inputs of EvalPlus: that of HumanEval/32, by
Newton's method, ends elsewhere where `sum` rounds as it does since Python 3.12."""


def published(
    name: str, root: Path, published_data: Callable[[str, str], Path], numbers: tuple[int, ...]
) -> BenchmarkConfig:
    """A mirror of some published problems."""
    (benchmark,) = benchmarks([name], str(root))
    url = str(benchmark.url)
    file = published_data(url.rpartition("/")[2], url)
    begin = {"humaneval": "HumanEval/", "mbpp": "Mbpp/"}[name]
    names = {f"{begin}{number}" for number in numbers}
    rows = [row for row in mirror.read_rows(file) if row["task_id"] in names]
    assert len(rows) == len(numbers)
    benchmark = replace(benchmark, expected=len(rows))
    make(benchmark, write_lines(root / file.stem, rows))
    return benchmark


@pytest.mark.parametrize("name", list(CHOSEN))
def test_published_problems_are_passed_by_their_solutions_only(
    published_data: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """All 164 and 378 problems: `python -m benchmarks.grading`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    benchmark = published(name, tmp_path, published_data, CHOSEN[name])
    n = len(CHOSEN[name])
    plus = n - UNSTABLE.get(name, 0)
    assert (benchmark.chat, list(benchmark.reports)) == (True, [name, f"{name}_plus"])
    for task, program, expected in (
        (benchmark, canonical, (n, plus)),
        (replace(benchmark, chat=False), canonical, (n, plus)),
        (benchmark, wrong_at_last, (n, 0)),
        (benchmark, raising, (0, 0)),
    ):
        verdict = count(task, program)
        assert (verdict.base, verdict.plus) == expected, program


def small_mirror(folder: Path) -> BenchmarkConfig:
    (benchmark,) = benchmarks(["humaneval"], str(folder))
    rows = [problem(number, f"f{number}", "return x + 1", [[1]], [[2], [3]]) for number in range(3)]
    benchmark = replace(benchmark, expected=3)
    make(benchmark, write_lines(folder / "HumanEvalPlus.jsonl", rows))
    return benchmark


def test_questions_are_evalplus_questions(tmp_path: Path) -> None:
    benchmark = small_mirror(tmp_path)
    begin = 'def f0(x):\n    """What it does."""'
    first, *others = evalplus.HARNESS.items(benchmark)
    instruction = (
        "Please provide a self-contained Python script that solves the following "
        "problem in a markdown code block"
    )
    assert first.requests[0].prompt == [
        {"role": "user", "content": f"{instruction}:\n```python\n{begin}\n```"}
    ]
    assert (first.name, len(others), first.requests[0].stop) == ("HumanEval/0", 2, ())
    (item,) = evalplus.HARNESS.items(replace(benchmark, chat=False, limit=1))
    assert item.requests[0].prompt == begin + "\n"
    assert {"\nclass ", "\nif __name__", "</s>"} <= set(item.requests[0].stop)


SAID = [
    "<think>Is it\n```\ndef f0(x): return 0\n```\n?</think>\n```python\ndef f0(x):\n    return x "
    "+ 1\n```\n"
    "Use it:\n```python\nprint(f0(1))\n```",
    (
        "```py\nimport math\n\ndef none(x): return x\n\ndef f1(x):\n    return math.floor(x) + 1 "
        "if x "
        "< 3 else 0\n\nf("
    ),
    "I cannot.",
]


def test_answers_are_stored_and_graded_without_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To three problems of HumanEval+, as written to a file and read from it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    benchmark = small_mirror(tmp_path)
    model = ScriptedEngine(SAID)
    (collected,) = collect_answers(model, [(benchmark, run.list_items(benchmark))])
    settings = model.generation
    assert (settings.stop, settings.max_tokens, settings.chat) == ((), 2048, True)
    file = tmp_path / "answers"
    write_rows(collected, file)
    answers = read_rows(Answer, file.read_bytes())
    assert [answer.reply.thought + (answer.reply.text or "") for answer in answers] == SAID
    out = tmp_path / "out"
    with pytest.raises(UserError, match="allow_code_execution=true"):
        run.grade(answers, benchmark, out, policy=Policy())
    with pytest.raises(RuntimeError, match="2 of 3 items"):
        run.grade(answers[:2], benchmark, out, policy=ALLOWED)
    results = run.grade(answers, benchmark, out, policy=ALLOWED)
    assert [result["score"] for result in results] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    rows = samples(out)
    assert [row["outcome"] for row in rows] == [1, 1, 0, 1, 0, 0]
    verdict, _, program = rows[4]["extracted"].partition("\n\n")
    assert verdict == "fail: another value was expected"
    assert program.startswith("import math\n\ndef none(x): return x\n\ndef f1(x):")
    record = json.loads((out / "result.json").read_text())
    assert record["protocol"]["seconds"] == 4.0
    assert record["protocol"]["prompt"] == answers[0].prompt


RIGHT = "def f(x):\n    return x + 1"
CACHED = f"import functools\n@functools.cache\n{RIGHT}"
"""EvalPlus drops a decorated function, so that only the program as it stands passes."""
FENCE = "```"
FENCED = f"{FENCE}py\n{CACHED}\n{FENCE}"
FORMS = {
    "program": CACHED,
    "fence": f"So:\n{FENCED}",
    "tildes": f"So:\n~~~\n{CACHED}\n~~~",
    "prose": f"This is it:\n\n{CACHED}\n\nIt adds one.\n\nUse it so:\n\n" + "print(f(1))\n" * 9,
    "a word of prose": f"Solution\n\n{CACHED}",
    "indented": f"So:\n\n{textwrap.indent(CACHED, '    ')}\n\nIt adds one.",
    "in a list": f"1. So:\n{textwrap.indent(FENCED, '   ')}\n2. Done.",
    "quoted": textwrap.indent(FENCED, "> "),
    "after a tag": f"<details>\n{FENCED}\n</details>",
    "longer fence": f"{FENCE}`markdown\nSolution\n{FENCED}\n{FENCE}`",
    "fence in a docstring": (
        f'{FENCE}py\ndef f(x):\n  """One more.\n\n  {FENCE}\n  f(1)\n  {FENCE}\n  """\n'
        f"  return x + 1\n{FENCE}"
    ),
    "inline code": f"{FENCE}f{FENCE} adds one:\n\n{FENCED}",
    "closing fence after a second return": (
        f"{FENCE}py\ndef f(x):\n    if x > 9:\n        return x + 1\n    return x + 1{FENCE}"
    ),
    "indented in a fence": f"{FENCE}py\n{textwrap.indent(CACHED, '    ')}\n{FENCE}",
    "signature again": f"{FENCED}\nIts signature:\n{FENCE}py\ndef f(x):\n    ...\n{FENCE}",
    "signature with imports": (
        f"{FENCE}py\nimport math\ndef f(x):\n    '''One more.'''\n{FENCE}\nSo:\n"
        f"{FENCE}py\ndef f(x):\n    return math.floor(x) + 1\n{FENCE}"
    ),
    "closing fence after code": f"{FENCE}py\n{RIGHT}{FENCE}\nIt adds one.",
    "opening fence after prose": f"So: {FENCED}",
    "unclosed": f"{FENCE}py\n{CACHED}",
    "cut off": f"{FENCE}py\n{CACHED}\n\nprint(f(",
    "cut off in an alternative": f"{FENCED}\nOr:\n{FENCE}py\ndef f(x):\n    x = 9\n    for",
    "wrong before right": f"{FENCE}py\ndef f(x):\n    return x\n{FENCE}\nBetter:\n{FENCED}",
    "twice": f"{FENCE}py\nfrom __future__ import annotations\n{CACHED}\n{FENCE}\n" * 2,
    "helper in a block": (
        f"{FENCE}py\ndef g(x):\n    return x + 1\n{FENCE}\nThen:\n"
        f"{FENCE}py\ndef f(x):\n    return g(x)\n{FENCE}"
    ),
    "table": "T = {}\nfor x in range(9):\n    T[x] = x + 1\ndef f(x):\n    return T[x]",
    "generator": "def g(x):\n    yield x + 1\ndef f(x):\n    return next(g(x))",
    "other blocks": f"{FENCE}sh\npip install x\n{FENCE}\n{FENCED}\n{FENCE}\n>>> f(1)\n2\n{FENCE}",
    "example that asks": f"{CACHED}\nx = int(input())\nprint(f(x))",
    "example that exits": f"import sys\n{CACHED}\nsys.exit(f(1))",
    "example that imports": f"{FENCED}\n{FENCE}py\nfrom solution import f\nf(1)\n{FENCE}",
}
"""Texts with a right program, few of which EvalPlus passes."""


def form_verdicts(folder: Path, texts: Iterable[str], **settings: Any) -> list[Verdict]:
    """The verdict on each text as the answer to a problem that the function f solves."""
    programs = [(f"HumanEval/{number}", text) for number, text in enumerate(texts)]
    rows = [
        problem(number, "f", "return x + 1", [[1]], [[2], [3]]) for number in range(len(programs))
    ]
    data = write_lines(folder / "problems.jsonl", rows)
    isolation = program_isolation()
    request = GradeRequest("humaneval", str(data), programs, isolation, extract=True, **settings)
    return GRADER.grade(request)


def test_programs_run_as_they_stand(tmp_path: Path) -> None:
    right = form_verdicts(tmp_path, FORMS.values())
    assert {
        name: verdict.plus for name, verdict in zip(FORMS, right, strict=True)
    } == dict.fromkeys(FORMS, "pass")
    wrong = form_verdicts(tmp_path, [text.replace("+ 1", "+ 2") for text in FORMS.values()])
    assert "pass" not in [verdict.base for verdict in wrong]


METHOD = "class Solution:\n    def f(self, x):\n        return x + 1\n"
ASYNC = "import asyncio\nasync def g(x):\n    return x + 1\n"
OTHER_FORMS = {
    "method": METHOD,
    "method in a fence": f"{FENCE}py\n{METHOD}{FENCE}\nSo:\n{FENCE}py\nSolution()\n{FENCE}",
    "method and function": f"{METHOD}def f(x):\n    return Solution().f(x)",
    "bound method": f"{METHOD}f = Solution().f",
    "inherited method": f"{METHOD}class A(Solution):\n    pass\nf = A().f",
    "object": "class A:\n    def __call__(self, x):\n        return x + 1\nf = A()",
    "class": "class f:\n    def __new__(cls, x):\n        return x + 1",
    "asynchronous": ASYNC.replace("g", "f"),
    "asynchronous helper": f"{ASYNC}def f(x):\n    return asyncio.run(g(x))",
    "name of a global": "globals()['f'] = lambda x: x + 1",
    "global of a function": "def g():\n    global f\n    f = lambda x: x + 1\ng()",
    "condition": f"if 1:\n{textwrap.indent(RIGHT, '    ')}\nelse:\n    f = None",
    "deleted": f"{RIGHT}\ndel f",
}
"""Texts whose function is no function at the top of a program."""


def test_no_verdict_is_worse_than_that_of_evalplus(tmp_path: Path) -> None:
    """With as_harness=true it is EvalPlus's. Answers that EvalPlus judges otherwise are marked."""
    texts = [*FORMS.values(), *OTHER_FORMS.values()]
    evalplus_problems = EvalPlusProblems("humaneval")
    row = problem(0, "f", "return x + 1", [[1]], [[2], [3]])
    by_evalplus = [evalplus_problems.accepts_text(row, text) for text in texts]
    as_harness = form_verdicts(tmp_path, texts, as_harness=True)
    assert [verdict.plus == "pass" for verdict in as_harness] == by_evalplus
    verdicts = form_verdicts(tmp_path, texts)
    is_right = [verdict.plus == "pass" for verdict in verdicts]
    assert sum(is_right) > sum(by_evalplus) > len(texts) / 4
    others = [ours != theirs for ours, theirs in zip(is_right, by_evalplus, strict=True)]
    assert [verdict.unlike_harness for verdict in verdicts] == others


@pytest.mark.parametrize("name", list(CHOSEN))
def test_every_difference_from_evalplus_is_explained(
    published_data: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """All texts: `python -m benchmarks.grading_differences`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = published_data(FILES[name], "EvalPlus").parent
    judged = judged_texts(data, name, seed=0, share=5)
    assert len(judged) > 20
    assert unexplained(differences(judged)) == []
    faults = [each for each in judged if each.verdicts[OURS] != each.text.is_right]
    assert faults == []


LINES = [
    "def f(x):",
    "    return x",
    "import os",
    "x = (",
    "",
    "   ",
    "class A:",
    "    pass",
    ")",
    "Text.",
    "'''",
    "f(1)",
]


@settings(max_examples=150, deadline=None)
@given(lines=st.lists(st.sampled_from(LINES), max_size=9))
def test_the_longest_program_is_the_one_evalplus_finds(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert longest_program(text).rstrip() == evalplus_sanitizer().code_extract(text).rstrip()


def test_reading_a_program_costs_little() -> None:
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    prose = "".join(f"word {i} ( = \n" for i in range(400))
    program = "".join(f"x{i} = {i}\n" for i in range(400))
    assert (sanitize(prose, "f"), sanitize(program, "f")) == ("word 0 ( = ", program)
    assert read_program(prose, "f") is read_program(program, "f") is None
    # 160 s each, as EvalPlus does it
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - seconds < 10


def test_nothing_kills_the_sanitizer(tmp_path: Path) -> None:
    data = str(write_lines(tmp_path / "data.jsonl", [problem(900, "f", "return x", [[1]], [[1]])]))

    def sanitized_by_grader(text: str) -> str:
        request = GradeRequest(
            "humaneval", data, [("HumanEval/900", text)], program_isolation(), extract=True
        )
        (verdict,) = GRADER.grade(request)
        return verdict.program

    program = "print(1)\ndef f(x): return x"
    broken = ["(" * 5000, "x = 1\0", "\ud800"]
    assert [*map(sanitized_by_grader, [*broken, program])] == [*broken, "def f(x): return x"]


GRADING = """
import sys
from moe_lab.evaluation.adapters.evalplus import GRADER, GradeRequest
endless = "def f(x):\\n    while True: pass"
answers = [("HumanEval/1", endless)]
GRADER.grade(GradeRequest("humaneval", sys.argv[1], answers, sys.argv[2], seconds=50.0))
"""


@pytest.fixture
def grading(tmp_path: Path) -> Iterator[psutil.Popen]:
    """A process that grades a program, which runs."""
    data = write_lines(tmp_path / "data.jsonl", [problem(1, "f", "return x", [[1]], [])])
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", GRADING, str(data), program_isolation()]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = psutil.Popen(command, env=environment)
    # the runner, the process that serves the request, and the program
    wait_until(lambda: len(process.children(recursive=True)) >= 3)
    yield process
    with suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait()


def test_graders_import_no_torch(grading: psutil.Popen) -> None:
    maps: list[str] = []
    for child in grading.children(recursive=True):
        # it has ended meanwhile, or is in the sandbox
        with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            maps.append(Path(f"/proc/{child.pid}/maps").read_text())
    if not maps:
        pytest.skip("only root reads the memory maps of isolated processes")
    assert not any("libtorch" in text for text in maps)


def test_killed_grader_leaves_no_processes_and_files(grading: psutil.Popen, tmp_path: Path) -> None:
    children = [child.pid for child in grading.children(recursive=True)]
    os.kill(grading.pid, signal.SIGKILL)
    grading.wait()
    wait_until(lambda: not any(map(is_running, children)))
    assert not list((tmp_path / "temporary").iterdir())
