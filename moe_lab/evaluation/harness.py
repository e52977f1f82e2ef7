"""Properties of benchmark harnesses, known without importing them, and the form of their results. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.paths import resolve
from moe_lab.results import Result, Sample


@dataclass(frozen=True)
class Harness:
    """Properties of a harness."""

    package: str | None = None
    """Package that grades, if it is not moe_lab itself and is installed in this interpreter."""
    metrics: tuple[str, ...] | None = None
    """Metrics it can report; None: those that the task defines."""
    question_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters that change the model's input."""
    grading_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters that change only how answers are graded."""
    two_phases: bool = False
    """Texts are graded without the model, so that generating and grading are separate steps."""
    generates: bool = False
    """All its benchmarks generate text."""
    continues_text: bool = False
    """The model continues a text, so a chat template cannot be used."""
    shows_examples: bool = False
    """It can put solved examples before a question."""
    judged: bool = False
    """A judge scores the answers."""
    gives_tools: bool = False
    """Its questions come with tools, which the chat template must read."""
    reads_path: bool = False
    """suite.path names its data: the folder of the benchmark's task, or the file of one without a task."""


_LIMITS = ("seconds", "memory_mib", "processes")
HARNESSES: Mapping[str, Harness] = {
    "lm_eval": Harness(package="lm-eval", question_parameters=("folder", "definition"), shows_examples=True),
    "evalplus": Harness(
        package="evalplus", metrics=("base", "plus"), grading_parameters=_LIMITS, two_phases=True, generates=True
    ),
    "evalscope": Harness(  # in an interpreter of its own
        metrics=("acc",),
        question_parameters=("start_date", "end_date"),
        grading_parameters=_LIMITS,
        two_phases=True,
        generates=True,
        shows_examples=True,
    ),
    "wildbench": Harness(
        metrics=("score",),
        question_parameters=("tag",),
        grading_parameters=("template",),
        two_phases=True,
        generates=True,
        judged=True,
    ),
    "function_calls": Harness(
        metrics=("acc",),
        question_parameters=("answers",),
        two_phases=True,
        generates=True,
        gives_tools=True,
        reads_path=True,
    ),
    "stories": Harness(metrics=("score",), generates=True, continues_text=True),
    "perplexity": Harness(
        metrics=("perplexity", "bits_per_byte", "loss"),
        question_parameters=("length",),
        continues_text=True,
        reads_path=True,
    ),
}
"""Harnesses by name, which is also the name of their module in `harnesses/`. Each module has

    items(benchmark) -> list[Item]                       what is asked; the same in every process
    grade(answers, benchmark, policy) -> Graded          without a model

and imports no torch.
"""


@dataclass(frozen=True)
class Graded:
    """Results of one benchmark on one model."""

    results: list[Result]
    """One result per entry of the benchmark's reports."""
    samples: list[Sample]
    """One sample per item and result."""
    protocol: dict[str, Any] = field(default_factory=dict)
    """Settings of the harness, as JSON."""
    tolerated: int = 0
    """Number of items that may lack an outcome; the protocol names them."""


def data_files(benchmark: BenchmarkConfig) -> list[Path]:
    """The files of a benchmark without a mirror; the last one has the items. Raises UserError naming a missing file.

    A task of lm-eval's format is a file beside its items, or the benchmark's own parameters.definition.
    """
    if not benchmark.task:
        raise UserError(f"benchmark {benchmark.name} has no data: name its file, such as suite.path=FILE")
    task = Path(resolve(benchmark.task)).expanduser().absolute()
    is_defined = benchmark.harness != "lm_eval" or "definition" in benchmark.parameters
    files = [task] if is_defined else [task, task.with_suffix(".jsonl")]
    if answers := benchmark.parameters.get("answers"):
        files.insert(0, task.parent / str(answers))
    for file in files:
        if not file.is_file():
            hint = ": name its folder by suite.path=FOLDER" if HARNESSES[benchmark.harness].gives_tools else ""
            raise UserError(f"benchmark {benchmark.name} needs {file}, and there is no such file{hint}")
    return files


def check_count(benchmark: BenchmarkConfig, count: int) -> None:
    """Raise UserError unless `count`, the items in the benchmark's data, is the expected number."""
    if benchmark.expected is not None and count != benchmark.expected:
        raise UserError(
            f"benchmark {benchmark.name} has {count} items and should have {benchmark.expected}: its data is not the "
            f"published set, or expected is wrong"
        )


def mean_result(name: str, metric: str, samples: Sequence[Sample], benchmark: BenchmarkConfig) -> Result:
    """The mean outcome of the samples of one result, with its standard error s / sqrt(n)."""
    outcomes = [sample["outcome"] for sample in samples if sample["benchmark"] == name]
    n = len(outcomes)
    mean = math.fsum(outcomes) / n
    spread = math.fsum((outcome - mean) ** 2 for outcome in outcomes)
    stderr = math.sqrt(spread / (n - 1) / n) if n > 1 else None
    return Result(benchmark=name, metric=metric, score=mean, stderr=stderr, n=n, expected=benchmark.expected)


def graded_by_mean(
    samples: list[Sample], benchmark: BenchmarkConfig, protocol: dict[str, Any], tolerated: int = 0
) -> Graded:
    """Results that are mean outcomes of their samples."""
    results = [mean_result(name, metric, samples, benchmark) for name, metric in benchmark.reports.items()]
    return Graded(results, samples, protocol, tolerated)


def loss_result(
    name: str,
    metric: str,
    losses: Sequence[float],
    weights: Sequence[float],
    benchmark: BenchmarkConfig,
    units_per_byte: float = 1.0,
) -> Result:
    """A metric of the mean loss, with the standard error of the loss over items times the metric's slope.

    `losses` are in nats per unit (token, word or byte) of each item, `weights` are its numbers of units. The metric
    loss is the mean, bits_per_byte is mean * units_per_byte / ln 2, and any other is a perplexity, exp(mean).
    """
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    mean = math.fsum(share * loss for share, loss in zip(shares, losses, strict=True))
    spread = math.fsum((share * (loss - mean)) ** 2 for share, loss in zip(shares, losses, strict=True))
    if metric == "loss":
        value, slope = mean, 1.0
    elif metric == "bits_per_byte":
        value, slope = mean * units_per_byte / math.log(2), units_per_byte / math.log(2)
    else:
        value = slope = math.exp(mean)
    stderr = math.sqrt(spread) * slope if len(losses) > 1 else None
    return Result(benchmark=name, metric=metric, score=value, stderr=stderr, n=len(losses), expected=benchmark.expected)


@cache
def installed(package: str) -> str | None:
    """The version of `package`, None if it is not installed. Cached, because reading metadata takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
