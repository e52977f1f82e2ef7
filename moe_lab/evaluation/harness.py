"""What an adapter hands back, and the few sums all of them need."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.results import Result, Sample


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
