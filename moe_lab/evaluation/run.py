"""Evaluate one benchmark on one model, at once or in two phases, and write its folder."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import generation, suite
from moe_lab.evaluation.generation import Answer, Generator, GenSpec
from moe_lab.evaluation.harness import HARNESSES, Graded, installed
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.results import SCHEMA, Result, ResultFile

ANSWERS = "answers.jsonl"


def _harness(benchmark: BenchmarkConfig) -> Any:
    return importlib.import_module(f"moe_lab.evaluation.harnesses.{benchmark.harness}")


def _check(benchmark: BenchmarkConfig, policy: Policy) -> None:
    problems = suite.preflight([benchmark], policy)
    if problems:
        # What is only lacking here, such as leave, data or a key, is no part of the step: another run may have it.
        raise (UserError if suite.wrong([benchmark]) else Unavailable)("; ".join(problems))


def evaluate(generator: Generator, benchmark: BenchmarkConfig, out: Path, *, policy: Policy) -> list[Result]:
    """Run the benchmark on a loaded model (`local_model.LocalModel`) and write out/result.json and out/samples.parquet.

    A benchmark that fails raises; nothing is averaged over the items that are left. Raises UserError for what
    `suite.preflight` would have said.
    """
    _check(benchmark, policy)
    if suite.has_two_phases(benchmark):
        answers = generate(generator, benchmark, out, out / "partial.jsonl")
        (out / "partial.jsonl").unlink()
        return grade(answers, benchmark, out, policy=policy)
    return _finish(_harness(benchmark).evaluate(generator, benchmark, policy), benchmark, out)


def generate(generator: Generator, benchmark: BenchmarkConfig, out: Path, partial: Path) -> list[Answer]:
    """Ask every question of the benchmark and write out/answers.jsonl; see `generation.collect` for `partial`."""
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
    answers = generation.collect(generator, questions, spec, partial)
    out.mkdir(parents=True, exist_ok=True)
    generation.write(answers, out / ANSWERS)
    return answers


def grade(answers: list[Answer], benchmark: BenchmarkConfig, out: Path, *, policy: Policy) -> list[Result]:
    """Grade what was generated and write out/result.json and out/samples.parquet; needs no model."""
    _check(benchmark, policy)
    graded: Graded = _harness(benchmark).grade(answers, benchmark, policy)
    graded.protocol.setdefault("prompt", answers[0].prompt)
    if too_long := [answer.item for answer in answers if answer.too_long]:
        graded.protocol["too_long"] = too_long
    return _finish(graded, benchmark, out)


def _finish(graded: Graded, benchmark: BenchmarkConfig, out: Path) -> list[Result]:
    _check_complete(graded, benchmark)
    _write(graded, benchmark, out)
    return graded.results


def _check_complete(graded: Graded, benchmark: BenchmarkConfig) -> None:
    for result in graded.results:
        missing = (result["expected"] or result["n"]) - result["n"]
        if benchmark.limit is None and not 0 <= missing <= graded.tolerated:
            raise RuntimeError(f"{result['benchmark']}: {result['n']} of {result['expected']} items were graded")


def _write(graded: Graded, benchmark: BenchmarkConfig, out: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    out.mkdir(parents=True, exist_ok=True)
    text, number = arrow.string(), arrow.float64()
    columns = {
        "benchmark": text,
        "item": text,
        "outcome": number,
        "prompt_hash": text,
        "output": text,
        "extracted": text,
        "answer_loss": number,
    }
    rows = [{name: _storable(value) for name, value in sample.items()} for sample in graded.samples]
    parquet.write_table(
        arrow.Table.from_pylist(rows, schema=arrow.schema(list(columns.items()))), out / "samples.parquet"
    )
    content = ResultFile(
        schema=SCHEMA,
        results=graded.results,
        protocol={**suite.identity(benchmark), "batch_size": benchmark.batch_size, **graded.protocol},
        versions=_versions(benchmark),
    )
    beside = out / "result.json.part"
    beside.write_text(json.dumps(content, indent=1, allow_nan=False))
    os.replace(beside, out / "result.json")


def _storable(value: Any) -> Any:
    """Text that Parquet can hold: a model may write half a character."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _versions(benchmark: BenchmarkConfig) -> dict[str, str]:
    package = HARNESSES[benchmark.harness].package
    return {name: installed(name) or "" for name in ("torch", "transformers", *([package] if package else []))}
