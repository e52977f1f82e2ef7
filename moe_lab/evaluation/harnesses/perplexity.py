"""Perplexity and bits per byte of a text, over windows that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.calibration.sources import whole_text
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Answer, Document, Graded, Item, data_files, loss_result
from moe_lab.results import Sample, Scale


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """The whole text, in windows of `parameters.length` tokens, the last of which may be shorter.

    By default they have 2048 tokens, or what the model can read.
    """
    length = benchmark.parameters.get("length")
    if benchmark.data is None:
        text = whole_text(data_files(benchmark)[-1], "suite.path")
    else:  # joined as papers do with WikiText, and as `calibration.joined` does
        text = BLANK_LINE.join(row["text"] for row in mirror.rows(benchmark))
    return [
        Item(
            "text",
            (Document(text, None if length is None else int(length), windows=benchmark.limit),),
        )
    ]


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Loss in nats, weighted by tokens; perplexity = exp(loss); bits per byte = loss * tokens /
    bytes / ln 2.

    Every token of a window but the first is predicted. Each window is a sample.
    """
    (answer,) = answers
    windows = answer.reply.windows
    text = answer.prompt
    counts = [window.tokens for window in windows]
    nats = [-window.nats / window.tokens for window in windows]
    bits_per_nat = answer.reply.tokens / len(text.encode("utf-8")) / math.log(2)
    sample = answer.sample("", 0.0, "", output="")
    samples: list[Sample] = []
    results = []
    for name, metric in benchmark.reports.items():
        losses = nats
        unit = "nats per token"
        if metric == "bits_per_byte":
            losses = [loss * bits_per_nat for loss in nats]
            unit = "bits per byte"
        for number, (loss, count) in enumerate(zip(losses, counts, strict=True)):
            about: Any = {"benchmark": name, "item": str(number), "outcome": loss, "units": count}
            samples.append(Sample(**{**sample, **about}))
        scale: Scale = "perplexity" if metric == "perplexity" else "loss"
        results.append(loss_result(name, metric, scale, unit, losses, counts, benchmark))
    protocol = {"length": counts[0] + 1, "predicted_tokens": sum(counts), "prompt": text[:200]}
    return Graded(results, samples, protocol)
