"""Grade programs with EvalPlus's data and rules: `python -m moe_lab.evaluation.harnesses.evalplus_grader`.

The process loads neither torch nor the model, and never runs a program itself: `sandbox/runner.py` does, which gets the
program and the inputs but not the expected outputs. Imports, problems, expected outputs, verdicts, confined runners and
the processes that compare are kept for the next request, so that a request for programs that were graded before, as
other plans often give, costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_lab.child_process import serve
from moe_lab.evaluation.sandbox import encoding
from moe_lab.evaluation.sandbox.children import LimitedChildren
from moe_lab.evaluation.sandbox.client import Outcome, Runners
from moe_lab.evaluation.sandbox.closed_world import leaves_closed_world
from moe_lab.evaluation.sandbox.encoding import encode
from moe_lab.evaluation.sandbox.runner import Request
from moe_lab.json_files import write_json

PARTS = ("base", "plus")
_CANONICAL_SECONDS = 30.0
_CANONICAL_MEMORY = 4 << 30
_LONGEST = 60.0
_OUTPUT = 64 << 20
_COMPARING_MEMORY = 1 << 30
_MOST_VERDICTS = 20_000  # of one data file that are kept in memory: about 40 MB
_MOST_FILES = 8  # data files that are kept in memory: the two published ones take 0.3 GB


@dataclass(frozen=True)
class GradeRequest:
    """Programs for the problems of one EvalPlus data file."""

    dataset: str
    """humaneval or mbpp: the data set whose rules apply."""
    data: str
    """Path of the data file."""
    programs: dict[str, str]
    """Task id -> complete program."""
    confined: bool
    """Run programs in namespaces; False: only in a subprocess with limits."""
    closed_world_only: bool
    """Count programs that could reach outside themselves as wrong, without running them."""
    sanitize: bool = False
    """Apply EvalPlus's sanitizer to the programs first."""
    seconds: float = 4.0
    """CPU limit of a call, or four times the CPU time of the canonical solution if that is more."""
    memory_mib: int = 4096
    """Limit on the address space of a program."""
    comparing_seconds: int = 20
    """CPU limit for comparing the outputs of one program, which may take `_COMPARING_MEMORY` bytes."""
    processes: int = 0
    """Programs that run at the same time; 0: one per core that this process may use."""
    cache: str | None = None
    """Private folder for the outputs of canonical solutions."""


@dataclass
class Verdict:
    """Result of a program on the base tests and on all tests: pass, fail, timeout, crash, output or refused."""

    base: str
    plus: str
    reason: str = ""


@dataclass
class DataFile:
    """What is known of one EvalPlus data file."""

    dataset: str
    """humaneval or mbpp."""
    problems: dict[str, dict[str, Any]]
    rules: types.ModuleType
    """`evalplus_rules`: imported by this process, so that its forks have it."""
    digest: str
    """sha256 of the file and of what determines how outputs are encoded."""
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task id -> part -> what the canonical solution returns, and its CPU seconds."""
    graded: dict[str, tuple[str, Verdict]] = field(default_factory=dict)
    """Hash of a program and what its verdict depends on -> the program after the sanitizer, and the verdict."""
    compared: dict[str, str] = field(default_factory=dict)
    """Hash of a task, a part and encoded outputs -> how they compare, a key of `_COMPARED`."""
    _children: LimitedChildren | None = None
    _children_for: tuple[int, int] | None = None

    def comparing(self, seconds: int) -> LimitedChildren:
        """Processes that know the expected outputs of now and compare others with them, within CPU seconds per request.

        They are kept for the next call. Must be called while this process has no other thread.
        """
        children_for = (seconds, len(self.expected))
        if self._children is None or self._children_for != children_for:
            self.close()
            self._children = LimitedChildren(self._compare, seconds, _COMPARING_MEMORY, cores())
            self._children_for = children_for
        return self._children

    def close(self) -> None:
        """End the processes that compare."""
        if self._children is not None:
            self._children.close()
            self._children = None

    def _compare(self, request: Any) -> str:
        """Work of a child: compare the encoded outputs of a task's part, and return a key of `_COMPARED`.

        They are decoded only here, with limited time and memory. Decoding makes data of them, never code, and comparing
        changes neither the inputs nor what is expected, which is decoded anew: so no program's outputs can change the
        verdict of the next.
        """
        task, part, encoded = request
        problem = self.problems[task]
        try:
            outputs = Outcome("ok", "", encoded, []).values()
        except ValueError:
            return "no value"
        expected = Outcome("ok", "", self.expected[task][part]["encoded"], []).values()
        if self.dataset == "mbpp" and problem["entry_point"] in self.rules.MBPP_OUTPUT_NOT_NONE_TASKS:
            expected = [value is not None for value in expected]
        return "right" if self.rules.agrees(self.dataset, problem, part, outputs, expected) else "wrong"


def problems_of(dataset: str, data: str) -> dict[str, dict[str, Any]]:
    """The problems as EvalPlus reads them, with its special input types."""
    # evalplus.data imports `datasets` for a benchmark not used here; without it the import takes 0.1 s instead of 1.3.
    unused = types.ModuleType("datasets")
    unused.load_dataset = None  # type: ignore[attr-defined]
    sys.modules.setdefault("datasets", unused)
    from evalplus.data import humaneval, mbpp

    if dataset == "humaneval":
        humaneval.HUMANEVAL_OVERRIDE_PATH = data  # read at each call; its environment variable only at import
        problems: dict[str, dict[str, Any]] = humaneval.get_human_eval_plus()
    else:
        mbpp.MBPP_OVERRIDE_PATH = data
        problems = mbpp.get_mbpp_plus()
    return problems


class Grader:
    """Grades one request after the other, each on several runners."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], DataFile] = {}
        self.confined = Runners(confined=True)
        """Runners in namespaces, kept for the next request."""
        self._sanitizing: LimitedChildren | None = None

    def grade(self, request: GradeRequest) -> dict[str, Any]:
        """Verdicts and sanitized programs by task id, and EvalPlus's version."""
        file = self._file(request)
        # Without namespaces a program can harm other processes, so that no later request may get the same ones.
        runners = self.confined if request.confined else Runners(confined=False)
        try:
            sanitizer = self._sanitizer(file.rules) if request.sanitize else None
            graded = _Grading(request, file, runners, sanitizer).graded()
        except OSError:  # one of the kept processes has ended, as for want of memory: the next request gets others
            self._end_children()
            raise
        finally:
            if runners is not self.confined:
                runners.close()
                self._end_children()
        return {
            "evalplus": version("evalplus"),
            "verdicts": {task: asdict(verdict) for task, (_, verdict) in graded.items()},
            "programs": {task: program for task, (program, _) in graded.items()},
        }

    def _file(self, request: GradeRequest) -> DataFile:
        code = Path(encoding.__file__).read_bytes() + sys.version.encode()  # both determine how outputs are encoded
        digest = hashlib.sha256(Path(request.data).read_bytes() + code).hexdigest()
        file = self._files.pop((request.dataset, digest), None)
        if file is None:
            problems = problems_of(request.dataset, request.data)
            from moe_lab.evaluation.harnesses import evalplus_rules  # here, because `problems_of` makes its import fast

            file = DataFile(request.dataset, problems, evalplus_rules, digest)
        self._files[request.dataset, digest] = file  # the last one is the one used last
        while len(self._files) > _MOST_FILES:
            self._files.pop(next(iter(self._files))).close()
        return file

    def _sanitizer(self, rules: types.ModuleType) -> LimitedChildren:
        """Processes that sanitize a program, given with the name of its function."""
        if self._sanitizing is None:
            limits = (rules.SECONDS, rules.MEMORY, cores())
            self._sanitizing = LimitedChildren(lambda request: str(rules.sanitized(*request)), *limits)
        return self._sanitizing

    def close(self) -> None:
        """End all processes."""
        self.confined.close()
        self._end_children()

    def _end_children(self) -> None:
        for file in self._files.values():
            file.close()
        if self._sanitizing is not None:
            self._sanitizing.close()
            self._sanitizing = None


class _Grading:
    """Grading of one request."""

    def __init__(
        self, request: GradeRequest, file: DataFile, runners: Runners, sanitizing: LimitedChildren | None
    ) -> None:
        self.request, self.file, self.problems, self.runners = request, file, file.problems, runners
        self._sanitizing = sanitizing
        self._comparing: LimitedChildren

    def graded(self) -> dict[str, tuple[str, Verdict]]:
        """Task id -> program after the sanitizer and verdict, for each program of the request."""
        programs, known = self.request.programs, self.file.graded
        keys = {task: self._key(task) for task in programs}
        missing = [task for task in programs if keys[task] not in known]
        graded = {task: known[key] for task, key in keys.items() if key in known}
        if missing:
            self._load_expected(missing)
            graded.update(self._grade(missing))
        for memory in (known, self.file.compared):
            if len(memory) > _MOST_VERDICTS:
                memory.clear()
        for task in missing:
            if "crash" not in (graded[task][1].base, graded[task][1].plus):  # another program may have caused it
                known[keys[task]] = graded[task]
        return {task: graded[task] for task in programs}

    def _key(self, task: str) -> str:
        request = self.request
        limits = (request.seconds, request.memory_mib, request.comparing_seconds)
        how = (request.confined, request.closed_world_only, request.sanitize)
        return hashlib.sha256(json.dumps([task, request.programs[task], limits, how]).encode()).hexdigest()

    def _grade(self, tasks: list[str]) -> dict[str, tuple[str, Verdict]]:
        self._comparing = self.file.comparing(self.request.comparing_seconds)  # forked before there are threads
        longest_first = sorted(tasks, key=self._expected_seconds, reverse=True)  # so that all end together
        with ThreadPoolExecutor(self._parallel(tasks)) as pool:
            return dict(zip(longest_first, pool.map(self._program_and_verdict, longest_first), strict=True))

    def _expected_seconds(self, task: str) -> float:
        return sum(sum(part["seconds"]) for part in self.file.expected[task].values())

    def _parallel(self, tasks: list[str]) -> int:
        return min(self.request.processes or cores(), len(tasks))

    def _run(self, task: str, part: str, program: str, seconds: list[float], memory: int) -> Outcome:
        inputs = [encode(list(arguments)) for arguments in self.problems[task][f"{part}_input"]]
        total = min(_LONGEST, sum(seconds)) + 1.0
        request = Request(program, self.problems[task]["entry_point"], inputs, seconds, total, memory, _OUTPUT)
        return self.runners.run(request)

    # Expected outputs are those of the canonical solutions, which are run like any other program.

    def _load_expected(self, tasks: list[str]) -> None:
        cached, expected = self._cache_file(), self.file.expected
        if cached is not None and cached.exists() and not expected.keys() >= set(tasks):
            expected.update(json.loads(cached.read_text()))
        missing = [task for task in tasks if task not in expected]
        if not missing:
            return
        with ThreadPoolExecutor(self._parallel(missing)) as pool:
            expected.update(zip(missing, pool.map(self._canonical, missing), strict=True))
        if cached is not None:
            write_json(cached, expected)

    def _canonical(self, task: str) -> dict[str, Any]:
        problem = self.problems[task]
        program = problem["prompt"] + problem["canonical_solution"]
        outputs = {}
        for part in PARTS:
            seconds = [_CANONICAL_SECONDS] * len(problem[f"{part}_input"])
            outcome = self._run(task, part, program, seconds, _CANONICAL_MEMORY)
            if outcome.status != "ok":
                how = f"{outcome.status} {outcome.error}"
                raise GradingError(f"{self.request.data}: the canonical solution of {task} does not run: {how}")
            outputs[part] = {"encoded": outcome.encoded, "seconds": outcome.seconds}
        return outputs

    def _cache_file(self) -> Path | None:
        if self.request.cache is None:
            return None
        folder = Path(self.request.cache)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022:
            raise GradingError(
                f"{folder} must belong to you and be writable by you alone: it says what right answers are"
            )
        return folder / f"{self.request.dataset}-{self.file.digest}.json"

    # The verdict of one program.

    def _program_and_verdict(self, task: str) -> tuple[str, Verdict]:
        program = self.request.programs[task]
        if self._sanitizing is not None:
            sanitized = self._sanitizing([program, self.problems[task]["entry_point"]])
            program = program if sanitized is None else sanitized
        return program, self._verdict(task, program)

    def _verdict(self, task: str, program: str) -> Verdict:
        if self.request.closed_world_only:
            reason = leaves_closed_world(program)
            if reason:
                return Verdict("refused", "refused", f"not run: it uses {reason}")
        base, reason = self._part_verdict(task, "base", program)
        if base != "pass" or not self.problems[task]["plus_input"]:
            return Verdict(base, base, reason)
        plus, reason = self._part_verdict(task, "plus", program)
        return Verdict(base, plus, reason)

    def _part_verdict(self, task: str, part: str, program: str) -> tuple[str, str]:
        canonical = self.file.expected[task][part]
        seconds = [max(self.request.seconds, 4.0 * once) for once in canonical["seconds"]]
        outcome = self._run(task, part, program, seconds, self.request.memory_mib << 20)
        if outcome.status != "ok":
            return ("fail" if outcome.status == "failed" else outcome.status), outcome.error
        return _COMPARED[self._comparison(task, part, outcome.encoded)]

    def _comparison(self, task: str, part: str, encoded: list[str]) -> str | None:
        """How outputs compare with those expected: a key of `_COMPARED`. Most right programs return the same."""
        request, known = [task, part, encoded], self.file.compared
        key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        if key not in known:
            status = self._comparing(request)
            if status is None:  # a matter of limits, not of the outputs alone
                return None
            known[key] = status
        return known[key]


_COMPARED = {
    "right": ("pass", ""),
    "wrong": ("fail", "another value was expected"),
    "no value": ("output", "it sent something else than a value"),
    None: ("output", "what it returned takes too much time or memory to compare"),
}


def cores() -> int:
    """Number of cores that this process may use, or all of the machine if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class GradingError(RuntimeError):
    """Grading failed, and not because of a program."""


class Worker:
    """What the process does."""

    def __init__(self) -> None:
        self._grader = Grader()

    def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """What `Grader.grade` returns for a request with these fields."""
        return self._grader.grade(GradeRequest(**request))

    def end_runners(self) -> None:
        """End the runners, which have sessions of their own; all others end with this process's group."""
        self._grader.confined.close()


if __name__ == "__main__":
    worker = Worker()
    serve(worker, worker.end_runners)
