"""Evaluate one benchmark on one loaded model and write its folder."""

from __future__ import annotations

import importlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import suite
from moe_lab.evaluation.graded import Graded
from moe_lab.evaluation.policy import Policy
from moe_lab.evaluation.subject import Subject
from moe_lab.results import SCHEMA, Result, ResultFile

__all__ = ["Policy", "Subject", "evaluate"]

ADAPTERS = {
    "lm_eval": "moe_lab.evaluation.harness_lm_eval",
    "evalplus": "moe_lab.evaluation.harness_evalplus",
    "stories": "moe_lab.evaluation.stories",
    "perplexity": "moe_lab.evaluation.perplexity",
}
"""Harness -> module with evaluate(subject, benchmark, policy) -> Graded; imported when first used."""


def evaluate(subject: Subject, benchmark: BenchmarkConfig, out: Path, *, policy: Policy) -> list[Result]:
    """Run the benchmark and write out/result.json and out/samples.parquet.

    A benchmark that fails raises; nothing is averaged over the items that are left. Raises UserError for what
    `suite.preflight` would have said.
    """
    problems = suite.preflight([benchmark], policy)
    if problems:
        raise UserError("; ".join(problems))
    graded: Graded = importlib.import_module(ADAPTERS[benchmark.harness]).evaluate(subject, benchmark, policy)
    _check_complete(graded, benchmark)
    _write(graded, benchmark, out)
    return graded.results


def _check_complete(graded: Graded, benchmark: BenchmarkConfig) -> None:
    for result in graded.results:
        complete = benchmark.limit is not None or result["expected"] in (None, result["n"])
        if not complete:
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
    package = suite.PACKAGES[benchmark.harness]
    return {name: version(name) for name in ("torch", "transformers", *([package] if package else []))}
