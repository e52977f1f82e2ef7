"""EvalPlus's problems on the loaded model: direct completion, then grading in a process of its own (`grade.py`)."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation.grade import GradeRequest
from moe_lab.evaluation.graded import Graded, mean_result, prompt_hash
from moe_lab.evaluation.policy import LIMITED, NAMESPACES, Policy
from moe_lab.evaluation.subject import GenSpec, Subject
from moe_lab.evaluation.suite import check_count, data_files, is_closed_world
from moe_lab.results import Sample


def evaluate(subject: Subject, benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Complete every problem's prompt once, greedily, and grade the programs on the base and on all (plus) tests.

    A right answer to plus has passed base too. Raises UserError where programs may not run, RuntimeError with the
    grader's last words where grading itself fails.
    """
    protection = policy.protection(closed_world=is_closed_world(benchmark))
    file = data_files(benchmark)[-1]
    problems = read_problems(file)
    check_count(benchmark, len(problems))
    problems = dict(list(problems.items())[: benchmark.limit])
    dataset = dataset_of(problems)
    prompts = {task: problem["prompt"].strip() + "\n" for task, problem in problems.items()}
    stop = (*EOS, *extra_eos_for_direct_completion(dataset))
    spec = GenSpec(benchmark.max_new_tokens, stop, benchmark.batch_size)
    completions = dict(zip(prompts, subject.generate(list(prompts.values()), spec), strict=True))
    programs = {task: prompts[task] + completions[task].replace("\t", "    ") for task in problems}
    request = GradeRequest(
        dataset=dataset,
        data=str(file),
        programs=programs,
        confined=protection == NAMESPACES,
        closed_world_only=protection == LIMITED,
        cache=str(_cache_folder()),
        **benchmark.parameters,
    )
    graded = grade(request)
    samples = [
        _sample(name, metric, task, prompts[task], completions[task], graded["verdicts"][task])
        for name, metric in benchmark.reports.items()
        for task in problems
    ]
    results = [mean_result(name, metric, samples, benchmark) for name, metric in benchmark.reports.items()]
    protocol = {
        "dataset": dataset,
        "sandbox": protection,
        "seconds": request.seconds,
        "memory_mib": request.memory_mib,
        "stop": list(stop),
        "prompt": next(iter(prompts.values())),
    }
    return Graded(results, samples, protocol)


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


def grade(request: GradeRequest) -> dict[str, Any]:
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


def _sample(name: str, metric: str, task: str, prompt: str, completion: str, verdict: Mapping[str, str]) -> Sample:
    status = verdict[metric]
    said = status if not verdict["reason"] or status == "pass" else f"{status}: {verdict['reason']}"
    return Sample(
        benchmark=name,
        item=task,
        outcome=float(status == "pass"),
        prompt_hash=prompt_hash(prompt),
        output=completion,
        extracted=said,
    )
