"""Grade programs with EvalPlus's data and rules: `python -m moe_lab.evaluation.harnesses.evalplus_grader`.

The process reads one request per line from standard input and writes one line with the verdicts to standard output.
It loads neither torch nor the model, and never runs a program itself: `sandbox/runner.py` does, which gets the program
and the inputs but not the expected outputs. Imports, problems, expected outputs, verdicts and confined runners are kept
for the next request, so that a request for programs that were graded before, as other plans often give, costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_lab.evaluation.sandbox import encoding
from moe_lab.evaluation.sandbox.client import Outcome, Runners
from moe_lab.evaluation.sandbox.closed_world import leaves_closed_world
from moe_lab.evaluation.sandbox.confinement import LimitedChildren, die_with_parent
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

    problems: dict[str, dict[str, Any]]
    digest: str
    """sha256 of the file and of what determines how outputs are encoded."""
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task id -> part -> what the canonical solution returns, and its CPU seconds."""
    graded: dict[str, tuple[str, Verdict]] = field(default_factory=dict)
    """Hash of a program and what its verdict depends on -> the program after the sanitizer, and the verdict."""


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
        self._confined = Runners(confined=True)

    def grade(self, request: GradeRequest) -> dict[str, Any]:
        """Verdicts and sanitized programs by task id, and EvalPlus's version."""
        file = self._file(request)
        # Without namespaces a program can harm the runner, so that no later request may get the same one.
        runners = self._confined if request.confined else Runners(confined=False)
        try:
            graded = _Grading(request, file, runners).graded()
        finally:
            if runners is not self._confined:
                runners.close()
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
            file = DataFile(problems_of(request.dataset, request.data), digest)
        self._files[request.dataset, digest] = file  # the last one is the one used last
        while len(self._files) > _MOST_FILES:
            del self._files[next(iter(self._files))]
        return file

    def close(self) -> None:
        """End the runners."""
        self._confined.close()


class _Grading:
    """Grading of one request."""

    def __init__(self, request: GradeRequest, file: DataFile, runners: Runners) -> None:
        from moe_lab.evaluation.harnesses import evalplus_rules  # here, because `problems_of` makes its import fast

        self.request, self.file, self.problems, self.runners = request, file, file.problems, runners
        self._rules = evalplus_rules
        self._sanitized: Callable[[Any], str | None] = lambda _: None
        self._compared: Callable[[Any], str | None] = lambda _: None

    def graded(self) -> dict[str, tuple[str, Verdict]]:
        """Task id -> program after the sanitizer and verdict, for each program of the request."""
        programs, known = self.request.programs, self.file.graded
        keys = {task: self._key(task) for task in programs}
        missing = [task for task in programs if keys[task] not in known]
        graded = {task: known[key] for task, key in keys.items() if key in known}
        if missing:
            self._load_expected(missing)
            graded.update(self._grade(missing))
        if len(known) > _MOST_VERDICTS:
            known.clear()
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
        count = self._parallel(tasks)
        with ExitStack() as children:  # forked before there are threads, with the expected outputs in memory
            if self.request.sanitize:
                limits = (self._rules.SECONDS, self._rules.MEMORY, count)
                self._sanitized = children.enter_context(LimitedChildren(self._sanitize, *limits))
            limits = (self.request.comparing_seconds, _COMPARING_MEMORY, count)
            self._compared = children.enter_context(LimitedChildren(self._compare, *limits))
            longest_first = sorted(tasks, key=self._expected_seconds, reverse=True)  # so that all end together
            with ThreadPoolExecutor(count) as pool:
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
        if self.request.sanitize:
            sanitized = self._sanitized([program, self.problems[task]["entry_point"]])
            program = program if sanitized is None else sanitized
        return program, self._verdict(task, program)

    def _sanitize(self, request: Any) -> str:
        """Work of a child: the program and the name of its function, sanitized."""
        return self._rules.evalplus_sanitized(*request)

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
        return _COMPARED[self._compared([task, part, outcome.encoded])]

    def _compare(self, request: Any) -> str:
        """Work of a child: compare the encoded outputs of a task's part, and return a key of `_COMPARED`.

        They are decoded only here, with limited time and memory. Decoding makes data of them, never code, and comparing
        changes neither the inputs nor what is expected, which is decoded anew: so no program's outputs can change the
        verdict of the next.
        """
        task, part, encoded = request
        problem, dataset = self.problems[task], self.request.dataset
        try:
            outputs = Outcome("ok", "", encoded, []).values()
        except ValueError:
            return "no value"
        expected = Outcome("ok", "", self.file.expected[task][part]["encoded"], []).values()
        if dataset == "mbpp" and problem["entry_point"] in self._rules.MBPP_OUTPUT_NOT_NONE_TASKS:
            expected = [value is not None for value in expected]
        return "right" if self._rules.agrees(dataset, problem, part, outputs, expected) else "wrong"


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


def main() -> None:
    """Answer each line of standard input, a request, by a line with verdicts, or with the error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # EvalPlus may print, which must not mix with the verdicts
    die_with_parent()
    grader = Grader()
    try:
        for line in sys.stdin:
            try:
                reply = grader.grade(GradeRequest(**json.loads(line)))
            except Exception as error:  # noqa: BLE001 - it belongs to this request alone, and is reported
                traceback.print_exc()
                reply = {"error": str(error) or type(error).__name__}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    finally:
        grader.close()


if __name__ == "__main__":
    main()
