"""Evaluate a benchmark on a model, in one step or in two (answering and grading), and write the
results."""

from __future__ import annotations

import json
from pathlib import Path

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import Policy, suite
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines import Engine
from moe_lab.evaluation.harness import (
    HARNESSES,
    Answer,
    Graded,
    check_count,
    installed,
    replace_surrogates,
)
from moe_lab.json_files import Record, write_text
from moe_lab.results import SCHEMA, Result, ResultFile, Sample

ANSWERS = "answers.jsonl"


def _check(benchmark: BenchmarkConfig, policy: Policy) -> None:
    problems = suite.preflight([benchmark], policy)
    if problems:
        # A missing permission, data set or key is not the step's fault: another run may have it.
        raise (UserError if suite.wrong([benchmark]) else Unavailable)("; ".join(problems))


def evaluate(
    engine: Engine,
    benchmark: BenchmarkConfig,
    out: Path,
    *,
    policy: Policy,
    record: Record | None = None,
) -> list[Result]:
    """Run the benchmark on a model and write out/result.json and out/samples.parquet.

    Raises UserError for a problem that `suite.preflight` reports. If an item fails, the benchmark
    fails.
    """
    _check(benchmark, policy)
    return grade(answer(engine, benchmark, record), benchmark, out, policy=policy)


def answer(
    engine: Engine, benchmark: BenchmarkConfig, record: Record | None = None
) -> list[Answer]:
    """The answers to all items of the benchmark."""
    items = suite.adapter(benchmark).items(benchmark)
    # whose one text is many windows
    if benchmark.limit is None and benchmark.harness != "perplexity":
        check_count(benchmark, len(items))
    if len({item.name for item in items}) < len(items):
        raise RuntimeError(f"benchmark {benchmark.name} has two items of one name")
    return collect_answers(engine, items, benchmark, record)


def grade(
    answers: list[Answer], benchmark: BenchmarkConfig, out: Path, *, policy: Policy
) -> list[Result]:
    """Grade answers and write out/result.json and out/samples.parquet. Needs no model."""
    _check(benchmark, policy)
    graded: Graded = suite.adapter(benchmark).grade(answers, benchmark, policy)
    graded.protocol.setdefault("prompt", answers[0].prompt)
    if too_long := [answer.item for answer in answers if answer.reply.ended == "too_long"]:
        graded.protocol["too_long"] = too_long
    if unfinished := [answer.item for answer in answers if answer.reply.text is None]:
        graded.protocol["unfinished_thoughts"] = unfinished
    _write(graded, benchmark, out)
    return graded.results


def _write(graded: Graded, benchmark: BenchmarkConfig, out: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    for result in graded.results:
        missing = (result["expected"] or result["n"]) - result["n"]
        if benchmark.limit is None and not 0 <= missing <= graded.tolerated:
            raise RuntimeError(
                f"{result['benchmark']}: {result['n']} of {result['expected']} items were graded"
            )
    out.mkdir(parents=True, exist_ok=True)
    types = {
        **dict.fromkeys(("outcome", "answer_loss", "units"), arrow.float64()),
        "replicate": arrow.int64(),
    }
    schema = arrow.schema(
        [(name, types.get(name, arrow.string())) for name in Sample.__annotations__]
    )
    rows = [
        {
            name: replace_surrogates(value) if isinstance(value, str) else value
            for name, value in sample.items()
        }
        for sample in graded.samples
    ]
    parquet.write_table(arrow.Table.from_pylist(rows, schema), out / "samples.parquet")
    package = HARNESSES[benchmark.harness].package
    versions = {name: installed(name) or "" for name in ("torch", "transformers", package) if name}
    content = ResultFile(
        schema=SCHEMA,
        results=graded.results,
        protocol={**suite.identity(benchmark), **graded.protocol},
        versions=versions,
    )
    write_text(out / "result.json", json.dumps(content, indent=1, allow_nan=False))
