"""Benchmarks of a study: what identifies them, and checks of all together. Imports nothing
heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.config.base import identity
from moe_lab.evaluation.harness import harness_of


@dataclass(frozen=True)
class Questions:
    """The questions of a benchmark, however the answers are graded."""

    benchmark: BenchmarkConfig


@identity.register
def _(questions: Questions) -> Any:
    return harness_of(questions.benchmark).question_identity(questions.benchmark)


@identity.register
def _(benchmark: BenchmarkConfig) -> Any:
    return harness_of(benchmark).identity(benchmark)


def wrong(benchmarks: Sequence[BenchmarkConfig]) -> list[str]:
    """A sentence for each setting or file of the benchmarks that is wrong on any machine, and for
    each result that two of them report."""
    sentences: list[str] = []
    reported: dict[str, str] = {}
    for benchmark in benchmarks:
        sentences += harness_of(benchmark).wrong(benchmark)
        for name in benchmark.reports:  # results of one name would be confused
            other = reported.setdefault(name, benchmark.name)
            if other != benchmark.name:
                sentences.append(
                    f"benchmarks {other} and {benchmark.name} both report {name}: evaluate them in "
                    f"two studies, or rename one by protocol.benchmarks.{benchmark.name}.reports"
                )
    return list(dict.fromkeys(sentences))
