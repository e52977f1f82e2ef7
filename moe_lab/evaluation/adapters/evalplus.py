"""Verdicts on programs by EvalPlus's rules (`evalplus_rules.py`).

Programs run in `sandbox/runner.py`, which gets them and their inputs but not the expected outputs.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_lab.child_process import environment
from moe_lab.evaluation.adapters import evalplus_rules
from moe_lab.evaluation.sandbox.client import LimitedCalls, Runners
from moe_lab.evaluation.sandbox.encoding import encode
from moe_lab.evaluation.sandbox.isolation import ISOLATIONS, NONE
from moe_lab.evaluation.sandbox.runner import Outcome, Request
from moe_lab.machine import cores

_CANONICAL_SECONDS = 30.0
"""CPU limit of each call of a canonical solution."""
_CANONICAL_MEMORY = 4 << 30
"""Bytes of address space of a canonical solution."""
_MOST_SECONDS = 60.0
"""CPU seconds that a program may take for all its calls together."""
_READING_LIMITS = (10.0, 4 << 30)
"""CPU seconds and bytes of memory for reading the program in a text."""
_COMPARISON_LIMITS = (20.0, 1 << 30)
"""CPU seconds and bytes of memory for the outputs of one program."""
_MOST_VERDICTS = 20_000  # cached in memory: about 40 MB


@dataclass(frozen=True)
class GradeRequest:
    """Programs for the problems of one EvalPlus data file."""

    dataset: str
    """humaneval or mbpp."""
    data: str
    """Path of the data file."""
    programs: Sequence[tuple[str, str]] = field(compare=False)
    """(task id, complete program or the text that contains it)."""
    isolation: str
    """How programs are isolated; see `sandbox/isolation.py`."""
    extract: bool = False
    """Read the programs in texts; see `_Grading._verdict`. False: run the texts as they are."""
    as_harness: bool = False
    """Give EvalPlus's own verdicts."""
    seconds: float = 4.0
    """CPU limit of a call in seconds. The limit is four times the CPU time of the canonical
    solution, if that product is larger."""
    memory_mib: int = 4096
    """Limit on the address space of a program."""
    processes: int = 0
    """Programs that run at the same time; 0: one per core that this process may use."""


@dataclass(frozen=True)
class Verdict:
    """Statuses of a program: `base` on the base tests, `plus` on the base and plus tests together.

    A status is pass, fail, timeout, crash (the program died) or output (an output is too large or
    not a value).
    """

    program: str
    """The program in the text."""
    base: str
    plus: str
    reason: str = ""
    """Why the program does not pass."""
    unlike_harness: bool = False
    """Whether EvalPlus's own verdict is worse."""

    def passed_parts(self) -> int:
        """How many of the statuses are pass."""
        return (self.base, self.plus).count("pass")

    def outcome(self, metric: str) -> tuple[float, str]:
        """(outcome, text) for `metric`, which is base or plus. The outcome is 1 if the program
        passes, else 0."""
        status = getattr(self, metric)
        reason = f": {self.reason}" if self.reason and status != "pass" else ""
        return float(status == "pass"), f"{status}{reason}\n\n{self.program}"


Problem = dict[str, Any]
"""EvalPlus's description of a problem."""
_Key = tuple[str, str, GradeRequest]
"""Task id, program and settings, which determine a verdict."""


@dataclass(frozen=True)
class _DataFile:
    """The problems of one EvalPlus data file, with cached results."""

    problems: dict[str, Problem]
    canonical_outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """(task id, part) -> outcome of the canonical solution on the tests of the part."""
    verdicts: dict[_Key, Verdict] = field(default_factory=dict)


class Grader:
    """Grades programs. Verdicts are cached, because copies of a model that are pruned differently
    often write the same program."""

    def __init__(self) -> None:
        variables = environment("PATH", "TMPDIR", HOME="/nonexistent")
        self.rules = LimitedCalls(evalplus_rules.__name__, variables)
        """Calls functions of evalplus_rules in processes with limits."""
        self.runners = {kind: Runners(kind) for kind in (*ISOLATIONS, NONE)}
        """Kind of isolation -> the processes that run programs."""
        self.files: dict[tuple[str, str], _DataFile] = {}
        """(data set, sha256 of the data file) -> problems and cached results."""

    def grade(self, request: GradeRequest) -> list[Verdict]:
        """The verdict on each program of the request. RuntimeError if a canonical solution does not
        run."""
        key = (request.dataset, hashlib.sha256(Path(request.data).read_bytes()).hexdigest())
        if key not in self.files:
            problems = evalplus_rules.read_problems(request.dataset, request.data)
            self.files[key] = _DataFile(problems)
        try:
            return _Grading(request, self.files[key], self).verdicts()
        finally:
            if request.isolation == NONE:  # a program may have harmed the processes
                self.close()

    def close(self) -> None:
        """End all processes; the next request starts new ones."""
        self.rules.close()
        for runners in self.runners.values():
            runners.close()


GRADER = Grader()
"""The grader of this process."""
atexit.register(GRADER.close)


@dataclass(frozen=True)
class _Grading:
    """Grades the programs of one request."""

    request: GradeRequest
    file: _DataFile
    grader: Grader

    def verdicts(self) -> list[Verdict]:
        """The verdict on each program of the request."""
        # the request, which is equal to another with other programs, has the settings of grading
        keys = [(task, text, self.request) for task, text in self.request.programs]
        cache = self.file.verdicts
        new_keys = [key for key in dict.fromkeys(keys) if key not in cache]
        with ThreadPoolExecutor(self.request.processes or cores()) as pool:
            verdicts = dict(zip(new_keys, pool.map(self._verdict, new_keys), strict=True))
        verdicts |= {key: cache[key] for key in keys if key in cache}
        if len(cache) > _MOST_VERDICTS:
            cache.clear()
        for key in new_keys:
            # a crash is not cached, because another program may have caused it
            if "crash" not in (verdicts[key].base, verdicts[key].plus):
                cache[key] = verdicts[key]
        return [verdicts[key] for key in keys]

    def _run(
        self, problem: Problem, part: str, program: str, seconds: list[float], memory: int
    ) -> Outcome:
        """Run a program on all tests of a `part`, base or plus. `seconds`: CPU limit of each test.
        `memory`: limit on the address space in bytes."""
        request = Request(
            program=program,
            entry_point=problem["entry_point"],
            inputs=_inputs(problem, part),
            seconds=seconds,
            total_seconds=min(_MOST_SECONDS, sum(seconds)) + 1.0,  # 1.0: loading the program
            memory=memory,
        )
        return self.grader.runners[self.request.isolation].run(request)

    def _canonical(self, problem: Problem, part: str) -> Outcome:
        """The outcome of the canonical solution of a problem on the tests of a `part`. RuntimeError
        if the solution does not run."""
        outcomes = self.file.canonical_outcomes
        task = problem["task_id"]
        if (task, part) not in outcomes:
            program = problem["prompt"] + problem["canonical_solution"]
            seconds = [_CANONICAL_SECONDS] * len(problem[f"{part}_input"])
            outcome = self._run(problem, part, program, seconds, _CANONICAL_MEMORY)
            if outcome.status != "ok":
                raise RuntimeError(
                    f"{self.request.data}: the canonical solution of {task} does not run: "
                    f"{outcome.status} {outcome.error}"
                )
            outcomes[task, part] = outcome
        return outcomes[task, part]

    def _verdict(self, key: _Key) -> Verdict:
        """The verdict on a text. If the program that EvalPlus reads in the text does not pass, the
        program as it stands is run, and the better verdict counts. So no verdict is worse than
        EvalPlus's."""
        task, text, _ = key
        problem = self.file.problems[task]
        if not self.request.extract:
            return self._program_verdict(problem, text)
        arguments = [text, problem["entry_point"]]
        # the text is run if the sanitizer fails (None) or leaves nothing ("")
        sanitized = self.grader.rules("sanitize", arguments, *_READING_LIMITS) or text
        by_harness = self._program_verdict(problem, sanitized)
        if self.request.as_harness or by_harness.plus == "pass":
            return by_harness
        programs = self.grader.rules("read_program", arguments, *_READING_LIMITS)
        if programs is None or programs[0].split() == sanitized.split():
            return by_harness
        program, guarded = programs
        by_program = replace(self._program_verdict(problem, guarded), program=program)
        best = max(by_program, by_harness, key=Verdict.passed_parts)
        is_better = best.passed_parts() > by_harness.passed_parts()
        return replace(best, unlike_harness=is_better)

    def _program_verdict(self, problem: Problem, program: str) -> Verdict:
        """The verdict on a program for a problem."""
        base, reason = self._part_verdict(problem, "base", program)
        plus = base
        if base == "pass" and problem["plus_input"]:
            plus, reason = self._part_verdict(problem, "plus", program)
        return Verdict(program, base, plus, reason)

    def _part_verdict(self, problem: Problem, part: str, program: str) -> tuple[str, str]:
        """(status, reason) of a program on the tests of a `part`, base or plus."""
        canonical = self._canonical(problem, part)
        limits = [max(self.request.seconds, 4.0 * seconds) for seconds in canonical.seconds]
        outcome = self._run(problem, part, program, limits, self.request.memory_mib << 20)
        if outcome.status != "ok":
            return "fail" if outcome.status == "failed" else outcome.status, outcome.error
        problem_fields = {
            "entry_point": problem["entry_point"],
            "atol": problem["atol"],
            "inputs": _inputs(problem, part),
            "as_harness": self.request.as_harness,
        }
        arguments = [self.request.dataset, problem_fields, outcome.encoded, canonical.encoded]
        return _STATUSES[self.grader.rules("compare", arguments, *_COMPARISON_LIMITS)]


def _inputs(problem: Problem, part: str) -> list[Any]:
    """The encoded arguments of each test of a `part`, base or plus."""
    return [encode(list(arguments)) for arguments in problem[f"{part}_input"]]


_STATUSES = {
    "right": ("pass", ""),
    "wrong": ("fail", "another value was expected"),
    "no value": ("output", "it returned something that is not a value"),
    None: ("output", "what it returned takes too much time or memory to compare"),
}
"""Result of `evalplus_rules.compare` -> status and reason. The result is None if the comparison
reached a limit or failed."""
