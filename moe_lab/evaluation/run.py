"""Evaluate a benchmark on a model, in one phase or in two (generating and grading), and write the results."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import generation, suite
from moe_lab.evaluation.generation import Answer, Generator, GenSpec, replace_surrogates
from moe_lab.evaluation.harness import HARNESSES, Graded, installed
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.results import SCHEMA, Result, ResultFile, Sample

ANSWERS = "answers.jsonl"


def _harness(benchmark: BenchmarkConfig) -> Any:
    return importlib.import_module(f"moe_lab.evaluation.harnesses.{benchmark.harness}")


def _check(benchmark: BenchmarkConfig, policy: Policy) -> None:
    problems = suite.preflight([benchmark], policy)
    if problems:
        # A missing permission, data set or key is not the step's fault: another run may have it.
        raise (UserError if suite.wrong([benchmark]) else Unavailable)("; ".join(problems))


def evaluate(generator: Generator, benchmark: BenchmarkConfig, out: Path, *, policy: Policy) -> list[Result]:
    """Run the benchmark on a model and write out/result.json and out/samples.parquet.

    Raises UserError for a problem that `suite.preflight` reports. If an item fails, the benchmark fails.
    """
    _check(benchmark, policy)
    if suite.has_two_phases(benchmark):
        return grade(generate(generator, benchmark, out), benchmark, out, policy=policy)
    return _write(_harness(benchmark).evaluate(generator, benchmark, policy), benchmark, out)


def generate(generator: Generator, benchmark: BenchmarkConfig, out: Path) -> list[Answer]:
    """Ask every question of the benchmark and write out/answers.jsonl."""
    harness = _harness(benchmark)
    questions = harness.ask(benchmark)
    if len({question.item for question in questions}) < len(questions):
        raise RuntimeError(f"benchmark {benchmark.name} has two items of one name")
    if benchmark.limit is None:
        suite.check_count(benchmark, len(questions))
    spec = GenSpec(
        benchmark.max_new_tokens,
        harness.stops(benchmark),
        benchmark.batch_size,
        benchmark.max_length,
        special_tokens=not benchmark.chat,
        skip_long=getattr(harness, "SKIPS_LONG", False),
    )
    answers = generation.collect(generator, questions, spec)
    out.mkdir(parents=True, exist_ok=True)
    generation.write(answers, out / ANSWERS)
    return answers


def grade(answers: list[Answer], benchmark: BenchmarkConfig, out: Path, *, policy: Policy) -> list[Result]:
    """Grade generated answers and write out/result.json and out/samples.parquet. Needs no model."""
    _check(benchmark, policy)
    graded: Graded = _harness(benchmark).grade(answers, benchmark, policy)
    graded.protocol.setdefault("prompt", answers[0].prompt)
    if too_long := [answer.item for answer in answers if answer.too_long]:
        graded.protocol["too_long"] = too_long
    if unfinished := [answer.item for answer in answers if answer.without_thought(chat=benchmark.chat) is None]:
        graded.protocol["unfinished_thoughts"] = unfinished
    return _write(graded, benchmark, out)


def _write(graded: Graded, benchmark: BenchmarkConfig, out: Path) -> list[Result]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    for result in graded.results:
        missing = (result["expected"] or result["n"]) - result["n"]
        if benchmark.limit is None and not 0 <= missing <= graded.tolerated:
            raise RuntimeError(f"{result['benchmark']}: {result['n']} of {result['expected']} items were graded")
    out.mkdir(parents=True, exist_ok=True)
    columns = {}
    for name in Sample.__annotations__:
        number = name in ("outcome", "answer_loss")
        values = [sample.get(name) for sample in graded.samples]
        texts = [replace_surrogates(value) if isinstance(value, str) else value for value in values]
        columns[name] = arrow.array(texts, arrow.float64() if number else arrow.string())
    parquet.write_table(arrow.table(columns), out / "samples.parquet")
    package = HARNESSES[benchmark.harness].package
    versions = {name: installed(name) or "" for name in ("torch", "transformers", package) if name}
    content = ResultFile(
        schema=SCHEMA,
        results=graded.results,
        protocol={**suite.identity(benchmark), **graded.protocol},
        versions=versions,
    )
    beside = out / "result.json.part"
    beside.write_text(json.dumps(content, indent=1, allow_nan=False))
    os.replace(beside, out / "result.json")
    return graded.results
