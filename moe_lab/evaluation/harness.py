"""What a benchmark harness is: what is known before it is imported, and what it hands back. Without torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.results import Result, Sample


@dataclass(frozen=True)
class Harness:
    """One harness, as it is known before its module is imported."""

    package: str | None = None
    """The distribution that does the grading, if it is not moe_lab itself and lives in this interpreter."""
    metrics: tuple[str, ...] | None = None
    """Metrics it can report; None: those of the task."""
    question_parameters: tuple[str, ...] = ()
    """What benchmark.parameters may hold that changes what the model is asked."""
    grading_parameters: tuple[str, ...] = ()
    """What benchmark.parameters may hold that changes only how answers are graded."""
    two_phases: bool = False
    """Texts are graded without the model: generating and grading are steps of their own."""
    generates: bool = False
    """Whether all its benchmarks generate text."""
    continues_text: bool = False
    """The model goes on with a text, so there is no chat template to use."""
    answer_loss: bool = False
    """It leaves the loss on right answers beside the outcomes."""
    shows_examples: bool = False
    """It can put solved examples before a question."""
    judged: bool = False
    """A judge scores the answers."""


HARNESSES: Mapping[str, Harness] = {
    "lm_eval": Harness(
        package="lm-eval",
        question_parameters=("folder",),
        answer_loss=True,
        shows_examples=True,
    ),
    "evalplus": Harness(
        package="evalplus",
        metrics=("base", "plus"),
        grading_parameters=("seconds", "memory_mib", "processes"),
        two_phases=True,
        generates=True,
        answer_loss=True,
    ),
    "evalscope": Harness(  # in an interpreter of its own
        metrics=("acc",),
        question_parameters=("start_date", "end_date"),
        grading_parameters=("seconds", "memory_mib", "processes"),
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
    "stories": Harness(
        metrics=("score",),
        generates=True,
        continues_text=True,
        answer_loss=True,
    ),
    "perplexity": Harness(
        metrics=("perplexity", "bits_per_byte", "loss"),
        question_parameters=("length",),
        continues_text=True,
    ),
}
"""Harnesses by name, which is also that of their module in `harnesses/`. One with two phases has

    ask(benchmark) -> list[Question]
    stops(benchmark) -> tuple of texts that end an answer
    grade(answers, benchmark, policy) -> Graded

without torch, and SKIPS_LONG = True where an item whose prompt is too long goes without a text and is graded so; the
others have evaluate(model, benchmark, policy) -> Graded.
"""


@dataclass(frozen=True)
class Graded:
    """One benchmark on one model."""

    results: list[Result]
    """One per entry of the benchmark's reports."""
    samples: list[Sample]
    """One per item and result."""
    protocol: dict[str, Any] = field(default_factory=dict)
    """How the harness was set; JSON."""
    tolerated: int = 0
    """Items that may be without an outcome; the protocol says which are."""


def prompt_hash(prompt: str) -> str:
    """First 16 hexadecimal digits of the prompt's sha256."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def mean_result(name: str, metric: str, samples: Sequence[Sample], benchmark: BenchmarkConfig) -> Result:
    """The mean outcome of the samples of one result, with its standard error s / sqrt(n)."""
    outcomes = [sample["outcome"] for sample in samples if sample["benchmark"] == name]
    n = len(outcomes)
    mean = math.fsum(outcomes) / n
    spread = math.fsum((outcome - mean) ** 2 for outcome in outcomes)
    stderr = math.sqrt(spread / (n - 1) / n) if n > 1 else None
    return Result(benchmark=name, metric=metric, score=mean, stderr=stderr, n=n, expected=benchmark.expected)


def weighted_loss(losses: Sequence[float], weights: Sequence[float]) -> tuple[float, float | None]:
    """The mean loss of items that hold different numbers of tokens or words, and its standard error over items."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    mean = math.fsum(share * loss for share, loss in zip(shares, losses, strict=True))
    spread = math.fsum((share * (loss - mean)) ** 2 for share, loss in zip(shares, losses, strict=True))
    return mean, math.sqrt(spread) if len(losses) > 1 else None


@cache
def installed(package: str) -> str | None:
    """The version of `package`; None without it. Looked up once: reading a package's metadata takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
