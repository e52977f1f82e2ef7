"""EvalPlus: problems with EvalPlus's own prompts, graded in a separate process (`evalplus_grader.py`).

A model either completes a problem's prompt, as base models do in EvalPlus, or is asked for a program through its chat
template, as EvalPlus asks models behind an API: with one message, and without a prefilled start of the answer.
"""

from __future__ import annotations

import atexit
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

from moe_lab.child_process import Child, Ended, Refused
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import is_closed_world, mirror
from moe_lab.evaluation.harness import Answer, Graded, Item, Text, check_count, data_files, graded_by_mean
from moe_lab.evaluation.harnesses.evalplus_grader import GradeRequest
from moe_lab.evaluation.sandbox import LIMITED, NAMESPACES, Policy
from moe_lab.evaluation.sandbox.closed_world import leaves_closed_world
from moe_lab.paths import cache
from moe_lab.results import Sample
from moe_lab.start import command

REFUSED = {"base": "refused", "plus": "refused"}
_INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """Every problem's prompt, to be completed or, with benchmark.chat, answered.

    The reference of a completion is the problem's canonical solution; an answer in a chat has none.
    """
    asked = []
    most, stop = benchmark.max_new_tokens, stops(benchmark)
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
    return () if benchmark.chat else (*EOS, *extra_eos_for_direct_completion(dataset_of(_problems(benchmark))))


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Grade programs on the base tests and on all (plus) tests. A program that passes plus has passed base too.

    Answers to published problems go through EvalPlus's sanitizer first, as in EvalPlus. Answers to the shipped problems
    do not need it, because the shipped models write nothing but code. A thought that does not end is no program.

    Raises UserError when programs may not be run, and RuntimeError with the grader's last line when grading fails.
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
    reaching = {task: leaves_closed_world(program) for task, program in programs.items() if protection == LIMITED}
    request = GradeRequest(
        dataset=dataset_of(problems),
        data=str(_data_file(benchmark)),
        programs={task: program for task, program in programs.items() if not reaching.get(task)},
        confined=protection == NAMESPACES,
        sanitize=benchmark.data is not None,
        cache=str(cache("expected")),
        **benchmark.parameters,
    )
    graded = kept_grader.grade(request)
    programs |= graded["programs"]
    refused = {task: {**REFUSED, "reason": f"not run: it uses {what}"} for task, what in reaching.items() if what}
    verdicts = graded["verdicts"] | refused
    samples = [
        _sample(name, metric, answer, verdicts[answer.item], programs[answer.item])
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


class KeptGrader:
    """The grading process of this process: started at the first request, and again when it has ended.

    It loads no torch, has a minimal environment and no home folder to write to, and grades one request after the other.
    """

    def __init__(self) -> None:
        self.process: Child | None = None

    def grade(self, request: GradeRequest) -> dict[str, Any]:
        """Verdicts and programs by task id. Raises RuntimeError when the process could not grade this request.

        After that, and after programs that could harm it, another process gets the next request.
        """
        if self.process is None or self.process.process.poll() is not None:
            self.close()
            kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
            usual = {"PYTHONNOUSERSITE": "1", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
            line = command("moe_lab.evaluation.harnesses.evalplus_grader")
            self.process = Child(line, {**kept, **usual}, Path("/"))
        try:
            graded: dict[str, Any] = self.process.call("grade", request=asdict(request))
        except (Ended, Refused) as error:
            self.close()
            raise RuntimeError(f"grading {request.data} failed: {error}") from None
        if not request.confined:
            self.close()
        return graded

    def close(self) -> None:
        """End the process and what it has started; the next request starts another one."""
        if self.process is not None:
            self.process.close()
            self.process = None


kept_grader = KeptGrader()
atexit.register(kept_grader.close)


def _sample(name: str, metric: str, answer: Answer, verdict: Mapping[str, str], program: str) -> Sample:
    status = verdict[metric]
    verdict_text = status if not verdict["reason"] or status == "pass" else f"{status}: {verdict['reason']}"
    return answer.sample(name, float(status == "pass"), f"{verdict_text}\n\n{program}")
