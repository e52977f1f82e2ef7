"""Grade programs with EvalPlus's data and rules: `python -m moe_lab.evaluation.harnesses.evalplus_grader`.

The process loads neither torch nor the model, and never runs a program itself: `sandbox/runner.py` does, which gets the
program and the inputs but not the expected outputs. Problems, expected outputs, verdicts, runners and the processes
that compare are kept for the next request, so that a request for programs that were graded before, as other plans often
give, costs nothing.
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
from moe_lab.evaluation.sandbox.encoding import encode
from moe_lab.evaluation.sandbox.runner import Request
from moe_lab.json_files import write_json

PARTS = ("base", "plus")
_CANONICAL_SECONDS = 30.0
_CANONICAL_MEMORY = 4 << 30
_LONGEST = 60.0
_OUTPUT = 64 << 20
_SANITIZING = (20.0, 4 << 30)
"""CPU seconds and bytes of memory that sanitizing a text may take."""
_COMPARING_MEMORY = 1 << 30
_MOST_VERDICTS = 20_000  # of one data file that are kept in memory: about 40 MB


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
    sanitize: bool = False
    """Apply EvalPlus's sanitizer to the programs first."""
    seconds: float = 4.0
    """CPU limit of a call, or four times the CPU time of the canonical solution if that is more."""
    memory_mib: int = 4096
    """Limit on the address space of a program."""
    comparing_seconds: float = 20.0
    """CPU limit for comparing the outputs of one program, which may take `_COMPARING_MEMORY` bytes."""
    processes: int = 0
    """Programs that run at the same time; 0: one per core that this process may use."""
    cache: str | None = None
    """Private folder for the outputs of canonical solutions."""


@dataclass
class Verdict:
    """Result of a program on the base tests and on all tests: pass, fail, timeout, crash or output."""

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
    """`evalplus_rules`."""
    digest: str
    """sha256 of the file and of what determines how outputs are encoded."""
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task id -> part -> what the canonical solution returns, and its CPU seconds."""
    graded: dict[str, tuple[str, Verdict]] = field(default_factory=dict)
    """Hash of a program and what its verdict depends on -> the program after the sanitizer, and the verdict."""
    compared: dict[str, str] = field(default_factory=dict)
    """Hash of a task, a part and outputs -> how they compare with those expected, a key of `_COMPARED`."""

    def __post_init__(self) -> None:
        self._children = LimitedChildren(self._work, cores())

    def sanitized(self, task: str, program: str) -> str:
        """The program after EvalPlus's sanitizer, or as it is where that takes too much time or memory."""
        text = self._children(["sanitize", program, self.problems[task]["entry_point"]], *_SANITIZING)
        return program if text is None else text

    def compare(self, task: str, part: str, encoded: list[str], seconds: float) -> str | None:
        """How outputs of a task's part compare with those expected, within CPU seconds: a key of `_COMPARED`.

        Most right programs return the same, which is compared once.
        """
        key = hashlib.sha256(json.dumps([task, part, encoded]).encode()).hexdigest()
        if key not in self.compared:
            request = ["compare", task, part, encoded, self.expected[task][part]["encoded"]]
            status = self._children(request, seconds, _COMPARING_MEMORY)
            if status is None:  # a matter of limits, not of the outputs alone
                return None
            self.compared[key] = status
        return self.compared[key]

    def _work(self, request: Any) -> str:
        """Work of a process with limits."""
        what, *arguments = request
        return str(self.rules.sanitized(*arguments)) if what == "sanitize" else self._compared(*arguments)

    def _compared(self, task: str, part: str, encoded: list[str], canonical: list[str]) -> str:
        """How encoded outputs compare with those of the canonical solution: a key of `_COMPARED`.

        They are decoded only here, with limited time and memory. Decoding makes data of them, never code.
        """
        problem = self.problems[task]
        try:
            outputs = Outcome("ok", "", encoded, []).values()
        except ValueError:
            return "no value"
        expected = Outcome("ok", "", canonical, []).values()
        if self.dataset == "mbpp" and problem["entry_point"] in self.rules.MBPP_OUTPUT_NOT_NONE_TASKS:
            expected = [value is not None for value in expected]
        return "right" if self.rules.agrees(self.dataset, problem, part, outputs, expected) else "wrong"

    def close(self) -> None:
        """End the processes that sanitize and compare."""
        self._children.close()


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
    """What the process does: it grades one request after the other, each on several runners."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], DataFile] = {}
        self._runners = {confined: Runners(confined=confined) for confined in (True, False)}

    def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """Verdicts and sanitized programs by task id for the fields of a `GradeRequest`, and EvalPlus's version."""
        asked = GradeRequest(**request)
        graded = _Grading(asked, self._file(asked), self._runners[asked.confined]).graded()
        return {
            "evalplus": version("evalplus"),
            "verdicts": {task: asdict(verdict) for task, (_, verdict) in graded.items()},
            "programs": {task: program for task, (program, _) in graded.items()},
        }

    def _file(self, request: GradeRequest) -> DataFile:
        code = Path(encoding.__file__).read_bytes() + sys.version.encode()  # both determine how outputs are encoded
        digest = hashlib.sha256(Path(request.data).read_bytes() + code).hexdigest()
        if (request.dataset, digest) not in self._files:
            problems = problems_of(request.dataset, request.data)
            from moe_lab.evaluation.harnesses import evalplus_rules  # here, because `problems_of` makes its import fast

            self._files[request.dataset, digest] = DataFile(request.dataset, problems, evalplus_rules, digest)
        return self._files[request.dataset, digest]

    def end_runners(self) -> None:
        """End the runners, which have sessions of their own; all others end with this process's group."""
        for runners in self._runners.values():
            runners.close()

    def close(self) -> None:
        """End all processes."""
        self.end_runners()
        for file in self._files.values():
            file.close()


@dataclass(frozen=True)
class _Grading:
    """Grading of one request."""

    request: GradeRequest
    file: DataFile
    runners: Runners

    def graded(self) -> dict[str, tuple[str, Verdict]]:
        """Task id -> program after the sanitizer and verdict, for each program of the request."""
        programs, known = self.request.programs, self.file.graded
        keys = {task: self._key(task) for task in programs}
        graded = {task: known[key] for task, key in keys.items() if key in known}
        missing = [task for task in programs if task not in graded]
        self._load_expected(missing)
        with self._pool() as pool:
            graded.update(zip(missing, pool.map(self._program_and_verdict, missing), strict=True))
        if len(known) > _MOST_VERDICTS:
            known.clear()
        for task in missing:
            if "crash" not in (graded[task][1].base, graded[task][1].plus):  # another program may have caused it
                known[keys[task]] = graded[task]
        return {task: graded[task] for task in programs}

    def _key(self, task: str) -> str:
        request = self.request
        how = (request.seconds, request.memory_mib, request.comparing_seconds, request.confined, request.sanitize)
        return hashlib.sha256(json.dumps([task, request.programs[task], how]).encode()).hexdigest()

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.request.processes or cores())

    def _run(self, task: str, part: str, program: str, seconds: list[float], memory: int) -> Outcome:
        problem = self.file.problems[task]
        inputs = [encode(list(arguments)) for arguments in problem[f"{part}_input"]]
        total = min(_LONGEST, sum(seconds)) + 1.0
        return self.runners.run(Request(program, problem["entry_point"], inputs, seconds, total, memory, _OUTPUT))

    # Expected outputs are those of the canonical solutions, which are run like any other program.

    def _load_expected(self, tasks: list[str]) -> None:
        cached, expected = self._cache_file(), self.file.expected
        if cached is not None and cached.exists() and not expected.keys() >= set(tasks):
            expected.update(json.loads(cached.read_text()))
        missing = [task for task in tasks if task not in expected]
        if not missing:
            return
        with self._pool() as pool:
            expected.update(zip(missing, pool.map(self._canonical, missing), strict=True))
        if cached is not None:
            write_json(cached, expected)

    def _canonical(self, task: str) -> dict[str, Any]:
        problem = self.file.problems[task]
        program = problem["prompt"] + problem["canonical_solution"]
        outputs = {}
        for part in PARTS:
            seconds = [_CANONICAL_SECONDS] * len(problem[f"{part}_input"])
            outcome = self._run(task, part, program, seconds, _CANONICAL_MEMORY)
            if outcome.status != "ok":
                how = f"{outcome.status} {outcome.error}"
                raise RuntimeError(f"{self.request.data}: the canonical solution of {task} does not run: {how}")
            outputs[part] = {"encoded": outcome.encoded, "seconds": outcome.seconds}
        return outputs

    def _cache_file(self) -> Path | None:
        if self.request.cache is None:
            return None
        folder = Path(self.request.cache)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022:
            raise RuntimeError(
                f"{folder} must belong to you and be writable by you alone: it says what right answers are"
            )
        return folder / f"{self.request.dataset}-{self.file.digest}.json"

    # The verdict of one program.

    def _program_and_verdict(self, task: str) -> tuple[str, Verdict]:
        program = self.request.programs[task]
        if self.request.sanitize:
            program = self.file.sanitized(task, program)
        base, reason = self._part_verdict(task, "base", program)
        if base != "pass" or not self.file.problems[task]["plus_input"]:
            return program, Verdict(base, base, reason)
        plus, reason = self._part_verdict(task, "plus", program)
        return program, Verdict(base, plus, reason)

    def _part_verdict(self, task: str, part: str, program: str) -> tuple[str, str]:
        canonical = self.file.expected[task][part]
        seconds = [max(self.request.seconds, 4.0 * once) for once in canonical["seconds"]]
        outcome = self._run(task, part, program, seconds, self.request.memory_mib << 20)
        if outcome.status != "ok":
            return ("fail" if outcome.status == "failed" else outcome.status), outcome.error
        return _COMPARED[self.file.compare(task, part, outcome.encoded, self.request.comparing_seconds)]


_COMPARED = {
    "right": ("pass", ""),
    "wrong": ("fail", "another value was expected"),
    "no value": ("output", "it sent something else than a value"),
    None: ("output", "what it returned takes too much time or memory to compare"),
}


def cores() -> int:
    """Number of cores that this process may use, or all of the machine if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    grader = Grader()
    serve(grader, grader.end_runners)
