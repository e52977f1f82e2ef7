"""Benchmarks of a study: what identifies them, and checks of all together. Imports nothing
heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation.harness import harness_of


@dataclass(frozen=True)
class Questions:
    """The questions of a benchmark, however the answers are graded."""

    benchmark: BenchmarkConfig

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All settings of the benchmark that can change what a model answers."""
        return harness_of(self.benchmark).question_identity(self.benchmark)


class IdentifiedBenchmark(BenchmarkConfig):
    """A benchmark that is identified by all that can change its results."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        return harness_of(self).identity(self)


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
