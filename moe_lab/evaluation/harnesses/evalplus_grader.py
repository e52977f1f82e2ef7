"""Grade programs with EvalPlus's data and rules: `python -m moe_lab.evaluation.harnesses.evalplus_grader`.

The process reads a request from standard input and writes verdicts to standard output. It loads neither torch nor the
model, and never runs a program itself: `sandbox/runner.py` does, which gets the program and the inputs but not the
expected outputs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

from moe_lab.evaluation.sandbox import encoding
from moe_lab.evaluation.sandbox.client import Outcome, Runners
from moe_lab.evaluation.sandbox.closed_world import leaves_closed_world
from moe_lab.evaluation.sandbox.confinement import die_with_parent, in_child
from moe_lab.evaluation.sandbox.encoding import encode
from moe_lab.evaluation.sandbox.runner import Request
from moe_lab.json_files import write_json

PARTS = ("base", "plus")
_CANONICAL_SECONDS = 30.0
_CANONICAL_MEMORY = 4 << 30
_LONGEST = 60.0
_OUTPUT = 64 << 20
_COMPARING_MEMORY = 1 << 30


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


def problems_of(dataset: str, data: str) -> dict[str, dict[str, Any]]:
    """The problems as EvalPlus reads them, with its special input types.

    Sets EvalPlus's environment variable for the path of the data, so a process can read only one file.
    """
    os.environ["HUMANEVAL_OVERRIDE_PATH" if dataset == "humaneval" else "MBPP_OVERRIDE_PATH"] = data
    # evalplus.data imports `datasets` for a benchmark not used here; without it the import takes 0.1 s instead of 1.3.
    unused = types.ModuleType("datasets")
    unused.load_dataset = None  # type: ignore[attr-defined]
    sys.modules.setdefault("datasets", unused)
    from evalplus.data import get_human_eval_plus, get_mbpp_plus

    problems: dict[str, dict[str, Any]] = (get_human_eval_plus if dataset == "humaneval" else get_mbpp_plus)()
    return problems


class Grader:
    """Grades the programs of one request on several runners."""

    def __init__(self, request: GradeRequest) -> None:
        self.request = request
        self.problems = problems_of(request.dataset, request.data)
        from moe_lab.evaluation.harnesses import evalplus_rules  # here, because `problems_of` makes its import fast

        self._rules = evalplus_rules
        self.programs = dict(request.programs)
        if request.sanitize:
            for task, text in request.programs.items():
                self.programs[task] = evalplus_rules.sanitized(text, self.problems[task]["entry_point"])
        self.runners = Runners(confined=request.confined)
        self._comparing = Lock()
        self._expected: dict[str, dict[str, Any]] = {}

    def verdicts(self) -> dict[str, Verdict]:
        """Task id -> verdict, for each program of the request."""
        with ThreadPoolExecutor(min(self.request.processes or cores(), max(1, len(self.programs)))) as pool:
            self._load_expected(pool)
            return dict(zip(self.programs, pool.map(self._verdict, self.programs), strict=True))

    def _run(self, task: str, part: str, program: str, seconds: list[float], memory: int) -> Outcome:
        inputs = [encode(list(arguments)) for arguments in self.problems[task][f"{part}_input"]]
        total = min(_LONGEST, sum(seconds)) + 1.0
        request = Request(program, self.problems[task]["entry_point"], inputs, seconds, total, memory, _OUTPUT)
        return self.runners.run(request)

    # Expected outputs are those of the canonical solutions, which are run like any other program.

    def _load_expected(self, pool: ThreadPoolExecutor) -> None:
        file = self._cache_file()
        if file is not None and file.exists():
            self._expected = json.loads(file.read_text())
        missing = [task for task in self.request.programs if task not in self._expected]
        if not missing:
            return
        self._expected.update(zip(missing, pool.map(self._canonical, missing), strict=True))
        if file is not None:
            write_json(file, self._expected)

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
        code = Path(encoding.__file__).read_bytes() + sys.version.encode()  # both determine how outputs are encoded
        digest = hashlib.sha256(Path(self.request.data).read_bytes() + code).hexdigest()
        return folder / f"{self.request.dataset}-{digest}.json"

    # The verdict of one program.

    def _verdict(self, task: str) -> Verdict:
        program = self.programs[task]
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
        canonical = self._expected[task][part]
        seconds = [max(self.request.seconds, 4.0 * once) for once in canonical["seconds"]]
        outcome = self._run(task, part, program, seconds, self.request.memory_mib << 20)
        if outcome.status != "ok":
            return ("fail" if outcome.status == "failed" else outcome.status), outcome.error
        expected = Outcome("ok", "", canonical["encoded"], []).values()
        if (
            self.request.dataset == "mbpp"
            and self.problems[task]["entry_point"] in self._rules.MBPP_OUTPUT_NOT_NONE_TASKS
        ):
            expected = [value is not None for value in expected]
        with self._comparing:
            status = in_child(
                lambda: self._compared(task, part, outcome, expected), self.request.comparing_seconds, _COMPARING_MEMORY
            )
        return _COMPARED[status]

    def _compared(self, task: str, part: str, outcome: Outcome, expected: list[Any]) -> str:
        """Compare outputs; returns a key of `_COMPARED`. They are decoded only here, with limited time and memory."""
        try:
            outputs = outcome.values()
        except ValueError:
            return "no value"
        right = self._rules.agrees(self.request.dataset, self.problems[task], part, outputs, expected)
        return "right" if right else "wrong"


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
    """Read a request from standard input, write the verdicts to standard output."""
    verdicts_file = os.dup(1)
    os.dup2(2, 1)  # EvalPlus may print, which must not mix with the verdicts
    request = GradeRequest(**json.load(sys.stdin))
    die_with_parent()
    grader = Grader(request)
    try:
        verdicts = {task: asdict(verdict) for task, verdict in grader.verdicts().items()}
    finally:
        grader.runners.close()
    with open(verdicts_file, "w") as file:
        json.dump({"evalplus": version("evalplus"), "verdicts": verdicts, "programs": grader.programs}, file)


if __name__ == "__main__":
    main()
