"""Cost and correctness of grading: `python -m benchmarks.grading DATA`.

1. Cost: the programs of several plans are graded by processes that a worker keeps between plans,
   and by new processes for each plan and benchmark (`kept_processes_fail`): programs for the
   shipped code benchmarks, and the canonical solutions of HumanEval+.
2. Correctness on HumanEval+ and MBPP+; DATA is a folder with HumanEvalPlus.jsonl.gz and
   MbppPlus.jsonl.gz. Programs are graded by the adapter in the form of a model's answers:
   - canonical solutions, as answers of a chat model and of a base model: all right on base and plus
     tests. At first, their expected outputs are unknown and are computed;
   - canonical solutions with a wrong result in the last plus test: right on base tests where there
     are fewer base than plus tests, all wrong on plus tests;
   - programs that raise: all wrong.

Bar: 164 canonical solutions within 5 minutes on 2 cores, expected outputs included. The measure is
CPU seconds divided by 2 cores, because wall-clock time includes other work on the machine; both are
printed, and include the start of all processes. Exit code 1 when a count or a bar is missed.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import median_misses, parser, program_isolation, ratios, timed
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.adapters.evalplus import GRADER, Grader, GradeRequest
from moe_lab.evaluation.harness import Graded
from moe_lab.evaluation.harnesses.evalplus import HARNESS
from moe_lab.evaluation.items import Answer, Item, Reply
from moe_lab.evaluation.mirror import benchmarks, make
from moe_lab.paths import resolve

BAR = 300.0
"""Bar in seconds: all canonical solutions on CORES cores, expected outputs included."""
CORES = 2
SHIPPED_PLANS = 8
"""Number of plans with `shipped_programs`."""
CANONICAL_PLANS = 3
"""Number of plans with `canonical_solutions`."""
KEPT_BAR = 0.5
"""Bar: wall-clock time of grading by kept processes, divided by that with new processes."""
SHIPPED = {"humaneval": "humaneval", "mbpp": "mbpp", "livecodebench": "humaneval"}
"""Shipped code benchmark -> data set whose rules apply."""
Problem = Mapping[str, Any]


def canonical(problem: Problem) -> str:
    """The canonical solution of a problem."""
    return str(problem["prompt"] + problem["canonical_solution"])


def wrong_at_last(problem: Problem) -> str:
    """The canonical solution with a wrong result in the last plus test, in a form that EvalPlus's
    sanitizer does not change."""
    return (
        f"import collections\n_solution = {canonical(problem)!r}\n_names = dict()\n"
        "_calls = collections.Counter()\n"
        f"def {problem['entry_point']}(*given):\n"
        f"    if not _names: exec(_solution, _names)\n"
        f"    _calls['all'] += 1\n"
        f"    out = _names[{problem['entry_point']!r}](*given)\n"
        f"    return out if _calls['all'] < {len(problem['plus_input'])} else 'no' if out is None "
        "else None\n"
    )


def longer_plus(benchmark: BenchmarkConfig) -> int:
    """Number of problems with fewer base than plus tests, whose base tests `wrong_at_last`
    passes."""
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
    cpu: float


def count(benchmark: BenchmarkConfig, program: Callable[[Problem], str]) -> Count:
    """Grade the program of each problem in the form of a model's answer."""
    problems = {row["task_id"]: row for row in mirror.rows(benchmark)}
    answers = [_answer(item, problems[item.name], program) for item in HARNESS.items(benchmark)]
    policy = Policy(allow_code_execution=True, sandbox=program_isolation())

    def graded_anew() -> Graded:
        graded = HARNESS.grade(answers, benchmark, policy)
        GRADER.close()  # so that the CPU seconds of its processes count
        for file in GRADER.files.values():
            file.verdicts.clear()  # expected outputs alone are known the next time
        return graded

    graded, wall, cpu = timed(graded_anew)
    base, plus = (round(result["score"] * result["n"]) for result in graded.results)
    return Count(base, plus, wall, cpu)


def _answer(item: Item, problem: Problem, program: Callable[[Problem], str]) -> Answer:
    """A program as the answer to an item: a completion, or a message of a chat model."""
    prompt = item.requests[0].prompt  # type: ignore[union-attr]
    if isinstance(prompt, str):  # a completion begins where the prompt ends
        return Answer(item.name, prompt, (Reply(program(problem).removeprefix(problem["prompt"])),))
    text = f"Here is a solution:\n\n```python\n{program(problem)}\n```\n\nIt does what was asked."
    return Answer(item.name, json.dumps(prompt), (Reply(text),))


def kept_processes_fail(data: Path | None) -> bool:
    """Print the ratio of the wall-clock seconds of grading by kept processes to those by new
    processes; True when it is above KEPT_BAR.

    Each of several plans has `canonical_solutions` of the folder `data`, or `shipped_programs` if
    `data` is None; no two programs are equal. The programs of a plan are graded by new processes
    and by kept ones, then those of the next plan. Kept processes start at the first plan. Expected
    outputs are known before. At the end, the kept processes grade the programs of the last plan
    once more; this time has no bar.
    """
    plans = SHIPPED_PLANS if data is None else CANONICAL_PLANS

    def requests_of(plan: str) -> list[GradeRequest]:
        return shipped_programs(plan) if data is None else [canonical_solutions(plan, data)]

    kept = Grader()
    for request in requests_of("expected"):
        kept.grade(request)  # computes the expected outputs
    kept.close()
    grade_by_new = partial(grade_by_new_processes, kept)
    calls = _seconds_of_calls(kept)
    kept_seconds = []
    new_seconds = []
    new_cpu_seconds = []
    try:
        for plan in range(plans):
            requests = requests_of(f"plan {plan}")
            wall, cpu = _seconds(requests, grade_by_new)
            new_seconds.append(wall)
            new_cpu_seconds.append(cpu)
            wall, _ = _seconds(requests, kept.grade)
            kept_seconds.append(wall)
        again, _ = _seconds(requests, kept.grade)
    finally:
        kept.close()
    programs = sum(len(request.programs) for request in requests)
    benchmark = "the shipped benchmarks" if data is None else "HumanEval+"
    median = statistics.median
    print(
        f"{programs} programs for {benchmark}: {median(kept_seconds):.2f} s in kept processes, "
        f"{again:.3f} s once more, {median(new_seconds):.2f} s in started ones"
    )
    print(
        f"  processor time: {median(new_cpu_seconds):.1f} s in started ones; calls of all "
        f"canonical solutions {calls:.1f} s",
        flush=True,
    )
    shares = ratios(kept_seconds, new_seconds)
    return median_misses("kept processes / started ones", shares, "<=", KEPT_BAR)


def grade_by_new_processes(kept: Grader, request: GradeRequest) -> None:
    """Grade by processes that are started for this request alone, with the expected outputs that
    `kept` has computed."""
    grader = Grader()
    grader.files |= {key: replace(file, verdicts={}) for key, file in kept.files.items()}
    grader.grade(request)
    grader.close()


def _seconds(
    requests: list[GradeRequest], grader: Callable[[GradeRequest], object]
) -> tuple[float, float]:
    """Wall-clock seconds of grading, and CPU seconds of this process and of the processes that end
    during grading."""
    _, wall, cpu = timed(lambda: [grader(request) for request in requests])
    return wall, cpu


def _seconds_of_calls(grader: Grader) -> float:
    """CPU seconds of the calls of canonical solutions by which expected outputs were computed."""
    files = grader.files.values()
    outcomes = [outcome for file in files for outcome in file.canonical_outcomes.values()]
    return float(sum(sum(outcome.seconds) for outcome in outcomes))


def shipped_programs(plan: str) -> list[GradeRequest]:
    """A request with a program per problem for each shipped code benchmark; a quarter of the
    programs are right. A comment with the name of the plan makes programs of plans differ."""
    requests = []
    for name, dataset in SHIPPED.items():
        data = Path(resolve(f"pocket:benchmarks/{name}.jsonl"))
        problems = [json.loads(line) for line in data.read_text().splitlines()]
        programs = []
        for number, problem in enumerate(problems):
            program = canonical(problem)
            if number % 4:
                program = f"def {problem['entry_point']}(*given): return None\n"
            programs.append((problem["task_id"], f"{program}\n# {plan}\n"))
        requests.append(_request(dataset, data, programs))
    return requests


def canonical_solutions(plan: str, data: Path) -> GradeRequest:
    """A request with the canonical solutions of HumanEval+, whose file is in the folder `data`, as
    answers of a chat model. A comment with the name of the plan makes programs of plans differ."""
    file = (data / "HumanEvalPlus.jsonl.gz").resolve()
    problems = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    programs = [(problem["task_id"], f"{canonical(problem)}\n# {plan}\n") for problem in problems]
    return replace(_request("humaneval", file, programs), extract=True)


def _request(dataset: str, data: Path, programs: list[tuple[str, str]]) -> GradeRequest:
    return GradeRequest(dataset, str(data), programs, program_isolation())


def main() -> int:
    """Measure, print, compare with the bars; returns 1 when a count or a bar is missed."""
    options = parser("grading", __doc__)
    options.add_argument("data", type=Path)
    options.add_argument("--benchmarks", nargs="+", default=["humaneval", "mbpp"])
    arguments = options.parse_args()
    failed = kept_processes_fail(None)
    if "humaneval" in arguments.benchmarks:
        failed |= kept_processes_fail(arguments.data)
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in benchmarks(arguments.benchmarks, folder):
            print(make(benchmark, arguments.data / Path(str(benchmark.url)).name), flush=True)
            failed |= _benchmark_fails(benchmark)
    return int(failed)


def _benchmark_fails(benchmark: BenchmarkConfig) -> bool:
    """Grade all kinds of programs of a benchmark and print the counts; True when one is wrong, or
    the bar fails."""
    items = benchmark.expected or 0
    completed = replace(benchmark, chat=False)
    first = count(benchmark, canonical)
    failed = _misses("canonical, chat, from nothing", first, items, items)
    failed |= _misses("canonical, chat", count(benchmark, canonical), items, items)
    failed |= _misses("canonical, completed", count(completed, canonical), items, items)
    wrong = count(benchmark, wrong_at_last)
    failed |= _misses("wrong at the last plus test", wrong, longer_plus(benchmark), 0)
    failed |= _misses("raising", count(benchmark, raising), 0, 0)
    if benchmark.name == "humaneval":
        missed = first.cpu / CORES > BAR
        print(
            f"  from nothing on {CORES} cores: bar <= {BAR:.0f} s: {'FAILED' if missed else 'ok'}",
            flush=True,
        )
        failed |= missed
    return failed


def _misses(what: str, result: Count, base: int, plus: int) -> bool:
    """Print a count; True when it differs from the expected numbers on base and plus tests."""
    right = (result.base, result.plus) == (base, plus)
    print(
        f"  {what}: base {result.base}, plus {result.plus}, expected {base} and {plus}: "
        f"{'ok' if right else 'FAILED'}; {result.cpu:.0f} s of processor time, "
        f"{result.cpu / CORES:.0f} s on {CORES} cores, {result.wall:.0f} s by the clock",
        flush=True,
    )
    return not right


if __name__ == "__main__":
    sys.exit(main())
