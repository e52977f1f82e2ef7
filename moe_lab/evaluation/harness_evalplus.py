"""EvalPlus's problems: direct completion, then grading in a process of its own (`grade.py`)."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation.generation import Answer, Question
from moe_lab.evaluation.grade import GradeRequest
from moe_lab.evaluation.graded import Graded, mean_result, prompt_hash
from moe_lab.evaluation.policy import LIMITED, NAMESPACES, Policy
from moe_lab.evaluation.suite import check_count, data_files, is_closed_world
from moe_lab.results import Sample


def ask(benchmark: BenchmarkConfig) -> list[Question]:
    """Every problem's prompt, to be completed."""
    return [Question(task, problem["prompt"].strip() + "\n") for task, problem in _problems(benchmark).items()]


def stops(benchmark: BenchmarkConfig) -> tuple[str, ...]:
    """Texts that end a completion."""
    return (*EOS, *extra_eos_for_direct_completion(dataset_of(_problems(benchmark))))


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Grade completions on the base and on all (plus) tests. A right answer to plus has passed base too.

    Raises UserError where programs may not run, RuntimeError with the grader's last words where grading itself fails.
    """
    protection = policy.protection(closed_world=is_closed_world(benchmark))
    dataset = dataset_of(_problems(benchmark))
    request = GradeRequest(
        dataset=dataset,
        data=str(data_files(benchmark)[-1]),
        programs={answer.item: answer.prompt + answer.output.replace("\t", "    ") for answer in answers},
        confined=protection == NAMESPACES,
        closed_world_only=protection == LIMITED,
        cache=str(_cache_folder()),
        **benchmark.parameters,
    )
    verdicts = run_grader(request)["verdicts"]
    samples = [
        _sample(name, metric, answer, verdicts[answer.item])
        for name, metric in benchmark.reports.items()
        for answer in answers
    ]
    results = [mean_result(name, metric, samples, benchmark) for name, metric in benchmark.reports.items()]
    protocol = {
        "dataset": dataset,
        "sandbox": protection,
        "seconds": request.seconds,
        "memory_mib": request.memory_mib,
        "stop": list(stops(benchmark)),
    }
    return Graded(results, samples, protocol)


def _problems(benchmark: BenchmarkConfig) -> dict[str, dict[str, Any]]:
    """Task id -> problem, as many as the benchmark's limit lets through."""
    problems = read_problems(data_files(benchmark)[-1])
    check_count(benchmark, len(problems))
    return dict(list(problems.items())[: benchmark.limit])


def read_problems(file: Path) -> dict[str, dict[str, Any]]:
    """Task id -> problem, from JSON lines, gzipped or not."""
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return {row["task_id"]: row for row in rows}


def dataset_of(problems: Mapping[str, Any]) -> str:
    """Whose rules hold: EvalPlus knows MBPP's problems by their ids, Mbpp/N; all others follow HumanEval's."""
    kinds = {"mbpp" if task.startswith("Mbpp/") else "humaneval" for task in problems}
    if len(kinds) != 1:
        raise UserError("task_id: a data file has either only ids Mbpp/N or none")
    return kinds.pop()


def run_grader(request: GradeRequest) -> dict[str, Any]:
    """Grade in a clean process: no torch, an empty folder, and an environment without anything of ours in it."""
    with tempfile.TemporaryDirectory(prefix="moe_lab-grade-") as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "verdicts.json")
        question.write_text(json.dumps(asdict(request)))
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        package = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-s", "-m", "moe_lab.evaluation.grade", str(question), str(answer)],
            cwd=folder,
            env={**kept, "PYTHONPATH": str(package), "HOME": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            last_words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise RuntimeError(f"grading {request.data} failed: {last_words[0]}")
        verdicts: dict[str, Any] = json.loads(answer.read_text())
        return verdicts


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "moe_lab", "expected")


def _sample(name: str, metric: str, answer: Answer, verdict: Mapping[str, str]) -> Sample:
    status = verdict[metric]
    said = status if not verdict["reason"] or status == "pass" else f"{status}: {verdict['reason']}"
    return Sample(
        benchmark=name,
        item=answer.item,
        outcome=float(status == "pass"),
        prompt_hash=prompt_hash(answer.prompt),
        output=answer.output,
        extracted=said,
    )
