"""EvalPlus: problems with EvalPlus's own prompts, graded in a separate process (`evalplus_grader.py`).

A model either completes a problem's prompt, as base models do in EvalPlus, or is asked for a program through its chat
template, as EvalPlus asks models behind an API: with one message, and without a prefilled start of the answer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import mirror
from moe_lab.evaluation.generation import Answer, Question
from moe_lab.evaluation.harness import Graded, graded_by_mean
from moe_lab.evaluation.harnesses.evalplus_grader import GradeRequest
from moe_lab.evaluation.sandbox.policy import LIMITED, NAMESPACES, Policy
from moe_lab.evaluation.suite import check_count, data_files, is_closed_world
from moe_lab.paths import cache
from moe_lab.results import Sample
from moe_lab.start import command

_INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)


def ask(benchmark: BenchmarkConfig) -> list[Question]:
    """Every problem's prompt, to be completed or, with benchmark.chat, answered.

    The reference of a completion is the problem's canonical solution; an answer in a chat has none.
    """
    questions = []
    for task, problem in _problems(benchmark).items():
        text = problem["prompt"].strip()
        if benchmark.chat:
            message = {"role": "user", "content": f"{_INSTRUCTION}\n```python\n{text}\n```"}
            questions.append(Question(task, [message]))
        else:
            questions.append(Question(task, f"{text}\n", problem["canonical_solution"]))
    return questions


def stops(benchmark: BenchmarkConfig) -> tuple[str, ...]:
    """Stop texts of a completion; answers in a chat have none."""
    return () if benchmark.chat else (*EOS, *extra_eos_for_direct_completion(dataset_of(_problems(benchmark))))


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Grade programs on the base tests and on all (plus) tests. A program that passes plus has passed base too.

    Answers to published problems go through EvalPlus's sanitizer first, as in EvalPlus. Answers to the shipped problems
    do not need it, because the shipped models write nothing but code. Raises UserError when programs may not be run,
    and RuntimeError with the grader's last line when grading itself fails.
    """
    protection = policy.protection(closed_world=is_closed_world(benchmark))
    problems = _problems(benchmark)
    programs = {}
    for answer in answers:
        if benchmark.chat:
            programs[answer.item] = fenced_program(answer.output, problems[answer.item]["entry_point"])
        else:
            programs[answer.item] = answer.prompt + answer.output.replace("\t", "    ")
    request = GradeRequest(
        dataset=dataset_of(problems),
        data=str(_data_file(benchmark)),
        programs=programs,
        confined=protection == NAMESPACES,
        closed_world_only=protection == LIMITED,
        sanitize=benchmark.data is not None,
        cache=str(cache("expected")),
        **benchmark.parameters,
    )
    graded = run_grader(request)
    samples = [
        _sample(name, metric, answer, graded["verdicts"][answer.item], graded["programs"][answer.item])
        for name, metric in benchmark.reports.items()
        for answer in answers
    ]
    protocol = {
        "dataset": request.dataset,
        "sandbox": protection,
        "sanitize": request.sanitize,
        "seconds": request.seconds,
        "memory_mib": request.memory_mib,
        "stop": list(stops(benchmark)),
    }
    return graded_by_mean(samples, benchmark, protocol)


def fenced_program(text: str, entry_point: str) -> str:
    """The last fenced block of `text` that defines the function `entry_point`.

    If no block defines it, the longest block; if there is no block, all of the text. A block without a closing fence
    ends with the text.
    """
    lines_of_blocks: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                lines_of_blocks.append([])
        elif inside:
            lines_of_blocks[-1].append(line)
    blocks = [textwrap.dedent("\n".join(lines)) for lines in lines_of_blocks]
    definition = re.compile(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    defining = [block for block in blocks if definition.search(block)]
    return defining[-1] if defining else max(blocks, key=len, default=text)


def _problems(benchmark: BenchmarkConfig) -> dict[str, dict[str, Any]]:
    """Task id -> problem, up to the benchmark's limit."""
    problems = {row["task_id"]: row for row in mirror.read_rows(_data_file(benchmark))}
    check_count(benchmark, len(problems))
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


def run_grader(request: GradeRequest) -> dict[str, Any]:
    """Grade in a process without torch, with a minimal environment and without a home folder to write to."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command("moe_lab.evaluation.harnesses.evalplus_grader"),
        cwd="/",
        env={**kept, "PYTHONNOUSERSITE": "1", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"},
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"grading {request.data} failed: {lines[-1]}")
    verdicts: dict[str, Any] = json.loads(done.stdout)
    return verdicts


def _sample(name: str, metric: str, answer: Answer, verdict: Mapping[str, str], program: str) -> Sample:
    status = verdict[metric]
    verdict_text = status if not verdict["reason"] or status == "pass" else f"{status}: {verdict['reason']}"
    return answer.sample(name, float(status == "pass"), f"{verdict_text}\n\n{program}")
