"""EvalPlus's problems, asked as EvalPlus asks, then graded in a process of its own (`evalplus_grader.py`).

A model either goes on with a problem's prompt, as EvalPlus lets base models do, or is asked for a program through its
chat template, as EvalPlus asks the models behind an API: one message, no beginning of the answer written for it.
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
from moe_lab.evaluation.generation import Answer, Messages, Question
from moe_lab.evaluation.harness import Graded, mean_result, prompt_hash
from moe_lab.evaluation.harnesses.evalplus_grader import GradeRequest
from moe_lab.evaluation.sandbox.policy import LIMITED, NAMESPACES, Policy
from moe_lab.evaluation.suite import check_count, data_files, is_closed_world
from moe_lab.results import Sample
from moe_lab.start import command

_INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)


def ask(benchmark: BenchmarkConfig) -> list[Question]:
    """Every problem's prompt, to be completed or, with benchmark.chat, answered. A completion has a reference: the
    problem's canonical solution; an answer in words has none."""
    return [
        Question(task, _prompt(problem, benchmark.chat), None if benchmark.chat else problem["canonical_solution"])
        for task, problem in _problems(benchmark).items()
    ]


def _prompt(problem: Mapping[str, Any], chat: bool) -> str | Messages:
    text = problem["prompt"].strip()
    return [{"role": "user", "content": f"{_INSTRUCTION}\n```python\n{text}\n```"}] if chat else f"{text}\n"


def stops(benchmark: BenchmarkConfig) -> tuple[str, ...]:
    """Texts that end a completion; an answer ends by itself."""
    return () if benchmark.chat else (*EOS, *extra_eos_for_direct_completion(dataset_of(_problems(benchmark))))


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Grade programs on the base and on all (plus) tests. A right answer to plus has passed base too.

    Published problems' answers go through EvalPlus's sanitizer first, as EvalPlus does it; shipped ones are completed
    by models that know nothing else.
    Raises UserError where programs may not run, RuntimeError with the grader's last words where grading itself fails.
    """
    protection = policy.protection(closed_world=is_closed_world(benchmark))
    problems = _problems(benchmark)
    request = GradeRequest(
        dataset=dataset_of(problems),
        data=str(_data_file(benchmark)),
        programs={answer.item: _program(answer, problems[answer.item], benchmark.chat) for answer in answers},
        confined=protection == NAMESPACES,
        closed_world_only=protection == LIMITED,
        sanitize=benchmark.data is not None,
        cache=str(_cache_folder()),
        **benchmark.parameters,
    )
    graded = run_grader(request)
    samples = [
        _sample(name, metric, answer, graded["verdicts"][answer.item], graded["programs"][answer.item])
        for name, metric in benchmark.reports.items()
        for answer in answers
    ]
    results = [mean_result(name, metric, samples, benchmark) for name, metric in benchmark.reports.items()]
    protocol = {
        "dataset": request.dataset,
        "sandbox": protection,
        "sanitize": request.sanitize,
        "seconds": request.seconds,
        "memory_mib": request.memory_mib,
        "stop": list(stops(benchmark)),
    }
    return Graded(results, samples, protocol)


def _program(answer: Answer, problem: Mapping[str, Any], chat: bool) -> str:
    if chat:
        return fenced_program(answer.output, problem["entry_point"])
    return answer.prompt + answer.output.replace("\t", "    ")


_FENCE = "```"


def fenced_program(text: str, entry_point: str) -> str:
    """The last fenced block of `text` that defines the function `entry_point`; without one the longest block, and
    without a fence all of the text. A block that was cut off counts to the end."""
    blocks = _blocks(text)
    definition = re.compile(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    defining = [block for block in blocks if definition.search(block)]
    return defining[-1] if defining else max(blocks, key=len, default=text)


def _blocks(text: str) -> list[str]:
    blocks: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(_FENCE):
            inside = not inside
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line)
    return [textwrap.dedent("\n".join(block)) for block in blocks]


def _problems(benchmark: BenchmarkConfig) -> dict[str, dict[str, Any]]:
    """Task id -> problem, as many as the benchmark's limit lets through."""
    problems = {row["task_id"]: row for row in mirror.read_rows(_data_file(benchmark))}
    check_count(benchmark, len(problems))
    return dict(list(problems.items())[: benchmark.limit])


def _data_file(benchmark: BenchmarkConfig) -> Path:
    """The release file: a mirror keeps it as it is."""
    if benchmark.data is None:
        return data_files(benchmark)[-1]
    (splits,) = mirror.subsets(benchmark).values()
    (file,) = splits[str(benchmark.split)]
    return file


def dataset_of(problems: Mapping[str, Any]) -> str:
    """Whose rules hold: EvalPlus knows MBPP's problems by their ids, Mbpp/N; all others follow HumanEval's."""
    kinds = {"mbpp" if task.startswith("Mbpp/") else "humaneval" for task in problems}
    if len(kinds) != 1:
        raise UserError("task_id: a data file has either only ids Mbpp/N or none")
    return kinds.pop()


def run_grader(request: GradeRequest) -> dict[str, Any]:
    """Grade in a clean process: no torch, no folder to write to, and an environment without anything of ours in it."""
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
        last_words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(f"grading {request.data} failed: {last_words[0]}")
    verdicts: dict[str, Any] = json.loads(done.stdout)
    return verdicts


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "moe_lab", "expected")


def _sample(name: str, metric: str, answer: Answer, verdict: Mapping[str, str], program: str) -> Sample:
    status = verdict[metric]
    verdict_text = status if not verdict["reason"] or status == "pass" else f"{status}: {verdict['reason']}"
    return Sample(
        benchmark=name,
        item=answer.item,
        outcome=float(status == "pass"),
        prompt_hash=prompt_hash(answer.prompt),
        output=answer.output,
        extracted=f"{verdict_text}\n\n{program}",
        answer_loss=answer.loss,
    )
