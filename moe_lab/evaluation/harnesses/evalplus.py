"""EvalPlus: problems with EvalPlus's own prompts, graded by its rules (`evalplus_rules.py`).

A model either completes a problem's prompt, as base models do in EvalPlus, or is asked for a
program through its chat template, as EvalPlus asks models behind an API: with one message, and
without a prefilled start of the answer.

Programs run in `sandbox/runner.py`, which gets them and their inputs but not the expected outputs.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import LIMITED, NAMESPACES, Policy, mirror
from moe_lab.evaluation.harness import Answer, Graded, Item, Text, data_files, graded_by_mean
from moe_lab.evaluation.harnesses import evalplus_rules
from moe_lab.evaluation.sandbox.client import LimitedCalls, Outcome, Runners
from moe_lab.evaluation.sandbox.closed_world import leaves_closed_world
from moe_lab.evaluation.sandbox.encoding import encode
from moe_lab.evaluation.sandbox.runner import Request
from moe_lab.evaluation.suite import is_closed_world
from moe_lab.models import cores

PARTS = ("base", "plus")
_CANONICAL_SECONDS = 30.0
_CANONICAL_MEMORY = 4 << 30
_LONGEST = 60.0
_OUTPUT = 64 << 20
_SANITIZING = (20.0, 4 << 30)
"""CPU seconds and bytes of memory that sanitizing a text may take."""
_COMPARING = (20.0, 1 << 30)
"""CPU seconds and bytes of memory that comparing the outputs of one program may take."""
_MOST_VERDICTS = 20_000  # that are kept in memory: about 40 MB
_BLOCK = re.compile(r"^[ \t]*```.*(?:\n|\Z)((?s:.*?))\n?(?:^[ \t]*```|\Z)", re.MULTILINE)
_INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem "
    "in a markdown code block:"
)


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """Every problem's prompt, to be completed or, with benchmark.chat, answered.

    The reference of a completion is the problem's canonical solution; an answer in a chat has none.
    """
    asked = []
    most = benchmark.max_new_tokens
    stop = stops(benchmark)
    for task, problem in _problems(benchmark).items():
        text = problem["prompt"].strip()
        if benchmark.chat:
            message = {"role": "user", "content": f"{_INSTRUCTION}\n```python\n{text}\n```"}
            request = Text([message], most)
        else:
            request = Text(f"{text}\n", most, stop, problem["canonical_solution"])
        asked.append(Item(task, (request,)))
    return asked


def stops(benchmark: BenchmarkConfig) -> tuple[str, ...]:
    """Stop texts of a completion; answers in a chat have none."""
    return (
        ()
        if benchmark.chat
        else (*EOS, *extra_eos_for_direct_completion(dataset_of(_problems(benchmark))))
    )


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Grade programs on the base tests and on all (plus) tests. A program that passes plus has
    passed base too.

    Answers to published problems go through EvalPlus's sanitizer first, as in EvalPlus. Answers to
    the shipped problems do not need it, because the shipped models write nothing but code. A
    thought that does not end is no program. UserError when programs may not be run, RuntimeError
    for a canonical solution that does not run.
    """
    protection = policy.protection(closed_world=is_closed_world(benchmark))
    problems = _problems(benchmark)
    programs = {}
    for answer in answers:
        text = answer.reply.text
        if text is None:
            programs[answer.item] = ""
        elif benchmark.chat:
            programs[answer.item] = fenced_program(text, problems[answer.item]["entry_point"])
        else:
            programs[answer.item] = answer.prompt + text.replace("\t", "    ")
    checked = programs.items() if protection == LIMITED else ()
    reaching = {task: what for task, program in checked if (what := leaves_closed_world(program))}
    request = GradeRequest(
        dataset=dataset_of(problems),
        data=str(_data_file(benchmark)),
        programs={task: program for task, program in programs.items() if task not in reaching},
        confined=protection == NAMESPACES,
        sanitize=benchmark.data is not None,
        **benchmark.parameters,
    )
    graded = kept_grader.grade(request)
    for task, what in reaching.items():
        graded[task] = Verdict(programs[task], "refused", "refused", f"not run: it uses {what}")
    protocol = {
        name: getattr(request, name) for name in ("dataset", "sanitize", "seconds", "memory_mib")
    }
    protocol |= {"sandbox": protection, "stop": list(stops(benchmark))}
    return graded_by_mean(
        answers, benchmark, lambda answer, metric: graded[answer.item].outcome(metric), protocol
    )


def fenced_program(text: str, entry_point: str) -> str:
    """The last fenced block of `text` that defines the function `entry_point`.

    If no block defines it, the longest block; if there is no block, all of the text. A block
    without a closing fence ends with the text.
    """
    blocks = [textwrap.dedent(block) for block in _BLOCK.findall(text)]
    definition = re.compile(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    defining = [block for block in blocks if definition.search(block)]
    return defining[-1] if defining else max(blocks, key=len, default=text)


def _problems(benchmark: BenchmarkConfig) -> dict[str, dict[str, Any]]:
    """Task id -> problem, up to the benchmark's limit."""
    problems = {row["task_id"]: row for row in mirror.read_rows(_data_file(benchmark))}
    return dict(list(problems.items())[: benchmark.limit])


def _data_file(benchmark: BenchmarkConfig) -> Path:
    """The release file, which a mirror keeps unchanged."""
    if benchmark.data is None:
        return data_files(benchmark)[-1]
    (splits,) = mirror.subsets(benchmark).values()
    (file,) = splits[str(benchmark.split)]
    return file


def dataset_of(problems: Mapping[str, Any]) -> str:
    """The data set whose rules apply: mbpp for problems with ids Mbpp/N, otherwise humaneval."""
    kinds = {"mbpp" if task.startswith("Mbpp/") else "humaneval" for task in problems}
    if len(kinds) != 1:
        raise UserError("task_id: a data file has either only ids Mbpp/N or none")
    return kinds.pop()


# Verdicts.


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
    processes: int = 0
    """Programs that run at the same time; 0: one per core that this process may use."""


@dataclass(frozen=True)
class Verdict:
    """Result of a program on the base tests and on all tests: pass, fail, timeout, crash, output or
    refused."""

    program: str
    """The program that was run, so after the sanitizer."""
    base: str
    plus: str
    reason: str = ""

    def outcome(self, metric: str) -> tuple[float, str]:
        """1 for a right program, and a text about it, for base or plus."""
        status = self.base if metric == "base" else self.plus
        reason = f": {self.reason}" if self.reason and status != "pass" else ""
        return float(status == "pass"), f"{status}{reason}\n\n{self.program}"


@dataclass(frozen=True)
class _DataFile:
    """What is known of one EvalPlus data file."""

    problems: dict[str, dict[str, Any]]
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task id -> part -> what the canonical solution returns, and its CPU seconds."""
    verdicts: dict[tuple[Any, ...], Verdict] = field(default_factory=dict)
    """A program and all that its verdict depends on -> verdict."""


class Grader:
    """Grades programs, and keeps what it knows and its processes for the next request.

    Programs that were graded before, as other plans often give, cost nothing.
    """

    def __init__(self) -> None:
        inherited = {
            name: os.environ[name]
            for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR")
            if name in os.environ
        }
        usual = {"PYTHONNOUSERSITE": "1", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
        self.rules = LimitedCalls(evalplus_rules.__name__, {**inherited, **usual})
        self.runners = {confined: Runners(confined=confined) for confined in (True, False)}
        self.files: dict[tuple[str, str], _DataFile] = {}
        """Data set and sha256 of a file -> what is known of it."""

    def grade(self, request: GradeRequest) -> dict[str, Verdict]:
        """Verdicts by task id. Raises RuntimeError for a canonical solution that does not run."""
        digest = hashlib.sha256(Path(request.data).read_bytes()).hexdigest()
        if (request.dataset, digest) not in self.files:
            self.files[request.dataset, digest] = _DataFile(
                evalplus_rules.problems_of(request.dataset, request.data)
            )
        try:
            return _Grading(request, self.files[request.dataset, digest], self).graded()
        finally:
            if not request.confined:  # a program may have harmed them
                self.close()

    def close(self) -> None:
        """End all processes; others are started for the next request."""
        self.rules.close()
        for runners in self.runners.values():
            runners.close()


kept_grader = Grader()
atexit.register(kept_grader.close)


@dataclass(frozen=True)
class _Grading:
    """Grading of one request."""

    request: GradeRequest
    file: _DataFile
    grader: Grader

    def graded(self) -> dict[str, Verdict]:
        """Task id -> verdict, for each program of the request."""
        request = self.request
        known = self.file.verdicts
        expected = self.file.expected
        programs = request.programs
        how = (request.seconds, request.memory_mib, request.confined, request.sanitize)
        keys = {task: (task, program, *how) for task, program in programs.items()}
        graded = {task: known[key] for task, key in keys.items() if key in known}
        missing = [task for task in programs if task not in graded]
        without = [task for task in missing if task not in expected]
        with ThreadPoolExecutor(request.processes or cores()) as pool:
            expected.update(zip(without, pool.map(self._canonical, without), strict=True))
            graded.update(zip(missing, pool.map(self._verdict, missing), strict=True))
        if len(known) > _MOST_VERDICTS:
            known.clear()
        for task in missing:
            # another program may have caused it
            if "crash" not in (graded[task].base, graded[task].plus):
                known[keys[task]] = graded[task]
        return {task: graded[task] for task in programs}

    def _inputs(self, task: str, part: str) -> list[Any]:
        return [encode(list(arguments)) for arguments in self.file.problems[task][f"{part}_input"]]

    def _run(
        self, task: str, part: str, program: str, seconds: list[float], memory: int
    ) -> Outcome:
        entry_point = self.file.problems[task]["entry_point"]
        total = min(_LONGEST, sum(seconds)) + 1.0
        request = Request(
            program, entry_point, self._inputs(task, part), seconds, total, memory, _OUTPUT
        )
        return self.grader.runners[self.request.confined].run(request)

    def _canonical(self, task: str) -> dict[str, Any]:
        """What the canonical solution, which is run like any other program, returns for each
        part."""
        problem = self.file.problems[task]
        program = problem["prompt"] + problem["canonical_solution"]
        outputs = {}
        for part in PARTS:
            seconds = [_CANONICAL_SECONDS] * len(problem[f"{part}_input"])
            outcome = self._run(task, part, program, seconds, _CANONICAL_MEMORY)
            if outcome.status != "ok":
                how = f"{outcome.status} {outcome.error}"
                raise RuntimeError(
                    f"{self.request.data}: the canonical solution of {task} does not run: {how}"
                )
            outputs[part] = {"encoded": outcome.encoded, "seconds": outcome.seconds}
        return outputs

    def _verdict(self, task: str) -> Verdict:
        program = self.request.programs[task]
        if self.request.sanitize:
            arguments = [program, self.file.problems[task]["entry_point"]]
            program = self.grader.rules("sanitized", arguments, *_SANITIZING) or program
        base, reason = self._part_verdict(task, "base", program)
        plus = base
        if base == "pass" and self.file.problems[task]["plus_input"]:
            plus, reason = self._part_verdict(task, "plus", program)
        return Verdict(program, base, plus, reason)

    def _part_verdict(self, task: str, part: str, program: str) -> tuple[str, str]:
        canonical = self.file.expected[task][part]
        seconds = [max(self.request.seconds, 4.0 * once) for once in canonical["seconds"]]
        outcome = self._run(task, part, program, seconds, self.request.memory_mib << 20)
        if outcome.status != "ok":
            return ("fail" if outcome.status == "failed" else outcome.status), outcome.error
        entry_point, atol = (self.file.problems[task][name] for name in ("entry_point", "atol"))
        problem = {"entry_point": entry_point, "atol": atol, "inputs": self._inputs(task, part)}
        arguments = [self.request.dataset, problem, outcome.encoded, canonical["encoded"]]
        return _COMPARED[self.grader.rules("compared", arguments, *_COMPARING)]


_COMPARED = {
    "right": ("pass", ""),
    "wrong": ("fail", "another value was expected"),
    "no value": ("output", "it sent something else than a value"),
    None: ("output", "what it returned takes too much time or memory to compare"),
}
