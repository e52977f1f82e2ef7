"""Cost and correctness of grading: `python -m benchmarks.grading DATA`.

First the shipped code benchmarks for several plans, graded by the process that a worker keeps, and by a process that is
started for each plan and benchmark (`seconds_per_program`); the ratio has a bar.

Then HumanEval+ and MBPP+, of which DATA is a folder with HumanEvalPlus.jsonl.gz and MbppPlus.jsonl.gz. Answers go
through the adapter, as a model's do:
- the canonical solutions, first with an empty cache (expected outputs are computed) and again with cached expected
  outputs, in the form of a chat model and of a base model: all right on base and plus;
- the same, but wrong at the call of the last plus test: right on base where that has fewer tests, all wrong on plus;
- programs that raise: all wrong.

Bar: 164 canonical solutions within 5 minutes on 2 cores, expected outputs included. The measure is CPU seconds divided
by 2 cores, because wall-clock time includes other work on the machine; both are printed, and include the start of the
grading process. Exit code 1 when a count or a bar is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import median_misses, parser, ratios, timed
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import mirror
from moe_lab.evaluation.generation import Answer, Question
from moe_lab.evaluation.harness import Graded
from moe_lab.evaluation.harnesses.evalplus import KeptGrader, ask, grade, kept_grader, run_grader
from moe_lab.evaluation.harnesses.evalplus_grader import GradeRequest
from moe_lab.evaluation.mirror.make import benchmarks, make
from moe_lab.evaluation.sandbox.client import namespaces_missing
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.paths import resolve

BAR = 300.0
CORES = 2
KEPT_BAR = 0.5
"""Most that grading by a kept process may take of the wall-clock time with a process for each plan and benchmark."""
SHIPPED = {"humaneval": "humaneval", "mbpp": "mbpp", "livecodebench": "humaneval"}
"""Shipped code benchmark -> data set whose rules apply."""
Problem = Mapping[str, Any]


def canonical(problem: Problem) -> str:
    """The data's own solution."""
    return str(problem["prompt"] + problem["canonical_solution"])


def wrong_at_last(problem: Problem) -> str:
    """The data's own solution with a wrong output in the last plus test; EvalPlus's sanitizer does not change it."""
    return (
        f"import collections\n_solution = {canonical(problem)!r}\n_names = dict()\n_calls = collections.Counter()\n"
        f"def {problem['entry_point']}(*given):\n"
        f"    if not _names: exec(_solution, _names)\n"
        f"    _calls['all'] += 1\n"
        f"    out = _names[{problem['entry_point']!r}](*given)\n"
        f"    return out if _calls['all'] < {len(problem['plus_input'])} else 'no' if out is None else None\n"
    )


def longer_plus(benchmark: BenchmarkConfig) -> int:
    """Number of problems with fewer base than plus tests, whose base tests `wrong_at_last` passes."""
    return sum(len(row["base_input"]) < len(row["plus_input"]) for row in mirror.rows(benchmark))


def raising(problem: Problem) -> str:
    """A program that never returns anything."""
    return f"def {problem['entry_point']}(*given):\n    raise ValueError(given)\n    return given\n"


@dataclass(frozen=True)
class Count:
    """Number of right answers on base and plus tests, and wall-clock and CPU seconds of grading."""

    base: int
    plus: int
    wall: float
    processor: float


def count(benchmark: BenchmarkConfig, program: Callable[[Problem], str]) -> Count:
    """Grade one program per problem in the form of a model's answers."""
    problems = {row["task_id"]: row for row in mirror.rows(benchmark)}
    answers = [_answer(question, problems[question.item], program) for question in ask(benchmark)]
    policy = Policy(allow_code_execution=True, sandbox="none" if namespaces_missing() else "namespaces")

    def graded_anew() -> Graded:
        graded = grade(answers, benchmark, policy)
        kept_grader.close()  # so that the CPU seconds of its children count, and no verdict is known the next time
        return graded

    graded, wall, used = timed(graded_anew)
    base, plus = (round(result["score"] * result["n"]) for result in graded.results)
    return Count(base, plus, wall, used)


def _answer(question: Question, problem: Problem, program: Callable[[Problem], str]) -> Answer:
    if isinstance(question.prompt, str):  # a completion begins where the prompt ends
        return Answer(question.item, question.prompt, program(problem).removeprefix(problem["prompt"]))
    said = f"Here is a solution:\n\n```python\n{program(problem)}\n```\n\nIt does what was asked."
    return Answer(question.item, json.dumps(question.prompt), said)


def seconds_per_program(plans: int, folder: str) -> tuple[list[float], list[float]]:
    """Wall-clock seconds per program of each plan, by a kept process and by processes started for each benchmark.

    Both ways grade the programs of one plan before they go on to the next. A quarter of the programs are right, and
    no two are equal. Expected outputs are known: `folder` is for them. The kept process starts with the first plan.
    """
    kept = KeptGrader()
    ways: list[Callable[[GradeRequest], object]] = [kept.grade, run_grader]
    seconds: tuple[list[float], list[float]] = ([], [])
    for request in _requests("expected", folder):
        run_grader(request)
    try:
        for plan in range(plans):
            requests = _requests(f"plan {plan}", folder)
            count = sum(len(request.programs) for request in requests)
            for way, times in zip(ways, seconds, strict=True):
                _, wall, _ = timed(partial(list, map(way, requests)))
                times.append(wall / count)
    finally:
        kept.close()
    return seconds


def _requests(plan: str, folder: str) -> list[GradeRequest]:
    """The programs of one plan for the shipped benchmarks."""
    requests = []
    for name, dataset in SHIPPED.items():
        data = Path(resolve(f"pocket:benchmarks/{name}.jsonl"))
        problems = [json.loads(line) for line in data.read_text().splitlines()]
        programs = {}
        for number, problem in enumerate(problems):
            wrong = f"def {problem['entry_point']}(*given): return None\n"
            programs[problem["task_id"]] = (wrong if number % 4 else canonical(problem)) + f"\n# {plan}\n"
        confined = namespaces_missing() is None
        requests.append(GradeRequest(dataset, str(data), programs, confined, not confined, cache=folder))
    return requests


def main() -> int:
    """Measure, print, compare."""
    options = parser("grading", __doc__)
    options.add_argument("data", type=Path)
    options.add_argument("--benchmarks", nargs="+", default=["humaneval", "mbpp"])
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept, started = seconds_per_program(8, f"{folder}/shipped")
        print(f"shipped code benchmarks: {1000 * statistics.median(kept):.1f} ms per program", flush=True)
        failed = median_misses("kept process / started ones", ratios(kept, started), "<=", KEPT_BAR)
        os.environ["XDG_CACHE_HOME"] = folder
        for benchmark in benchmarks(arguments.benchmarks, folder):
            print("\n".join(make(benchmark, arguments.data)), flush=True)
            failed |= _check(benchmark)
    return int(failed)


def _check(benchmark: BenchmarkConfig) -> bool:
    n = benchmark.expected or 0
    completed = replace(benchmark, chat=False)
    first = count(benchmark, canonical)
    failed = _report("canonical, chat, from nothing", first, (n, n))
    failed |= _report("canonical, chat", count(benchmark, canonical), (n, n))
    failed |= _report("canonical, completed", count(completed, canonical), (n, n))
    failed |= _report("wrong at the last plus test", count(benchmark, wrong_at_last), (longer_plus(benchmark), 0))
    failed |= _report("raising", count(benchmark, raising), (0, 0))
    if benchmark.name == "humaneval":
        missed = first.processor / CORES > BAR
        print(f"  from nothing on {CORES} cores: bar <= {BAR:.0f} s: {'FAILED' if missed else 'ok'}", flush=True)
        failed |= missed
    return failed


def _report(what: str, found: Count, wanted: tuple[int, int]) -> bool:
    right = (found.base, found.plus) == wanted
    print(
        f"  {what}: base {found.base}, plus {found.plus}, expected {wanted[0]} and {wanted[1]}: "
        f"{'ok' if right else 'FAILED'}; {found.processor:.0f} s of processor time, {found.processor / CORES:.0f} s on "
        f"{CORES} cores, {found.wall:.0f} s by the clock",
        flush=True,
    )
    return not right


if __name__ == "__main__":
    sys.exit(main())
