"""Cost and correctness of grading: `python -m benchmarks.grading DATA`.

First the programs of several plans, graded by the processes that a worker keeps, and by some that
are started for each plan and benchmark (`kept_misses`): programs for the shipped code benchmarks,
and the canonical solutions of HumanEval+.

Then HumanEval+ and MBPP+, of which DATA is a folder with HumanEvalPlus.jsonl.gz and
MbppPlus.jsonl.gz. Answers go through the adapter, as a model's do:
- the canonical solutions, first with unknown expected outputs, which are computed, and again with
  known ones, in the form of a chat model and of a base model: all right on base and plus;
- the same, but wrong at the call of the last plus test: right on base where that has fewer tests,
  all wrong on plus;
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

from benchmarks.measure import median_misses, namespaces_missing, parser, timed
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.adapters.evalplus import GRADER, Grader, GradeRequest
from moe_lab.evaluation.harness import Graded
from moe_lab.evaluation.harnesses.evalplus import HARNESS
from moe_lab.evaluation.items import Answer, Item, Reply
from moe_lab.evaluation.mirror import benchmarks, make
from moe_lab.paths import resolve

BAR = 300.0
CORES = 2
SHIPPED_PLANS = 8
CANONICAL_PLANS = 3
KEPT_BAR = 0.5
"""Most that grading by kept processes may take of the wall-clock time with new ones for each plan
and benchmark."""
SHIPPED = {"humaneval": "humaneval", "mbpp": "mbpp", "livecodebench": "humaneval"}
"""Shipped code benchmark -> data set whose rules apply."""
Problem = Mapping[str, Any]


def canonical(problem: Problem) -> str:
    """The data's own solution."""
    return str(problem["prompt"] + problem["canonical_solution"])


def wrong_at_last(problem: Problem) -> str:
    """The data's own solution with a wrong output in the last plus test; EvalPlus's sanitizer does
    not change it."""
    return (
        f"import collections\n_solution = {canonical(problem)!r}\n_names = dict()\n_calls = "
        "collections.Counter()\n"
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
    processor: float


def count(benchmark: BenchmarkConfig, program: Callable[[Problem], str]) -> Count:
    """Grade one program per problem in the form of a model's answers."""
    problems = {row["task_id"]: row for row in mirror.rows(benchmark)}
    answers = [_answer(item, problems[item.name], program) for item in HARNESS.items(benchmark)]
    policy = Policy(
        allow_code_execution=True, sandbox="none" if namespaces_missing() else "namespaces"
    )

    def graded_anew() -> Graded:
        graded = HARNESS.grade(answers, benchmark, policy)
        GRADER.close()  # so that the CPU seconds of its processes count
        for file in GRADER.files.values():
            file.verdicts.clear()  # expected outputs alone are known the next time
        return graded

    graded, wall, used = timed(graded_anew)
    base, plus = (round(result["score"] * result["n"]) for result in graded.results)
    return Count(base, plus, wall, used)


def _answer(item: Item, problem: Problem, program: Callable[[Problem], str]) -> Answer:
    prompt = item.requests[0].prompt  # type: ignore[union-attr]
    if isinstance(prompt, str):  # a completion begins where the prompt ends
        return Answer(item.name, prompt, (Reply(program(problem).removeprefix(problem["prompt"])),))
    said = f"Here is a solution:\n\n```python\n{program(problem)}\n```\n\nIt does what was asked."
    return Answer(item.name, json.dumps(prompt), (Reply(said),))


def kept_misses(data: Path | None) -> bool:
    """Print the ratio of wall-clock seconds of grading by kept processes to those by started ones,
    True above KEPT_BAR.

    The programs are, for each of several plans, `canonical_solutions` of `data`, or else
    `shipped_programs`. Both ways grade those of one plan before they go on to the next, and no two
    programs are equal. The kept ones start with the first plan. Expected outputs are known. At last
    the kept ones get the programs of the last plan once more, for which there is no bar.
    """
    plans = SHIPPED_PLANS if data is None else CANONICAL_PLANS

    def requests_of(plan: str) -> list[GradeRequest]:
        return shipped_programs(plan) if data is None else [canonical_solutions(plan, data)]

    kept = Grader()
    seconds = []
    again = 0.0
    for request in requests_of("expected"):
        kept.grade(request)
    kept.close()
    run_grader = partial(grade_by_new_processes, kept)
    calls = _seconds_of_calls(kept)
    try:
        for plan in range(plans):
            requests = requests_of(f"plan {plan}")
            started, processor = _seconds(requests, run_grader)
            warm, _ = _seconds(requests, kept.grade)
            seconds.append((warm, started, processor))
        again, _ = _seconds(requests, kept.grade)
    finally:
        kept.close()
    programs = sum(len(request.programs) for request in requests)
    medians = [statistics.median(times) for times in zip(*seconds, strict=True)]
    print(
        f"{programs} programs "
        f"{'for the shipped benchmarks' if data is None else 'for HumanEval+'}: {medians[0]:.2f} s "
        f"in kept processes, {again:.3f} s once more, {medians[1]:.2f} s in started ones"
    )
    print(
        f"  processor time: {medians[2]:.1f} s in started ones; calls of all canonical solutions "
        f"{calls:.1f} s",
        flush=True,
    )
    shares = [warm / started for warm, started, _ in seconds]
    return median_misses("kept processes / started ones", shares, "<=", KEPT_BAR)


def grade_by_new_processes(known: Grader, request: GradeRequest) -> None:
    """Grade by processes that are started for this request alone, with the expected outputs that
    are `known`."""
    grader = Grader()
    grader.files |= {key: replace(file, verdicts={}) for key, file in known.files.items()}
    grader.grade(request)
    grader.close()


def _seconds(
    requests: list[GradeRequest], grader: Callable[[GradeRequest], object]
) -> tuple[float, float]:
    """Wall-clock seconds of grading, and CPU seconds of the processes that ended meanwhile and of
    this one."""
    _, wall, used = timed(lambda: [grader(request) for request in requests])
    return wall, used


def _seconds_of_calls(grader: Grader) -> float:
    """CPU seconds that the calls of the canonical solutions took when their outputs were
    computed."""
    tasks = [task for file in grader.files.values() for task in file.expected.values()]
    return float(sum(sum(part["seconds"]) for task in tasks for part in task.values()))


def shipped_programs(plan: str) -> list[GradeRequest]:
    """Programs for each shipped code benchmark, of which a quarter are right."""
    requests = []
    for name, dataset in SHIPPED.items():
        data = Path(resolve(f"pocket:benchmarks/{name}.jsonl"))
        problems = [json.loads(line) for line in data.read_text().splitlines()]
        programs = {}
        for number, problem in enumerate(problems):
            wrong = f"def {problem['entry_point']}(*given): return None\n"
            programs[problem["task_id"]] = (
                wrong if number % 4 else canonical(problem)
            ) + f"\n# {plan}\n"
        requests.append(_request(dataset, data, programs))
    return requests


def canonical_solutions(plan: str, data: Path) -> GradeRequest:
    """The canonical solutions of HumanEval+, whose file is in the folder `data`, as answers of a
    chat model."""
    file = (data / "HumanEvalPlus.jsonl.gz").resolve()
    problems = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    programs = {problem["task_id"]: f"{canonical(problem)}\n# {plan}\n" for problem in problems}
    return replace(_request("humaneval", file, programs), sanitize=True)


def _request(dataset: str, data: Path, programs: dict[str, str]) -> GradeRequest:
    confined = namespaces_missing() is None
    return GradeRequest(dataset, str(data), programs, confined)


def main() -> int:
    """Measure, print, compare."""
    options = parser("grading", __doc__)
    options.add_argument("data", type=Path)
    options.add_argument("--benchmarks", nargs="+", default=["humaneval", "mbpp"])
    arguments = options.parse_args()
    failed = kept_misses(None)
    if "humaneval" in arguments.benchmarks:
        failed |= kept_misses(arguments.data)
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in benchmarks(arguments.benchmarks, folder):
            print(make(benchmark, arguments.data / Path(str(benchmark.url)).name), flush=True)
            failed |= _check(benchmark)
    return int(failed)


def _check(benchmark: BenchmarkConfig) -> bool:
    n = benchmark.expected or 0
    completed = replace(benchmark, chat=False)
    first = count(benchmark, canonical)
    failed = _report("canonical, chat, from nothing", first, (n, n))
    failed |= _report("canonical, chat", count(benchmark, canonical), (n, n))
    failed |= _report("canonical, completed", count(completed, canonical), (n, n))
    failed |= _report(
        "wrong at the last plus test", count(benchmark, wrong_at_last), (longer_plus(benchmark), 0)
    )
    failed |= _report("raising", count(benchmark, raising), (0, 0))
    if benchmark.name == "humaneval":
        missed = first.processor / CORES > BAR
        print(
            f"  from nothing on {CORES} cores: bar <= {BAR:.0f} s: {'FAILED' if missed else 'ok'}",
            flush=True,
        )
        failed |= missed
    return failed


def _report(what: str, found: Count, wanted: tuple[int, int]) -> bool:
    right = (found.base, found.plus) == wanted
    print(
        f"  {what}: base {found.base}, plus {found.plus}, expected {wanted[0]} and {wanted[1]}: "
        f"{'ok' if right else 'FAILED'}; {found.processor:.0f} s of processor time, "
        f"{found.processor / CORES:.0f} s on {CORES} cores, {found.wall:.0f} s by the clock",
        flush=True,
    )
    return not right


if __name__ == "__main__":
    sys.exit(main())
